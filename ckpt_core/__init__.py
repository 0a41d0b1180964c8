"""Training state to durable, verified checkpoints and back: the engine of the plugins."""

from ckpt_core import policies, storage
from ckpt_core._pipeline.reader import verify
from ckpt_core.catalog import Catalog, CheckpointInfo
from ckpt_core.checkpointer import Checkpointer
from ckpt_core.directory import DirectoryCheckpoint, DirectoryCheckpointer
from ckpt_core.errors import (
    CheckpointCorruptedError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    OutOfMemoryError,
    RankFailedError,
    SerializationError,
    SnapshotTornError,
    StateMismatchError,
    StorageError,
    UnsafeCheckpointError,
)
from ckpt_core.events import EventLog
from ckpt_core.ranks import RankGroup
from ckpt_core.state.kinds import Kind, Part
from ckpt_core.tiers import Tiers

__all__ = [
    "Catalog",
    "CheckpointCorruptedError",
    "CheckpointError",
    "CheckpointFormatError",
    "CheckpointInfo",
    "CheckpointNotFoundError",
    "Checkpointer",
    "DirectoryCheckpoint",
    "DirectoryCheckpointer",
    "EventLog",
    "Kind",
    "OutOfMemoryError",
    "Part",
    "RankFailedError",
    "RankGroup",
    "SerializationError",
    "SnapshotTornError",
    "StateMismatchError",
    "StorageError",
    "Tiers",
    "UnsafeCheckpointError",
    "policies",
    "storage",
    "verify",
]

__version__ = "0.1.0"
