"""Two jobs pointed at one directory by mistake: the second is told.

While a process saves into a directory it has a claim on it, by which other processes know of it. What a claim is, is the
storage's business: a lock on a local disk (:mod:`ckpt_core.storage.local_claim`), a small object on a store
(:mod:`ckpt_core.storage.leases`). A claim stops nobody and fails no save.
"""

from __future__ import annotations

import abc
import collections
import logging
import os
import threading
import weakref
from collections.abc import Callable

__all__ = ["Claim", "Claims", "claim_on"]

logger = logging.getLogger(__name__)

_MOST_DIRECTORIES = (
    16  # of one checkpointer: one that saves every checkpoint into a directory of its own would collect them
)


class Claim(abc.ABC):
    """This process's claim on a directory.

    Args:
        directory: Path or URL.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._has_told = False

    @abc.abstractmethod
    def renew(self) -> None:
        """Called at the beginning of each save into the directory; returns at once."""

    def is_alone(self) -> bool:
        """Return whether no other job may be writing files of the same names; it may have to wait to find out."""
        return True

    @abc.abstractmethod
    def release(self, *, wait: bool = True) -> None:
        """End the claim.

        Args:
            wait: Whether to return when others can know.
        """

    @abc.abstractmethod
    def forget(self) -> None:
        """Called in a forked process: the claim is that of its parent."""

    def tell(self, other: str) -> None:
        """Warn, once, that ``other`` had the directory first."""
        if self._has_told:
            return
        self._has_told = True
        logger.warning(
            "another job saves checkpoints into %s: %s. Neither damages a checkpoint of the other, but where the names are "
            "the same, the later save replaces the earlier one, and one job's retention deletes what the other has saved. "
            "What to do: end one of the two, or give it a directory of its own",
            self.directory,
            other,
        )


class _Registry:
    """The claims of this process. Several checkpointers that save into one directory share one."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a signal handler that saves may interrupt a save
        self.claims: dict[str, Claim] = {}
        self.users: collections.Counter[str] = collections.Counter()

    def leave(self, directory: str, *, wait: bool) -> None:
        with self.lock:
            if directory not in self.claims:
                return  # this is a fork of the process that had it
            self.users[directory] -= 1
            if self.users[directory] > 0:
                return
            claim = self.claims.pop(directory)
        claim.release(wait=wait)


_registry = _Registry()


def _start_anew() -> None:
    global _registry
    inherited, _registry = _registry, _Registry()
    for claim in inherited.claims.values():
        claim.forget()


if hasattr(os, "register_at_fork"):
    # A data loader's worker must not keep the claim of a training that was killed.
    os.register_at_fork(after_in_child=_start_anew)


def claim_on(directory: str) -> Claim | None:
    """Return this process's claim on ``directory``, if it has one."""
    return _registry.claims.get(_identity(directory))


def _identity(directory: str) -> str:
    return directory if "://" in directory else os.path.realpath(directory)


class Claims:
    """The directories that one checkpointer saves into."""

    def __init__(self) -> None:
        self._directories: list[str] = []
        self._process = os.getpid()
        weakref.finalize(self, _leave_all, self._directories, wait=False)

    def hold(self, directory: str, make: Callable[[str], Claim | None]) -> None:
        """Claim ``directory``, or renew the claim, and warn if another job has it.

        Args:
            directory: Path or URL.
            make: Its storage's :meth:`~ckpt_core.storage.Storage.claim`.
        """
        if self._process != os.getpid():
            self._process = os.getpid()
            self._directories.clear()
        directory = _identity(directory)
        with _registry.lock:
            claim = _registry.claims.get(directory) or make(directory)
            if claim is None:
                return
            _registry.claims[directory] = claim
            if directory not in self._directories:
                self._add(directory)
        claim.renew()

    def _add(self, directory: str) -> None:
        self._directories.append(directory)
        _registry.users[directory] += 1
        if len(self._directories) > _MOST_DIRECTORIES:
            _registry.leave(self._directories.pop(0), wait=False)

    def is_alone(self, directory: str) -> bool:
        """Return whether no other job may be writing files of the same names into ``directory``."""
        claim = claim_on(directory)
        return claim is None or claim.is_alone()

    def release(self) -> None:
        """End what :meth:`hold` began."""
        _leave_all(self._directories, wait=True)


def _leave_all(directories: list[str], *, wait: bool) -> None:
    while directories:
        _registry.leave(directories.pop(), wait=wait)
