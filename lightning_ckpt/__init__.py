"""Checkpointing for Lightning: exact resume, synchronous and asynchronous saves, verified files."""

from lightning_ckpt.io import AsyncCheckpointIO, SyncCheckpointIO
from lightning_ckpt.resumable import ResumableCheckpoint

__all__ = ["AsyncCheckpointIO", "ResumableCheckpoint", "SyncCheckpointIO"]
