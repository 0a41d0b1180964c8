"""Both tiers as one storage to read from: a checkpoint's local copy or, if that is missing or damaged, its upload."""

from __future__ import annotations

import errno
import functools
import logging
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from ckpt_core._pipeline.directory_commit import names_of_files
from ckpt_core.errors import (
    CheckpointCorruptedError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    StorageError,
)
from ckpt_core.storage import FileInfo, FileReader, FileWriter, LocalStorage, Storage
from ckpt_core.storage.base import is_directory_checkpoint, transfer
from ckpt_core.tiers.ledger import LEDGER_NAME, Identity, identity_of, read_ledger, write_ledger
from ckpt_core.tiers.places import Tiers

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

#: Errors for which a local copy is passed over.
DAMAGE = (CheckpointCorruptedError, CheckpointFormatError, StorageError)

# Damaged copies that were warned about: a warning is logged once, although a look-up and the load after it read a copy.
_DAMAGED: set[tuple[str, Identity]] = set()


class TieredStorage(Storage):
    """Two tiers as one storage. It accepts paths of either tier, and lists paths in the tier of the given directory."""

    def __init__(
        self, tiers: Tiers, *, local: Storage | None = None, storage_options: dict[str, Any] | None = None
    ) -> None:
        self.tiers = tiers
        self.local = local or LocalStorage()
        self._storage_options = storage_options

    @functools.cached_property
    def remote(self) -> Storage:
        """The storage of the uploads; opened on first use, because clients do not survive a fork."""
        return self.tiers.storage(self._storage_options)

    def nearest(self, path: str, read: Callable[[Storage, str], Result]) -> Result:
        """Call ``read`` on the local copy of a checkpoint, or on the upload if the local copy is missing or damaged."""
        local = self.tiers.local_path(path)
        identity = self.local_identity(path)
        if identity is not None:
            try:
                return read(self.local, local)
            except CheckpointNotFoundError:
                if identity_of(local) is not None:
                    raise
            except DAMAGE as error:
                if not self.can_replace(path, identity, error):
                    raise
        return read(self.remote, self.tiers.remote_path(path))

    def local_identity(self, path: str) -> Identity | None:
        """Return the identity of a checkpoint's local copy; None if there is none or it is known to be damaged."""
        local = self.tiers.local_path(path)
        identity = identity_of(local)
        return None if identity is None or (local, identity) in _DAMAGED else identity

    def can_replace(self, path: str, identity: Identity, error: CheckpointError) -> bool:
        """Return whether the upload can be read instead of a damaged local copy; if so, log a warning."""
        remote, local = self.tiers.remote_path(path), self.tiers.local_path(path)
        if isinstance(error, StorageError) and error.errno == errno.EISDIR:
            return False  # not damaged, but a checkpoint of the other layout
        try:
            known = read_ledger(self.remote, os.path.dirname(remote)).get(os.path.basename(remote))
            if known is not None and known.inode != identity.inode:
                return False  # the upload is of another save
            if not identity.is_in(self.remote, remote):
                return False
        except CheckpointError:
            return False  # the first error is the one to report
        logger.warning("using the copy %s instead of the local one, %s: %s", remote, local, error.message)
        _DAMAGED.add((local, identity))
        return True

    # ---- reading -----------------------------------------------------------------------------------------------------

    def open(self, path: str) -> FileReader:
        try:
            return self.local.open(self.tiers.local_path(path))
        except CheckpointNotFoundError:
            return self.remote.open(self.tiers.remote_path(path))

    def exists(self, path: str) -> bool:
        return self.local.exists(self.tiers.local_path(path)) or self.remote.exists(self.tiers.remote_path(path))

    def list(self, directory: str) -> Sequence[FileInfo]:
        return self._union(directory, lambda storage, path: storage.list(path))

    def list_directories(self, directory: str) -> Sequence[FileInfo]:
        return self._union(directory, lambda storage, path: storage.list_directories(path))

    def subdirectories(self, directory: str) -> Sequence[str]:
        def as_files(storage: Storage, path: str) -> Sequence[FileInfo]:
            return [FileInfo(found, 0, 0.0) for found in storage.subdirectories(path)]

        return [found.path for found in self._union(directory, as_files)]

    def _union(self, directory: str, listing: Callable[[Storage, str], Sequence[FileInfo]]) -> Sequence[FileInfo]:
        near = _by_name(listing(self.local, self.tiers.local_path(directory)))
        there = self.tiers.remote_path(directory)
        far = _by_name(listing(self.remote, there))
        known = {} if far.keys() <= near.keys() else read_ledger(self.remote, there)
        # The store's dates are those of the uploads, not of the commits.
        committed = {name: known[name].committed if name in known else file.modified for name, file in far.items()}
        times = {**committed, **{name: file.modified for name, file in near.items()}}
        root = directory.rstrip("/")
        return [FileInfo(f"{root}/{name}", file.size, times[name]) for name, file in {**far, **near}.items()]

    # ---- writing: to the local tier, from which the uploader takes it ------------------------------------------------

    def create(self, path: str, expected_size: int) -> FileWriter:
        return self.local.create(self.tiers.local_path(path), expected_size)

    def copy(self, source: str, target: str) -> int:
        local_target = self.tiers.local_path(target)
        try:
            return self.local.copy(self.tiers.local_path(source), local_target)
        except CheckpointNotFoundError:
            return transfer(self.remote, self.tiers.remote_path(source), self.local, local_target)

    def remove(self, path: str) -> None:
        self.local.remove(self.tiers.local_path(path))
        self.remove_upload(path)

    def remove_directory(self, path: str, *, names: Collection[str] = ()) -> None:
        self.local.remove_directory(self.tiers.local_path(path), names=names)
        self.remove_upload(path)

    def remove_upload(self, path: str) -> None:
        """Delete a checkpoint from the remote tier; do nothing if there is none."""
        remote = self.tiers.remote_path(path)
        if is_directory_checkpoint(self.remote, remote):
            self.remote.remove_directory(remote, names=names_of_files(self.remote, remote))
        else:
            self.remote.remove(remote)
        directory, name = os.path.split(remote)
        known = read_ledger(self.remote, directory)
        if known.pop(name, None) is not None:
            write_ledger(self.remote, directory, known)

    def remove_orphans(self, directory: str) -> Sequence[str]:
        return [
            *self.local.remove_orphans(self.tiers.local_path(directory)),
            *self.remote.remove_orphans(self.tiers.remote_path(directory)),
        ]

    def orphans(self, directory: str) -> Sequence[str]:
        return [
            *self.local.orphans(self.tiers.local_path(directory)),
            *self.remote.orphans(self.tiers.remote_path(directory)),
        ]


def _by_name(files: Sequence[FileInfo]) -> dict[str, FileInfo]:
    return {name: file for file in files if (name := os.path.basename(file.path)) != LEDGER_NAME}
