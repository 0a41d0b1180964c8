"""Atomic, durable commit of directory checkpoints on a local filesystem, and their deletion and clean-up.

A directory is filled under a hidden name (*staging*) next to its final one, and renamed. If there is one of that name
already, the two are exchanged in one step (``RENAME_EXCHANGE``); where the filesystem cannot do that, two renames do
it, and :func:`restore` repairs what a crash between them leaves. Every process that writes into a hidden directory
holds a shared lock on it, so a hidden directory without a lock is the orphan of dead processes.

The functions here raise ``OSError``; :class:`~ckpt_core.storage.LocalStorage` turns it into an error for the user.
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
    """Sync ``directory``, so that the names in it are durable."""
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
        # The path of each, and the descriptor that holds its lock. The set is changed by atomic operations, without a
        # lock of ours: a signal handler that saves could wait for that for ever.
        self._locks: set[tuple[str, int]] = set()

    def begin(self, path: str, token: str) -> str:
        """Create the hidden directory for ``path``, or join the processes that have, and return its path."""
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
        """Rename the hidden directory, whose files are all durable, to ``path``; keep other files that are there."""
        for attempt in range(_MOST_ATTEMPTS):
            try:
                _publish(hidden_name(path, token), path, token, gone)
            except OSError as error:
                # Another job has created or removed a directory of that name at this moment.
                if error.errno not in _CHANGED_MEANWHILE or attempt == _MOST_ATTEMPTS - 1:
                    raise
            else:
                return

    def discard(self, path: str, token: str) -> None:
        """Delete the hidden directory, even if other processes are still writing into it."""
        _delete_tree(hidden_name(path, token))

    def leave(self, path: str, token: str) -> None:
        """Stop writing into the hidden directory; delete it if it still exists and no other process writes into it."""
        staging = hidden_name(path, token)
        descriptor = -1
        for held in [held for held in tuple(self._locks) if held[0] == staging]:
            with contextlib.suppress(KeyError):  # another thread that leaves, too, was faster
                self._locks.remove(held)
                descriptor = held[1]
                break
        with contextlib.suppress(OSError):
            if descriptor != -1:
                # Closing alone would leave the lock with forked data loader workers, which have the descriptor, too.
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
    with contextlib.suppress(OSError):  # the new one is committed; what cannot be deleted of the old is an orphan
        if os.path.isdir(replaced) and not os.path.islink(replaced):
            os.chmod(replaced, 0o700)  # its mode may have denied access even to its owner
        _delete_tree(replaced)


def hidden_name(path: str, token: str) -> str:
    """Return the hidden path at which a checkpoint is written until it is committed to ``path``."""
    directory, name = os.path.split(os.path.abspath(path))
    if not token.endswith(_REPLACED):  # for a replaced directory, :func:`restore` needs the whole name
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
            continue  # another process took it for an orphan, and deleted it before it was locked
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
    """Hard-link into ``staging`` the files in ``path`` that do not belong to the checkpoint there."""
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
    """Sync a file, so that its bytes are durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: str, other: str) -> bool:
    """Exchange two paths in one step; return False if the system or the filesystem cannot."""
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
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # so that no other process restores it meanwhile
        os.rename(path, replaced)
        try:
            os.rename(staging, path)
        except OSError:
            try:
                os.rename(replaced, path)
            except OSError:
                if os.path.lexists(path):  # another job was faster: its checkpoint replaces the one moved away here
                    _delete_tree(_given_up(replaced, path))
            raise
        sync_directory(parent)
        return _given_up(replaced, path)
    finally:
        os.close(descriptor)


def _given_up(replaced: str, path: str) -> str:
    """Rename a replaced directory so that :func:`restore` ignores it, before its files are deleted; return the name."""
    name = hidden_name(path, uuid.uuid4().hex[:12])
    try:
        os.rename(replaced, name)
        sync_directory(os.path.dirname(name))
    except OSError:
        return name if os.path.lexists(name) else replaced  # not restored either way: the new one is in its place
    return name


def restore(directory: str) -> None:
    """Rename back the directories in ``directory`` whose replacement, by two renames, a crash interrupted."""
    ending = _REPLACED + SUFFIX
    with contextlib.suppress(OSError), os.scandir(directory or ".") as entries:
        for entry in entries:
            if entry.name.startswith(".") and entry.name.endswith(ending):
                _restore(entry.path, _replaced_name(entry.path))


def _replaced_name(path: str) -> str:
    """Return the original path of a directory that a process was replacing."""
    directory, name = os.path.split(path)
    return os.path.join(directory, name[1 : -len(_REPLACED + SUFFIX)].rpartition(".")[0])


def _restore(replaced: str, path: str) -> None:
    with _locked_alone(replaced) as abandoned:
        if abandoned and not os.path.lexists(path):
            os.rename(replaced, path)
            sync_directory(os.path.dirname(path))


@contextlib.contextmanager
def _locked_alone(path: str) -> Iterator[bool]:
    """Hold an exclusive lock on ``path`` in the body, and yield True; yield False if the lock cannot be taken."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield False  # deleted, or another user's
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        yield False  # another process writes into it, or the filesystem has no locks
        return
    try:
        yield True
    finally:
        os.close(descriptor)


def is_abandoned(path: str) -> bool:
    """Return whether :func:`remove_if_abandoned` would delete an unfinished file or directory."""
    if path.endswith(_REPLACED + SUFFIX) and not os.path.lexists(_replaced_name(path)):
        return False  # it is restored instead
    with _locked_alone(path) as abandoned:
        return abandoned


def remove_if_abandoned(path: str) -> bool:
    """Delete an unfinished file or directory if no process writes into it; return whether it was deleted."""
    with _locked_alone(path) as abandoned, contextlib.suppress(OSError):
        if abandoned:
            _delete_tree(path)  # while it is locked, so that no process begins to write into it
            return True
    return False


def delete_directory(path: str) -> None:
    """Delete the directory ``path`` so that it disappears in one step, as far as the filesystem allows.

    If this user may not delete all of it, ``PermissionError`` is raised and nothing is deleted.
    """
    effective = os.access in os.supports_effective_ids
    inside = (os.path.join(folder, name) for folder, folders, _ in os.walk(path) for name in folders)
    for folder in [path, *inside]:
        if os.path.islink(folder) or os.access(folder, os.R_OK | os.W_OK | os.X_OK, effective_ids=effective):
            continue
        if os.path.lexists(folder):  # if not, another process is deleting it
            # Its contents would be left over, under the hidden name.
            raise PermissionError(errno.EACCES, f"no permission to delete in {folder}", folder)
    hidden = hidden_name(path, uuid.uuid4().hex[:12])
    _undeleted.add(hidden)  # before it exists, because Ctrl-C may come right after the rename
    try:
        os.rename(path, hidden)
        # Without the sync, a loss of power could leave the final name without all of the files.
        sync_directory(os.path.dirname(hidden))
    except FileNotFoundError:
        return
    except OSError as error:
        if os.path.lexists(hidden):  # renamed, but the sync has failed: the disk is faulty
            pass
        elif error.errno in _NOT_ALLOWED:
            raise  # the directory itself could not be deleted either, after its files
        else:
            hidden = path  # a mount point cannot be renamed
    _delete_tree(hidden)


def _delete_tree(path: str) -> None:
    """Delete a file or a directory tree; other processes may be deleting it, too."""
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
