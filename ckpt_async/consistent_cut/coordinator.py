"""The coordinator's part in a snapshot: it begins one at a time, and commits it only if it is whole and consistent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ckpt_async.consistent_cut.effects import CommitCut, Effect, ReserveSnapshot, RollbackNeeded, Send, SnapshotAborted
from ckpt_async.consistent_cut.messages import (
    Abort,
    Begin,
    Committed,
    Hello,
    Message,
    PersistFailed,
    ShardAck,
    Welcome,
    WorkerAck,
)
from ckpt_async.consistent_cut.types import (
    ConsistentCut,
    CutOptions,
    InconsistentCutError,
    MessageTag,
    SnapshotAbortedError,
    StaleGenerationError,
    VectorClock,
)


def verify_cut(
    streams: Iterable[int], worker_acks: Mapping[str, WorkerAck], shard_acks: Mapping[str, ShardAck]
) -> VectorClock:
    """Return the vector clock on which all workers and shards agree.

    Args:
        streams: All streams of the run.
        worker_acks: The acknowledgement of each worker, with the cut of its streams.
        shard_acks: The acknowledgement of each shard, with the updates in its copy.

    Raises:
        InconsistentCutError: They do not agree.
    """
    vector = VectorClock().joined_with(*(ack.cut for ack in worker_acks.values()))
    if set(vector) != set(streams):
        raise InconsistentCutError(f"the workers cut streams {list(vector)}, the run has {sorted(streams)}")
    for shard, shard_ack in shard_acks.items():
        sent = VectorClock().joined_with(*(ack.pieces[shard] for ack in worker_acks.values()))
        for what, expected, found in (("updates", vector, shard_ack.cut), ("pieces", sent, shard_ack.pieces)):
            for stream, (should, does) in expected.differences(found).items():
                raise InconsistentCutError(
                    f"shard {shard} holds {does} {what} of stream {stream} where the cut has {should}",
                    key=f"stream {stream}",
                    remedy="the snapshot was not committed; resume from the previous checkpoint",
                )
    return vector


@dataclass
class _Worker:
    streams: tuple[int, ...]
    incarnation: int
    ready: bool


@dataclass
class _Snapshot:
    snapshot_id: int
    began_at: float
    workers: dict[str, int]
    worker_acks: dict[str, WorkerAck] = field(default_factory=dict)
    shard_acks: dict[str, ShardAck] = field(default_factory=dict)
    committing: bool = False


class SnapshotCoordinator:
    """The state machine of the coordinator: begins snapshots, collects acknowledgements, and commits or aborts each.

    Args:
        streams: All streams of the run.
        shards: Names of all shards, in the order in which they hold the parameters.
        generation: Number of this start of the whole run.
        last_snapshot_id: Highest ID that was ever reserved, as found in the names of the snapshots' directories.
        options: Equal for all participants.
    """

    def __init__(
        self,
        streams: Iterable[int],
        shards: Iterable[str],
        *,
        generation: int = 0,
        last_snapshot_id: int = 0,
        options: CutOptions | None = None,
    ) -> None:
        self.last_committed: ConsistentCut | None = None
        self._streams = tuple(sorted(streams))
        self._shards = tuple(shards)
        self._generation = generation
        self._last_id = last_snapshot_id
        self._options = options or CutOptions()
        self._shards_here: set[str] = set()
        self._workers: dict[str, _Worker] = {}
        self._snapshot: _Snapshot | None = None
        self._lost: str | None = None

    @property
    def open_snapshot(self) -> int | None:
        """ID of the snapshot that is being taken or committed; None if there is none."""
        return self._snapshot.snapshot_id if self._snapshot else None

    @property
    def obstacle(self) -> str | None:
        """Why no snapshot can begin now; None if one can."""
        if self._lost is not None:
            return self._lost
        if self._snapshot is not None:
            return f"snapshot {self._snapshot.snapshot_id} is not finished"
        if missing := [shard for shard in self._shards if shard not in self._shards_here]:
            return f"shard {', '.join(missing)} has not said hello"
        if behind := [name for name, worker in self._workers.items() if not worker.ready]:
            return f"worker {', '.join(behind)} is catching up"
        owners = Counter(stream for worker in self._workers.values() for stream in worker.streams)
        if wrong := [
            f"stream {stream} has {owners[stream]} workers" for stream in self._streams if owners[stream] != 1
        ]:
            return ", ".join(wrong)
        return None

    def trigger(self, now: float) -> list[Effect]:
        """Begin a snapshot.

        Args:
            now: Seconds of a monotonic clock.

        Raises:
            SnapshotAbortedError: None can begin now; check :attr:`obstacle` first.
        """
        if (obstacle := self.obstacle) is not None:
            raise SnapshotAbortedError(f"no snapshot can begin: {obstacle}")
        self._last_id += 1
        workers = {name: worker.incarnation for name, worker in self._workers.items()}
        self._snapshot = _Snapshot(self._last_id, now, workers)
        return [ReserveSnapshot(self._last_id), *self._to_all(Begin(self._tag(self._last_id)))]

    def on_message(self, message: Message) -> list[Effect]:
        """Process a message of a participant.

        Raises:
            StaleGenerationError: It was sent in another generation, or by an earlier incarnation of a worker.
        """
        self._check_generation(message.tag)
        match message:
            case Hello(role="shard"):
                return self._greet_shard(message)
            case Hello():
                return self._greet_worker(message)
            case WorkerAck() | ShardAck():
                return self._note_ack(message)
            case PersistFailed():
                if self._is_open(message.tag.snapshot_id):
                    return self.abort(f"{message.sender} could not write its state: {message.reason}")
                return []
            case _:
                raise TypeError(f"a {type(message).__name__} is not for the coordinator")

    def tick(self, now: float) -> list[Effect]:
        """Check time limits: abort a snapshot that takes too long.

        Args:
            now: Seconds of a monotonic clock.
        """
        snapshot = self._snapshot
        if snapshot is None or snapshot.committing or now - snapshot.began_at < self._options.snapshot_timeout:
            return []
        acks = {*snapshot.worker_acks, *snapshot.shard_acks}
        missing = ", ".join(name for name in (*snapshot.workers, *self._shards) if name not in acks)
        seconds = self._options.snapshot_timeout
        remedy = "if they only write slowly, raise CutOptions.snapshot_timeout"
        return self.abort(f"nothing was heard from {missing} within {seconds} s ({remedy})")

    def member_lost(self, name: str, incarnation: int | None = None) -> list[Effect]:
        """Process the loss of a participant, which is dead or taken for dead.

        Args:
            name: Name of the participant.
            incarnation: Which incarnation of the worker was lost; ignored if a later one has joined. None: any.
        """
        known = self._workers.get(name)
        if known is not None and incarnation is not None and incarnation < known.incarnation:
            return []
        effects = self.abort(f"{name} was lost")
        is_worker = self._workers.pop(name, None) is not None
        if is_worker and self._options.on_worker_failure == "rejoin":
            return effects
        if is_worker or name in self._shards:
            self._lost = f"{name} was lost"
            effects.append(RollbackNeeded(self._lost))
        return effects

    def abort(self, reason: str) -> list[Effect]:
        """Give up the snapshot that is being taken, if there is one, unless it is already being committed."""
        return self._abort(SnapshotAbortedError(f"snapshot {self.open_snapshot} was aborted: {reason}"))

    def committed(self, snapshot_id: int) -> list[Effect]:
        """Process the commit: the manifest that :class:`CommitCut` asked for is durable.

        Args:
            snapshot_id: The snapshot that it belongs to.
        """
        snapshot = self._committing(snapshot_id)
        self.last_committed = self._cut(snapshot)
        self._snapshot = None
        return self._to_all(Committed(self._tag(snapshot_id)))

    def commit_failed(self, snapshot_id: int, reason: str) -> list[Effect]:
        """Abort the snapshot whose manifest could not be written; if the manifest exists in spite of that, it is valid.

        Args:
            snapshot_id: The snapshot that the manifest belongs to.
            reason: Why it could not be written.
        """
        self._committing(snapshot_id).committing = False
        return self.abort(f"the manifest could not be written: {reason}")

    def _check_generation(self, tag: MessageTag) -> None:
        self._tag(self._last_id).check_generation(tag)

    def _tag(self, snapshot_id: int) -> MessageTag:
        return MessageTag(self._generation, snapshot_id)

    def _to_all(self, message: Message) -> list[Effect]:
        return [Send(name, message) for name in (*self._workers, *self._shards)]

    def _is_open(self, snapshot_id: int) -> bool:
        return (
            self._snapshot is not None and self._snapshot.snapshot_id == snapshot_id and not self._snapshot.committing
        )

    def _committing(self, snapshot_id: int) -> _Snapshot:
        snapshot = self._snapshot
        if snapshot is None or snapshot.snapshot_id != snapshot_id or not snapshot.committing:
            raise SnapshotAbortedError(f"snapshot {snapshot_id} is not being committed")
        return snapshot

    def _abort(self, error: SnapshotAbortedError | InconsistentCutError) -> list[Effect]:
        snapshot = self._snapshot
        if snapshot is None or snapshot.committing:
            return []
        self._snapshot = None
        messages = self._to_all(Abort(self._tag(snapshot.snapshot_id), error.message))
        return [*messages, SnapshotAborted(snapshot.snapshot_id, error)]

    def _greet_shard(self, hello: Hello) -> list[Effect]:
        if hello.sender not in self._shards:
            raise InconsistentCutError(f"{hello.sender} is not one of the run's shards: {', '.join(self._shards)}")
        self._shards_here.add(hello.sender)
        return self._welcome(hello)

    def _greet_worker(self, hello: Hello) -> list[Effect]:
        known = self._workers.get(hello.sender)
        if known is not None and hello.incarnation < known.incarnation:
            raise StaleGenerationError(f"worker {hello.sender} was replaced by its life {known.incarnation}")
        if known == _Worker(hello.streams, hello.incarnation, ready=True):
            return self._welcome(hello)  # a repeated hello: messages may arrive twice
        effects = self.abort(f"worker {hello.sender} has come")
        self._workers[hello.sender] = _Worker(hello.streams, hello.incarnation, hello.ready)
        return [*effects, *self._welcome(hello)]

    def _welcome(self, hello: Hello) -> list[Effect]:
        """Tell a participant which snapshots are over, and do not reuse an ID that it has seen."""
        self._last_id = max(self._last_id, hello.tag.snapshot_id)
        over = self._last_id if self._snapshot is None else self._snapshot.snapshot_id - 1
        return [Send(hello.sender, Welcome(self._tag(over)))]

    def _note_ack(self, ack: WorkerAck | ShardAck) -> list[Effect]:
        snapshot = self._snapshot
        if snapshot is None or not self._is_open(ack.tag.snapshot_id):
            return []  # the snapshot is over
        if isinstance(ack, ShardAck):
            snapshot.shard_acks[ack.sender] = ack
        elif snapshot.workers.get(ack.sender) == ack.incarnation:
            snapshot.worker_acks[ack.sender] = ack
        if not self._is_whole(snapshot):
            return []
        try:
            cut = self._cut(snapshot)
        except InconsistentCutError as error:
            return self._abort(error)
        snapshot.committing = True
        worker_reports = {name: snapshot.worker_acks[name].report for name in cut.workers}
        shard_reports = {name: snapshot.shard_acks[name].report for name in cut.shards}
        return [CommitCut(cut, worker_reports, shard_reports)]

    def _is_whole(self, snapshot: _Snapshot) -> bool:
        """Return whether the state of every participant is durable."""
        return len(snapshot.worker_acks) == len(snapshot.workers) and len(snapshot.shard_acks) == len(self._shards)

    def _cut(self, snapshot: _Snapshot) -> ConsistentCut:
        return ConsistentCut(
            snapshot_id=snapshot.snapshot_id,
            generation=self._generation,
            vector=self._verify(snapshot),
            workers=tuple(snapshot.workers),
            shards=self._shards,
        )

    def _verify(self, snapshot: _Snapshot) -> VectorClock:
        return verify_cut(self._streams, snapshot.worker_acks, snapshot.shard_acks)
