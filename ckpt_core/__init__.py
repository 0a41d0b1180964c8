"""Training state to durable, verified checkpoints and back; the engine under ``lightning_ckpt`` and ``accelerate_ckpt``."""

from ckpt_core.catalog import Catalog, CheckpointInfo
from ckpt_core.checkpointer import Checkpointer
from ckpt_core.errors import (
    CheckpointCorruptedError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    RankFailedError,
    SerializationError,
    SnapshotTornError,
    StateMismatchError,
    StorageError,
    UnsafeCheckpointError,
)
from ckpt_core.reader import verify

__all__ = [
    "Catalog",
    "CheckpointCorruptedError",
    "CheckpointError",
    "CheckpointFormatError",
    "CheckpointInfo",
    "CheckpointNotFoundError",
    "Checkpointer",
    "RankFailedError",
    "SerializationError",
    "SnapshotTornError",
    "StateMismatchError",
    "StorageError",
    "UnsafeCheckpointError",
    "verify",
]

__version__ = "0.1.0"
