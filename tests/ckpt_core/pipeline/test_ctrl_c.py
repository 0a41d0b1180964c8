"""Ctrl-C at every moment of a save: nothing is left behind, and the next save works."""

from __future__ import annotations

import linecache
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Checkpointer, verify
from ckpt_core._pipeline.jobs import Job, JobQueue
from ckpt_core.errors import OutOfMemoryError
from ckpt_core.process import awaited_paths
from ckpt_core.storage import Fault, FaultyStorage, LocalStorage
from tests.support.interrupting import at_every_moment

FILES = {
    "sync": ("storage/local.py", "_pipeline/writer.py", "_pipeline/save.py", "_pipeline/file_save.py"),
    "async": ("_pipeline/save.py", "_pipeline/jobs.py", "_pipeline/buffer_pool.py", "_pipeline/staging.py"),
    "no thread": (
        "_pipeline/save.py",
        "_pipeline/jobs.py",
        "_pipeline/buffer_pool.py",
        "_pipeline/staging.py",
        "_pipeline/writer.py",
        "_pipeline/file_save.py",
    ),
    "twice": ("_pipeline/save.py", "_pipeline/jobs.py", "_pipeline/staging.py", "ckpt_core/process/threads.py"),
}
# Signals are not handled between the last line of a block and the release of its lock, nor at the head of a block,
# although lines are traced there, too. ``do_uninterrupted`` and its first lines: nothing can be done about a second
# signal there, right after the first.
UNREAL = ("with ", "try:")
UNREAL_LATE = (*UNREAL, "except", "do_uninterrupted(", "if not runs:", "interruption: BaseException", "while True:")


class Interrupting:
    """Raises KeyboardInterrupt while it is pickled."""

    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


def interrupted_line(files: tuple[str, ...]) -> str:
    frame = sys._getframe()
    while not frame.f_code.co_filename.endswith(files):
        assert frame.f_back is not None
        frame = frame.f_back
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return f"{line} ({frame.f_code.co_filename}:{frame.f_lineno})"


def start_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("ckpt-"):
            raise RuntimeError("can't start new thread")  # as under ulimit -u
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)


@pytest.mark.sampled(1)
@pytest.mark.extended_cells("twice", "async")
@pytest.mark.parametrize("strategy", FILES)
def test_ctrl_c_at_any_line_of_a_save(strategy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if strategy == "no thread":
        start_no_threads(monkeypatch)
    where = ""
    state = {"w": torch.ones(3), **({"x": Interrupting()} if strategy == "twice" else {})}

    def interrupt() -> None:
        nonlocal where
        where = interrupted_line(FILES[strategy])
        if not where.startswith(UNREAL_LATE if strategy in ("twice", "no thread") else UNREAL):
            raise KeyboardInterrupt

    interrupted = 0
    for number, run in enumerate(at_every_moment(FILES[strategy], interrupt, opcodes=False)):
        directory = tmp_path / str(number)
        directory.mkdir()
        # "warn": without a thread, Ctrl-C may be the failure that the next save would raise.
        checkpointer = Checkpointer(strategy="sync" if strategy == "sync" else "async", on_error="warn")
        try:
            run(lambda: checkpointer.save(state, directory / "a"))  # noqa: B023
        except KeyboardInterrupt:
            interrupted += 1

        def save_again() -> None:
            checkpointer.save({"w": torch.zeros(3)}, directory / "b")  # noqa: B023
            checkpointer.close()  # noqa: B023

        again = threading.Thread(target=save_again, daemon=True)
        again.start()
        again.join(200.0)
        assert not again.is_alive(), f"the next save waits for ever after Ctrl-C at {where}"
        assert verify(directory / "b"), where
        assert set(os.listdir(directory)) <= {"a", "b"}, where
        assert not awaited_paths._saves, where
    assert interrupted > 50


def test_ctrl_c_at_any_line_leaves_no_live_tensors_that_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OutOfMemoryError("no memory", remedy="free some")

    where, interrupted = "", 0

    def interrupt() -> None:
        nonlocal where
        where = interrupted_line(("_pipeline/save.py",))
        if not where.startswith(UNREAL):
            raise KeyboardInterrupt

    for run in at_every_moment(("_pipeline/save.py",), interrupt, opcodes=False):
        # Without a copy, writing the live tensors takes this long.
        storage = FaultyStorage(LocalStorage(), [Fault("write_at", delay=0.05)])
        checkpointer = Checkpointer(on_error="warn", storage=storage)
        monkeypatch.setattr(checkpointer._pipeline.buffers, "acquire", refuse)
        try:
            run(lambda: checkpointer.save({"w": torch.ones(3)}, tmp_path / "a"))  # noqa: B023
        except KeyboardInterrupt:
            interrupted += 1
        assert not checkpointer.pending, where
        checkpointer.close()
    assert interrupted > 50


def test_ctrl_c_at_any_line_lets_no_job_run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    start_no_threads(monkeypatch)
    line = ""

    def interrupt() -> None:
        nonlocal line
        line = interrupted_line(("_pipeline/jobs.py",))
        if not line.startswith(UNREAL_LATE):
            raise KeyboardInterrupt

    interrupted = 0
    for run in at_every_moment(("_pipeline/jobs.py",), interrupt, opcodes=False):
        queue, done = JobQueue("ckpt-writer", on_error="warn", report=lambda *_: None), list[str]()
        first = Job("first", lambda: done.append("first"), "save")  # noqa: B023
        second = Job("second", lambda: done.append("second"), "save")  # noqa: B023
        queue.submit(first)
        try:
            run(queue.run_queued)
        except KeyboardInterrupt:
            interrupted += 1
        queue.submit(second)
        queue.run_queued()
        assert done == ["first", "second"] or (done == ["second"] and first.error is not None), line
        assert queue.jobs() == [], line
        assert first.done.is_set(), line
    assert interrupted > 10
