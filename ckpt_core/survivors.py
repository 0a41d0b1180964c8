"""Just-in-time checkpoints: when a rank dies, a surviving rank, which holds the replicated state, saves it.

Where ranks are replicas of each other (DDP), the state that only the dead rank had is small: random generators, data
position. Each rank writes this per-rank state to a file after each step, where it survives SIGKILL. A rank that leaves
a failed collective records that in its file, and reads the files of the other ranks. The survivors choose the earliest
of their last steps for which they still hold all weights. Of the ranks that hold them, the lowest saves; with HSDP, the
lowest for each shard. They communicate only through these files, since the process group is broken and the store may
have died with rank 0. No wait is unlimited.

The idea: Gupta et al., "Just-In-Time Checkpointing: Low Cost Error Recovery from Deep Learning Training Failures",
EuroSys 2024.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import logging
import os
import re
import signal
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import xxhash
from torch.distributed.tensor import DTensor

from ckpt_core.errors import StorageError
from ckpt_core.process.process_groups import abort_process_groups
from ckpt_core.process.threads import Latch
from ckpt_core.recorder import record_path
from ckpt_core.state.fast_pickle import note_of, read_note
from ckpt_core.state.kinds import parameters_of
from ckpt_core.storage import is_remote

__all__ = [
    "EVERYTHING",
    "NO_PLACE",
    "WAIT_SECONDS",
    "BufferCopies",
    "LiveWeights",
    "Rescue",
    "Survivors",
    "ignoring_signals",
    "no_rescue",
    "shards_of",
    "wait_seconds_of",
    "why_not_replicas",
]

log = logging.getLogger(__name__)

#: How long survivors wait for each other by default: less than the 30 seconds after which ``torchrun`` kills them.
WAIT_SECONDS = 15.0

_SLOTS = 4
_SLOT_BYTES = 1 << 22  # the file is sparse
_HEAD_BYTES = 4096
_WRITTEN = _SLOTS  # the slot with the results of ``write``, for the rank that saves
_EXCHANGE = _WRITTEN + 1  # the first of _SLOTS slots for what was noted before an exchange of gradients
_RECORD = struct.Struct("<8sQQQ")  # digest of the session, number of the step, bytes of the data, digest of the data
_MOST_BYTES = _SLOT_BYTES - _RECORD.size
_CHECK = struct.Struct("<Q")
_PAUSE_SECONDS = 0.02
_LOOKS = 3  # first steps in which this rank checks whether the filesystem shows it the locks of the other ranks
_LOSS_SECONDS = 1.0  # the locks of a dead process are released within this time
_ABORT_SECONDS = 0.5  # after this, process groups are aborted: survivors may wait for this rank in a collective
_LOST = re.compile(
    r"gloo|nccl|process ?group|connection (closed|reset|refused)|broken pipe|socket|timed out waiting|"
    r"collective|remote (peer|process)|communicator",
    re.IGNORECASE,
)

#: Why survivors cannot save, if some rank does not see the files of all ranks (:attr:`Survivors.sees_all`).
NO_PLACE = (
    "the checkpoints are on a store, and the ranks are on several machines, so survivors have no files to meet in: "
    "give a directory that all machines share"
)

#: Stands in :attr:`Rescue.unknown` for the whole per-rank state of a rank that has left no usable note.
EVERYTHING = "all that it had"
_TRAINING, _STOPPED, _WROTE, _LEFT, _OVER = "training", "stopped", "wrote", "left", "over"


class Rescue(NamedTuple):
    """The state that one survivor saves, or several together, where each holds a shard of the state."""

    number: int  # of the step, as passed to note
    ranks: list[Any]  # the noted state of each rank, in rank order
    unknown: dict[int, list[str]]  # by lost rank, names of the state that is uncertain and was taken from this rank
    writers: list[int]  # for each rank, the rank that writes its part
    written: list[Any]  # what ``write`` has returned on each writer, this rank's first

    def notes(self, saver: int, own: str, *others: str) -> list[str]:
        """Return messages about state of lost ranks that was replaced by this rank's; flight records are left out.

        Args:
            saver: This rank.
            own: Key of the per-rank state in each note.
            *others: Other keys with per-rank state.
        """
        found = []
        for rank, names in self.unknown.items():
            counts = [name for name in names if name == EVERYTHING or name.split(".")[0] in (own, *others)]
            counts = [name.removeprefix(f"{own}.") for name in counts if not name.startswith(f"{own}.recorder")]
            counts = list(dict.fromkeys(counts))
            if counts:
                more = f" and {len(counts) - 3} more" if len(counts) > 3 else ""
                found.append(f"rank {rank} was lost, and continues with {', '.join(counts[:3])}{more} of rank {saver}")
        return found

    def per_rank_state_of(self, rank: int, own: str) -> Any:
        """Return the per-rank state of a rank; without its flight record, if that was taken from a different rank."""
        state = self.ranks[rank][own]
        return {**state, "recorder": None} if rank in self.unknown else state


def wait_seconds_of(value: Any) -> float | None:
    """Convert the value of ``just_in_time`` (True, False or seconds) to the seconds for which survivors wait, or None.

    Raises:
        ValueError: The value is none of these.

    Example:
        >>> wait_seconds_of(True), wait_seconds_of(False), wait_seconds_of(5)
        (15.0, None, 5.0)
    """
    if value is None or value is False:
        return None
    if value is True:
        return WAIT_SECONDS
    if not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError(f"just_in_time must be true, false, or seconds above 0, not {value!r:.80}")
    return float(value)


def why_not_replicas(
    kind: str, modules: Iterable[torch.nn.Module], optimizers: Iterable[Any], *, are_replicas: bool
) -> str | None:
    """Return a message why no rank can save the state of a lost rank; None if each rank holds the whole state.

    Args:
        kind: The strategy that connects the ranks, for the message.
        modules: The trained modules.
        optimizers: The torch optimizers.
        are_replicas: Whether ranks hold equal states with this strategy, as far as that is known.
    """
    # Compared by name: importing the class compiles other optimizers, and warns.
    classes = {cls.__name__ for optimizer in optimizers for cls in type(optimizer).__mro__}
    if are_replicas and "ZeroRedundancyOptimizer" in classes:
        kind, are_replicas = "ZeroRedundancyOptimizer", False
    elif are_replicas and any(isinstance(parameter, DTensor) for parameter in parameters_of(modules)):
        kind, are_replicas = "a model of distributed tensors", False
    return None if are_replicas else f"it is for ranks that hold what others hold, too (DDP, HSDP), and this is {kind}"


def shards_of(modules: Iterable[torch.nn.Module], world_size: int) -> list[int] | None:
    """Return the shard number of each rank (HSDP); None if it cannot be determined, or no two ranks share a shard."""
    every = parameters_of(modules)
    parameters = [parameter for parameter in every if isinstance(parameter, DTensor)]
    if not parameters or len(parameters) < len(every):
        return None
    mesh = parameters[0].device_mesh.mesh
    if mesh.numel() != world_size or any(not torch.equal(each.device_mesh.mesh, mesh) for each in parameters):
        return None
    cuts = [any(not each.placements[i].is_replicate() for each in parameters) for i in range(mesh.ndim)]
    found = [0] * world_size
    for place in itertools.product(*map(range, mesh.shape)):
        for index, size, is_cut in zip(place, mesh.shape, cuts, strict=True):
            found[int(mesh[place])] = found[int(mesh[place])] * size + index if is_cut else found[int(mesh[place])]
    return found if len(set(found)) < world_size else None


def no_rescue(problem: str) -> str:
    """Return the warning for the start of a run in which nothing can be saved when a rank dies.

    Args:
        problem: Why nothing can be saved.
    """
    return f"just_in_time will save nothing if a rank dies: {problem}; the next start resumes from the last checkpoint"


@contextlib.contextmanager
def ignoring_signals() -> Iterator[None]:
    """Ignore SIGTERM, which launchers send when a rank has died, so that survivors can finish their save."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


class BufferCopies:
    """Copies of the buffers that training changes, such as BatchNorm's statistics, as they were after the last step.

    Args:
        modules: The modules with the buffers.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        # Grouped by module: BatchNorm's kernels change its statistics, but not their version; its counter's changes.
        own = (list(inner.buffers(recurse=False)) for module in modules for inner in module.modules())
        self._groups = [buffers for buffers in own if buffers]
        self._versions = [_versions(buffers) for buffers in self._groups]
        self._copies: dict[int, list[torch.Tensor]] = {}

    def take(self) -> bool:
        """Copy the buffers that have changed since the last call; return whether any has."""
        changed = False
        for index, buffers in enumerate(self._groups):
            if _versions(buffers) != self._versions[index]:
                changed = True
                self._versions[index] = _versions(buffers)
                self._copies[index] = [buffer.detach().clone() for buffer in buffers]
        return changed

    def put_back(self) -> bool:
        """Undo changes since the last :meth:`take`; return False if a changed buffer was never copied."""
        for index, buffers in enumerate(self._groups):
            if _versions(buffers) != self._versions[index]:
                if index not in self._copies:
                    return False
                with torch.no_grad():
                    torch._foreach_copy_(buffers, self._copies[index])
                self._versions[index] = _versions(buffers)
        return True

    @property
    def changed(self) -> list[torch.Tensor]:
        """The buffers that training has changed so far."""
        return [buffer for index in self._copies for buffer in self._groups[index]]


class LiveWeights:
    """The live weights of a rank; knows whether they are still those of the last noted step.

    Args:
        modules: The trained modules.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._parameters = parameters_of(modules)
        self._buffers = BufferCopies(modules)
        self._noted: int | None = None
        #: The first noted step with the same weights as the last one.
        self.since = 0

    @property
    def versions(self) -> int:
        """A number that changes with the weights."""
        return _versions(self._parameters)

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The buffers that training has changed so far."""
        return self._buffers.changed

    def note(self, number: int) -> None:
        """Remember the current weights as those of the noted step ``number``."""
        versions = self.versions
        if self._buffers.take() or versions != self._noted:
            self.since = number
        self._noted = versions

    @property
    def are_noted(self) -> bool:
        """Whether the weights are still those of the last noted step."""
        return self.versions == self._noted

    def put_back(self) -> bool:
        """Undo changes of buffers since the last noted step; return whether that was possible."""
        return self._buffers.put_back()


def _versions(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor._version for tensor in tensors)


class Survivors:
    """One rank's view of all ranks of a run, through a file of each rank; leads the survivors to a joint save.

    Args:
        directory: The directory of the checkpoints, on a filesystem that the ranks share. If it is a URL, the files are
            in the machine's directory for temporary files, and all ranks must be on one machine.
        rank: This process's rank.
        world_size: Number of ranks.
        session: Text that is the same on all ranks and different for every run.
        wait_seconds: How long survivors wait for each other.
        shards: The shard number of each rank; None if each rank holds the whole state.
    """

    def __init__(
        self,
        directory: str,
        rank: int,
        world_size: int,
        session: str,
        wait_seconds: float = WAIT_SECONDS,
        shards: Sequence[int] | None = None,
    ) -> None:
        self._shards = [0] * world_size if shards is None else list(shards)
        self._rank, self._session, self._wait_seconds = rank, session, wait_seconds
        self._paths: list[str] = []
        self._mark = xxhash.xxh3_64_digest(session.encode())
        self._ended = Latch()
        self._descriptor: int | None = None
        self.last = 0
        self._has_left = False
        self._unseen = [other for other in range(world_size) if other != rank]  # ranks whose locks were never seen here
        self._saved: int | None = None
        try:
            place = _local_place(directory) if is_remote(directory) else directory
            self._paths = [record_path(place, other, "survivor") for other in range(world_size)]
            os.makedirs(os.path.dirname(self._paths[rank]), exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._paths[rank])  # a process of an earlier start may still run and hold the lock on it
            self._descriptor = os.open(self._paths[rank], os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with contextlib.suppress(OSError):  # a filesystem without locks
                # POSIX locks are not inherited by data loading workers, which may outlive a killed training process.
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._tell(_TRAINING)
        except OSError as error:
            self._give_up(str(error))

    @property
    def sees_all(self) -> bool:
        """Whether this rank sees the files of all other ranks; call it only after each has created its file."""
        return self._descriptor is not None and all(self._head(other) is not None for other in self._others)

    # ---- while training ----------------------------------------------------------------------------------------------

    def note(self, state: Any) -> None:
        """Write this rank's per-rank state to its file after a step.

        Args:
            state: Plain data and tensors. All ranks note the same steps in the same order.
        """
        if self._descriptor is None:
            return
        data = note_of(state)
        if len(data) > _MOST_BYTES:
            self._give_up(f"a rank's own state has {len(data)} bytes, and at most {_SLOT_BYTES} are noted")
            return
        if self._has_left:  # the user's script caught the exception, and training continues
            self._has_left = False
            self._tell(_TRAINING)
        self.last += 1
        try:
            self._put(self.last, data, self.last % _SLOTS)
            self._look()
        except OSError as error:
            self._give_up(str(error))

    def note_start(self, state: Any) -> None:
        """Write this rank's state before its first step: a base to derive its first step from, never saved itself.

        Args:
            state: As for :meth:`note`; a later call replaces it.
        """
        data = note_of(state)
        if len(data) <= _MOST_BYTES:
            with contextlib.suppress(OSError):
                self._put(0, data, 0)

    def note_exchange(self, *parts: Any) -> None:
        """Write, before gradients are exchanged, those entries of the next note that each rank changes on its own.

        The other ranks complete the step only if this rank reaches the exchange. If it then dies before its note, they
        use these entries instead, as far as their own notes show that nothing changes them in between.

        Args:
            *parts: Newer values of entries of the last note, each part in addition to those before it.
        """
        number = self.last + 1
        with contextlib.suppress(OSError):
            self._put(number, note_of(list(parts)), _EXCHANGE + number % _SLOTS)
            self._look()

    def _look(self) -> None:
        if self.last <= _LOOKS and self._descriptor is not None:
            self._unseen = [other for other in self._unseen if not self._state_of(other)[2]]

    def _put(self, number: int, data: bytes, slot: int) -> None:
        if self._descriptor is not None:
            head = _RECORD.pack(self._mark, number, len(data), xxhash.xxh3_64_intdigest(data))
            os.pwrite(self._descriptor, head + data, _HEAD_BYTES + slot * _SLOT_BYTES)

    def _give_up(self, why: str) -> None:
        log.warning("rank %d: just_in_time will save nothing if a rank dies: %s", self._rank, why)
        self.close(remove=True)

    def _tell(self, doing: str, number: Any = None) -> None:
        if self._descriptor is not None:
            text = json.dumps([self._session, doing, number]).encode()
            check = _CHECK.pack(xxhash.xxh3_64_intdigest(text))
            os.pwrite(self._descriptor, (check + text).ljust(_HEAD_BYTES, b"\0"), 0)

    def close(self, *, remove: bool = False) -> None:
        """Release the lock and stop taking part.

        Args:
            remove: Whether to delete the file, because training came to its end.
        """
        descriptor, self._descriptor = self._descriptor, None
        self._ended.set()
        if descriptor is not None:
            if remove:  # before the lock is released, or this rank would look dead for a moment
                with contextlib.suppress(OSError):
                    if os.path.samestat(os.stat(self._paths[self._rank]), os.fstat(descriptor)):
                        os.unlink(self._paths[self._rank])
            with contextlib.suppress(OSError):
                os.close(descriptor)

    # ---- when something has failed -----------------------------------------------------------------------------------

    def is_loss(self, error: BaseException) -> bool:
        """Return whether an exception was caused by the loss of another rank, and not by this rank itself."""
        if self._descriptor is None:
            return False
        seen: BaseException | None = error
        while seen is not None and not isinstance(seen, StorageError):  # that is about a connection to an object store
            if isinstance(seen, (RuntimeError, OSError)) and _LOST.search(f"{type(seen).__name__} {seen}"):
                return True
            seen = seen.__cause__ or seen.__context__
        is_alone = isinstance(error, SystemExit)  # this rank was asked to end, and the others did not answer
        deadline = time.monotonic() + _LOSS_SECONDS
        while not self.is_rank_lost() and not (is_alone and self.is_rank_gone()):
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE_SECONDS)
        return True

    def is_rank_lost(self) -> bool:
        """Return whether another rank of this run is dead, or has itself noticed that a rank is dead."""
        states = [self._state_of(other) for other in self._others]
        return any(
            doing in (_STOPPED, _WROTE, _OVER) or (doing == _TRAINING and not alive) for doing, _, alive in states
        )

    def is_rank_gone(self) -> bool:
        """Return whether another rank has left, or is certainly dead: its lock was seen here once, and is now free."""
        for other in self._others:
            doing, _, alive = self._state_of(other)
            if doing in (_LEFT, _STOPPED, _WROTE, _OVER) or (
                doing == _TRAINING and not alive and other not in self._unseen
            ):
                return True
        return False

    def find_dead(self) -> list[int]:
        """Return the other ranks that are certainly dead: their locks were seen here once, and are now free."""
        states = {other: self._state_of(other) for other in self._others if other not in self._unseen}
        return [other for other, (doing, _, alive) in states.items() if doing is not None and not alive]

    def leave(self) -> None:
        """Record that this rank stops taking part, because of an exception of its own; its notes stay.

        If it notes another step, it takes part again.
        """
        with contextlib.suppress(OSError):
            self._tell(_LEFT)
        self._has_left = True
        self._ended.set()

    def rescue(
        self,
        holds: int | None,
        save: Callable[[Rescue], None],
        write: Callable[[Rescue], Any] | None = None,
        since: int | None = None,
    ) -> bool:
        """Agree with the other survivors on a step, and save it if this rank is the saver; else wait for the saver.

        Args:
            holds: The number of the noted step whose weights this rank still has; None if there is none.
            save: Saves, and returns when the checkpoint is durable; called on the saver.
            write: Writes one rank's shard before ``save``, and returns plain data that ``save`` needs; called on each
                rank that holds a shard to be saved. None if the saver holds the whole state.
            since: The first noted step with the same weights as ``holds``, if that is an earlier step.

        Returns:
            Whether this rank has saved.
        """
        try:
            held = None if holds is None else [holds if since is None else since, holds]
            self._tell(_STOPPED, held)
            return self._rescue(held, save, write)
        except OSError:
            log.exception("rank %d: could not save a checkpoint after a rank had died", self._rank)
            return False
        finally:
            with contextlib.suppress(OSError):
                self._tell(_OVER, self._saved)
            self._ended.set()

    def wait_until_over(self) -> None:
        """Block until this rank has left its collective and done its part of the save; call it on another thread."""
        self._ended.wait(2 * self._wait_seconds)

    def _rescue(
        self, holds: list[int] | None, save: Callable[[Rescue], None], write: Callable[[Rescue], Any] | None
    ) -> bool:
        now = time.monotonic()
        abort, deadline, aborted = now + _ABORT_SECONDS, now + self._wait_seconds, False
        states = {other: self._state_of(other) for other in self._others}
        while any(doing == _TRAINING and alive for doing, _, alive in states.values()) and now < deadline:
            if now > abort and not aborted:
                abort_process_groups()
                aborted = True
            time.sleep(_PAUSE_SECONDS)
            states = {other: self._state_of(other) for other in self._others}
            now = time.monotonic()
        if any(doing == _OVER and number is not None for doing, number, _ in states.values()):
            return False  # another rank was faster, and has saved
        held = {other: at for other, (doing, at, alive) in states.items() if doing in (_STOPPED, _WROTE) and alive}
        number, writers = self._writers({**held, self._rank: holds})
        if number is None:
            log.error("rank %d: no surviving rank holds a complete state: resume from the last checkpoint", self._rank)
            return False
        saver = min(writers)
        if self._rank not in writers:
            self._wait_for(saver, deadline + self._wait_seconds)
            return False
        if self._rank == saver and self._rank and self._head(0) is None:
            log.error(
                "rank %d: no checkpoint is saved: what rank 0 writes is not seen here, so a checkpoint that this rank "
                "saves might not be found; keep checkpoints on a filesystem that all machines share",
                self._rank,
            )
            return False
        rescue = self._gathered(number, writers)
        if write is not None:
            rescue.written.append(write(rescue))
        if self._rank != saver:
            self._put(number, note_of(rescue.written), _WRITTEN)
            self._tell(_WROTE, holds)
            self._wait_for(saver, deadline + 2 * self._wait_seconds)
            return False
        for other in sorted(set(writers) - {saver}):
            self._wait_for(other, deadline + self._wait_seconds)
            written = self._noted(other, number, _WRITTEN)
            if written is None or self._state_of(other)[0] != _WROTE:
                raise OSError(f"rank {other} has not written its shard")
            rescue.written.extend(written)
        save(rescue)
        self._saved = number
        return True

    def _writers(self, held: Mapping[int, list[int] | None]) -> tuple[int | None, list[int]]:
        """Return the first step that the survivors hold completely, and for each rank the one that writes its part.

        ``held`` has, for each survivor, the first and the last noted step with its current weights.
        """
        whole = {rank: steps for rank, steps in held.items() if steps}
        for number in sorted({last for _, last in whole.values()}):
            able = [rank for rank, (since, last) in whole.items() if since <= number <= last]
            able.sort(key=lambda rank: (whole[rank][1] == number, -rank))  # best last: no later note, then low rank
            first = {self._shards[rank]: rank for rank in able}
            if first.keys() >= set(self._shards):
                return number, [first[shard] for shard in self._shards]
        return None, []

    def _wait_for(self, saver: int, deadline: float) -> None:
        # Wait before ending: a launcher may kill all ranks as soon as one has ended.
        while time.monotonic() < deadline:
            doing, _, alive = self._state_of(saver)
            if doing != _STOPPED or not alive:
                return
            time.sleep(_PAUSE_SECONDS)

    def _gathered(self, number: int, writers: list[int]) -> Rescue:
        ranks, unknown = [], {}
        for other in range(len(self._paths)):
            found, lost = self._taken_over(other, number)
            if lost:
                unknown[other] = lost
            ranks.append(found)
        return Rescue(number, ranks, unknown, writers, [])

    def _taken_over(self, other: int, number: int) -> tuple[Any, list[str]]:
        """Return a rank's note of a step, or one derived from this rank's notes, and the names of uncertain entries."""
        noted = self._noted(other, number)
        if noted is not None:
            return noted, []
        mine, before = (self._noted(self._rank, each) for each in (number, number - 1))
        if before is None:
            return mine, [EVERYTHING]
        theirs, unknown = self._taken_over(other, number - 1)
        if EVERYTHING in unknown:
            return mine, [EVERYTHING]
        slot = _EXCHANGE + number % _SLOTS
        parts = [(None, None), *zip(*(self._noted(r, number, slot) or [] for r in (other, self._rank)), strict=False)]
        found = []
        for their_part, my_part in parts:
            if their_part is not None:
                theirs, before = _with(theirs, their_part), _with(before, my_part)
            lost: list[str] = list(unknown)
            found.append((_follow(theirs, before, mine, "", lost), lost))
        return min(found, key=lambda state_and_lost: len(state_and_lost[1]))

    # ---- the files ---------------------------------------------------------------------------------------------------

    @property
    def _others(self) -> list[int]:
        return [other for other in range(len(self._paths)) if other != self._rank]

    def _state_of(self, rank: int) -> tuple[str | None, Any, bool]:
        """Return a rank's recorded activity and its argument, and whether it is alive; None if it has no file here."""
        head = self._head(rank)
        try:
            return (None, None, False) if head is None else (*head, self._is_alive(rank))
        except FileNotFoundError:  # training came to its end on that rank, which deleted the file
            return None, None, False

    def _head(self, rank: int) -> tuple[str, Any] | None:
        data = self._read(rank, _HEAD_BYTES, 0)
        text = data[_CHECK.size :].rstrip(b"\0")
        if _CHECK.pack(xxhash.xxh3_64_intdigest(text)) != data[: _CHECK.size]:
            return None
        session, doing, number = json.loads(text)
        return (doing, number) if session == self._session else None

    def _noted(self, rank: int, number: int, slot: int | None = None) -> Any:
        place = _HEAD_BYTES + (number % _SLOTS if slot is None else slot) * _SLOT_BYTES
        data = self._read(rank, _SLOT_BYTES, place) if number >= 0 else b""
        if len(data) < _RECORD.size:
            return None
        mark, found, size, check = _RECORD.unpack_from(data)
        body = data[_RECORD.size : _RECORD.size + size]
        if (mark, found, check) != (self._mark, number, xxhash.xxh3_64_intdigest(body)):
            return None
        return read_note(body)

    def _read(self, rank: int, size: int, offset: int) -> bytes:
        if rank == self._rank and self._descriptor is not None:  # closing another descriptor would release the lock
            return os.pread(self._descriptor, size, offset)
        try:
            with open(self._paths[rank], "rb", buffering=0) as file:
                return os.pread(file.fileno(), size, offset)
        except FileNotFoundError:
            return b""

    def _is_alive(self, rank: int) -> bool:
        with open(self._paths[rank], "rb") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError as error:
                return error.errno in (errno.EAGAIN, errno.EACCES)  # otherwise a filesystem without locks: unknown
        return False


def _local_place(url: str) -> str:
    """Return a local directory that only this user can write to, for a run whose checkpoints are on an object store."""
    home = os.path.join(tempfile.gettempdir(), f"ckpt-{os.geteuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(home, 0o700)
    status = os.lstat(home)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "the directory belongs to others, or they may write to it", home)
    return os.path.join(home, hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16])


def _with(state: Any, part: Any) -> Any:
    """Return a copy of a nested state in which the newer entries of ``part`` replace the old ones."""
    if isinstance(state, dict) and isinstance(part, dict):
        return {**state, **{key: _with(state.get(key), value) for key, value in part.items()}}
    if isinstance(state, list) and isinstance(part, dict):  # whose keys are indices of the list
        return [_with(item, part[index]) if index in part else item for index, item in enumerate(state)]
    return part


def _follow(theirs: Any, before: Any, now: Any, name: str, lost: list[str]) -> Any:
    """Derive a lost rank's state from its last note ``theirs`` and this rank's change from ``before`` to ``now``.

    Entries that did not change on this rank are assumed unchanged there, and entries that were equal on both ranks are
    assumed to be still equal. For all others, this rank's value is returned, and the name is added to ``lost``.
    """
    if _same(before, now):
        return theirs
    if _same(theirs, before) and not _NEVER_ALIKE.search(name):
        return now
    if isinstance(theirs, Mapping) and isinstance(now, Mapping) and theirs.keys() == now.keys():
        past = before if isinstance(before, Mapping) else {}
        return {key: _follow(theirs[key], past.get(key), now[key], f"{name}.{key}", lost) for key in now}
    if isinstance(theirs, (list, tuple)) and isinstance(now, (list, tuple)) and len(theirs) == len(now):
        pasts = before if isinstance(before, (list, tuple)) and len(before) == len(now) else [None] * len(now)
        found = [_follow(*item, f"{name}.{i}", lost) for i, item in enumerate(zip(theirs, pasts, now, strict=True))]
        return type(now)(found) if type(now) in (list, tuple) else now
    lost.append(name.removeprefix("."))
    return now


# Entries that depend on a rank's own data, and are equal on two ranks only by chance; not a metric's place in the loop.
_NEVER_ALIKE = re.compile(r"\bmetrics\b(?!\.connector\.(first_iteration|current_hook))|\bbuffers\b|\brecorder\b")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
            return False
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other)
