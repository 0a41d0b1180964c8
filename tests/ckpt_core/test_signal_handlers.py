"""A signal handler saves and waits for its save, whatever the interrupted thread was doing."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Checkpointer, CheckpointNotFoundError, DirectoryCheckpointer, Kind, Part, verify
from ckpt_core.commit_time import commit_time, note_commit, seconds_behind
from ckpt_core.events import Event
from ckpt_core.preemption import Notices, Preemption
from ckpt_core.storage import FileWriter, LocalStorage
from ckpt_core.storage.lease import Lease
from ckpt_core.survivors import Survivors
from tests.support.interrupting import at_every_moment


def begin_and_leave(storage: LocalStorage, directory: Path) -> None:
    path = str(directory / "unfinished")
    storage.begin_directory(path, "token")
    storage.leave_directory(path, "token")


def save_in_the_background(storage: LocalStorage, directory: Path) -> None:
    with Checkpointer(storage=storage) as checkpointer:
        checkpointer.save({}, directory / "outer")


ACTS: dict[str, tuple[str, Callable[[Any, Path], object]]] = {
    "commit": ("commit_time.py", lambda *_: commit_time()),
    "note": ("commit_time.py", lambda *_: note_commit(commit_time() + 1)),
    "clock": ("commit_time.py", lambda *_: seconds_behind()),
    "directory": ("local_directory.py", begin_and_leave),
    "thread": ("ckpt_core/process/at_exit.py", save_in_the_background),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("act", ACTS)
def test_a_handler_saves_at_any_moment(act: str, tmp_path: Path) -> None:
    storage, counter = LocalStorage(), itertools.count()
    saved: list[int] = []

    def handler() -> None:
        number = next(counter)
        state = torch.full((3,), number)
        with (
            Checkpointer(storage=storage) as background,
            DirectoryCheckpointer(strategy="sync", storage=storage) as foreground,
        ):
            background.save({"w": state}, tmp_path / "background")
            background.wait()
            foreground.save([Part("model", {"w": state}, Kind.REPLICATED)], tmp_path / "foreground")
            saved.append(int(background.load(tmp_path / "background")["w"][0]))

    file, interrupted = ACTS[act]
    for run in at_every_moment((file,), handler, opcodes=False):
        run(lambda: interrupted(storage, tmp_path))
    assert saved
    assert saved == list(range(len(saved)))
    with DirectoryCheckpointer().load(tmp_path / "foreground") as checkpoint:
        assert checkpoint.load("model")["w"][0] == len(saved) - 1
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


class NoObjects:
    """A store without leases of other jobs, for the thread of a lease."""

    def put(self, path: str, data: bytes) -> None: ...
    def get(self, path: str) -> None: ...
    def delete(self, path: str, *, once: bool = False) -> None: ...
    def hidden_objects(self, directory: str, prefix: str) -> list[Any]:
        return []

    def remove_abandoned(self, directory: str) -> list[str]:
        return []


def lease() -> Lease:
    made = Lease(NoObjects(), f"s3://bucket/{uuid.uuid4()}")
    made.renew()
    return made


WAITS: dict[str, tuple[Callable[[Path], Any], Callable[[Any], object]]] = {
    "notices": (
        lambda directory: Notices(Preemption(signals=(), notice=directory / "never", look_every=3600), print),
        lambda notices: notices.close(),
    ),
    "survivors": (lambda directory: Survivors(str(directory), 0, 1, "run"), lambda survivors: survivors.close()),
    "lease that is known": (lambda _: lease(), lambda lease: lease.is_alone()),
    "lease that is released": (lambda _: lease(), lambda lease: lease.release(wait=False)),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_handler_does_what_it_interrupts(name: str, tmp_path: Path) -> None:
    make, act = WAITS[name]
    done: list[None] = []
    made: list[Any] = []

    def handler() -> None:
        act(made[-1])
        done.append(None)

    for run in at_every_moment(("/threading.py", "ckpt_core/process/threads.py"), handler, opcodes=False):
        made.append(make(tmp_path))
        run(lambda: act(made[-1]))
        if isinstance(made[-1], Lease):
            made[-1].release()
    assert done
    for each in made:
        act(each)


def test_a_handler_waits_with_the_checkpointer_whose_save_it_interrupts(tmp_path: Path) -> None:
    checkpointer, counter = Checkpointer(max_pending=2), itertools.count()
    saved: list[int] = []

    def handler() -> None:
        number = next(counter)
        checkpointer.save({"w": torch.full((3,), number)}, tmp_path / "inner")
        checkpointer.copy(tmp_path / "inner", tmp_path / "copy")
        checkpointer.wait()
        with contextlib.suppress(CheckpointNotFoundError):  # the interrupted save may not be committed
            Checkpointer().load(tmp_path / "outer")
        checkpointer.close()
        saved.append(int(checkpointer.load(tmp_path / "inner")["w"][0]))

    files = ("_pipeline/save.py", "_pipeline/jobs.py", "_pipeline/staging.py", "ckpt_core/process/threads.py")
    for run in at_every_moment(files, handler, opcodes=False):
        run(lambda: checkpointer.save({"w": torch.ones(3)}, tmp_path / "outer"))
        checkpointer.wait()
        assert verify(tmp_path / "outer")
        assert checkpointer.pending == ()
    assert len(saved) > 50
    assert saved == list(range(len(saved)))
    assert verify(tmp_path / "copy")


class Locked:
    """A listener that holds a lock, as those of metrics do, and is interrupted while it holds it."""

    def __init__(self, interrupted_at: str) -> None:
        self.events: list[str] = []
        self._lock = threading.Lock()
        self._interrupted_at: str | None = interrupted_at

    def __call__(self, event: Event) -> None:
        with self._lock:
            name = type(event).__name__
            if name == self._interrupted_at:
                self._interrupted_at = None
                signal.raise_signal(signal.SIGUSR1)
            self.events.append(f"{name} {Path(getattr(event, 'path', '')).name}")


@pytest.mark.parametrize("at", ["SaveStarted", "SnapshotTaken"])
@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_a_handler_saves_where_it_has_interrupted_a_listener(strategy: Any, at: str, tmp_path: Path) -> None:
    listener = Locked(at)
    checkpointer = Checkpointer(strategy=strategy, listeners=[listener])
    before = signal.signal(
        signal.SIGUSR1, lambda *_: checkpointer.save({"w": torch.zeros(3)}, tmp_path / "inner") and None
    )
    try:
        checkpointer.save({"w": torch.ones(3)}, tmp_path / "outer")
    finally:
        signal.signal(signal.SIGUSR1, before)
    checkpointer.close()
    assert verify(tmp_path / "outer")
    assert verify(tmp_path / "inner")
    for path in ("inner", "outer"):
        told = [event.split()[0] for event in listener.events if event.endswith(path)]
        assert told == ["SaveStarted", "SnapshotTaken", "SaveCommitted"]


def test_ctrl_c_in_a_save_without_a_thread_is_raised_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(LocalStorage):
        def create(self, path: str, expected_size: int) -> FileWriter:
            if path.endswith("a.ckpt"):
                signal.raise_signal(signal.SIGINT)
            return super().create(path, expected_size)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")  # as under ulimit -u

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with Checkpointer(storage=Interrupted()) as checkpointer:
        with pytest.raises(KeyboardInterrupt):
            checkpointer.save({"w": torch.ones(3)}, tmp_path / "a.ckpt")
        assert (checkpointer.pending, checkpointer.take_failure()) == ((), None)
        checkpointer.save({"w": torch.ones(3)}, tmp_path / "b.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["b.ckpt"]
