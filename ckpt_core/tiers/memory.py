"""The memory tier: the last snapshots of a run, in host memory outside its processes, so that they survive a crash.

They are files on an in-memory filesystem (``/dev/shm``): that needs no extra process, and the formats, digests and
atomic commit of checkpoints on disks work there, too. This module adds what memory needs in addition: the directory is
private and bounded, the next start of the run finds it, and it is deleted when the run has ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import glob
import hashlib
import json
import logging
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from ckpt_core._commit.agreement import Agreement
from ckpt_core._commit.rank_group import RankGroup
from ckpt_core.errors import CheckpointError, RankFailedError, StorageError
from ckpt_core.events import Event, SaveCommitted, SaveFailed, size_in_words
from ckpt_core.option_checks import check_count, check_options, check_path
from ckpt_core.paths import StrPath
from ckpt_core.storage import is_remote, local_path
from ckpt_core.storage.in_memory import MemoryStorage
from ckpt_core.tiers.machines import Machine, MachinesStorage, MemoryServer

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

#: Mount point of the in-memory filesystem on Linux.
MEMORY_ROOT = "/dev/shm"
_RECORD = "run.json"
_LONGEST_NAME = 60
_ATTEMPTS = 10  # how often to try to make directories, which an ending run or a clean-up may delete


class MemoryTier:
    """The last two snapshots of one run in memory: where they are kept, and when the next is due.

    Every rank has one. Rank 0's makes the directory (:meth:`begin`), chooses the path of the next snapshot
    (:meth:`next_path`) and deletes all snapshots at the regular end (:meth:`end`). If a snapshot fails, for example
    because it does not fit, a warning is logged, and training continues without snapshots.

    Args:
        run: The directory of the run's checkpoints, or a URL; the next start finds the snapshots by it.
        every: Steps from one snapshot to the next.
        root: A directory on an in-memory filesystem.

    Attributes:
        directory: Where the snapshots are.
        storage: The storage that keeps them.
        machines: How many machines have them in their memories.
        snapshots: How many commits of snapshots this process has seen.
        stall_seconds: How long training has stood still for them, the sum of the calls of :meth:`took`.

    Raises:
        ValueError: ``every`` is not at least 1, or ``root`` is a URL.

    Examples:
        >>> from ckpt_core import Checkpointer
        >>> from ckpt_core.tiers import MemoryTier
        >>> memory = MemoryTier("run-7/checkpoints", every=10)
        >>> [step for step in range(1, 31) if memory.due(step)]
        [10, 20, 30]
        >>> snapshots = Checkpointer(**memory.settings("async"))  # what saves them
    """

    def __init__(self, run: StrPath, *, every: int = 1, root: StrPath = MEMORY_ROOT) -> None:
        checks: dict[str, Callable[[Any], Any]] = {"run": check_path, "every": check_count, "root": check_path}
        check_options(checks, locals())
        if is_remote(root):
            raise ValueError(f"snapshots in memory need a local directory, not {root!r}")
        text = local_path(run)
        self._run = text.rstrip("/") if is_remote(text) else os.path.realpath(text)
        self._root = os.path.abspath(local_path(root))
        self._home = f"{self._root}/ckpt-{os.geteuid()}"
        name = os.path.basename(self._run)[:_LONGEST_NAME] or "run"
        self._place = f"{self._home}/{name}-{hashlib.sha256(self._run.encode()).hexdigest()[:16]}"
        self.directory = f"{self._place}/snapshots"
        self.storage: MemoryStorage = MemoryStorage(self._place)
        self.machines = 1
        self.snapshots = 0
        self.stall_seconds = 0.0
        self._every = every
        self._last = 0
        self._record: int | None = None  # descriptor of the record file, locked while the run is alive
        self._server: MemoryServer | None = None
        self._kept: list[str] = []  # paths of the snapshots, oldest first
        self._has_failed = False

    def settings(self, strategy: str) -> dict[str, Any]:
        """Return the arguments for the checkpointer that saves the snapshots.

        Args:
            strategy: ``"sync"`` or ``"async"``.
        """
        return {"strategy": strategy, "on_error": "warn", "storage": self.storage, "listeners": [self]}

    def covers(self, path: StrPath) -> bool:
        """Return whether a checkpoint is one of the run's snapshots in memory."""
        return os.path.dirname(os.fspath(path).rstrip("/")) == self.directory

    # ---- before training ---------------------------------------------------------------------------------------------

    def found(self) -> str | None:
        """Return the directory for look-ups; None if it is missing or, with a warning, belongs to another user."""
        if not os.path.lexists(self._place):
            return None
        try:
            self._refuse_others()
        except StorageError as error:
            logger.warning("could not look for snapshots in memory: %s", error)
            return None
        return self.directory

    def begin(self) -> str:
        """Make the directory, on rank 0; return the token for :meth:`is_seen` on the other ranks.

        Raises:
            StorageError: There is no such memory, or another user has the directory.
        """
        return self._in_own_directory(self._take)

    def _in_own_directory(self, action: Callable[[], Result]) -> Result:
        if not os.path.isdir(self._root):
            raise StorageError(
                "there is no in-memory filesystem for snapshots here",
                path=self._root,
                remedy="name one that is mounted (memory_dir), or train without memory_every_n_steps",
            )
        try:
            for _ in range(_ATTEMPTS - 1):
                # Another run that ends, or a clean-up, may delete the directories before this run has locked its own.
                with contextlib.suppress(FileNotFoundError):
                    return self._act_in_directory(action)
            return self._act_in_directory(action)
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)
            remedy = "free some of it (ckpt clean --memory)" if is_full else "name another place (memory_dir)"
            raise StorageError(
                f"snapshots cannot be kept in memory: {error.strerror}",
                path=self.directory,
                remedy=f"{remedy}, or train without memory_every_n_steps",
                errno=error.errno,
            ) from error

    def _act_in_directory(self, action: Callable[[], Result]) -> Result:
        for directory in (self._home, self._place, self.directory):
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory, 0o700)
        self._refuse_others()
        return action()

    def _take(self) -> str:
        self.storage.drop_spares()
        self.storage.remove_orphans(self.directory)
        token, self._record = uuid.uuid4().hex, _lock_record(self._place)
        data = json.dumps({"version": 1, "run": self._run, "token": token}).encode()
        os.pwrite(self._record, data, 0)
        os.ftruncate(self._record, len(data))
        self._look(self.storage)
        return token

    def _look(self, storage: MemoryStorage) -> None:
        entries = [*storage.list(self.directory), *storage.list_directories(self.directory)]
        self._kept = [entry.path for entry in sorted(entries, key=lambda entry: entry.modified)]

    def is_seen(self, token: str) -> bool:
        """Return whether this rank sees the memory of rank 0: on another machine or in another container it does not.

        Args:
            token: The token that :meth:`begin` has returned on rank 0.
        """
        return _read(self._place).get("token") == token

    def join_machines(self, agreement: Agreement, ranks: RankGroup) -> None:
        """Join the memories of several machines; call it on all ranks together after :meth:`begin`.

        The lowest rank of each machine serves its memory to the others.

        Args:
            agreement: The agreement of these ranks.
            ranks: The ranks that save together.

        Raises:
            CheckpointError: They cannot be joined; the same on all ranks.
        """
        store = ranks.store
        assert isinstance(store, TCPStore)  # there are several ranks
        mark = f"{self._place}/rank-{ranks.session}-"
        addresses = PrefixStore(f"memory-{ranks.session}", store)
        place = agreement.from_rank_zero("memory", self._place)
        served: list[int] = []
        locked: list[int] = []  # this rank's lock on the record, held until the rank that serves has locked it

        def be_seen() -> None:
            if self._place != place:
                raise RankFailedError(
                    f"rank {ranks.rank} would keep snapshots in {self._place}, and rank 0 in {place}",
                    remedy="use the same path for memory_dir and for the checkpoints on all machines",
                )
            locked.append(self._in_own_directory(lambda: _lock_record(self._place)))
            Path(f"{mark}{ranks.rank}").touch()

        def serve() -> None:
            served.append(min(int(name.rpartition("-")[2]) for name in glob.glob(f"{glob.escape(mark)}*")))
            address = ""
            if served[0] == ranks.rank:
                if ranks.rank:
                    self.begin()
                self._server = MemoryServer(self._place, ranks.key("memory"), store.host, is_here=ranks.rank == 0)
                address = json.dumps(self._server.machine)
            addresses.set(str(ranks.rank), address)

        try:
            agreement.all_succeeded("memory", be_seen)
            agreement.all_succeeded("memory", serve)
        finally:
            for record in locked:
                os.close(record)
        texts = [] if ranks.rank else [addresses.get(str(rank)).decode() for rank in range(ranks.world_size)]
        found = [[rank, *json.loads(text)] for rank, text in enumerate(texts) if text]
        found = agreement.from_rank_zero("memory", found)
        os.unlink(f"{mark}{ranks.rank}")
        self._look(self.storage)
        self.machines, mine = len(found), [rank for rank, _, _ in found].index(served[0])
        machines = [Machine(host, port) for _, host, port in found]
        self.storage = MachinesStorage(self._place, machines, mine, ranks.key("memory"), self.directory)

    def begin_at(self, step: int) -> None:
        """Count steps from ``step``, at which training begins or continues."""
        self._last = step

    def _refuse_others(self) -> None:
        for directory in (self._home, self._place):
            status = os.lstat(directory)
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
                raise StorageError(
                    "snapshots in memory are not kept in a directory that belongs to others, or that they may "
                    f"write to (owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o})",
                    path=directory,
                    remedy="have it deleted, or set another memory_dir",
                )

    # ---- in training -------------------------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Return whether a snapshot is due after a step. Call it once for each step, on all ranks."""
        last, self._last = self._last, step
        return step // self._every > last // self._every

    def next_path(self, step: int, name: str = "step={}", *, is_busy: bool = False) -> str | None:
        """Make room for the snapshot of a step, on rank 0, and return its path; None if it is to be skipped.

        Args:
            step: The step of the training.
            name: The name of the snapshot, with ``{}`` for the step.
            is_busy: Whether the previous snapshot is still being written; this one is then skipped.
        """
        if self._has_failed or is_busy:
            return None
        path = f"{self.directory}/{name.format(step)}"
        self.make_room(path)
        return path

    def make_room(self, path: str) -> None:
        """Delete the snapshots in this machine's memory that the next one replaces.

        Args:
            path: The path of the next snapshot, as chosen by rank 0.
        """
        with contextlib.suppress(CheckpointError):
            if self.machines > 1:  # this machine is not notified of the commits of other machines
                self._look(MemoryStorage(self._place))
            for old in [kept for kept in self._kept if kept != path][:-1]:  # the newest stays until the commit
                self._kept.remove(old)
                self.storage.set_aside(old)

    def took(self, seconds: float) -> None:
        """Add the seconds for which training stood still for a snapshot."""
        self.stall_seconds += seconds

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_record": None, "_server": None}  # a copy has begun nothing

    def __call__(self, event: Event) -> None:
        if isinstance(event, SaveCommitted):
            self.snapshots += 1
            self._kept = [*(path for path in self._kept if path != event.path), event.path]
            if self._record is not None:
                self.storage.drop_spares()
        elif isinstance(event, SaveFailed):
            self.fail(event.error)

    def fail(self, reason: object) -> None:
        """Take no more snapshots, and log the reason, once."""
        if not self._has_failed:
            self._has_failed = True
            logger.warning("this run takes no more snapshots in memory, and saves to disk only: %s", reason)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def in_words(self) -> str:
        """Return a line about the snapshots taken; empty if there were none."""
        if not self.snapshots:
            return ""
        each = 1000 * self.stall_seconds / self.snapshots
        return f"{self.snapshots} snapshots in memory; training stood still for {each:.1f} ms for each"

    def leave(self) -> None:
        """Keep the snapshots for the next start."""
        if self._record is not None:
            self.storage.drop_spares()
            os.close(self._record)
            self._record = None
            if self._server is not None:
                self._server.close()

    def end(self) -> None:
        """Delete the snapshots, after the run has ended regularly. Does nothing if :meth:`begin` was not called."""
        if self._record is not None:
            record = os.dup(self._record)  # keeps the lock while leave() closes the other descriptor
            self.leave()
            _delete(self._place, record)


@dataclasses.dataclass(frozen=True)
class RunInMemory:
    """The snapshots of one run in memory, as found by :func:`runs_in_memory`.

    Attributes:
        directory: Where they are.
        run: The directory of the run's checkpoints; empty if that is not known.
        bytes: How much memory they take.
        is_alive: Whether the run is under way.
    """

    directory: str
    run: str
    bytes: int
    is_alive: bool

    def __str__(self) -> str:
        return f"{self.directory} ({size_in_words(self.bytes)}, of {self.run or 'an unknown run'})"

    def delete(self) -> bool:
        """Delete the snapshots, unless the run has begun again; return whether they are gone."""
        with contextlib.suppress(OSError):
            record = os.open(f"{self.directory}/{_RECORD}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            _delete(self.directory, record)
        return not os.path.lexists(self.directory)


def runs_in_memory(root: StrPath = MEMORY_ROOT) -> Sequence[RunInMemory]:
    """Return the snapshots of this user's runs in the memory of this machine, including runs that are not alive."""
    home, found = f"{local_path(root)}/ckpt-{os.geteuid()}", []
    with contextlib.suppress(OSError):
        for entry in sorted(os.listdir(home)):
            directory = f"{home}/{entry}"
            size = sum(_bytes_of(f"{at}/{name}") for at, _, names in os.walk(directory) for name in names)
            run = RunInMemory(directory, str(_read(directory).get("run", "")), size, _is_locked(directory))
            if os.path.lexists(directory):  # the run may have ended meanwhile
                found.append(run)
    return found


def _bytes_of(file: str) -> int:
    with contextlib.suppress(OSError):
        return os.lstat(file).st_blocks * 512
    return 0


def _read(directory: str) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError), open(f"{directory}/{_RECORD}", encoding="utf-8") as file:
        found = json.load(file)
        return found if isinstance(found, dict) else {}
    return {}


def _is_locked(directory: str) -> bool:
    with contextlib.suppress(OSError), open(f"{directory}/{_RECORD}", "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _lock_record(place: str) -> int:
    """Lock the record of a run while it is alive; return the descriptor. FileNotFoundError if it is being deleted."""
    path = f"{place}/{_RECORD}"
    record = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(record, fcntl.LOCK_SH)  # waits at most for a check or a deletion, which lock it exclusively
        if not os.path.samestat(os.stat(path), os.fstat(record)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    except BaseException:
        os.close(record)
        raise
    return record


def _delete(directory: str, record: int) -> None:
    """Delete the snapshots of a run, unless it is alive; closes ``record``."""
    gone = f"{directory}-{uuid.uuid4().hex[:12]}"  # renamed first, because a run that begins recreates the directory
    try:
        fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.stat(f"{directory}/{_RECORD}"), os.fstat(record)):
            return
        os.rename(directory, gone)
    except OSError:
        return
    finally:
        os.close(record)
    shutil.rmtree(gone, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(directory))  # fails if another run has snapshots
