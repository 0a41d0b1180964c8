"""The ledger: a small file next to the uploads that records which local copy each was made of.

It also records when that copy was committed. Stores only report when an upload ended, which gives another order if an
older checkpoint was uploaded late.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
from collections.abc import Mapping

from ckpt_core._pipeline.directory_commit import read_manifest
from ckpt_core._pipeline.loading import stamp_of
from ckpt_core.commit_time import NO_STAMP, Stamp
from ckpt_core.errors import CheckpointError, CheckpointFormatError, CheckpointNotFoundError
from ckpt_core.storage import MANIFEST_NAME, LocalStorage, Storage
from ckpt_core.storage.base import is_directory_checkpoint

logger = logging.getLogger(__name__)

LEDGER_NAME = ".ckpt-tiers.json"
_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Identity:
    """Identifies one local copy of a checkpoint among all that have been or will be at its path."""

    # Unix time of its commit in seconds, as recorded in the checkpoint; without a record, the file system's date.
    committed: float = dataclasses.field(compare=False)
    inode: int  # of the file, or of a directory's manifest: each save makes a new one
    size: int  # of that file in bytes
    modified_ns: int  # Unix time of the last change of that file, in nanoseconds
    # ID of the save that wrote a directory, equal in all copies of it; None for a file, empty for a damaged manifest.
    save: str | None = None

    def is_copy_of(self, other: Identity) -> bool:
        """Return whether both hold the same bytes: they are hard links of one file, or directories of one save."""
        if self.save is not None:
            return self.save == other.save != ""
        return dataclasses.replace(other, committed=self.committed) == self

    def is_in(self, storage: Storage, path: str) -> bool:
        """Return whether a checkpoint of this layout is at ``path``: another process may have deleted an upload."""
        return storage.exists(path) if self.save is None else is_directory_checkpoint(storage, path)


def identity_of(path: str) -> Identity | None:
    """Return the identity of the checkpoint at a local path; None if there is none."""
    is_directory = os.path.isdir(path)
    try:
        status = os.stat(f"{path}/{MANIFEST_NAME}" if is_directory else path)
    except OSError:
        return None
    identity = status.st_ino, status.st_size, status.st_mtime_ns
    stamp = _stamp_of(path, is_directory, *identity)
    save = _save_of(path, *identity) if is_directory else None
    return Identity(status.st_mtime if stamp.committed is None else stamp.committed, *identity, save)


@functools.lru_cache(maxsize=256)
def _stamp_of(path: str, is_directory: bool, *_identity: int) -> Stamp:
    try:
        return stamp_of(path, storage=LocalStorage(), is_directory=is_directory)
    except CheckpointError:
        return NO_STAMP


@functools.lru_cache(maxsize=256)
def _save_of(path: str, *_identity_of_manifest: int) -> str:
    try:
        return read_manifest(LocalStorage(), path)[1].save_id
    except CheckpointError:
        return ""


def read_ledger(storage: Storage, directory: str) -> dict[str, Identity]:
    """Read the ledger of a directory: the identity of each upload's local copy, by the name of the checkpoint."""
    path = f"{directory}/{LEDGER_NAME}"
    try:
        with storage.open(path) as reader:
            document = json.loads(reader.read_whole())
        if document["version"] != _VERSION:
            raise ValueError(f"it has version {document['version']}")
        return {str(name): Identity(*fields) for name, fields in document["uploads"].items()}
    except CheckpointNotFoundError:
        return {}
    except (CheckpointFormatError, ValueError, LookupError, TypeError, AttributeError) as error:
        logger.warning(
            "the record of uploads %s cannot be used, so some uploads are repeated needlessly: %s", path, error
        )
        return {}


def write_ledger(storage: Storage, directory: str, uploads: Mapping[str, Identity]) -> None:
    """Replace the ledger of a directory."""
    fields = {name: dataclasses.astuple(identity) for name, identity in uploads.items()}
    data = json.dumps({"version": _VERSION, "uploads": fields}, separators=(",", ":")).encode()
    storage.write_whole(f"{directory}/{LEDGER_NAME}", data)
