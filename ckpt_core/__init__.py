"""Engine of the plugins: saves a training state as a durable, verified checkpoint and loads it again."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt_core import policies, storage
    from ckpt_core._pipeline.device_copy import wait_staged
    from ckpt_core._pipeline.loading import verify
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
    from ckpt_core.interchange import LoadReport, load_into
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
    "LoadReport",
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
    "load_into",
    "policies",
    "storage",
    "verify",
    "wait_staged",
]

__version__ = "0.1.0"

_HOMES = {
    "Catalog": "catalog",
    "CheckpointInfo": "catalog",
    "Checkpointer": "checkpointer",
    "DirectoryCheckpoint": "directory",
    "DirectoryCheckpointer": "directory",
    "EventLog": "events",
    "Kind": "state.kinds",
    "LoadReport": "interchange",
    "Part": "state.kinds",
    "RankGroup": "ranks",
    "Tiers": "tiers",
    "load_into": "interchange",
    "verify": "_pipeline.loading",
    "wait_staged": "_pipeline.device_copy",
}


def __getattr__(name: str) -> Any:
    """Import a public name or submodule on first access, so that ``ckpt --help`` does not import torch."""
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES.get(name, "errors" if name.endswith("Error") and name in __all__ else None)
    if home is not None:
        value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
        globals()[name] = value
        return value
    module = f"{__name__}.{name}"
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
