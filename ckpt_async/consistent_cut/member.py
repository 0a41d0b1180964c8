"""What workers and shards do alike in a snapshot: they stamp what they send, and say when their bytes are durable."""

from __future__ import annotations

import dataclasses

from ckpt_async.consistent_cut.effects import COORDINATOR, Effect, Send
from ckpt_async.consistent_cut.messages import PersistFailed, ShardAck, WorkerAck
from ckpt_async.consistent_cut.types import CutOptions, MessageTag


class CutMember:
    """A worker or a shard, by its name; arguments as for :class:`CutWorker` and :class:`CutShard`."""

    def __init__(self, name: str, generation: int, snapshot_id: int, options: CutOptions | None) -> None:
        self.name = name
        self._generation = generation
        self._snapshot_id = snapshot_id
        self._options = options or CutOptions()
        self._acks: dict[int, WorkerAck | ShardAck] = {}

    @property
    def tag(self) -> MessageTag:
        """What its messages carry; a worker's pull requests too."""
        return MessageTag(self._generation, self._snapshot_id)

    def persisted(self, snapshot_id: int, report: str = "") -> list[Effect]:
        """The bytes of :class:`PersistWorker` or :class:`PersistShard` are durable.

        Args:
            snapshot_id: Its ``snapshot_id``.
            report: Passed on to the commit.
        """
        ack = self._acks.pop(snapshot_id, None)
        return [] if ack is None else [Send(COORDINATOR, dataclasses.replace(ack, report=report))]

    def persist_failed(self, snapshot_id: int, reason: str) -> list[Effect]:
        """They could not be written."""
        self._acks.pop(snapshot_id, None)
        return [Send(COORDINATOR, PersistFailed(MessageTag(self._generation, snapshot_id), self.name, reason))]

    def _check_generation(self, tag: MessageTag) -> None:
        self.tag.check_generation(tag)
