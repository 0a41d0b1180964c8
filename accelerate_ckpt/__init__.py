"""Checkpoints for Hugging Face Accelerate: ``save_state`` and ``load_state`` become durable, asynchronous and exact.

A script without changes::

    accelerate launch -m accelerate_ckpt --strategy async train.py ...

A script that opts in::

    accelerator = attach(Accelerator(), strategy="async")

The engine is :mod:`ckpt_core`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerate_ckpt._attach import CheckpointProjectConfiguration, attach
    from accelerate_ckpt._state.load import FolderNotFoundError
    from accelerate_ckpt._state.warm_start import warm_start
    from accelerate_ckpt.config import CheckpointConfig

__all__ = ["CheckpointConfig", "CheckpointProjectConfiguration", "FolderNotFoundError", "attach", "warm_start"]

_HOMES = {
    "CheckpointConfig": "config",
    "CheckpointProjectConfiguration": "_attach",
    "FolderNotFoundError": "_state.load",
    "attach": "_attach",
    "warm_start": "_state.warm_start",
}


def __getattr__(name: str) -> Any:
    """Import torch and Accelerate only when needed, so that a launched script can set environment variables first."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
