"""A claim on a local directory: a lock on the directory itself, which ends with the process."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from ckpt_core.storage.claims import Claim

__all__ = ["DirectoryLock"]


class DirectoryLock(Claim):
    """An exclusive ``flock`` on the directory's own descriptor: no file shows it, and a killed process leaves none behind.

    Where the filesystem cannot lock a directory there is no claim, and nobody is told.

    Args:
        directory: Path.
        make: Makes the directory if there is none.
    """

    def __init__(self, directory: str, make: Callable[[str], None]) -> None:
        super().__init__(directory)
        self._make = make
        self._descriptor = -1

    def renew(self) -> None:
        if self._descriptor != -1:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(self.directory), os.fstat(self._descriptor)):
                    return
            self.forget()  # another directory has its name now
        with contextlib.suppress(OSError):  # it cannot be made or opened: the save will tell
            self._make(self.directory)
            descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = _holder(descriptor)
                os.close(descriptor)
                if holder != str(os.getpid()):  # which may know the directory by another name
                    self.tell(f"process {holder}{_command(holder)}" if holder else "another process")
            except OSError:
                os.close(descriptor)
            else:
                self._descriptor = descriptor

    def release(self, *, wait: bool = True) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor != -1:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # whoever else has the descriptor
            os.close(descriptor)

    def forget(self) -> None:
        # Unlocking would take it from the parent, too.
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor != -1:
            os.close(descriptor)


def _holder(descriptor: int) -> str:
    """Return the number of the process that has locked the open directory; empty if that is not known."""
    status = os.fstat(descriptor)
    identity = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if words[1] == "FLOCK" and words[5] == identity:
                return words[4]
    return ""


def _command(pid: str) -> str:
    with contextlib.suppress(OSError):
        words = Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").split()
        return f" ({' '.join(words)[:100]})"
    return ""
