"""Checkpointing for Lightning: exact resume, synchronous and asynchronous saves, verified files."""

from lightning_ckpt.io import AsyncCheckpointIO, SyncCheckpointIO

__all__ = ["AsyncCheckpointIO", "SyncCheckpointIO"]
