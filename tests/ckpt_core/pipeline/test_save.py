"""Whatever happens in a save, its buffer is returned, its state is released, and the next save works."""

from __future__ import annotations

import gc
import signal
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Checkpointer, Kind, Part, RankGroup, SnapshotTornError, StorageError
from ckpt_core._commit.save_outcome import JointSave, SaveSeries
from ckpt_core._pipeline.directory_save import DirectorySave, DirectoryState
from ckpt_core._pipeline.file_save import FileSave
from ckpt_core._pipeline.save import Pipeline, Save
from ckpt_core._pipeline.staging import Snapshot
from ckpt_core._pipeline.unchanged import UnchangedFiles
from ckpt_core._plan import WritePlanCache
from ckpt_core.errors import OutOfMemoryError
from ckpt_core.events import Event, SaveCommitted, SaveFailed, SaveStarted, SnapshotTaken
from ckpt_core.storage import Fault, FaultyStorage, LocalStorage, Storage

LAYOUTS = ["file", "directory"]
STRATEGIES = ["sync", "async"]
NUMBERS = 5_000_000  # floats: more than one window of a file


def save_of(layout: str, pipeline: Pipeline, tensor: torch.Tensor, storage: Storage, path: Path) -> Save:
    if layout == "file":
        return FileSave({"w": tensor}, storage, str(path), pipeline)
    return DirectorySave(
        DirectoryState([Part("model", {"w": tensor}, Kind.REPLICATED)], {}, None, None, False),
        lambda: UnchangedFiles(rank=0, world_size=1, divide_replicated=False).begin(storage, str(path)),
        str(path),
        pipeline,
        JointSave(SaveSeries(RankGroup.alone()), str(path), timeout=60.0),
        WritePlanCache(),
    )


def save(pipeline: Pipeline, save: Save) -> None:
    """Save, and raise any failure, also one in the background."""
    with pipeline.attempt(save.path):
        pipeline.save(save, started=time.perf_counter())
    assert pipeline.queue.wait(timeout=60.0)
    pipeline.queue.raise_failure()


def pipeline_of(strategy: Any, events: list[Event]) -> Pipeline:
    return Pipeline(strategy=strategy, max_pending=1, on_error="raise", listeners=[events.append])


def assert_usable(pipeline: Pipeline, layout: str, path: Path) -> None:
    assert not pipeline.buffers.exhausted
    assert pipeline.queue.pending == ()
    save(pipeline, save_of(layout, pipeline, torch.zeros(3), LocalStorage(), path))
    assert path.exists()
    pipeline.close()


@pytest.mark.each_value
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, StorageError])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("method", ["take", "complete"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_training_thread_fails(
    layout: str, strategy: Any, method: str, late: bool, kind: type[BaseException], tmp_path: Path
) -> None:
    events: list[Event] = []
    pipeline = pipeline_of(strategy, events)
    failing = save_of(layout, pipeline, torch.ones(NUMBERS), LocalStorage(), tmp_path / "a")
    real = getattr(failing, method)

    def fail(snapshot: Snapshot) -> None:
        if late:
            real(snapshot)
        raise kind("a bug")

    setattr(failing, method, fail)
    with pytest.raises(kind, match="a bug"):
        save(pipeline, failing)
    assert pipeline.queue.failures == 0, "it was raised where it happened"
    assert [type(event) for event in events] == [SaveStarted, SaveFailed]
    assert list(tmp_path.iterdir()) == []
    assert_usable(pipeline, layout, tmp_path / "b")


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_writing_thread_fails(layout: str, strategy: Any, number: int, tmp_path: Path) -> None:
    events: list[Event] = []
    pipeline = pipeline_of(strategy, events)
    storage = FaultyStorage(LocalStorage(), [Fault("write_at", number=number, error=OSError(28, "No space left"))])
    with pytest.raises(StorageError, match="No space left"):
        save(pipeline, save_of(layout, pipeline, torch.ones(NUMBERS), storage, tmp_path / "a"))
    taken = [SnapshotTaken] if strategy == "async" else []
    assert sorted(type(event).__name__ for event in events) == sorted(
        kind.__name__ for kind in [SaveStarted, *taken, SaveFailed]
    )
    assert list(tmp_path.iterdir()) == []
    assert_usable(pipeline, layout, tmp_path / "b")


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_memory_for_a_copy_training_waits_for_the_live_tensors(
    layout: str, changes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise OutOfMemoryError("no memory", remedy="free some")

    events: list[Event] = []
    pipeline = pipeline_of("async", events)
    monkeypatch.setattr(pipeline.buffers, "acquire", refuse)
    tensor = torch.ones(NUMBERS)
    change = Fault(lambda operation: operation.name == "write_at" and changes and bool(tensor.add_(1).sum() < 0))
    saving = save_of(layout, pipeline, tensor, FaultyStorage(LocalStorage(), [change]), tmp_path / "a")
    if changes:
        with pytest.raises(SnapshotTornError):
            save(pipeline, saving)
    else:
        save(pipeline, saving)
    assert (tmp_path / "a").exists() is not changes
    last = SaveFailed if changes else SaveCommitted
    assert [type(event) for event in events] == [SaveStarted, last, SnapshotTaken], "training was free last"
    assert "training waits" in caplog.text
    monkeypatch.undo()
    assert_usable(pipeline, layout, tmp_path / "b")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ctrl_c_in_a_save_without_a_copy_waits_until_the_live_tensors_are_written(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OutOfMemoryError("no memory", remedy="free some")

    def interrupt(*_: object) -> None:
        if not is_interrupted.is_set():
            is_interrupted.set()
            raise KeyboardInterrupt

    def interrupt_when_it_waits() -> None:
        assert waits.wait(200.0)
        while not is_interrupted.wait(0.1):  # a signal right before the thread begins to wait does not wake it
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        may_write.set()

    waits, is_interrupted, may_write = threading.Event(), threading.Event(), threading.Event()
    pipeline = pipeline_of("async", [])
    monkeypatch.setattr(pipeline.buffers, "acquire", refuse)
    warn = pipeline._warn_of_memory
    monkeypatch.setattr(pipeline, "_warn_of_memory", lambda error: (warn(error), waits.set()))
    storage = FaultyStorage(LocalStorage(), [Fault("write_at", until=may_write)])
    saving = save_of(layout, pipeline, torch.ones(NUMBERS), storage, tmp_path / "a")
    thread = threading.Thread(target=interrupt_when_it_waits)
    before = signal.signal(signal.SIGUSR1, interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            pipeline.save(saving, started=time.perf_counter())
        assert pipeline.queue.pending == ()
    finally:
        signal.signal(signal.SIGUSR1, before)
        thread.join()
    assert (tmp_path / "a").exists()
    monkeypatch.undo()
    assert_usable(pipeline, layout, tmp_path / "b")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_commit_is_told_after_the_snapshot(layout: str, tmp_path: Path) -> None:
    events: list[Event] = []
    pipeline = pipeline_of("async", events)
    for number in range(20):
        save(pipeline, save_of(layout, pipeline, torch.ones(3), LocalStorage(), tmp_path / str(number)))
    pipeline.close()
    assert [type(event) for event in events] == [SaveStarted, SnapshotTaken, SaveCommitted] * 20


class Held:
    """Its pickling, on the thread that saves, waits until it is let go."""

    def __init__(self) -> None:
        self.reached, self.let_go = threading.Event(), threading.Event()

    def __reduce__(self) -> tuple[Any, ...]:
        self.reached.set()
        assert self.let_go.wait(200.0)
        return dict, ()


def test_a_thread_that_has_saved_beside_another_one_saves_in_the_background_again(tmp_path: Path) -> None:
    events: list[Event] = []
    checkpointer = Checkpointer(max_pending=2, listeners=[events.append])
    first, second = Held(), Held()
    is_first_taken, is_second_taken = threading.Event(), threading.Event()

    def save_twice() -> None:
        checkpointer.save({"held": first}, tmp_path / "first")
        is_first_taken.set()
        assert is_second_taken.wait(200.0)
        checkpointer.save({}, tmp_path / "third")

    one = threading.Thread(target=save_twice)
    one.start()
    assert first.reached.wait(200.0)
    other = threading.Thread(target=lambda: checkpointer.save({"held": second}, tmp_path / "second"))
    other.start()
    assert second.reached.wait(200.0)
    first.let_go.set()
    assert is_first_taken.wait(200.0)
    second.let_go.set()
    other.join()
    is_second_taken.set()
    one.join()
    checkpointer.close()
    seconds = {Path(event.path).name: event.background_seconds for event in events if isinstance(event, SaveCommitted)}
    assert seconds.keys() == {"first", "second", "third"}
    assert all(seconds.values()), "a save in the foreground has none"


@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_garbage_is_not_looked_for_while_training_is_stopped(tmp_path: Path, collects: bool, fails: bool) -> None:
    class Looks:
        def __reduce__(self) -> Any:
            seen.append(gc.isenabled())
            if fails:
                raise ValueError("no")
            return (int, ())

    seen: list[bool] = []
    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        with Checkpointer(strategy="async") as checkpointer, pytest.raises(Exception) if fails else nullcontext():  # noqa: PT011
            checkpointer.save({"looks": Looks()}, tmp_path / "a.ckpt")
        assert (set(seen), gc.isenabled()) == ({False}, collects)
    finally:
        (gc.enable if before else gc.disable)()
