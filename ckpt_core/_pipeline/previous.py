"""The checkpoint that a save replaces."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from ckpt_core._layouts.sharded.manifest import ExtraFile, Manifest
from ckpt_core.errors import CheckpointError, CheckpointNotFoundError, StorageError
from ckpt_core.storage import MANIFEST_NAME, Storage, is_remote

__all__ = [
    "NOTHING",
    "Previous",
    "files_of",
    "names_of_files",
    "not_alone",
    "previous_at",
    "read_manifest",
    "unchangeable",
]


@dataclasses.dataclass(frozen=True)
class Previous:
    """The checkpoint that is at the path before a save.

    Attributes:
        exists: Whether there is one.
        files: Its own files.
        extra: Those that callers added, by name.
    """

    exists: bool
    files: Collection[str] = ()
    extra: Mapping[str, ExtraFile] = dataclasses.field(default_factory=dict)


NOTHING = Previous(exists=False)


def read_manifest(storage: Storage, path: str) -> tuple[bytes, Manifest]:
    """Return the manifest of the checkpoint at ``path``: its bytes, and what they say.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    with storage.open(f"{path}/{MANIFEST_NAME}") as reader:
        data = bytearray(reader.size)
        reader.read_into(0, memoryview(data))
    return bytes(data), Manifest.decode(bytes(data), path=path)


def files_of(manifest: Manifest) -> tuple[set[str], dict[str, ExtraFile]]:
    """Return the names of the files that a checkpoint consists of, and the files that callers have added, by name."""
    own = {file.name for rank in manifest.ranks for file in rank.files}
    own |= {rank.digests.name for rank in manifest.ranks if rank.digests is not None}
    return own, {file.name: file for rank in manifest.ranks for file in rank.extra_files}


def names_of_files(storage: Storage, path: str) -> set[str]:
    """Return the names of all files of the checkpoint at ``path``; none if its manifest cannot be read."""
    try:
        own, extra = files_of(read_manifest(storage, path)[1])
    except CheckpointError:
        return set()
    return {*own, *extra}


def previous_at(storage: Storage, path: str) -> Previous:
    """Return what is at ``path``.

    Raises:
        StorageError: An object store does not say.
    """
    try:
        _, manifest = read_manifest(storage, path)
    except CheckpointNotFoundError:
        return NOTHING
    except StorageError:
        if is_remote(path):
            raise
        return NOTHING  # a file, or a directory that cannot be read: replacing it will tell
    except CheckpointError:
        return Previous(exists=True)  # damaged, or of another program: nothing there is known to be ours
    return Previous(True, *files_of(manifest))


def unchangeable(name: str, path: str) -> StorageError:
    """Return the error for a file of a caller that would have to change in the same moment as the manifest."""
    return StorageError(
        f"{name!r} has changed and cannot be replaced together with the rest of the checkpoint",
        path=path,
        key=name,
        remedy="on an object store, save to a path of its own each time",
    )


def not_alone(name: str, path: str) -> StorageError:
    """Return the error for a file of a caller where another job may be writing one of the same name."""
    return StorageError(
        f"another job saves into the same directory, and could overwrite {name!r}, which has the same name in all checkpoints",
        path=path,
        key=name,
        remedy="end one of the two jobs, or give it a directory of its own",
    )
