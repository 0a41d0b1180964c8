"""Common base of our storage reader and writer for DCP: the path and the storage of the checkpoint."""

from __future__ import annotations

import os
from typing import Any

from ckpt_core.paths import StrPath, full_path
from ckpt_core.storage import Storage, storage_for


class NamedCheckpoint:
    """The path of a checkpoint, and the storage that keeps it."""

    def __init__(self, path: StrPath | None, storage_options: dict[str, Any] | None, storage: Storage | None) -> None:
        self._path = None if path is None else full_path(path)
        self._storage_options = storage_options
        self._storage = storage

    @property
    def checkpoint_id(self) -> str | None:
        """The path of the checkpoint; None if not given yet."""
        return self._path

    def _found(self, how: str) -> tuple[str, Storage]:
        if self._path is None:
            raise ValueError(f"name the checkpoint: {type(self).__name__}(path), or {how}(..., checkpoint_id=path)")
        return self._path, self._storage or storage_for(self._path, self._storage_options)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        """Return whether the id can be a path: every string and path object can."""
        return isinstance(checkpoint_id, (str, os.PathLike))
