"""Kills a process in the middle of its changes to a directory, for scripts of crash tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from ckpt_core.storage import local_directory

CHANGES = ("mkdir", "open", "pwrite", "ftruncate", "fsync", "replace", "rename", "link", "unlink", "rmdir")


def killed_before(number: int, *, exchanges: bool = True) -> None:
    """Let this process kill itself right before its change number ``number`` (from 0) to a directory.

    Without ``exchanges``, it works as on a filesystem that cannot exchange two directories.
    """
    left = iter(range(number))
    os_open = os.open

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if real is os_open and not args[1] & (os.O_WRONLY | os.O_CREAT):
                return real(*args, **options)
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        return call

    for name in CHANGES:
        setattr(os, name, wrap(getattr(os, name)))
    local_directory._exchange = wrap(local_directory._exchange) if exchanges else lambda one, other: False
