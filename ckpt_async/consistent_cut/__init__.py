"""When each process of an asynchronous training captures its state, and what the commit must check.

State machines without I/O, clock or threads (``docs/consistent_cuts.md``). What they say to each other is in
:mod:`~ckpt_async.consistent_cut.messages`, and what they ask of the process around them in
:mod:`~ckpt_async.consistent_cut.effects`.
"""

from ckpt_async.consistent_cut.coordinator import SnapshotCoordinator, verify_cut
from ckpt_async.consistent_cut.effects import COORDINATOR
from ckpt_async.consistent_cut.replay import replay_schedule
from ckpt_async.consistent_cut.shard import CutShard, ShardState
from ckpt_async.consistent_cut.types import (
    ConsistentCut,
    CutOptions,
    InconsistentCutError,
    SnapshotAbortedError,
    StaleGenerationError,
    UpdateId,
    VectorClock,
    deal_streams,
)
from ckpt_async.consistent_cut.worker import CutWorker

__all__ = [
    "COORDINATOR",
    "ConsistentCut",
    "CutOptions",
    "CutShard",
    "CutWorker",
    "InconsistentCutError",
    "ShardState",
    "SnapshotAbortedError",
    "SnapshotCoordinator",
    "StaleGenerationError",
    "UpdateId",
    "VectorClock",
    "deal_streams",
    "replay_schedule",
    "verify_cut",
]
