"""The end of every save of a directory, whoever says that all ranks have written."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterator, Mapping

from ckpt_core._pipeline.previous import previous_at
from ckpt_core.errors import CheckpointError, StorageError
from ckpt_core.storage import Storage

__all__ = ["errors_name", "publish"]

_LISTING_SECONDS = 10.0  # a network filesystem may be that late in showing what another machine has written


@contextlib.contextmanager
def errors_name(path: str, *, written_to: str) -> Iterator[None]:
    """Let errors name files below ``path``, where the user knows them, and not below the directory that they are written to."""
    try:
        yield
    except CheckpointError as error:
        if error.path is not None and error.path.startswith(written_to):
            error.path = path + error.path[len(written_to) :]
        raise


def publish(
    storage: Storage,
    path: str,
    token: str,
    manifest: bytes,
    sizes: Mapping[str, int],
    *,
    written_to: str,
    added: Collection[str] = (),
    keeps_old: bool = False,
    is_shared: bool = True,
) -> None:
    """Make what was written the checkpoint at its path, in the place of what was there.

    Args:
        storage: Where it is.
        path: The checkpoint.
        token: That of the save.
        manifest: Its manifest.
        sizes: Bytes of the files that the ranks have written, by name.
        written_to: The directory that they were written to.
        added: Names of the files that callers have added.
        keeps_old: Whether files of the checkpoint before stay where they are.
        is_shared: Whether other processes, maybe of other machines, have written some of them.

    Raises:
        StorageError: A file is not seen here, or the storage refused.
    """
    if is_shared:
        _wait_for(storage, written_to, sizes, path)
    previous = previous_at(storage, path)
    old = [name for name in (*previous.files, *previous.extra) if name not in sizes and name not in added]
    storage.publish_directory(path, token, manifest, gone=[] if keeps_old else old)


def _wait_for(storage: Storage, directory: str, sizes: Mapping[str, int], path: str) -> None:
    """Raise if a file that another rank has written is not where this rank sees it: on the disk of another machine."""
    deadline = time.monotonic() + _LISTING_SECONDS
    while True:
        found = {os.path.basename(file.path): file.size for file in storage.list(directory)}
        missing = sorted(name for name, size in sizes.items() if found.get(name) != size)
        if not missing:
            return
        if time.monotonic() > deadline:
            raise StorageError(
                f"rank 0 does not see {len(missing)} files of {len(sizes)} that the ranks have written, "
                f"{missing[0]!r} among them",
                path=path,
                remedy="save to a directory that all machines share",
            )
        time.sleep(0.1)
