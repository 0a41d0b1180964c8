"""What a state machine asks of the process around it.

State machines do no I/O, have no clock and start no threads. Each call returns a list of effects, to be performed in
their order.
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
    """Write a worker's state, then call ``worker.persisted(snapshot_id, report)``; in the background if you like.

    Attributes:
        snapshot_id: The snapshot it belongs to.
        cut: The worker's streams and how many updates of each are in.
        state: What ``capture`` returned at the cut.
        pulled: With ``record_order``: for each update since the start, the version of each shard it was computed from.
    """

    snapshot_id: int
    cut: VectorClock
    state: Any
    pulled: Mapping[UpdateId, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class PersistShard:
    """Write a shard's state, then call ``shard.persisted(snapshot_id, report)``; in the background if you like.

    Attributes:
        snapshot_id: The snapshot it belongs to.
        cut: All streams and how many updates of each are in.
        copy: What ``state.copy()`` returned, with later pieces of the cut applied to it.
        recorded: With ``channel_state="record"``: pieces to be applied to the copy, in this order, after loading.
        order: With ``record_order``: updates in the order in which they went into the copy since the start.
        folded: Number of pieces that were under way and were applied to the copy or recorded.
        held: Number of pieces that were held back by alignment.
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
    """The snapshot was given up: its copy is not needed any more and its memory can be used again."""

    snapshot_id: int
    copy: Any


@dataclass(frozen=True, slots=True)
class ReserveSnapshot:
    """Make the id durable (create the snapshot's directory) before the effects that follow.

    A coordinator that is restarted must be given an id at least as high.
    """

    snapshot_id: int


@dataclass(frozen=True, slots=True)
class CommitCut:
    """Everything is durable and consistent: write the manifest, then call ``coordinator.committed(snapshot_id)``.

    Attributes:
        cut: What the manifest says.
        worker_reports: Report of each worker, by name.
        shard_reports: Report of each shard, by name.
    """

    cut: ConsistentCut
    worker_reports: Mapping[str, str]
    shard_reports: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SnapshotAborted:
    """The snapshot was given up; log or raise the error. Files written for it can be deleted."""

    snapshot_id: int
    error: SnapshotAbortedError | InconsistentCutError


@dataclass(frozen=True, slots=True)
class RollbackNeeded:
    """A participant is lost and cannot be replaced while the others continue: restart all from the last checkpoint."""

    reason: str


Effect = (
    Send | PersistWorker | PersistShard | DiscardCopy | ReserveSnapshot | CommitCut | SnapshotAborted | RollbackNeeded
)
