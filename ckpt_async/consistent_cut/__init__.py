"""The protocol of consistent cuts: when each process of an asynchronous training captures, and what a commit checks.

State machines without I/O, clock or threads (``docs/consistent_cuts.md``). Their messages to each other are in
:mod:`~ckpt_async.consistent_cut.messages`, and their instructions to the process that runs them in
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
