"""The load pipeline: open, verify, build."""

from __future__ import annotations

import os
from typing import Any

from ckpt_core.errors import CheckpointNotFoundError, StorageError
from ckpt_core.layouts.sharded.reading import DirectoryCheckpoint
from ckpt_core.layouts.torch_file import load_torch_file, peek_torch_file, verify_torch_file
from ckpt_core.storage import MANIFEST_NAME, Storage, local_path, storage_for

__all__ = ["is_directory_checkpoint", "load", "peek", "verify"]


def load(
    path: str | os.PathLike[str],
    *,
    map_location: Any = None,
    weights_only: bool | None = None,
    storage_options: dict[str, Any] | None = None,
    storage: Storage | None = None,
) -> tuple[Any, bool, int]:
    """Load a checkpoint.

    Args:
        path: Local path or URL.
        map_location: As for ``torch.load``.
        weights_only: As for ``torch.load``: None means True.
        storage_options: For fsspec.
        storage: Where the file is; by default, what the path says.

    Returns:
        The state; whether every byte was compared with its digest (False for files that other programs wrote); the
        file's size in bytes.

    Raises:
        CheckpointError: See the tree in :mod:`ckpt_core.errors`.
    """

    def read(place: Storage, name: str) -> tuple[Any, bool, int]:
        with place.open(name) as reader:
            state, verified = load_torch_file(reader, map_location=map_location, weights_only=weights_only)
            return state, verified, reader.size

    path = local_path(path)
    return (storage or storage_for(path, storage_options)).nearest(path, read)


def peek(
    path: str | os.PathLike[str], *, storage_options: dict[str, Any] | None = None, storage: Storage | None = None
) -> Any:
    """Load a checkpoint without its tensors' bytes: their shapes and types are right, their values are undefined.

    Of a checkpoint that is a directory, the metadata are returned.

    Args:
        path: Local path or URL.
        storage_options: For fsspec.
        storage: Where the file is; by default, what the path says.

    Raises:
        CheckpointError: As :func:`load`; damage inside a tensor is not found.
    """
    path = local_path(path)
    return (storage or storage_for(path, storage_options)).nearest(path, _peek)


def _peek(storage: Storage, path: str) -> Any:
    if is_directory_checkpoint(storage, path):
        with DirectoryCheckpoint(path, storage) as checkpoint:
            return checkpoint.metadata
    with storage.open(path) as reader:
        return peek_torch_file(reader)


def verify(
    path: str | os.PathLike[str], *, storage_options: dict[str, Any] | None = None, storage: Storage | None = None
) -> bool:
    """Compare every byte of a checkpoint with its digest, without building anything.

    Args:
        path: Local path or URL.
        storage_options: For fsspec.
        storage: Where the file is; by default, what the path says.

    Returns:
        True if all bytes match; False if the file holds no digests, because another program wrote it.

    Raises:
        CheckpointCorruptedError: Bytes are missing or differ; the error names the record.
        CheckpointNotFoundError: There is no such file, and no such directory with a manifest.
    """
    path = local_path(path)
    return (storage or storage_for(path, storage_options)).nearest(path, _verify)


def _verify(storage: Storage, path: str) -> bool:
    try:
        with storage.open(path) as reader:
            return verify_torch_file(reader)
    except (CheckpointNotFoundError, StorageError):
        if not is_directory_checkpoint(storage, path):
            raise
    with DirectoryCheckpoint(path, storage) as checkpoint:
        checkpoint.verify()
    return True


def is_directory_checkpoint(storage: Storage, path: str) -> bool:
    """Return whether ``path`` is a directory with a manifest."""
    return storage.exists(f"{path}/{MANIFEST_NAME}")
