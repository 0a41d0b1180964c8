"""Effects: the instructions of a state machine to the process that runs it.

State machines do no I/O, have no clock and start no threads. Each call returns a list of effects, which the process has
to perform in their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_async.consistent_cut.messages import Message, PushHeader
from ckpt_async.consistent_cut.types import (
    ConsistentCut,
    InconsistentCutError,
    SnapshotAbortedError,
    UpdateId,
    VectorClock,
)

__all__ = [
    "COORDINATOR",
    "CommitCut",
    "DiscardCopy",
    "Effect",
    "PersistShard",
    "PersistWorker",
    "ReserveSnapshot",
    "RollbackNeeded",
    "Send",
    "SnapshotAborted",
]

COORDINATOR = "coordinator"


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to the participant of that name; :data:`COORDINATOR` is the coordinator's."""

    to: str
    message: Message


@dataclass(frozen=True, slots=True)
class PersistWorker:
    """Write a worker's state, maybe in the background, and then call ``worker.persisted(snapshot_id, report)``.

    Attributes:
        snapshot_id: The snapshot that the state belongs to.
        cut: The worker's streams, and how many updates of each are in the cut.
        state: The result of ``capture`` at the cut.
        pulled: With ``record_order``: for each update since the start, the versions of the shards it was computed from.
    """

    snapshot_id: int
    cut: VectorClock
    state: Any
    pulled: Mapping[UpdateId, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class PersistShard:
    """Write a shard's state, maybe in the background, and then call ``shard.persisted(snapshot_id, report)``.

    Attributes:
        snapshot_id: The snapshot that the state belongs to.
        cut: All streams, and how many updates of each are in the cut.
        copy: The result of ``state.copy()``, with the pieces of the cut that arrived later applied to it.
        recorded: With ``channel_state="record"``: pieces to apply to the copy, in this order, after loading.
        order: With ``record_order``: all updates in the copy since the start, in the order in which they were applied.
        folded: Number of pieces that arrived after the copy and were applied to it or recorded.
        held: Number of pieces that alignment held back.
    """

    snapshot_id: int
    cut: VectorClock
    copy: Any
    recorded: tuple[tuple[PushHeader, Any], ...] = ()
    order: tuple[UpdateId, ...] = ()
    folded: int = 0
    held: int = 0


@dataclass(frozen=True, slots=True)
class DiscardCopy:
    """Release the copy of a snapshot that was given up; its memory can be reused."""

    snapshot_id: int
    copy: Any


@dataclass(frozen=True, slots=True)
class ReserveSnapshot:
    """Make the ID durable (create the snapshot's directory) before the effects that follow.

    A restarted coordinator must be given an ID at least as high.
    """

    snapshot_id: int


@dataclass(frozen=True, slots=True)
class CommitCut:
    """Write the manifest, then call ``coordinator.committed(snapshot_id)``: all states are durable and consistent.

    Attributes:
        cut: The cut to write into the manifest.
        worker_reports: Report of each worker, by name.
        shard_reports: Report of each shard, by name.
    """

    cut: ConsistentCut
    worker_reports: Mapping[str, str]
    shard_reports: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SnapshotAborted:
    """Log or raise the error: the snapshot was given up. Files written for it can be deleted."""

    snapshot_id: int
    error: SnapshotAbortedError | InconsistentCutError


@dataclass(frozen=True, slots=True)
class RollbackNeeded:
    """Restart all from the last checkpoint: a participant is lost, and cannot be replaced while the others continue."""

    reason: str


Effect = (
    Send | PersistWorker | PersistShard | DiscardCopy | ReserveSnapshot | CommitCut | SnapshotAborted | RollbackNeeded
)
