"""A shard's part in a snapshot: it copies its state before updates from after the cut, and adds all from before it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ckpt_async.consistent_cut.effects import COORDINATOR, DiscardCopy, Effect, PersistShard, Send
from ckpt_async.consistent_cut.member import CutMember
from ckpt_async.consistent_cut.messages import (
    Abort,
    Begin,
    Committed,
    Hello,
    Marker,
    Message,
    Position,
    PullHeader,
    PushHeader,
    ShardAck,
    Takeover,
    Welcome,
)
from ckpt_async.consistent_cut.types import CutOptions, MessageTag, StaleGenerationError, UpdateId, VectorClock

Piece = tuple[PushHeader, Any]


class ShardState(Protocol):
    """The state of a shard: parameters, optimizer, and all else that an update or a pull changes."""

    def apply(self, update: UpdateId, payload: Any) -> None:
        """Apply one piece of an update. An exception leaves the shard unusable."""

    def copy(self) -> ShardState:
        """Return an independent copy of the current state; reused memory, or copy-on-write, makes this short."""


@dataclass
class _Snapshot:
    """A snapshot that is under way at a shard."""

    snapshot_id: int
    opened_at: float
    cut: dict[int, int] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)
    copy: ShardState | None = None
    # Number of pieces, and last update, of each stream in the copy or recorded with it.
    pieces: dict[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    recorded: list[Piece] = field(default_factory=list)
    order: list[UpdateId] = field(default_factory=list)
    folded: int = 0
    held: int = 0


class CutShard(CutMember):
    """The state machine of a shard: applies updates, each once and in stream order, and takes part in snapshots.

    Args:
        name: This shard's name, to which participants send messages.
        state: The state of the shard.
        positions: All streams of the run, and how many updates of each ``state`` contains.
        generation: Number of this start of the whole run.
        snapshot_id: Newest snapshot of earlier generations.
        options: Equal for all participants.
    """

    def __init__(
        self,
        name: str,
        state: ShardState,
        positions: Mapping[int, int],
        *,
        generation: int = 0,
        snapshot_id: int = 0,
        options: CutOptions | None = None,
    ) -> None:
        super().__init__(name, generation, snapshot_id, options)
        self.state = state
        self.version = 0
        # Pieces and last update of each stream that were accepted in order; pieces held back are not applied yet.
        self._taken = dict(positions)
        self._last_taken = dict(positions)
        self._applied = dict(positions)
        self._last_applied = dict(positions)
        self._incarnations = dict.fromkeys(positions, 0)
        self._early: dict[int, dict[int, Piece]] = {stream: {} for stream in positions}
        self._held: list[Piece] = []
        self._snapshot: _Snapshot | None = None
        self._order: list[UpdateId] = []

    @property
    def open_snapshot(self) -> int | None:
        """ID of the snapshot that is being taken; None if there is none."""
        return self._snapshot.snapshot_id if self._snapshot else None

    @property
    def held(self) -> int:
        """Number of pieces that alignment holds back."""
        return len(self._held)

    def hello(self) -> list[Effect]:
        """Introduce the shard to the coordinator: at the start, and after a restart of the coordinator."""
        return [Send(COORDINATOR, Hello(self.tag, self.name, "shard"))]

    def on_push(self, header: PushHeader, payload: Any, now: float) -> list[Effect]:
        """Process a piece of an update. Pieces may arrive in any order and more than once.

        Args:
            header: The header of the piece.
            payload: Passed to ``state.apply``, now or later; it must not change until then.
            now: Seconds of a monotonic clock.

        Raises:
            StaleGenerationError: It was sent in another generation, or by an earlier incarnation of the worker.
        """
        stream = header.update.stream
        effects = self._admit(header.tag, (stream,), header.incarnation, now)
        if header.piece <= self._taken[stream] or header.piece in self._early[stream]:
            return effects
        self._early[stream][header.piece] = (header, payload)
        while (piece := self._early[stream].pop(self._taken[stream] + 1, None)) is not None:
            self._taken[stream] += 1
            self._last_taken[stream] = piece[0].update.seq
            self._take(piece)
        return [*effects, *self._complete()]

    def on_pull(self, tag: MessageTag, now: float) -> tuple[PullHeader, list[Effect]]:
        """Process a request for the parameters.

        Args:
            tag: The tag of the worker that asks.
            now: Seconds of a monotonic clock.

        Returns:
            The header for the reply, which must be sent with the parameters as they are at this moment.

        Raises:
            StaleGenerationError: The request was sent in another generation.
        """
        effects = self._observe(tag, now)
        header = PullHeader(self.tag, self.version, VectorClock(self._last_applied), VectorClock(self._applied))
        return header, effects

    def on_message(self, message: Message, now: float) -> list[Effect]:
        """Process a message of the coordinator or a worker that is neither a push nor a pull.

        Args:
            message: The message.
            now: Seconds of a monotonic clock.

        Raises:
            StaleGenerationError: It was sent in another generation, or by an earlier incarnation of a worker.
        """
        match message:
            case Begin():
                return self._observe(message.tag, now)
            case Abort() | Welcome():
                self._check_generation(message.tag)
                return self._give_up(message.tag.snapshot_id)
            case Marker():
                effects = self._admit(message.tag, message.cut, message.incarnation, now)
                self._note_marker(message)
                return [*effects, *self._complete()]
            case Takeover():
                effects = self._admit(message.tag, message.streams, message.incarnation, now)
                return [*effects, self._position(message)]
            case Committed():
                self._check_generation(message.tag)
                return []
            case _:
                raise TypeError(f"a {type(message).__name__} is not for a shard")

    def tick(self, now: float) -> list[Effect]:
        """Check time limits: an aligned snapshot that waits too long becomes an unaligned one.

        Args:
            now: Seconds of a monotonic clock.
        """
        snapshot = self._snapshot
        if snapshot is None or snapshot.copy is not None:
            return []
        if now - snapshot.opened_at < self._options.aligned_timeout:
            return []
        self._copy_state(snapshot)
        self._release()
        return self._complete()

    def _admit(self, tag: MessageTag, streams: Iterable[int], incarnation: int, now: float) -> list[Effect]:
        """Refuse a message of an earlier generation or incarnation; then open the snapshot of its tag, if it is new."""
        self._check_generation(tag)
        self._check_incarnation(streams, incarnation)
        return self._observe(tag, now)

    def _check_incarnation(self, streams: Iterable[int], incarnation: int) -> None:
        """Refuse messages of a worker's earlier incarnations; at a new one, drop its pieces that came out of order."""
        for stream in streams:
            if incarnation < self._incarnations[stream]:
                raise StaleGenerationError(
                    f"a message about stream {stream} is from life {incarnation} of its worker, which was replaced by"
                    f" life {self._incarnations[stream]}"
                )
        for stream in streams:
            if incarnation > self._incarnations[stream]:
                self._incarnations[stream] = incarnation
                self._early[stream].clear()

    def _observe(self, tag: MessageTag, now: float) -> list[Effect]:
        """Open a snapshot at the first sign of it, before the message that shows it is processed."""
        self._check_generation(tag)
        if tag.snapshot_id <= self._snapshot_id:
            return []
        effects = self._give_up(tag.snapshot_id)
        self._open(tag.snapshot_id, now)
        return effects

    def _open(self, snapshot_id: int, now: float) -> None:
        self._snapshot = _Snapshot(snapshot_id, now)
        if self._options.alignment == "unaligned":
            self._copy_state(self._snapshot)

    def _give_up(self, snapshot_id: int) -> list[Effect]:
        """End the snapshots up to this one, so that their late messages do not open them again."""
        self._snapshot_id = max(self._snapshot_id, snapshot_id)
        snapshot = self._snapshot
        if snapshot is None or snapshot.snapshot_id > snapshot_id:
            return []
        self._snapshot = None
        self._release()
        return [DiscardCopy(snapshot.snapshot_id, snapshot.copy)] if snapshot.copy is not None else []

    def _take(self, piece: Piece) -> None:
        """Process the next piece of a stream."""
        header, _ = piece
        snapshot = self._snapshot
        if snapshot is None:
            self._apply(piece)
        elif header.tag.snapshot_id < snapshot.snapshot_id:
            self._apply(piece)
            if snapshot.copy is not None:
                self._add_to_copy(snapshot, piece)
        elif snapshot.copy is None:
            self._held.append(piece)
            snapshot.held += 1
        else:
            self._apply(piece)

    def _apply(self, piece: Piece) -> None:
        header, payload = piece
        self.state.apply(header.update, payload)
        self._applied[header.update.stream] += 1
        self._last_applied[header.update.stream] = header.update.seq
        self.version += 1
        if self._options.record_order:
            self._order.append(header.update)

    def _copy_state(self, snapshot: _Snapshot) -> None:
        snapshot.copy = self.state.copy()
        snapshot.pieces = dict(self._applied)
        snapshot.last = dict(self._last_applied)
        snapshot.order = self._order.copy()

    def _add_to_copy(self, snapshot: _Snapshot, piece: Piece) -> None:
        """Add to the snapshot a piece that was under way at the cut."""
        header, _ = piece
        self._fold(snapshot, piece)
        snapshot.pieces[header.update.stream] += 1
        snapshot.last[header.update.stream] = header.update.seq
        snapshot.folded += 1
        if self._options.record_order:
            snapshot.order.append(header.update)

    def _fold(self, snapshot: _Snapshot, piece: Piece) -> None:
        assert snapshot.copy is not None
        if self._options.channel_state == "record":
            snapshot.recorded.append(piece)
        else:
            snapshot.copy.apply(piece[0].update, piece[1])

    def _release(self) -> None:
        """Apply the pieces that alignment held back."""
        held, self._held = self._held, []
        for piece in held:
            self._apply(piece)

    def _note_marker(self, marker: Marker) -> None:
        snapshot = self._snapshot
        if snapshot is None or marker.tag.snapshot_id != snapshot.snapshot_id:
            return  # the snapshot is over
        snapshot.cut.update(marker.cut)
        snapshot.sent.update(marker.pieces)

    def _complete(self) -> list[Effect]:
        """Return the copy for writing once all pieces that belong to the cut are in it."""
        snapshot = self._snapshot
        if snapshot is None or not self._is_complete(snapshot):
            return []
        if snapshot.copy is None:
            self._copy_state(snapshot)
        self._snapshot = None
        self._release()
        # The updates that are in the copy, not those that should be: the commit compares the two.
        cut = VectorClock({stream: max(seq, snapshot.last[stream]) for stream, seq in snapshot.cut.items()})
        tag = MessageTag(self._generation, snapshot.snapshot_id)
        self._acks = {snapshot.snapshot_id: ShardAck(tag, self.name, cut, VectorClock(snapshot.pieces))}
        return [
            PersistShard(
                snapshot_id=snapshot.snapshot_id,
                cut=cut,
                copy=snapshot.copy,
                recorded=tuple(snapshot.recorded),
                order=tuple(snapshot.order),
                folded=snapshot.folded,
                held=snapshot.held,
            )
        ]

    def _is_complete(self, snapshot: _Snapshot) -> bool:
        """Return whether all streams are cut and all pieces up to the cut have arrived."""
        if len(snapshot.cut) < len(self._applied):
            return False
        return snapshot.sent == (self._applied if snapshot.copy is None else snapshot.pieces)

    def _position(self, takeover: Takeover) -> Send:
        position = Position(
            self.tag,
            self.name,
            takeover.incarnation,
            VectorClock(self._last_taken).restricted_to(takeover.streams),
            VectorClock(self._taken).restricted_to(takeover.streams),
        )
        return Send(takeover.sender, position)
