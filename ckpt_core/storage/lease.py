"""Leases: a process's claim on a directory of an object store, a small object that a live process keeps rewriting.

Every process has a lease of its own, so nothing depends on conditional requests, which some stores ignore: a process
writes its lease and then lists the others. Of two processes that start at once, at least one sees the other. A process
that found no other lease is **first** and stays so. Any other is warned, and becomes first when no other is left.

Whether the process of a lease is alive is judged by the store's clock only, from the times at which that lease and our
own were last written. For a process on this machine it is known at once. A lease from another machine that was written
within the last ``ALIVE_SECONDS`` may be that of a process that was just killed: it counts once it is written again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from ckpt_core.errors import CheckpointError
from ckpt_core.process import at_exit
from ckpt_core.process.threads import Latch
from ckpt_core.storage.base import Claim, FileInfo
from ckpt_core.storage.claims import claim_on

logger = logging.getLogger(__name__)

LEASE_PREFIX = ".ckpt-lease-"
RENEW_SECONDS = 15.0
ALIVE_SECONDS = 60.0  # a lease that was not written for so long counts as that of a dead process
_ASK_AGAIN_SECONDS = 2.0  # between two checks while it is unknown whether another job is alive
_SECONDS_TO_END = 10.0

_leases: weakref.WeakSet[Lease] = weakref.WeakSet()  # whose threads have started; released at exit
_cleaned: set[str] = set()


def _end_leases() -> None:
    for wait in (False, True):
        for lease in list(_leases):
            lease.release(wait=wait)


os.register_at_fork(after_in_child=_leases.clear)
at_exit.call_after_threads(_end_leases)


class LeaseStore(Protocol):
    """The requests to a store that leases need."""

    def put(self, path: str, data: bytes) -> None:
        """Write an object, replacing what is there."""

    def get(self, path: str) -> bytes | None:
        """Return an object's bytes, or None if there is none."""

    def delete(self, path: str, *, once: bool = False) -> None:
        """Delete an object; with ``once``, a failed request is not retried."""

    def hidden_objects(self, directory: str, prefix: str) -> Sequence[FileInfo]:
        """Return the objects directly in ``directory`` whose names begin with ``prefix``."""

    def remove_abandoned(self, directory: str) -> Sequence[str]:
        """Delete unfinished uploads into ``directory`` whose processes are certainly dead; return the paths."""
        return []


@dataclasses.dataclass
class _Other:
    """A lease of another process: which process wrote it, and its time of change when it was first seen."""

    owner: dict[str, Any]
    modified: float
    is_confirmed: bool = False  # whether its process is alive: it has been written since, or is on this machine


class Lease(Claim):
    """This process's lease on a directory, which a thread rewrites periodically."""

    def __init__(self, store: LeaseStore, directory: str) -> None:
        super().__init__(directory)
        self._store = store
        self._path = f"{directory.rstrip('/')}/{LEASE_PREFIX}{uuid.uuid4().hex}"
        self._others: dict[str, _Other] = {}
        self._is_first = False
        self._is_known = Latch()  # set once it is known whether other jobs are alive
        self._is_released = Latch()
        self._ends_at = float("inf")  # release() waits no longer than until then; by time.monotonic()
        self._is_silent = False  # whether the store refused the last request, which has been logged
        self._written_at = -float("inf")  # by time.monotonic()
        self._written_at_store = 0.0  # by the clock of the store
        self._lock = threading.RLock()  # a signal handler that saves may interrupt a save
        self._thread: threading.Thread | None = None

    def renew(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ckpt-lease", daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
                self._thread.start()
                _leases.add(self)

    def _run(self) -> None:
        while not self._is_released.is_set():
            self.beat()
            self._clean_up()
            pause = RENEW_SECONDS if self._is_known.is_set() else min(RENEW_SECONDS, _ASK_AGAIN_SECONDS)
            self._is_released.wait(pause)
        try:
            self._store.delete(self._path, once=True)
        except Exception as error:  # noqa: BLE001 - of any type, as a client of a store may raise it
            logger.info("could not delete the lease %s, which ends by itself: %s", self._path, error)

    def _clean_up(self) -> None:
        """Delete, once per process, unfinished uploads of dead processes; training does not wait for this thread."""
        if self.directory in _cleaned:
            return
        _cleaned.add(self.directory)  # only once: later, a slow upload of this process could be taken for abandoned
        try:
            removed = self._store.remove_abandoned(self.directory)
        except Exception as error:  # noqa: BLE001 - as above
            logger.info("could not look for unfinished uploads into %s: %s", self.directory, error)
            return
        if removed:
            logger.info("deleted %d unfinished uploads of dead processes, such as %s", len(removed), removed[0])

    def release(self, *, wait: bool = True) -> None:
        self._ends_at = min(self._ends_at, time.monotonic() + _SECONDS_TO_END)
        self._is_released.set()
        if wait and self in _leases and self._thread is not None:
            self._thread.join(max(0.0, self._ends_at - time.monotonic()))

    def forget(self) -> None:
        """Do nothing: the thread does not run in a fork."""

    def is_alone(self) -> bool:
        """Return whether this process is first; waits until that is known, at most twice :data:`ALIVE_SECONDS`."""
        self._is_known.wait(2 * ALIVE_SECONDS)
        if time.monotonic() - self._written_at > ALIVE_SECONDS / 2:
            self.beat()  # the process was suspended, or the store is slow
        return self._is_first and self._is_known.is_set()

    def others(self) -> bool:
        """Query the store, and return whether another job may be alive."""
        with self._lock:
            self._look()
            return bool(self._others)

    def beat(self) -> None:
        """Write the lease and look at those of others; if the store refuses, log a warning."""
        with self._lock:
            try:
                if time.monotonic() - self._written_at > ALIVE_SECONDS:
                    self._is_first = False  # other processes may have taken this one for dead
                self._store.put(self._path, json.dumps(this_process()).encode())
                self._written_at = time.monotonic()
                self._look()
            except Exception as error:  # noqa: BLE001 - as above
                if not self._is_silent:
                    logger.warning("cannot find out whether another job saves into %s: %s", self.directory, error)
                self._is_silent = True
                self._is_first |= self._written_at < 0  # never written: assume that there are no others
                self._is_known.set()
                return
            self._is_silent = False
            self._is_first |= not self._others
            confirmed = [other.owner for other in self._others.values() if other.is_confirmed]
            if self._is_first or len(confirmed) == len(self._others):
                self._is_known.set()
        if confirmed and not self._is_first:
            self.tell(", ".join(f"process {owner.get('pid')} on {owner.get('host')}" for owner in confirmed))

    def _look(self) -> None:
        found = {info.path: info.modified for info in self._store.hidden_objects(self.directory, LEASE_PREFIX)}
        self._written_at_store = max(self._written_at_store, found.pop(self._path, 0.0))
        now = self._written_at_store + time.monotonic() - self._written_at
        others = {}
        for path, modified in found.items():
            other = self._others.get(path) or _Other(_owner_of(self._store, path), modified)
            if other.owner == this_process():
                continue  # an earlier lease of this process, which is being deleted
            is_living = is_alive(other.owner)
            other.is_confirmed |= modified > other.modified or is_living is True
            if now - modified > ALIVE_SECONDS or is_living is False:
                with contextlib.suppress(CheckpointError):
                    self._store.delete(path)
            else:
                others[path] = other
        self._others = others


def has_others(store: LeaseStore, directory: str) -> bool:
    """Return whether another job may be saving into ``directory``."""
    lease = claim_on(directory)
    if isinstance(lease, Lease):
        return lease.others()
    remove_dead_leases(store, store.hidden_objects(directory, LEASE_PREFIX))
    return bool(store.hidden_objects(directory, LEASE_PREFIX))


def remove_dead_leases(store: LeaseStore, leases: Iterable[FileInfo]) -> None:
    """Delete those of ``leases`` whose processes were on this machine and are dead."""
    for info in leases:
        if is_alive(_owner_of(store, info.path)) is False:
            store.delete(info.path)


def _owner_of(store: LeaseStore, path: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        owner = json.loads(store.get(path) or b"{}")
        return owner if isinstance(owner, dict) else {}
    return {}


def this_process() -> dict[str, Any]:
    """Return what identifies this process among all others, on any machine, as plain data."""
    return {"host": socket.gethostname(), "machine": _machine(), "pid": os.getpid(), "started": _start_of(os.getpid())}


def _machine() -> str:
    """Return an ID of this boot and PID namespace, within which process IDs are unique; empty if unknown."""
    with contextlib.suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _start_of(pid: int) -> str:
    """Return the start time of a process of this machine, as a kernel tick count; empty if there is none."""
    with contextlib.suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else fields[18]
    return ""


def is_alive(owner: dict[str, Any]) -> bool | None:
    """Return whether a process is alive; None if it is on another machine, so that this is unknown."""
    if not owner.get("machine") or owner["machine"] != _machine():
        return None
    pid, started = owner.get("pid"), owner.get("started")
    return isinstance(pid, int) and bool(started) and _start_of(pid) == started
