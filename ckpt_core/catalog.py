"""The checkpoints under one directory: which exist, and which is the newest that verifies."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from ckpt_core.errors import CheckpointError, CheckpointNotFoundError, StorageError, UnsafeCheckpointError
from ckpt_core.events import CheckpointSkipped, Listener
from ckpt_core.layouts.sharded.leftovers import remove_leftovers
from ckpt_core.reader import peek, verify
from ckpt_core.storage import Storage, is_remote, local_path, storage_for
from ckpt_core.tiers import LEDGER_NAME, TieredStorage, Tiers, read_ledger
from ckpt_core.writer import notify

__all__ = ["Catalog", "CheckpointInfo"]

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint in a catalog.

    Attributes:
        path: Local path or URL.
        size: Length in bytes; of a directory, that of all files directly in it.
        modified: Unix time at which it was committed, in seconds.
        is_directory: Whether it is a directory and not one file.
    """

    path: str
    size: int
    modified: float
    is_directory: bool = False


def _age(info: CheckpointInfo) -> tuple[float, bool, list[int], str]:
    # Object stores date in whole seconds. Within one, larger numbers are newer; names without, as "last", are replaced by each.
    numbers = [int(digits) for digits in re.findall(r"[0-9]+", os.path.basename(info.path))]
    return info.modified, not numbers, numbers, info.path


class Catalog:
    """The committed checkpoints directly in one directory, be they files or directories.

    Args:
        root: Local directory or URL.
        suffix: Ending of the names that count; ``""`` for all, which is for directories that hold nothing else.
        storage_options: For fsspec.
        listeners: Told about checkpoints that are passed over.
        storage: Where the directory is; by default, what ``root`` says.
        tiers: Look in both tiers (:class:`ckpt_core.tiers.Tiers`), if ``root`` lies in one of them; ``storage`` is the local one.

    Example:
        >>> from ckpt_core import Catalog
        >>> Catalog("no/such/directory").checkpoints()
        []
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        suffix: str = ".ckpt",
        storage_options: dict[str, Any] | None = None,
        listeners: Sequence[Listener] = (),
        storage: Storage | None = None,
        tiers: Tiers | None = None,
    ) -> None:
        self.root = local_path(root)
        self._suffix = suffix
        if tiers is not None and tiers.covers(self.root):
            storage = TieredStorage(tiers, local=storage, storage_options=storage_options)
        self._storage = storage or storage_for(self.root, storage_options if is_remote(root) else None)
        self._listeners = listeners

    def checkpoints(self) -> list[CheckpointInfo]:
        """Return all committed checkpoints, the newest first."""
        storage = self._storage
        try:
            return self._listed(storage, self.root)
        except StorageError as error:
            if not isinstance(storage, TieredStorage):
                raise
            root = storage.tiers.local_path(self.root)
            found = self._listed(storage.local, root)
            if not found:
                raise  # rather than a fresh start
            logger.warning("looked for checkpoints in %s only: %s", root, error)
            return found

    def _listed(self, storage: Storage, root: str) -> list[CheckpointInfo]:
        files = [(file, False) for file in storage.list(root)]
        directories = [(file, True) for file in storage.list_directories(root)]
        # Of what was uploaded from a local tier, the store knows when that ended, which may have been in another order.
        is_uploaded = any(os.path.basename(file.path) == LEDGER_NAME for file, _ in files)
        committed = read_ledger(storage, root) if is_uploaded else {}
        found = []
        for file, is_directory in files + directories:
            name = os.path.basename(file.path)
            if name.endswith(self._suffix) and name != LEDGER_NAME:
                modified = committed[name].committed if name in committed else file.modified
                found.append(CheckpointInfo(file.path, file.size, modified, is_directory))
        return sorted(found, key=_age, reverse=True)

    def newest_verified(self, accept: Callable[[Any], bool] | None = None) -> CheckpointInfo | None:
        """Return the newest checkpoint whose bytes all match their digests, or None if there is none.

        Each damaged one is named in a warning. A file without digests (another program's) counts as it is.

        Args:
            accept: Called with a checkpoint's state, its tensors without values, or with the metadata of a directory
                (:func:`ckpt_core.reader.peek`); says whether it is of the kind that is looked for.
        """
        for info in self.checkpoints():
            try:
                verify(info.path, storage=self._storage)
                if accept is None or self._is_accepted(info.path, accept):
                    return info
            except CheckpointNotFoundError:
                continue  # deleted meanwhile
            except CheckpointError as error:
                logger.warning("passed over the checkpoint %s: %s", info.path, error.message)
                notify(self._listeners, CheckpointSkipped(path=info.path, reason=error.message))
        return None

    def peek(self, path: str) -> Any:
        """Return a checkpoint's state, its tensors without values, or the metadata of a directory.

        Args:
            path: The checkpoint, in this directory or another of the same storage.

        Raises:
            CheckpointError: As :func:`ckpt_core.reader.peek`.
        """
        return peek(path, storage=self._storage)

    def check(self, path: str) -> None:
        """Compare every byte of a checkpoint with its digest.

        Args:
            path: The checkpoint, in this directory or another of the same storage.

        Raises:
            CheckpointError: As :func:`ckpt_core.verify`.
        """
        verify(path, storage=self._storage)

    def _is_accepted(self, path: str, accept: Callable[[Any], bool]) -> bool:
        try:
            return accept(self.peek(path))
        except UnsafeCheckpointError:
            return True  # holds more than plain data: cannot be judged without running its code

    def verify(self) -> dict[str, CheckpointError | None]:
        """Verify every checkpoint; return the error of each, None for those that are whole."""
        result: dict[str, CheckpointError | None] = {}
        for info in self.checkpoints():
            try:
                verify(info.path, storage=self._storage)
                result[info.path] = None
            except CheckpointError as error:
                result[info.path] = error
        return result

    def prune(self) -> list[str]:
        """Delete what dead processes left unfinished in the directory, files and directories; return the deleted paths.

        On an object store that is what has not changed for an hour (uploads) or a day (directories that were never committed).
        """
        removed = list(self._storage.remove_orphans(self.root))
        if is_remote(self.root):
            removed += remove_leftovers(self._storage, self.root)
        return removed
