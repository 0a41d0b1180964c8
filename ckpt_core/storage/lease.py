"""Two jobs pointed at one directory by mistake: the second is warned.

While a process saves into a directory it has a claim on it, by which other processes know of it. A claim stops nobody
and fails no save. On a local disk it is a lock on the directory itself, which ends with the process; on an object store
it is a lease: a small object of this process, written again as long as it lives.

Every process has a lease of its own, so nothing depends on conditional requests, which some stores ignore: a process
writes its lease and then lists those of others. Of two that come at once, at least one sees the other. One that was
alone when it came stays **first**; any other is warned, and is first when there is nobody else any more.

Whether a lease is of the living is judged by the clock of the store alone: the time of its last change, and that of our
own. Of a process of this machine it is known at once. One of another machine that was written within the last
``ALIVE_SECONDS`` may be that of a process that was killed just now: it counts when it has been written again.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ckpt_core import at_exit
from ckpt_core.errors import CheckpointError
from ckpt_core.storage.base import Claim, FileInfo

__all__ = [
    "ALIVE_SECONDS",
    "LEASE_PREFIX",
    "RENEW_SECONDS",
    "Claims",
    "DirectoryLock",
    "Lease",
    "LeaseStore",
    "claim_on",
    "has_others",
    "remove_dead_leases",
]

logger = logging.getLogger(__name__)

LEASE_PREFIX = ".ckpt-lease-"
RENEW_SECONDS = 15.0
ALIVE_SECONDS = 60.0  # since it was last written
_ASK_AGAIN_SECONDS = 2.0  # while it is not known whether another job lives
_SECONDS_TO_END = 10.0
_MOST_DIRECTORIES = (
    16  # of one checkpointer: one that saves every checkpoint into a directory of its own would collect them
)


# ---- the claims of this process --------------------------------------------------------------------------------------


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


def _forget_claims() -> None:
    global _registry
    inherited, _registry = _registry, _Registry()
    for claim in inherited.claims.values():
        claim.forget()


if hasattr(os, "register_at_fork"):
    # A data loader's worker must not keep the claim of a training that was killed.
    os.register_at_fork(after_in_child=_forget_claims)


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


# ---- a local directory -----------------------------------------------------------------------------------------------


class DirectoryLock(Claim):
    """An exclusive ``flock`` on the directory's own descriptor: no file shows it, a killed process leaves none behind.

    Where the filesystem cannot lock a directory there is no claim, and nobody is warned.

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


# ---- a directory of a store ------------------------------------------------------------------------------------------


class LeaseStore(abc.ABC):
    """The requests that leases are made of."""

    @abc.abstractmethod
    def put(self, path: str, data: bytes) -> None:
        """Make an object, replacing what is there."""

    @abc.abstractmethod
    def get(self, path: str) -> bytes | None:
        """Return an object's bytes, or None if there is none."""

    @abc.abstractmethod
    def delete(self, path: str) -> None:
        """Delete an object."""

    @abc.abstractmethod
    def hidden_objects(self, directory: str, prefix: str) -> Sequence[FileInfo]:
        """Return the objects directly in ``directory`` whose names begin with ``prefix``."""

    def remove_abandoned(self, directory: str) -> Sequence[str]:
        """Delete what processes that are surely dead left unfinished in ``directory``; return the paths."""
        return []


@dataclasses.dataclass
class _Other:
    """A lease of another process: who wrote it, and when we saw it first."""

    owner: dict[str, Any]
    modified: float
    is_confirmed: bool = False  # written again since we saw it first: its process lives

    @property
    def name(self) -> str:
        return f"process {self.owner.get('pid')} on {self.owner.get('host')}"


class Lease(Claim):
    """This process's lease on a directory.

    Args:
        store: Where.
        directory: URL.
    """

    def __init__(self, store: LeaseStore, directory: str) -> None:
        super().__init__(directory)
        self.was_deleted = threading.Event()
        self._store = store
        self._path = f"{directory.rstrip('/')}/{LEASE_PREFIX}{uuid.uuid4().hex}"
        self._owner = _this_process()
        self._others: dict[str, _Other] = {}
        self._is_first = False
        self._is_known = threading.Event()
        self._written_at = -float("inf")  # by time.monotonic()
        self._written_at_store = 0.0  # by the clock of the store
        self._lock = threading.Lock()

    def renew(self) -> None:
        _keeper.add(self)  # which writes it, and again and again

    def release(self, *, wait: bool = True) -> None:
        _keeper.drop(self)
        if wait:
            self.was_deleted.wait(_SECONDS_TO_END)

    def forget(self) -> None:
        self.was_deleted.set()

    def is_alone(self) -> bool:
        """Return whether this process is first; waits until that is known, for :data:`ALIVE_SECONDS` at the most."""
        self._is_known.wait(2 * ALIVE_SECONDS)
        if time.monotonic() - self._written_at > ALIVE_SECONDS / 2:
            self.beat()  # the process was suspended, or the store is slow
        return self._is_first and self._is_known.is_set()

    def others(self) -> bool:
        """Return whether another job may live, as the store knows it now."""
        with self._lock:
            self._look()
            return bool(self._others)

    @property
    def is_known(self) -> bool:
        """Whether it is known if others live."""
        return self._is_known.is_set()

    def beat(self) -> None:
        """Write the lease and look at those of others; a refusal of the store is logged."""
        with self._lock:
            try:
                if time.monotonic() - self._written_at > ALIVE_SECONDS:
                    self._is_first = False  # others may have taken this process for dead
                self._store.put(self._path, json.dumps(self._owner).encode())
                self._written_at = time.monotonic()
                self._look()
            except Exception as error:  # noqa: BLE001 - of any type: the thread is that of all leases
                logger.warning("cannot find out whether another job saves into %s: %s", self.directory, error)
                self._is_first |= self._written_at < 0  # nothing speaks against it
                self._is_known.set()
                return
            if not self._others:
                self._is_first = True
            if self._is_first or all(other.is_confirmed for other in self._others.values()):
                self._is_known.set()
            confirmed = [other.name for other in self._others.values() if other.is_confirmed]
        if confirmed and not self._is_first:
            self.tell(", ".join(confirmed))

    def _look(self) -> None:
        found = {info.path: info.modified for info in self._store.hidden_objects(self.directory, LEASE_PREFIX)}
        self._written_at_store = max(self._written_at_store, found.pop(self._path, 0.0))
        now = self._written_at_store + time.monotonic() - self._written_at
        for path in self._others.keys() - found.keys():
            del self._others[path]
        for path, modified in found.items():
            other = self._others.get(path)
            if other is None:
                other = self._others[path] = _Other(self._owner_of(path), modified)
            other.is_confirmed |= modified > other.modified or _lives(other.owner) is True
            if now - modified > ALIVE_SECONDS or _lives(other.owner) is False:
                del self._others[path]
                with contextlib.suppress(CheckpointError):
                    self._store.delete(path)

    def _owner_of(self, path: str) -> dict[str, Any]:
        try:
            owner = json.loads(self._store.get(path) or b"{}")
        except ValueError:
            return {}
        return owner if isinstance(owner, dict) else {}

    def clean_up(self) -> None:
        """Delete what dead processes left unfinished in the directory; a refusal of the store is logged."""
        try:
            removed = self._store.remove_abandoned(self.directory)
        except Exception as error:  # noqa: BLE001 - as above
            logger.info("could not look for unfinished uploads into %s: %s", self.directory, error)
            return
        if removed:
            logger.info("deleted %d unfinished uploads of dead processes, such as %s", len(removed), removed[0])

    def delete(self) -> None:
        """End the lease."""
        try:
            self._store.delete(self._path)
        except Exception as error:  # noqa: BLE001 - as above
            logger.info("could not delete the lease %s, which ends by itself: %s", self._path, error)
        self.was_deleted.set()


def has_others(store: LeaseStore, directory: str) -> bool:
    """Return whether another job may be saving into ``directory``."""
    lease = claim_on(directory)
    if isinstance(lease, Lease):
        return lease.others()
    remove_dead_leases(store, directory)
    return bool(store.hidden_objects(directory, LEASE_PREFIX))


def remove_dead_leases(store: LeaseStore, directory: str) -> None:
    """Delete the leases of processes of this machine that are dead."""
    for info in store.hidden_objects(directory, LEASE_PREFIX):
        with contextlib.suppress(ValueError):
            owner = json.loads(store.get(info.path) or b"{}")
            if isinstance(owner, dict) and _lives(owner) is False:
                store.delete(info.path)


# ---- who lives -------------------------------------------------------------------------------------------------------


def _this_process() -> dict[str, Any]:
    return {"host": socket.gethostname(), "machine": _machine(), "pid": os.getpid(), "started": _start_of(os.getpid())}


def _machine() -> str:
    """Return what distinguishes the processes that have different numbers here from all others; empty if unknown."""
    with contextlib.suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _start_of(pid: int) -> str:
    """Return when a process of this machine has begun; empty if there is none."""
    with contextlib.suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else fields[18]
    return ""


def _lives(owner: dict[str, Any]) -> bool | None:
    """Return whether a process lives; None if it is of another machine."""
    if not owner.get("machine") or owner["machine"] != _machine():
        return None
    pid, started = owner.get("pid"), owner.get("started")
    return isinstance(pid, int) and bool(started) and _start_of(pid) == started


# ---- what keeps leases alive -----------------------------------------------------------------------------------------


class _Keeper:
    """Writes the leases of this process again and again, on a thread that lives as long as there are any.

    It is there anyway, and no training waits for it: so it also cleans each directory up when the first lease on it
    begins.
    """

    def __init__(self) -> None:
        self._leases: list[Lease] = []
        self._ended: list[Lease] = []
        self._clean_directories: set[str] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, lease: Lease) -> None:
        """Keep ``lease`` alive, from now on."""
        with self._changed:
            if lease in self._leases:
                return
            self._leases.append(lease)
            self._wake()

    def drop(self, lease: Lease) -> None:
        """Let ``lease`` end."""
        with self._changed:
            if lease in self._leases:
                self._leases.remove(lease)
                self._ended.append(lease)
                self._wake()
            else:
                lease.was_deleted.set()

    def _wake(self) -> None:
        self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ckpt-lease", daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
                self._thread.start()

    def _run(self) -> None:
        due = 0.0
        known: set[Lease] = set()
        while True:
            with self._changed:
                if self._leases and not self._ended and time.monotonic() < due and known.issuperset(self._leases):
                    self._changed.wait(due - time.monotonic())
                ended, self._ended = self._ended, []
                leases = list(self._leases)
                if not leases and not ended:
                    self._thread = None
                    return
            for lease in ended:
                lease.delete()
            is_due = time.monotonic() >= due
            for lease in leases:
                if is_due or lease not in known:
                    lease.beat()
                # Once: only now can no upload of this process have been silent for long.
                if lease.directory not in self._clean_directories:
                    self._clean_directories.add(lease.directory)
                    lease.clean_up()
            known = set(leases)
            if is_due:
                all_known = all(lease.is_known for lease in leases)
                due = time.monotonic() + (RENEW_SECONDS if all_known else min(RENEW_SECONDS, _ASK_AGAIN_SECONDS))

    def close(self) -> None:
        """End all leases; at the end of the process."""
        with self._changed:
            self._ended += self._leases
            self._leases.clear()
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(_SECONDS_TO_END)


_keeper = _Keeper()


def _forget_keeper() -> None:
    global _keeper  # noqa: PLW0603 - a fact about the process
    _keeper = _Keeper()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_keeper)


def _end_leases() -> None:
    _keeper.close()


at_exit.call_after_threads(_end_leases)
