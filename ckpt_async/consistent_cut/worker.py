"""A worker's part in a snapshot: it is cut between two updates, before it uses parameters from after the cut."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ckpt_async.consistent_cut.effects import COORDINATOR, Effect, PersistWorker, Send
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
    Takeover,
    Welcome,
    WorkerAck,
)
from ckpt_async.consistent_cut.types import CutOptions, InconsistentCutError, UpdateId, VectorClock


class CutWorker(CutMember):
    """The state machine of a worker: numbers and tags its updates, and captures its state at the cut of a snapshot.

    Args:
        name: This worker's name, to which participants send messages.
        positions: The worker's streams, and how many updates of each are in the checkpoint that it starts from.
        shards: Names of all shards.
        capture: Returns an independent copy of what the worker needs to resume from here: random generators, the cursor
            of *consumed* batches, residuals, scaler. Called between two updates.
        generation: Number of this start of the whole run.
        snapshot_id: Newest snapshot of earlier generations.
        incarnation: Number of this start of the worker within the generation; grows with each start.
        options: Equal for all participants.
    """

    def __init__(
        self,
        name: str,
        positions: Mapping[int, int],
        shards: Iterable[str],
        capture: Callable[[], Any],
        *,
        generation: int = 0,
        snapshot_id: int = 0,
        incarnation: int = 0,
        options: CutOptions | None = None,
    ) -> None:
        super().__init__(name, generation, snapshot_id, options)
        self.incarnation = incarnation
        self._shards = tuple(shards)
        self._capture = capture
        self._observed = snapshot_id
        self._issued = dict(positions)
        self._sent = {shard: dict(positions) for shard in self._shards}
        self._inflight: dict[int, deque[tuple[int, dict[str, int]]]] = {stream: deque() for stream in positions}
        self._versions: dict[str, int] = {}
        self._pulled: dict[UpdateId, dict[str, int]] = {}
        # While this worker takes over a lost worker's streams: how much of them each shard has.
        self._positions: dict[str, Position] | None = None
        self._held: dict[str, VectorClock] = {}
        self._torn_until: dict[int, int] = {}
        self._ready = True

    @classmethod
    def rejoining(
        cls,
        name: str,
        streams: Iterable[int],
        shards: Iterable[str],
        capture: Callable[[], Any],
        *,
        incarnation: int,
        generation: int = 0,
        options: CutOptions | None = None,
    ) -> CutWorker:
        """Return a worker that takes the place of a lost one while all others continue.

        It asks the shards how much of the streams they have, repeats the updates that only some of them have, and takes
        part in snapshots after that. It may begin when :attr:`can_train` is True.
        """
        worker = cls(
            name,
            dict.fromkeys(streams, 0),
            shards,
            capture,
            generation=generation,
            incarnation=incarnation,
            options=options,
        )
        worker._positions = {}
        worker._ready = False
        return worker

    @property
    def cut(self) -> VectorClock:
        """The number of updates issued so far, for each of the worker's streams."""
        return VectorClock(self._issued)

    @property
    def can_train(self) -> bool:
        """Whether the worker knows the positions of its streams; False at first for one that rejoins."""
        return self._positions is None

    def next_seq(self, stream: int) -> int:
        """Return the number of the stream's next batch."""
        return self._issued[stream] + 1

    def hello(self) -> list[Effect]:
        """Introduce the worker to the coordinator: at the start, and after a restart of the coordinator."""
        streams = tuple(self._issued)
        hello = Hello(self.tag, self.name, "worker", streams, self.incarnation, ready=self._ready)
        return [Send(COORDINATOR, hello)]

    def on_message(self, message: Message) -> list[Effect]:
        """Process a message of the coordinator or a shard; at any time, also in the middle of an update.

        Raises:
            StaleGenerationError: The message is from another generation.
        """
        self._check_generation(message.tag)
        match message:
            case Begin():
                self._observed = max(self._observed, message.tag.snapshot_id)
            case Abort() | Welcome():
                self._skip(message.tag.snapshot_id)
                if isinstance(message, Welcome) and not self.can_train:
                    return self._take_over()
            case Position():
                self._learn_position(message)
            case Committed():
                pass
            case _:
                raise TypeError(f"a {type(message).__name__} is not for a worker")
        return []

    def at_boundary(self, pulled: Mapping[str, PullHeader] | None = None) -> list[Effect]:
        """Take the cut here, between two updates, if a snapshot requires it.

        Args:
            pulled: Headers, by shard, of the pull from which the *next* update is computed. Call this before using it.

        Raises:
            StaleGenerationError: The pull is from another generation.
        """
        for shard, header in (pulled or {}).items():
            self._note_pull(shard, header)
        if self._observed <= self._snapshot_id:
            return self._announce_ready()
        if not self._ready:
            # A snapshot that began before this worker has caught up cannot include it.
            self._skip(self._observed)
            return self._announce_ready()
        return self._take_cut(self._observed)

    def may_push(self, stream: int) -> bool:
        """Return whether another update of the stream is allowed; if not, pull again."""
        limit = self._options.max_inflight_updates
        waiting = self._inflight[stream]
        return self.can_train and (limit is None or not waiting or self.next_seq(stream) - waiting[0][0] < limit)

    def next_update(self, stream: int, shards: Iterable[str] | None = None) -> dict[str, PushHeader]:
        """Issue the next update of the stream: return a header for the piece that goes to each shard.

        Args:
            stream: One of the worker's streams.
            shards: Names of the shards with parameters in the update; by default all shards.

        Returns:
            Headers by shard, without shards that have this update already, from an earlier incarnation of the worker.

        Raises:
            InconsistentCutError: More than ``max_inflight_updates`` are under way.
        """
        if not self.may_push(stream):
            raise InconsistentCutError(
                f"worker {self.name} has as many updates of stream {stream} under way as it may",
                key=f"stream {stream}",
                remedy="wait until may_push(stream), or raise CutOptions.max_inflight_updates",
            )
        update = UpdateId(stream, self.next_seq(stream))
        self._issued[stream] = update.seq
        headers = {}
        for shard in self._shards if shards is None else shards:
            if shard not in self._held or not self._held[shard].includes(update):
                self._sent[shard][stream] += 1
                headers[shard] = PushHeader(self.tag, update, self._sent[shard][stream], self.incarnation)
        if headers:
            pieces = {shard: header.piece for shard, header in headers.items()}
            self._inflight[stream].append((update.seq, pieces))
        if self._options.record_order:
            self._pulled[update] = dict(self._versions)
        return headers

    def _note_pull(self, shard: str, header: PullHeader) -> None:
        self._check_generation(header.tag)
        self._observed = max(self._observed, header.tag.snapshot_id)
        self._versions[shard] = header.version
        for stream, waiting in self._inflight.items():
            for _, pieces in waiting:
                if pieces.get(shard, header.pieces[stream] + 1) <= header.pieces[stream]:
                    del pieces[shard]
            while waiting and not waiting[0][1]:
                waiting.popleft()

    def _take_cut(self, snapshot_id: int) -> list[Effect]:
        state = self._capture()
        self._snapshot_id = snapshot_id
        pieces = {shard: VectorClock(sent) for shard, sent in self._sent.items()}
        self._acks = {snapshot_id: WorkerAck(self.tag, self.name, self.cut, pieces, self.incarnation)}
        markers = [
            Send(shard, Marker(self.tag, self.name, self.cut, pieces[shard], self.incarnation))
            for shard in self._shards
        ]
        return [*markers, PersistWorker(snapshot_id, self.cut, state, dict(self._pulled))]

    def _skip(self, snapshot_id: int) -> None:
        """Pass over the snapshots up to this one without a cut: none will be committed, so their tags do not matter."""
        self._snapshot_id = max(self._snapshot_id, snapshot_id)
        self._observed = max(self._observed, snapshot_id)

    def _take_over(self) -> list[Effect]:
        takeover = Takeover(self.tag, self.name, tuple(self._issued), self.incarnation)
        return [Send(shard, takeover) for shard in self._shards]

    def _learn_position(self, position: Position) -> None:
        if self._positions is None or position.incarnation != self.incarnation:
            return
        self._skip(position.tag.snapshot_id)
        self._positions[position.sender] = position
        if len(self._positions) < len(self._shards):
            return
        for stream in self._issued:
            held = [position.applied[stream] for position in self._positions.values()]
            self._torn_until[stream] = max(held)
            limit = self._options.max_inflight_updates
            # Update k was issued only after update k - limit had reached every shard that it has pieces for.
            complete = min(held) if limit is None else max(min(held), max(held) - limit)
            self._issued[stream] = complete
        self._sent = {shard: dict(position.pieces) for shard, position in self._positions.items()}
        self._held = {shard: position.applied for shard, position in self._positions.items()}
        self._positions = None

    def _announce_ready(self) -> list[Effect]:
        caught_up = self.can_train and all(self._issued[stream] >= until for stream, until in self._torn_until.items())
        if self._ready or not caught_up:
            return []
        self._ready = True
        return self.hello()
