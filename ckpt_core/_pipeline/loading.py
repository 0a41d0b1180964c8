"""Loads torch files; verifies checkpoints of either layout, and inspects them without reading tensor data."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import Any

from ckpt_core._layouts.directory.files import Files
from ckpt_core._layouts.directory.loading import DirectoryReader
from ckpt_core._layouts.directory.manifest import read_stamp as read_stamp_of_manifest
from ckpt_core._layouts.torch_file.loading import (
    glance_at_torch_file,
    load_torch_file,
    peek_torch_file,
    verify_torch_file,
)
from ckpt_core._layouts.torch_file.opening import is_archive, read_stamp
from ckpt_core.commit_time import Stamp, step_in
from ckpt_core.errors import CheckpointError, CheckpointFormatError, CheckpointNotFoundError, StorageError
from ckpt_core.paths import StrPath, full_path
from ckpt_core.process.threads import IO_THREADS, run_parallel
from ckpt_core.storage import MANIFEST_NAME, Storage, is_remote, local_path, storage_for
from ckpt_core.storage.base import is_directory_checkpoint

_DEPTH = 1  # a plugin nests its metadata under one key of its own


def load(
    path: str,
    *,
    map_location: Any = None,
    weights_only: bool | None = None,
    storage: Storage,
) -> tuple[Any, bool, int]:
    """Load a file; return the state, whether every byte was compared with its digest, and the file's size in bytes.

    Files written by other programs have no digests.
    """

    def read(place: Storage, name: str) -> tuple[Any, bool, int]:
        with place.open(name) as reader:
            state, verified = load_torch_file(reader, map_location=map_location, weights_only=weights_only)
            return state, verified, reader.size

    return storage.nearest(path, read)


def peek(path: str, *, storage: Storage) -> Any:
    """Load a checkpoint without its tensor data: shapes and dtypes are correct, values are undefined.

    For a directory, return its metadata. Damage inside a tensor is not detected.
    """
    return storage.nearest(path, _peek)


def _peek(storage: Storage, path: str) -> Any:
    if is_directory_checkpoint(storage, path):
        with DirectoryReader(path, storage) as checkpoint:
            return checkpoint.metadata
    with storage.open(path) as reader:
        try:
            return peek_torch_file(reader)
        except CheckpointFormatError:
            # A nested tensor stores its shapes as tensors, which are not read here.
            return load_torch_file(reader, map_location="cpu", weights_only=None)[0]


def glance(path: str, *, storage: Storage) -> Any:
    """Return the plain values of a checkpoint, without tensors and objects; for a directory, its metadata."""

    def read(place: Storage, name: str) -> Any:
        if is_directory_checkpoint(place, name):
            with DirectoryReader(name, place) as checkpoint:
                return checkpoint.metadata
        with place.open(name) as opened:
            return glance_at_torch_file(opened)

    return storage.nearest(path, read)


def stamp_of(path: str, *, storage: Storage, is_directory: bool) -> Stamp:
    """Return when a checkpoint was committed and at which step; for an old format without a stamp, only the step."""

    def read(place: Storage, name: str) -> Stamp:
        if is_directory:
            files = Files(name, place)
            stamp = read_stamp_of_manifest(files.read_manifest(), path=files.path_of(MANIFEST_NAME))
            if stamp.committed is None and stamp.step is None:
                with DirectoryReader(name, place) as checkpoint:
                    stamp = Stamp(step=step_in(checkpoint.metadata, depth=_DEPTH))
            return stamp
        with place.open(name) as reader:
            found = read_stamp(reader)
            if found is None and not is_archive(reader):
                return Stamp()  # the format of torch before 1.6, which can only be read as a whole
            if found is None or (found.committed is None and found.step is None):
                return Stamp(step=step_in(glance_at_torch_file(reader)))
            return found

    return storage.nearest(path, read)


def note_commits(storage: Storage, directory: str, ending: str) -> None:
    """Read when the checkpoints in a directory were committed, so that a new save next to them gets a later time.

    Reads all directory checkpoints, and the files whose names end with ``ending``, such as ``.ckpt``.
    """
    try:
        paths = [file.path for file in storage.list(directory) if os.path.splitext(file.path)[1] == ending]
        manifests = [f"{found.path}/{MANIFEST_NAME}" for found in storage.list_directories(directory)]
    except CheckpointError:
        return  # the save itself will raise it

    def note(path: str) -> None:
        with contextlib.suppress(CheckpointError), storage.open(path) as reader:
            if path in manifests:
                read_stamp_of_manifest(reader.read_whole(), path=reader.path)
            else:
                read_stamp(reader)

    found = [*paths, *manifests]
    run_parallel(note, found, threads=min(IO_THREADS, len(found)))


def verify(path: StrPath, *, storage_options: dict[str, Any] | None = None, storage: Storage | None = None) -> bool:
    """Compare every byte of a checkpoint with its digest, without building tensors or objects.

    Args:
        path: Local path or URL.
        storage_options: Options for fsspec.
        storage: The storage that holds the checkpoint; by default, derived from the path.

    Returns:
        True if all bytes match; False if the file holds no digests, because another program wrote it.

    Raises:
        CheckpointCorruptedError: Bytes are missing or differ; the error names the record.
        CheckpointNotFoundError: There is no such file, and no such directory with a manifest.
    """
    path = full_path(path) if is_remote(path) else local_path(path)
    return (storage or storage_for(path, storage_options)).nearest(path, _verify)


def _verify(storage: Storage, path: str) -> bool:
    try:
        with storage.open(path) as reader:
            return verify_torch_file(reader)
    except (CheckpointNotFoundError, StorageError) as error:
        if not is_directory_checkpoint(storage, path):
            if isinstance(error, StorageError) and error.errno == errno.EISDIR:
                storage.list(path)  # raises if the directory may not be read
            raise
    with DirectoryReader(path, storage) as checkpoint:
        checkpoint.verify()
    return True
