"""A directory checkpoint that is read from the nearest tier, and from the other one when damage comes to light."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ckpt_core._layouts.sharded.matching import LocalView
from ckpt_core._layouts.sharded.reading import DirectoryCheckpoint
from ckpt_core.errors import CheckpointError
from ckpt_core.storage import Storage
from ckpt_core.tiers.nearest import DAMAGE, TieredStorage

__all__ = ["NearestDirectoryCheckpoint"]

Result = TypeVar("Result")


class NearestDirectoryCheckpoint(DirectoryCheckpoint):
    """A committed directory checkpoint, open for reading; in two tiers, whatever of it is whole.

    Damage inside a tensor is found when its bytes arrive. What was asked for is then read once more, all of it, from the other
    tier, if that has a copy of the same save.

    Args:
        path: The checkpoint's directory or URL.
        storage: Where it is.
    """

    def __init__(self, path: str, storage: Storage) -> None:
        self._tiers = storage if isinstance(storage, TieredStorage) else None
        self._name = path
        if self._tiers is None:
            self._open(storage, path)
        else:
            self._identity = self._tiers.local_identity(path)
            self._tiers.nearest(path, self._open)

    def _open(self, storage: Storage, path: str) -> None:
        super().__init__(path, storage)
        self._is_local = self._tiers is not None and storage is self._tiers.local

    def load(
        self,
        part: str,
        *,
        into: Any = None,
        local: LocalView | None = None,
        rank: int | None = 0,
        map_location: str | torch.device | None = None,
        strict: bool = True,
    ) -> Any:
        read = functools.partial(
            super().load, part, into=into, local=local, rank=rank or 0, map_location=map_location, strict=strict
        )
        return self._from_whole_copy(read)

    def read_file(self, name: str) -> bytes:
        return self._from_whole_copy(functools.partial(super().read_file, name))

    def verify(self) -> None:
        self._from_whole_copy(super().verify)

    def _from_whole_copy(self, read: Callable[[], Result]) -> Result:
        try:
            return read()
        except DAMAGE as error:
            if not self._change_over(error):
                raise
        return read()

    def _change_over(self, error: CheckpointError) -> bool:
        tiers, save_id = self._tiers, self.save_id
        if tiers is None or not self._is_local or self._identity is None:
            return False
        if not tiers.can_replace(self._name, self._identity, error):
            return False
        self.close()
        self._open(tiers.remote, tiers.tiers.remote_path(self._name))
        return self.save_id == save_id  # otherwise parts of two saves would be mixed
