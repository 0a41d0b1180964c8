"""Directories on a local filesystem that appear whole and durable under their name, or not at all.

A directory is filled under a hidden name beside its final one, and renamed. One that is there already changes places
with it in one step (``RENAME_EXCHANGE``); where the filesystem cannot do that, two renames do it, and :func:`restore`
mends what a crash between them leaves. Everyone who writes into a hidden directory holds a shared lock on it, which
tells the orphan of dead processes from work in progress.

The functions here raise ``OSError``; :class:`~ckpt_core.storage.LocalStorage` makes it an error for the user.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator, Sequence

from ckpt_core.storage import permissions
from ckpt_core.storage.base import MANIFEST_NAME

SUFFIX = ".ckpt-part"
CANNOT_LINK = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)
CANNOT_LOCK = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_CANNOT_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
_REPLACED = "-replaced"
_CHANGED_MEANWHILE = (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST)
_MOST_ATTEMPTS = 10
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# Hidden directories whose deletion has failed or was interrupted: the next save in their directory tries again.
_undeleted: set[str] = set()


def sync_directory(directory: str) -> None:
    """Make the names in ``directory`` durable."""
    descriptor = os.open(directory or ".", os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network filesystems refuse to sync a directory; on those a rename is durable by itself.
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(descriptor)


class StagingDirectories:
    """The hidden directories that this process is writing into."""

    def __init__(self) -> None:
        # Its path and the descriptor with its lock. Changed in one step, without a lock of ours, which a signal
        # handler that saves could wait for.
        self._locks: set[tuple[str, int]] = set()

    def begin(self, path: str, token: str) -> str:
        """Create the hidden directory of ``path``, or join those who have, and return its path."""
        staging = hidden_name(path, token)
        for left in [left for left in tuple(_undeleted) if os.path.dirname(left) == os.path.dirname(staging)]:
            with contextlib.suppress(OSError):
                _delete_tree(left)
        replaced = permissions.replaced_by(path)
        is_directory = replaced is not None and stat.S_ISDIR(replaced.st_mode)
        descriptor = _create_locked(staging, permissions.first_mode(replaced if is_directory else None, 0o777))
        self._locks.add((staging, descriptor))
        return staging

    def publish(self, path: str, token: str, gone: Sequence[str]) -> None:
        """Give the hidden directory, all of whose files are durable, its final name; keep what others put there."""
        for attempt in range(_MOST_ATTEMPTS):
            try:
                _publish(hidden_name(path, token), path, token, gone)
            except OSError as error:
                # Another job has made a directory of that name in the very moment, or has removed it.
                if error.errno not in _CHANGED_MEANWHILE or attempt == _MOST_ATTEMPTS - 1:
                    raise
            else:
                return

    def discard(self, path: str, token: str) -> None:
        """Delete the hidden directory, whoever is still writing into it."""
        _delete_tree(hidden_name(path, token))

    def leave(self, path: str, token: str) -> None:
        """Stop writing into the hidden directory, and delete it if it is there still and nobody else writes into it."""
        staging = hidden_name(path, token)
        descriptor = -1
        for held in [held for held in tuple(self._locks) if held[0] == staging]:
            with contextlib.suppress(KeyError):  # another one, who leaves too, was faster
                self._locks.remove(held)
                descriptor = held[1]
                break
        with contextlib.suppress(OSError):
            if descriptor != -1:
                # Closing alone would leave the lock to the forked workers of a data loader, who have the descriptor
                # too.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        with contextlib.suppress(OSError):
            os.close(descriptor)
        remove_if_abandoned(staging)


def _publish(staging: str, path: str, token: str, gone: Sequence[str]) -> None:
    parent = os.path.dirname(staging)
    if not os.path.lexists(path):
        _sync_tree(staging)
        os.rename(staging, path)
        sync_directory(parent)
        return
    if os.path.isdir(path) and not os.path.islink(path):
        _keep_others(path, staging, {*gone, MANIFEST_NAME})
        permissions.adopt_tree(staging, path)
    _sync_tree(staging)
    if _exchange(staging, path):
        replaced = staging
        sync_directory(parent)
    else:
        replaced = _replace_by_two_renames(staging, path, token)
    with contextlib.suppress(OSError):  # it is committed; what cannot be deleted is an orphan
        if os.path.isdir(replaced) and not os.path.islink(replaced):
            os.chmod(replaced, 0o700)  # it may have been closed even to its owner
        _delete_tree(replaced)


def hidden_name(path: str, token: str) -> str:
    """Return the name that work on ``path`` has until it is committed."""
    directory, name = os.path.split(os.path.abspath(path))
    if not token.endswith(_REPLACED):  # of those, :func:`restore` has to know the whole name
        while len(os.fsencode(name)) > 200:  # a name has at most 255 bytes
            name = name[:-1]
    return os.path.join(directory, f".{name}.{token}{SUFFIX}")


def _create_locked(staging: str, mode: int) -> int:
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(staging, mode)
        try:
            descriptor = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # somebody took it for an orphan before it was locked
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        except OSError as error:
            if error.errno not in CANNOT_LOCK:
                os.close(descriptor)
                raise
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(staging), os.fstat(descriptor)):
                return descriptor
        os.close(descriptor)


def _sync_tree(directory: str) -> None:
    for folder, _, _ in os.walk(directory, topdown=False):
        sync_directory(folder)


def _keep_others(path: str, staging: str, ours: set[str]) -> None:
    """Link into ``staging`` the files of ``path`` that the checkpoint there does not consist of."""
    for name in _files_in(path):
        target = os.path.join(staging, name)
        if name in ours or name.endswith(SUFFIX) or os.path.lexists(target):
            continue
        os.makedirs(os.path.dirname(target), exist_ok=True)
        source = os.path.join(path, name)
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError as error:
            if error.errno not in CANNOT_LINK:
                raise
            shutil.copy2(source, target, follow_symlinks=False)
            if not os.path.islink(target):
                sync_file(target)


def _files_in(directory: str) -> Iterator[str]:
    for folder, folders, files in os.walk(directory):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in files + links:
            yield os.path.relpath(os.path.join(folder, name), directory)


def sync_file(path: str) -> None:
    """Make the bytes of a file durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: str, other: str) -> bool:
    """Let two paths change places in one step; False where the system or the filesystem cannot."""
    rename: Callable[..., int] | None = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), other)


def _replace_by_two_renames(staging: str, path: str, token: str) -> str:
    parent = os.path.dirname(staging)
    replaced = hidden_name(path, token + _REPLACED)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # so that nobody mends what is not broken
        os.rename(path, replaced)
        try:
            os.rename(staging, path)
        except OSError:
            try:
                os.rename(replaced, path)
            except OSError:
                if os.path.lexists(path):  # another job was faster: what we have moved away was replaced by that
                    _delete_tree(_given_up(replaced, path))
            raise
        sync_directory(parent)
        return _given_up(replaced, path)
    finally:
        os.close(descriptor)


def _given_up(replaced: str, path: str) -> str:
    """Give a replaced directory a name that :func:`restore` does not care about: it is about to lose its files."""
    name = hidden_name(path, uuid.uuid4().hex[:12])
    try:
        os.rename(replaced, name)
        sync_directory(os.path.dirname(name))
    except OSError:
        return name if os.path.lexists(name) else replaced  # the new one is in its place, so it is not restored
    return name


def restore(directory: str) -> None:
    """Give those their name back that a process was replacing, by two renames, when it died between the two."""
    ending = _REPLACED + SUFFIX
    with contextlib.suppress(OSError), os.scandir(directory or ".") as entries:
        for entry in entries:
            if entry.name.startswith(".") and entry.name.endswith(ending):
                _restore(entry.path, _replaced_name(entry.path))


def _replaced_name(path: str) -> str:
    """Return the name that a directory had before a process was replacing it."""
    directory, name = os.path.split(path)
    return os.path.join(directory, name[1 : -len(_REPLACED + SUFFIX)].rpartition(".")[0])


def _restore(replaced: str, path: str) -> None:
    with _locked_alone(replaced) as abandoned:
        if abandoned and not os.path.lexists(path):
            os.rename(replaced, path)
            sync_directory(os.path.dirname(path))


@contextlib.contextmanager
def _locked_alone(path: str) -> Iterator[bool]:
    """Hold the only lock on ``path``; gives False if that is not to be had."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield False  # gone, or not ours to read: somebody else's business
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        yield False  # somebody writes into it, or nobody can lock here
        return
    try:
        yield True
    finally:
        os.close(descriptor)


def is_abandoned(path: str) -> bool:
    """Return whether :func:`remove_if_abandoned` would delete an unfinished file or directory."""
    if path.endswith(_REPLACED + SUFFIX) and not os.path.lexists(_replaced_name(path)):
        return False  # gets its name back
    with _locked_alone(path) as abandoned:
        return abandoned


def remove_if_abandoned(path: str) -> bool:
    """Delete an unfinished file or directory if nobody writes into it; return whether it is gone."""
    with _locked_alone(path) as abandoned, contextlib.suppress(OSError):
        if abandoned:
            _delete_tree(path)  # while it is locked, so that nobody begins to write into it
            return True
    return False


def delete_directory(path: str) -> None:
    """Delete the directory ``path`` so that it disappears in one step, as far as the filesystem allows.

    Where this user may not delete all of it, nothing is deleted.
    """
    effective = os.access in os.supports_effective_ids
    inside = (os.path.join(folder, name) for folder, folders, _ in os.walk(path) for name in folders)
    for folder in [path, *inside]:
        if os.path.islink(folder) or os.access(folder, os.R_OK | os.W_OK | os.X_OK, effective_ids=effective):
            continue
        if os.path.lexists(folder):  # otherwise another process is deleting it
            # What lies in it would be left, under the hidden name.
            raise PermissionError(errno.EACCES, f"no permission to delete in {folder}", folder)
    hidden = hidden_name(path, uuid.uuid4().hex[:12])
    _undeleted.add(hidden)  # before it is there, for Ctrl-C right after the rename
    try:
        os.rename(path, hidden)
        # Or the loss of power could leave the name, and not all of the files.
        sync_directory(os.path.dirname(hidden))
    except FileNotFoundError:
        return
    except OSError as error:
        if os.path.lexists(hidden):  # the disk fails
            pass
        elif error.errno in _NOT_ALLOWED:
            raise  # nor could the name be deleted, when its files are
        else:
            hidden = path  # a mount point
    _delete_tree(hidden)


def _delete_tree(path: str) -> None:
    """Delete a file or a directory with all that is in it; others may be doing the same."""
    if path.endswith(SUFFIX):
        _undeleted.add(path)
    _delete_all(path)
    _undeleted.discard(path)


def _delete_all(path: str) -> None:
    try:
        is_directory = stat.S_ISDIR(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return
    if not is_directory:
        _delete(os.unlink, path)
        return
    for folder, folders, files in os.walk(path, topdown=False):
        for name in files:
            _delete(os.unlink, os.path.join(folder, name))
        for name in folders:
            inside = os.path.join(folder, name)
            _delete(os.unlink if os.path.islink(inside) else os.rmdir, inside)
    _delete(os.rmdir, path)


def _delete(remove: Callable[[str], None], path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        remove(path)
