"""A directory for other programs that appears under its name when it is complete and durable, or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator

from ckpt_core.errors import StorageError
from ckpt_core.paths import StrPath
from ckpt_core.storage import is_remote, local_path

__all__ = ["new_directory"]


@contextlib.contextmanager
def new_directory(target: StrPath) -> Iterator[str]:
    """Give a directory to fill, which becomes ``target`` at the end; if the body raises, nothing is left.

    Args:
        target: Where nothing is yet, or an empty directory.

    Raises:
        StorageError: There is something, it is a URL, or the disk refused.
    """
    if is_remote(target):
        raise StorageError(
            "other programs' formats are written to local directories only",
            path=os.fspath(target),
            remedy="export to a local directory, and upload that",
        )
    path = os.path.abspath(local_path(target))
    if os.path.lexists(path) and not (os.path.isdir(path) and not os.listdir(path)):
        raise StorageError("there is something already", path=path, remedy="export to a path where there is nothing")
    parent, name = os.path.split(path)
    try:
        os.makedirs(parent, exist_ok=True)
        hidden = tempfile.mkdtemp(prefix=f".{name}.", suffix=".export", dir=parent)
        try:
            yield hidden
            os.chmod(hidden, 0o777 & ~_umask())
            _sync(hidden)
            os.rename(hidden, path)
            _sync_path(parent)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            f"the export could not be written: {error}", path=path, remedy="make room, or export elsewhere"
        ) from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync(directory: str) -> None:
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            _sync_path(os.path.join(folder, name))
        _sync_path(folder)


def _sync_path(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
