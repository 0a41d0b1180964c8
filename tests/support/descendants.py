"""Finds and kills all descendants of a process, including orphans and those in sessions of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path

_NAME = "CKPT_TEST_DESCENDANTS_OF"


def new_mark() -> dict[str, str]:
    """Return an environment variable that marks a process and its descendants; marks made in those begin with it."""
    return {_NAME: os.environ.get(_NAME, "") + uuid.uuid4().hex}


@contextlib.contextmanager
def none_left() -> Iterator[None]:
    """End the body at SIGTERM as at Ctrl-C; however it ends, SIGKILL all processes that it started."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    resource_tracker.ensure_running()  # before the mark, so that it is not killed: it cleans up after the others
    mark = new_mark()
    os.environ.update(mark)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        kill_all(mark)


def members(mark: dict[str, str]) -> dict[int, list[str]]:
    """Return the environments of the processes started with a mark and of their descendants, by process id."""
    (wanted,) = (f"{name}={value}" for name, value in mark.items())
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's; a zombie's is empty
            variables = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            if any(variable.startswith(wanted) for variable in variables):
                found[int(entry.name)] = variables
    return found


def kill_all(mark: dict[str, str]) -> None:
    """SIGKILL all processes that were started with a mark; return when none is left."""
    while processes := members(mark):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.001)
