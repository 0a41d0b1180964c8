"""Training state to durable, verified checkpoints and back; the engine under ``lightning_ckpt`` and ``accelerate_ckpt``."""

from ckpt_core._commit import RankGroup
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
from ckpt_core.state.kinds import Kind, Part

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
    "Kind",
    "OutOfMemoryError",
    "Part",
    "RankFailedError",
    "RankGroup",
    "SerializationError",
    "SnapshotTornError",
    "StateMismatchError",
    "StorageError",
    "UnsafeCheckpointError",
    "verify",
]

__version__ = "0.1.0"
