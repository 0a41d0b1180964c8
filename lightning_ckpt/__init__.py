"""Checkpointing for Lightning: exact resume, synchronous, asynchronous and sharded saves, verified files."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_ckpt.io import AsyncCheckpointIO, SyncCheckpointIO
    from lightning_ckpt.resumable import ResumableCheckpoint
    from lightning_ckpt.sharded import ShardedCheckpointIO

__all__ = ["AsyncCheckpointIO", "ResumableCheckpoint", "ShardedCheckpointIO", "SyncCheckpointIO"]

_MODULES = {
    "AsyncCheckpointIO": "io",
    "ResumableCheckpoint": "resumable",
    "ShardedCheckpointIO": "sharded",
    "SyncCheckpointIO": "io",
}


def __getattr__(name: str) -> Any:
    # Lightning imports this package into every program, for its entry points; those that do not use it pay nothing.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
