"""The common base of workers and shards: the tag of their messages, and the report that their bytes are durable."""

from __future__ import annotations

import dataclasses

from ckpt_async.consistent_cut.effects import COORDINATOR, Effect, Send
from ckpt_async.consistent_cut.messages import PersistFailed, ShardAck, WorkerAck
from ckpt_async.consistent_cut.types import CutOptions, MessageTag


class CutMember:
    """The part of a worker or a shard in snapshots; arguments as for :class:`CutWorker` and :class:`CutShard`."""

    def __init__(self, name: str, generation: int, snapshot_id: int, options: CutOptions | None) -> None:
        self.name = name
        self._generation = generation
        self._snapshot_id = snapshot_id
        self._options = options or CutOptions()
        self._acks: dict[int, WorkerAck | ShardAck] = {}

    @property
    def tag(self) -> MessageTag:
        """The tag that its messages carry, and also a worker's pull requests."""
        return MessageTag(self._generation, self._snapshot_id)

    def persisted(self, snapshot_id: int, report: str = "") -> list[Effect]:
        """Acknowledge that the bytes of :class:`PersistWorker` or :class:`PersistShard` are durable.

        Args:
            snapshot_id: The ``snapshot_id`` of that effect.
            report: Passed on to the commit.
        """
        ack = self._acks.pop(snapshot_id, None)
        return [] if ack is None else [Send(COORDINATOR, dataclasses.replace(ack, report=report))]

    def persist_failed(self, snapshot_id: int, reason: str) -> list[Effect]:
        """Report that the bytes of a snapshot could not be written."""
        self._acks.pop(snapshot_id, None)
        return [Send(COORDINATOR, PersistFailed(MessageTag(self._generation, snapshot_id), self.name, reason))]

    def _check_generation(self, tag: MessageTag) -> None:
        self.tag.check_generation(tag)
