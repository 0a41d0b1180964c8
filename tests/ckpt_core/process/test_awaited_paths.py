"""A caller that touches what is being saved waits for it, and no other caller does."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_core import Catalog, DirectoryCheckpointer
from ckpt_core.events import Event, SaveCommitted
from ckpt_core.storage import Fault, FaultyStorage, LocalStorage
from tests.ckpt_core.test_directory_checkpointer import SECONDS, parts
from tests.conftest import ACCELERATE

A_MOMENT = 0.2


class HeldSave:
    """A save of ``folder/new`` that is committed when ``release`` is set."""

    def __init__(self, folder: Path, *, error: OSError | None = None) -> None:
        self.path = folder / "new"
        self.release = threading.Event()
        storage = FaultyStorage(LocalStorage(), [Fault("publish_directory", until=self.release, error=error)])
        self.checkpointer = DirectoryCheckpointer(storage=storage, on_error="warn")
        self.checkpointer.save(parts(), self.path)
        self.checkpointer.wait_when_touched(self.path)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[HeldSave]:
    save = HeldSave(tmp_path / "a")
    (tmp_path / "a" / "old").mkdir(parents=True)  # with parents, as the save creates ``a`` in the background
    yield save
    save.release.set()
    save.checkpointer.close()


def begin(act: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(act())
        except OSError as error:
            found.append(type(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


@pytest.mark.parametrize(
    "touch",
    [
        os.path.exists,
        Path.is_dir,
        lambda path: os.access(path, os.R_OK),
        lambda path: bool(os.listdir(path)),
        lambda path: "new" in os.listdir(path.parent),
        lambda path: next(iter(os.scandir(path))).name != "",
        lambda path: bool((path / "manifest.json").read_bytes()),
        lambda path: path.rename(path.with_name("newer")).is_dir(),
        lambda path: shutil.rmtree(path) is None,
        lambda path: shutil.rmtree(path.parent) is None,
        lambda path: subprocess.run(["ls", str(path)], check=False, stdout=subprocess.DEVNULL).returncode == 0,
        lambda path: os.system(f"test -e '{path}'") == 0,
    ],
)
def test_a_touch_waits_until_it_is_there(held: HeldSave, touch: Callable[[Path], bool]) -> None:
    thread, found = begin(lambda: touch(held.path))
    thread.join(A_MOMENT)
    assert thread.is_alive()
    held.release.set()
    thread.join(SECONDS)
    assert found == [True]


@pytest.mark.parametrize(
    "look",
    [
        lambda path: "model" in DirectoryCheckpointer().load(path).parts,
        lambda path: Catalog(path.parent, suffix="").newest_verified().path == str(path),  # type: ignore[union-attr]
    ],
)
def test_another_checkpointer_of_the_process_waits_too(held: HeldSave, look: Callable[[Path], bool]) -> None:
    thread, found = begin(lambda: look(held.path))
    thread.join(A_MOMENT)
    assert thread.is_alive()
    held.release.set()
    thread.join(SECONDS)
    assert found == [True]


def test_a_catalog_of_another_directory_does_not_wait(held: HeldSave) -> None:
    assert Catalog(held.path.parent / "old", suffix="").newest_verified() is None
    assert held.checkpointer.is_pending(held.path)


def test_what_was_deleted_does_not_come_back(held: HeldSave) -> None:
    thread, _ = begin(lambda: shutil.rmtree(held.path))
    held.release.set()
    thread.join(SECONDS)
    held.checkpointer.wait()
    assert not held.path.exists()


def test_nothing_else_waits(held: HeldSave) -> None:
    def look() -> bool:
        folder = held.path.parent
        (folder / "old" / "state.json").write_text("{}")
        (folder / "newer").mkdir()  # its name begins as that of the one being saved
        os.listdir(folder / "newer")
        os.listdir(folder.parent)
        assert folder.is_dir()
        assert held.checkpointer.is_pending(held.path)
        shutil.copytree(folder / "old", folder / "newer" / "copied")
        shutil.rmtree(folder / "old")
        return (folder / "newer" / "copied" / "state.json").is_file()

    thread, found = begin(look)
    thread.join(SECONDS)
    assert found == [True]
    assert not held.release.is_set()


def test_a_save_that_fails_leaves_nothing_to_be_found(tmp_path: Path) -> None:
    save = HeldSave(tmp_path / "a", error=OSError(28, "No space left on device"))
    thread, found = begin(lambda: os.listdir(save.path))
    thread.join(A_MOMENT)
    assert thread.is_alive()
    save.release.set()
    thread.join(SECONDS)
    assert found == [FileNotFoundError]


def test_a_wait_can_be_interrupted(held: HeldSave) -> None:
    main = threading.main_thread().ident
    timer = threading.Timer(A_MOMENT, signal.pthread_kill, [main, signal.SIGINT])
    with pytest.raises(KeyboardInterrupt):  # on a busy machine, the signal may come before the wait
        timer.start()
        held.path.exists()
    timer.join()
    assert held.checkpointer.is_pending(held.path)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_process_does_not_wait_for_a_thread_that_it_does_not_have(held: HeldSave) -> None:
    child = os.fork()
    if child == 0:
        signal.alarm(int(SECONDS))
        os._exit(int(held.path.exists()))
    assert os.waitpid(child, 0)[1] == 0


def test_who_is_called_at_the_commit_may_have_others_look_at_it(tmp_path: Path) -> None:
    found: list[Any] = []

    def look(event: Event) -> None:
        if isinstance(event, SaveCommitted):
            thread, names = begin(lambda: os.listdir(event.path))
            thread.join(SECONDS)
            found.append("manifest.json" in names[0])

    with DirectoryCheckpointer(listeners=[look]) as checkpointer:
        checkpointer.save(parts(), tmp_path / "a")
        checkpointer.wait_when_touched(tmp_path / "a")
    assert found == [True]


def test_a_log_handler_which_holds_a_lock_does_not_wait(held: HeldSave) -> None:
    class Rotating(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            record.found = os.listdir(held.path.parent)

    record = logging.makeLogRecord({})
    thread, _ = begin(lambda: Rotating().handle(record))
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert "old" in record.found  # type: ignore[attr-defined]


@pytest.mark.usefixtures("held")
def test_the_functions_of_the_standard_library_are_the_same_to_others(tmp_path: Path) -> None:
    assert pickle.loads(pickle.dumps(os.stat)) is os.stat
    assert {os.stat, os.access} <= os.supports_dir_fd
    os.symlink("nowhere", tmp_path / "link")
    shutil.copystat(tmp_path / "link", tmp_path / "link", follow_symlinks=False)
    assert os.stat("link", dir_fd=os.open(tmp_path, os.O_RDONLY), follow_symlinks=False).st_size == 7


def test_programs_without_saves_in_the_background_keep_theirs(fork_script: Any) -> None:
    fork_script(
        """
        import os, sys, posix, safetensors
        original = safetensors.safe_open
        import torch
        from accelerate import Accelerator
        from accelerate_ckpt import attach
        accelerator = attach(Accelerator(cpu=True), "sync")
        accelerator.prepare(torch.nn.Linear(300, 300))
        accelerator.save_state("saved")
        assert os.stat is posix.stat and os.access is posix.access and safetensors.safe_open is original
        """,
        modules=ACCELERATE,
    )


def test_it_ends_with_the_save(tmp_path: Path) -> None:
    from ckpt_core.process import awaited_paths

    with DirectoryCheckpointer() as checkpointer:
        for number in range(3):
            checkpointer.save(parts(), tmp_path / str(number))
            checkpointer.wait_when_touched(tmp_path / str(number))
    checkpointer.wait_when_touched(tmp_path / "0")
    assert awaited_paths._expected == awaited_paths._saves == []
    assert sys.getsizeof(awaited_paths._expected) < 500
