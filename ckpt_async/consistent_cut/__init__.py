"""When each process of an asynchronous training captures its state, and what the commit must check.

State machines without I/O, clock or threads; ``docs/consistent_cuts.md`` explains the algorithm.
"""

from ckpt_async.consistent_cut.coordinator import SnapshotCoordinator, verify_cut
from ckpt_async.consistent_cut.effects import (
    COORDINATOR,
    CommitCut,
    DiscardCopy,
    Effect,
    PersistShard,
    PersistWorker,
    ReserveSnapshot,
    RollbackNeeded,
    Send,
    SnapshotAborted,
)
from ckpt_async.consistent_cut.errors import InconsistentCutError, SnapshotAbortedError, StaleGenerationError
from ckpt_async.consistent_cut.messages import (
    Abort,
    Begin,
    Committed,
    Hello,
    Marker,
    Message,
    PersistFailed,
    Position,
    PullHeader,
    PushHeader,
    ShardAck,
    Takeover,
    Welcome,
    WorkerAck,
    decode_message,
    encode_message,
)
from ckpt_async.consistent_cut.options import CutOptions
from ckpt_async.consistent_cut.replay import ApplyPiece, ComputeUpdate, ReadShard, replay_schedule
from ckpt_async.consistent_cut.shard import CutShard, ShardState
from ckpt_async.consistent_cut.types import ConsistentCut, MessageTag, UpdateId, VectorClock, deal_streams
from ckpt_async.consistent_cut.worker import CutWorker

__all__ = [
    "COORDINATOR",
    "Abort",
    "ApplyPiece",
    "Begin",
    "CommitCut",
    "Committed",
    "ComputeUpdate",
    "ConsistentCut",
    "CutOptions",
    "CutShard",
    "CutWorker",
    "DiscardCopy",
    "Effect",
    "Hello",
    "InconsistentCutError",
    "Marker",
    "Message",
    "MessageTag",
    "PersistFailed",
    "PersistShard",
    "PersistWorker",
    "Position",
    "PullHeader",
    "PushHeader",
    "ReadShard",
    "ReserveSnapshot",
    "RollbackNeeded",
    "Send",
    "ShardAck",
    "ShardState",
    "SnapshotAborted",
    "SnapshotAbortedError",
    "SnapshotCoordinator",
    "StaleGenerationError",
    "Takeover",
    "UpdateId",
    "VectorClock",
    "Welcome",
    "WorkerAck",
    "deal_streams",
    "decode_message",
    "encode_message",
    "replay_schedule",
    "verify_cut",
]
