"""File permissions: a checkpoint that replaces another one keeps its mode, and its owner where we may set that."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import uuid

from ckpt_core.storage.base import MANIFEST_NAME

_MODE = 0o777  # bits that are taken over: not set-user-ID and the like
_OURS = 0o600  # bits that a file has while it is being written


def replaced_by(path: str) -> os.stat_result | None:
    """Return the status of what a save at ``path`` replaces, following a link; None if there is nothing."""
    with contextlib.suppress(OSError):
        return os.stat(path)
    return None


def first_mode(replaced: os.stat_result | None, mode: int) -> int:
    """Return the mode with which to create a replacement: no more than ``replaced`` allows, but writable for us."""
    return mode if replaced is None else mode & (replaced.st_mode | _OURS | mode & 0o100)


def differ(one: os.stat_result, other: os.stat_result) -> bool:
    """Return whether two files differ in mode, owner or group."""
    return _identity(one) != _identity(other)


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_mode & _MODE, status.st_uid, status.st_gid


def adopt(target: int | str, replaced: os.stat_result | None, *, most: int = _MODE) -> None:
    """Give a file or directory of ours the mode of what it replaces, and its owner and group if we may.

    The mode is limited to the bits of ``most``. If nothing is replaced, nothing is changed.
    """
    if replaced is None or not differ(os.stat(target), replaced):
        return
    for owner, group in ((-1, replaced.st_gid), (replaced.st_uid, -1)):
        with contextlib.suppress(OSError):
            os.chown(target, owner, group)
    mode = replaced.st_mode & most & _MODE
    if os.stat(target).st_gid != replaced.st_gid:
        mode &= ~0o070 | mode << 3  # a group other than the original one gets no more than all users
    os.chmod(target, mode)


def copy_file(source: str, target: str, replaced: os.stat_result, *, most: int = _MODE) -> None:
    """Copy a file durably to ``target``, which must not exist, with the permissions of ``replaced``."""
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, first_mode(replaced, 0o666))
    try:
        shutil.copyfile(source, target)
        adopt(descriptor, replaced, most=most)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def adopt_tree(directory: str, replaced: str) -> None:
    """Give a directory of ours, and all that is in it, the permissions of the directory that it replaces.

    A file that the old directory did not have gets no more than the manifest had there. A file that other checkpoints
    share (a hard link) is copied if it needs permissions of its own.
    """
    manifest = _file(os.path.join(replaced, MANIFEST_NAME))
    for folder, _, files in os.walk(directory):
        before = os.path.join(replaced, os.path.relpath(folder, directory))
        for name in files:
            path = os.path.join(folder, name)
            status, old = _file(path), _file(os.path.join(before, name))
            if status is not None and old is not None:
                _adopt_file(path, status, old, _MODE)
            elif status is not None and manifest is not None and status.st_mode & ~manifest.st_mode & _MODE:
                _adopt_file(path, status, manifest, status.st_mode)
    for folder, _, _ in os.walk(directory, topdown=False):  # folders last: their new mode may forbid us to write there
        before = os.path.join(replaced, os.path.relpath(folder, directory))
        if os.path.isdir(before):
            adopt(folder, os.stat(before))


def _file(path: str) -> os.stat_result | None:
    with contextlib.suppress(OSError):
        status = os.lstat(path)
        if stat.S_ISREG(status.st_mode):
            return status
    return None


def _adopt_file(path: str, status: os.stat_result, old: os.stat_result, most: int) -> None:
    if not differ(status, old) or os.path.samestat(status, old):
        return
    if status.st_nlink == 1:
        adopt(path, old, most=most)
        return
    copied = f"{path}.{uuid.uuid4().hex[:12]}"
    copy_file(path, copied, old, most=most)
    os.replace(copied, path)
