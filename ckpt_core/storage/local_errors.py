"""What went wrong on a local filesystem, with a remedy where one is known."""

from __future__ import annotations

import errno
import os
import shutil

from ckpt_core.errors import StorageError

__all__ = ["existing_directory", "storage_error"]

_REMEDIES = {
    errno.ENOSPC: "free some space, keep fewer checkpoints, or save to another disk",
    errno.EDQUOT: "your disk quota is used up: delete something or save to another disk",
    errno.EROFS: "the filesystem is mounted read-only: save to another directory",
    errno.EACCES: "you may not write there: change the directory or its permissions",
    errno.EPERM: "you may not write there: change the directory or its permissions",
    errno.EIO: "the disk reports an error: check it, and save to another one",
    errno.EISDIR: "there is a directory of that name: choose another path or delete it",
    errno.ENOTDIR: "a part of the path is a file: check the path",
    errno.EEXIST: "a part of the path is a file: check the path",
    errno.ENAMETOOLONG: "choose a shorter file name",
    errno.ECONNRESET: "the storage broke the connection: check the network and that it is up, then save again",
    errno.ETIMEDOUT: "the storage does not answer: check the network and that it is up, then save again",
}


def storage_error(action: str, path: str, error: OSError, needed: int | None = None) -> StorageError:
    """Return the error for the user that an operating system's ``error`` stands for, with a remedy where one is known."""
    detail = error.strerror or str(error) or type(error).__name__
    if error.errno == errno.ENOSPC and needed is not None:
        free = shutil.disk_usage(existing_directory(os.path.dirname(os.path.abspath(path)))).free
        detail += f": {needed} bytes needed, {free} free"
    return StorageError(
        f"cannot {action} the checkpoint: {detail}",
        path=path,
        remedy=_REMEDIES.get(error.errno or 0),
        errno=error.errno,
    )


def existing_directory(path: str) -> str:
    """Return the longest beginning of ``path`` that is a directory."""
    while not os.path.isdir(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return path
