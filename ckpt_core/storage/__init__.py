"""Storage for checkpoints: local disks, object stores through fsspec, and one that injects faults, for tests."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from ckpt_core.errors import CheckpointError, CheckpointNotFoundError, StorageError
from ckpt_core.option_checks import check_mapping, check_options, or_none
from ckpt_core.paths import StrPath, is_remote, local_path
from ckpt_core.storage.base import MANIFEST_NAME, PROBE_NAME, FileInfo, FileReader, FileWriter, Storage
from ckpt_core.storage.counting import counted
from ckpt_core.storage.faulty import Fault, FaultyStorage, Operation
from ckpt_core.storage.local import LocalStorage, refuse_wrong_local, try_to_create_in

__all__ = [
    "MANIFEST_NAME",
    "Fault",
    "FaultyStorage",
    "FileInfo",
    "FileReader",
    "FileWriter",
    "LocalStorage",
    "Operation",
    "Storage",
    "is_remote",
    "local_path",
    "refuse_missing_bucket",
    "refuse_unwritable",
    "refuse_wrong_directory",
    "storage_for",
]

_BUCKETS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")  # schemes for which a save does not create the bucket


def storage_for(path: StrPath, storage_options: dict[str, Any] | None = None) -> Storage:
    """Return the storage that keeps ``path``.

    Args:
        path: A local path or a URL.
        storage_options: Options for fsspec's client of the store; and ``"backend"``: ``"fsspec"`` (obstore is not
            used) or ``"obstore"`` (an error if it cannot be used). By default, obstore is used where that is possible.
            For local paths, only ``"follow_links"`` has an effect, see :class:`LocalStorage`.

    Raises:
        ValueError: ``storage_options`` is not a mapping.
        StorageError: There is no such backend, its package is not installed, or the options do not fit.
    """
    check_options({"storage_options": or_none(check_mapping)}, locals())
    if not is_remote(path):
        return counted(LocalStorage(bool((storage_options or {}).get("follow_links"))))
    from ckpt_core.storage.fsspec_storage import FsspecStorage

    return counted(FsspecStorage(os.fspath(path), storage_options))


def refuse_missing_bucket(path: StrPath, storage_options: dict[str, Any] | None = None) -> None:
    """Raise an error for a URL whose bucket does not exist: that is a wrong name, not the first start of a run.

    Raises:
        CheckpointNotFoundError: The store says that there is no such bucket. If it does not answer, nothing is raised.
    """
    protocol, separator, rest = os.fspath(path).partition("://")
    if not separator or protocol not in _BUCKETS:
        return
    bucket = f"{protocol}://{rest.partition('/')[0]}"
    try:
        is_there = storage_for(bucket, storage_options).exists(bucket)
    except StorageError:
        return  # the user may have access below a prefix only
    if not is_there:
        raise CheckpointNotFoundError(
            f"there is no such bucket: {bucket}", path=bucket, remedy="make it, or check its name and the endpoint"
        )


def refuse_wrong_directory(path: StrPath, storage_options: dict[str, Any] | None = None) -> None:
    """Raise an error for a directory in which no checkpoint can be, instead of taking it for that of a first start.

    Raises:
        StorageError: The local path is that of a file, or is below a file or a dangling symbolic link.
        CheckpointNotFoundError: As :func:`refuse_missing_bucket`.
    """
    if is_remote(path):
        refuse_missing_bucket(path, storage_options)
    else:
        refuse_wrong_local(local_path(path), "list")


def refuse_unwritable(path: StrPath, storage_options: dict[str, Any] | None = None) -> None:
    """Raise an error for a directory in which a run could not save.

    The directory need not exist. Nothing is left in it, unless a store lets this process write but not delete.

    Raises:
        StorageError: As :func:`refuse_wrong_directory`; or this process may not write there, or the disk or store
            refuses the write.
        CheckpointNotFoundError: As :func:`refuse_missing_bucket`.
    """
    if not is_remote(path):
        try_to_create_in(refuse_wrong_local(local_path(path), "write"))
        return
    refuse_missing_bucket(path, storage_options)
    storage, probe = storage_for(path, storage_options), f"{os.fspath(path).rstrip('/')}/{PROBE_NAME}"
    try:
        storage.write_whole(probe, b"\0")
    except StorageError as error:
        raise StorageError(
            f"no checkpoint can be saved here: {error.message}",
            path=os.fspath(path),
            remedy="check the URL, the credentials, which must allow to write, and the storage_options",
            errno=error.errno,
        ) from error
    with contextlib.suppress(CheckpointError):  # the check after the first save reports it
        storage.remove(probe)
