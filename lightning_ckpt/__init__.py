"""Checkpointing for Lightning: exact resume, synchronous, asynchronous and sharded saves, verified files."""

from lightning_ckpt.io import AsyncCheckpointIO, SyncCheckpointIO
from lightning_ckpt.loading import load_from_checkpoint
from lightning_ckpt.resumable import ResumableCheckpoint
from lightning_ckpt.sharded import ShardedCheckpointIO
from lightning_ckpt.warm_start import WarmStart

__all__ = [
    "AsyncCheckpointIO",
    "ResumableCheckpoint",
    "ShardedCheckpointIO",
    "SyncCheckpointIO",
    "WarmStart",
    "load_from_checkpoint",
]
