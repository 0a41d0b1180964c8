"""Claims on the directories that this process saves into, so that two jobs that share one by mistake are warned.

While a process saves into a directory it has a claim on it, which other processes see. A claim is advisory: it blocks
no job and fails no save. On a local disk it is a lock on the directory itself, which ends with the process; on an
object store it is a lease (:mod:`ckpt_core.storage.lease`).
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from ckpt_core.storage.base import Claim

# Limit per checkpointer: if each checkpoint is saved into a directory of its own, claims would accumulate.
_MOST_DIRECTORIES = 16

# The claims of this process: several checkpointers that save into one directory share a claim.
_lock = threading.RLock()  # a signal handler that saves may interrupt a save
_claims: dict[str, Claim] = {}
_users: collections.Counter[Claim] = collections.Counter()


def claim_on(directory: str) -> Claim | None:
    """Return this process's claim on ``directory``, if it has one."""
    return _claims.get(_identity(directory))


def _identity(directory: str) -> str:
    return directory if "://" in directory else os.path.realpath(directory)


class Claims:
    """The claims of one checkpointer, on the directories that it saves into."""

    def __init__(self) -> None:
        self._held: list[Claim] = []
        weakref.finalize(self, _leave, self._held, wait=False)

    def hold(self, directory: str, make: Callable[[str], Claim | None]) -> None:
        """Claim ``directory`` by ``make``, its storage's ``claim``, or renew the claim; warn if another job has it."""
        directory = _identity(directory)
        with _lock:
            claim = _claims.get(directory) or make(directory)
            if claim is None:
                return
            _claims[directory] = claim
            if claim not in self._held:
                self._held.append(claim)
                _users[claim] += 1
            _leave(self._held, wait=False, but=_MOST_DIRECTORIES)
            claim.renew()

    def is_alone(self, directory: str) -> bool:
        """Return whether certainly no other job is writing files of the same names into ``directory``."""
        claim = claim_on(directory)
        return claim is None or claim.is_alone()

    def release(self) -> None:
        """End all claims that :meth:`hold` has made."""
        _leave(self._held, wait=True)


def _leave(held: list[Claim], *, wait: bool, but: int = 0) -> None:
    while len(held) > but:
        claim = held.pop(0)
        with _lock:
            _users[claim] -= 1
            if _users[claim] or _claims.get(claim.directory) is not claim:
                continue  # other checkpointers share it; or this is a fork of the process that had it
            del _claims[claim.directory], _users[claim]
        claim.release(wait=wait)


def _forget_claims() -> None:
    """Drop all claims, in a forked process: a data loader's worker must not keep the claim of a killed training."""
    global _lock  # noqa: PLW0603 - a thread that is not in the fork may have had it
    _lock = threading.RLock()
    for claim in _claims.values():
        claim.forget()
    _claims.clear()
    _users.clear()


os.register_at_fork(after_in_child=_forget_claims)


# ---- on a local disk -------------------------------------------------------------------------------------------------


class DirectoryLock(Claim):
    """An exclusive ``flock`` on the directory itself: it needs no lock file, and a killed process leaves none behind.

    If the filesystem cannot lock a directory, there is no claim, and no job is warned.
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
        with contextlib.suppress(OSError):  # it cannot be made or opened: the save will raise that
            self._make(self.directory)
            descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = _holder(descriptor) if isinstance(error, BlockingIOError) else str(os.getpid())
                os.close(descriptor)
                if holder != str(os.getpid()):  # this process may have it locked under another path
                    self.tell(f"process {holder}{_command(holder)}" if holder else "another process")
            else:
                self._descriptor = descriptor

    def release(self, *, wait: bool = True) -> None:
        if self._descriptor != -1:
            with contextlib.suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # closing is not enough: a fork may have the descriptor
            self.forget()

    def forget(self) -> None:
        # Close without unlocking: in a fork, unlocking would end the parent's lock, too.
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor != -1:
            os.close(descriptor)


def _holder(descriptor: int) -> str:
    """Return the ID of the process that has locked the open directory; empty if that is not known."""
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
