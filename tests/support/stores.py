"""Storages for tests, and a look behind them."""

from __future__ import annotations

from typing import Any

from ckpt_core.storage import LocalStorage, Storage
from ckpt_core.storage.fsspec_storage import FsspecStorage
from ckpt_core.storage.remote import remote_storage

__all__ = ["Place", "storage_at", "unfinished_uploads"]

#: A directory, and the ``storage_options`` to reach it.
Place = tuple[str, dict[str, Any] | None]


def storage_at(place: Place) -> Storage:
    """Return the storage of a place."""
    root, options = place
    return remote_storage(root, options) if "://" in root else LocalStorage()


def unfinished_uploads(root: str, storage: Storage) -> list[str]:
    """The keys of uploads that S3 knows of; none elsewhere."""
    if not root.startswith("s3://"):
        return []
    options: dict[str, Any] = storage._options  # type: ignore[attr-defined]
    filesystem = FsspecStorage(root, options)._filesystem  # obstore cannot be asked
    found = filesystem.call_s3("list_multipart_uploads", Bucket=root.split("/")[2]).get("Uploads", [])
    return [upload["Key"] for upload in found]
