"""Finds and kills all descendants of a process, also in sessions of their own and without parents."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from pathlib import Path

_NAME = "CKPT_TEST_DESCENDANTS_OF"


def new_mark() -> dict[str, str]:
    """Return a variable for the environment of a process, which its descendants inherit."""
    return {_NAME: uuid.uuid4().hex}


def members(mark: dict[str, str]) -> dict[int, list[str]]:
    """Return the processes that were started with a mark, with their environments."""
    (wanted,) = (f"{name}={value}" for name, value in mark.items())
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile, or somebody else's; that of a dead one is empty
            variables = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            if wanted in variables:
                found[int(entry.name)] = variables
    return found


def kill_all(mark: dict[str, str]) -> None:
    """SIGKILL all processes that were started with a mark; return when none is left."""
    while processes := members(mark):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.001)
