"""Which storage reaches a URL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_core.errors import StorageError
from ckpt_core.storage.base import Storage
from ckpt_core.storage.fsspec_storage import FsspecStorage

__all__ = ["remote_storage"]


def remote_storage(url: str, storage_options: Mapping[str, Any] | None = None) -> Storage:
    """Return the storage that keeps ``url``.

    Args:
        url: Not a local path.
        storage_options: ``"backend"``, which is ``"fsspec"`` unless it says ``"obstore"``, and what that takes: endpoint,
            credentials and so on.

    Raises:
        StorageError: There is no such backend, its package is not installed, or the options do not fit.
    """
    options = dict(storage_options or {})
    backend = options.pop("backend", "fsspec")
    options.pop("follow_links", None)  # stores have none
    if backend == "obstore":
        from ckpt_core.storage.obstore_storage import ObstoreStorage

        return ObstoreStorage(url, options)
    if backend != "fsspec":
        raise StorageError(
            f"there is no storage backend {backend!r}", path=url, remedy='choose "fsspec" or "obstore" as "backend"'
        )
    return FsspecStorage(url, options)
