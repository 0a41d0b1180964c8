"""Storage on local disks: direct I/O where the filesystem supports it, and atomic, durable writes of files.

A file is written under a temporary name in its own directory, synced, renamed, and the directory synced. Direct I/O
from page-aligned memory bypasses the page cache: it takes about a quarter of the processor time, has no cold-cache
penalty after idling, and evicts nothing that the training's data loading needs.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
import uuid
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from ckpt_core.errors import CheckpointCorruptedError, CheckpointNotFoundError, StorageError
from ckpt_core.option_checks import check_options, check_switch
from ckpt_core.storage import local_directory, permissions
from ckpt_core.storage.base import MANIFEST_NAME, Claim, FileInfo, FileReader, FileWriter, Storage
from ckpt_core.storage.claims import DirectoryLock
from ckpt_core.storage.failures import existing_directory, storage_error
from ckpt_core.storage.local_directory import CANNOT_LINK, CANNOT_LOCK, SUFFIX, sync_directory
from ckpt_core.storage.local_reader import BLOCK, LocalFileReader, address, close

_OF_FILE_SYSTEM = "lost+found"  # a directory in the root of each ext4 volume, which only the user root may list
_WITHOUT_NAME = getattr(os, "O_TMPFILE", os.O_DIRECTORY)
_NO_FILES_WITHOUT_NAME = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT, errno.ENOSYS)
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # deleted meanwhile, or a dangling or circular link


class LocalFileWriter(FileWriter):
    """Writes one file under a hidden name, which ``commit`` renames to the final one."""

    parallel = True
    threads = 4  # threads wait for the disk, so the number of processors does not matter

    def __init__(self, path: str, expected_size: int) -> None:
        self._path = path
        self._expected_size = expected_size
        self._directory = os.path.dirname(os.path.abspath(path))
        self._part = local_directory.hidden_name(path, uuid.uuid4().hex[:12])
        self._direct = False
        self._descriptor = -1
        try:
            _make_directories(self._directory)
            _refuse_special(path)
            self._open()
            while not _lock(self._descriptor):
                self._close()
                self._open()
            _reserve(self._descriptor, expected_size)
        except BaseException as error:  # also Ctrl-C: no clean-up deletes a file that this process has locked
            self.abort()
            if isinstance(error, OSError):
                raise storage_error("write", path, error, expected_size) from error
            raise

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        mode = permissions.first_mode(_file_replaced_by(self._path), 0o666)
        if hasattr(os, "O_DIRECT"):
            try:
                self._descriptor = os.open(self._part, flags | os.O_DIRECT, mode)
                self._direct = True
                return
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                if os.path.exists(self._part):
                    os.unlink(self._part)
        self._descriptor = os.open(self._part, flags, mode)

    def write_at(self, offset: int, data: memoryview) -> None:
        try:
            if self._direct and (len(data) % BLOCK or address(data) % BLOCK):
                self._leave_direct()
            self._write(offset, data)
        except OSError as error:
            raise storage_error("write", self._path, error, self._expected_size) from error

    def _write(self, offset: int, data: memoryview) -> None:
        while data:
            was_direct = self._direct  # another thread may turn direct I/O off meanwhile
            try:
                written = os.pwrite(self._descriptor, data, offset)
            except OSError as error:
                if error.errno != errno.EINVAL or not was_direct:
                    raise
                self._leave_direct()
                continue
            data, offset = data[written:], offset + written

    def _leave_direct(self) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._direct = False

    def commit(self, size: int) -> None:
        try:
            os.ftruncate(self._descriptor, size)
            permissions.adopt(self._descriptor, _file_replaced_by(self._path))
            os.fsync(self._descriptor)
            os.replace(self._part, self._path)
            sync_directory(self._directory)
        except OSError as error:
            raise storage_error("commit", self._path, error, self._expected_size) from error
        self._close()

    def abort(self) -> None:
        if self._descriptor != -1:
            # It is gone already if commit() failed only to sync the directory. If it cannot be deleted, the next save
            # deletes it; the error to report is the one that led here.
            with contextlib.suppress(OSError):
                os.unlink(self._part)
            self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        close(descriptor)


def _refuse_working_directory(path: str, does: str, remedy: str) -> None:
    """Raise ``StorageError`` if ``path`` is this process's working directory, or contains it."""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        return  # the working directory was deleted
    directory = os.path.realpath(path)
    if os.path.isdir(path) and os.path.commonpath([os.path.realpath(here), directory]) == directory:
        raise StorageError(f"{does} the directory in which this process works", path=path, remedy=remedy)


def _refuse_special(path: str, *, is_directory: bool = False) -> None:
    """Raise an error if a checkpoint would replace a device or a pipe, or a file would replace a directory."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode) and is_directory:
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        raise StorageError(
            "the path is not a regular file, so it is not replaced", path=path, remedy="give another path"
        )


def _file_replaced_by(path: str) -> os.stat_result | None:
    status = permissions.replaced_by(path)
    return status if status is not None and stat.S_ISREG(status.st_mode) else None


def _reserve(descriptor: int, size: int) -> None:
    # posix_fallocate writes zeros if the filesystem cannot reserve space; the plain system call fails instead.
    allocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if allocate is None or size == 0:
        return
    if allocate(descriptor, 0, ctypes.c_long(0), ctypes.c_long(size)) != 0:
        code = ctypes.get_errno()
        if code not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise OSError(code, os.strerror(code))


def refuse_wrong_local(path: str, action: str) -> str:
    """Return the nearest existing parent of a directory, or the directory; raise if the rest cannot be created.

    Raises:
        StorageError: ``path`` is that of a file, or is below a file or a dangling symbolic link.
    """
    directory = os.path.abspath(path)
    existing = existing_directory(directory)
    if existing == directory:
        return existing
    first = os.path.join(existing, os.path.relpath(directory, existing).split(os.sep)[0])
    try:
        mode = os.lstat(first).st_mode
    except FileNotFoundError:
        return existing
    except OSError as error:
        raise storage_error(action, directory, error) from error
    if stat.S_ISLNK(mode):
        raise StorageError(
            f"cannot {action} the checkpoint: its directory is behind a link that leads nowhere",
            path=first,
            remedy="mount the filesystem that it leads to, or make the directory",
        )
    if not stat.S_ISDIR(mode):  # a directory may have been created there meanwhile
        raise storage_error(action, directory, NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)))
    return first


def try_to_create_in(directory: str) -> None:
    """Raise an error if this process cannot create files in a directory. No file becomes visible in it.

    Raises:
        StorageError: There is no permission, or the disk refuses.
    """
    try:
        os.close(os.open(directory, _WITHOUT_NAME | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except OSError as error:
        if error.errno in _NO_FILES_WITHOUT_NAME:  # no O_TMPFILE on this filesystem: check the permissions at least
            if os.access(directory, os.W_OK | os.X_OK):
                return
            error = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        raise storage_error("write", directory, error) from error


def _make_directories(directory: str) -> None:
    while (existing := existing_directory(directory)) != directory:
        missing = os.path.relpath(directory, existing).split(os.sep)[0]
        os.makedirs(os.path.join(existing, missing), exist_ok=True)
        sync_directory(existing)


class LocalStorage(Storage):
    """Files on a local (or mounted) filesystem.

    Args:
        follow_links: Whether files *inside* a checkpoint's directory may be symbolic links, as DVC and the caches of
            the Hugging Face Hub make them. By such links, a checkpoint of unknown origin could make the reader read any
            file. A link to a whole checkpoint is always followed.
    """

    def __init__(self, follow_links: bool = False) -> None:
        check_options({"follow_links": check_switch}, locals())
        self._follow_links = follow_links
        self._staging = local_directory.StagingDirectories()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_staging"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._staging = local_directory.StagingDirectories()  # a copy is not writing any directory

    def create(self, path: str, expected_size: int) -> FileWriter:
        return LocalFileWriter(path, expected_size)

    def open(self, path: str) -> FileReader:
        return LocalFileReader(path)

    def open_inside(self, directory: str, name: str) -> FileReader:
        path = directory
        for component in name.split("/"):
            path = f"{path}/{component}"
            if os.path.islink(path) and not self._follow_links:
                raise CheckpointCorruptedError(
                    "a file of the checkpoint is a symbolic link, which may lead to any other file",
                    path=path,
                    remedy='if you trust the links, set storage_options={"follow_links": True}, or copy the checkpoint '
                    "with the files that they lead to (cp -rL)",
                )
        try:
            return self.open(path)
        except CheckpointNotFoundError as error:
            if not os.path.islink(path):
                raise
            raise CheckpointCorruptedError(
                "a file of the checkpoint is a link to where nothing is",
                path=path,
                remedy="bring back what it leads to",
            ) from error

    def exists(self, path: str) -> bool:
        return os.path.lexists(path)

    def remove(self, path: str) -> None:
        is_directory = os.path.isdir(path) and not os.path.islink(path)
        if is_directory:
            _refuse_working_directory(
                path, "what is to be deleted is", "give the path of a checkpoint, or change the working directory"
            )
        try:
            if is_directory:
                local_directory.delete_directory(path)
            else:
                os.unlink(path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise storage_error("remove", path, error) from error

    def copy(self, source: str, target: str) -> int:
        directory = os.path.dirname(os.path.abspath(target))
        part = local_directory.hidden_name(target, uuid.uuid4().hex[:12])
        try:
            _make_directories(directory)
            _refuse_special(target)
            status, replaced = os.stat(source), _file_replaced_by(target)
            # A hard link cannot have permissions of its own.
            if replaced is not None and permissions.differ(status, replaced):
                permissions.copy_file(source, part, replaced)
            else:
                try:
                    os.link(os.path.realpath(source), part)
                except OSError as error:
                    if error.errno not in CANNOT_LINK:
                        raise
                    permissions.copy_file(source, part, status)
            size = os.stat(part).st_size
            os.replace(part, target)
            sync_directory(directory)
        except FileNotFoundError as error:
            raise CheckpointNotFoundError("there is no checkpoint to copy", path=source) from error
        except OSError as error:
            raise storage_error("copy", target, error) from error
        finally:
            # It still exists after a failure, or if the target was a hard link of the same file: rename does nothing.
            with contextlib.suppress(OSError):
                os.unlink(part)
        return size

    def list(self, directory: str) -> Sequence[FileInfo]:
        infos = []
        for entry in _entries(directory):
            try:
                if entry.is_file():
                    status = entry.stat()
                    infos.append(FileInfo(entry.path, status.st_size, status.st_mtime))
            except OSError as error:
                if error.errno not in _NOT_THERE:
                    raise storage_error("list", entry.path, error) from error
        return infos

    def _committed(self, path: str) -> Sequence[FileInfo]:
        size = 0
        try:
            found = super()._committed(path)
            if found or not os.path.lexists(os.path.join(path, MANIFEST_NAME)):
                return found
            size = sum(file.size for file in self.list(path))
        except StorageError:
            pass
        # It may be a checkpoint that cannot be read: list it, so that a look-up passes over it with a warning.
        with contextlib.suppress(OSError):
            return [FileInfo(path, size, os.stat(path).st_mtime)]
        return []

    def remove_orphans(self, directory: str) -> Sequence[str]:
        parts = unfinished(directory)
        local_directory.restore(directory)
        return [path for path in parts if local_directory.remove_if_abandoned(path)]

    def orphans(self, directory: str) -> Sequence[str]:
        return [path for path in unfinished(directory) if local_directory.is_abandoned(path)]

    def put_file(self, source: str, target: str) -> None:
        directory = os.path.dirname(os.path.abspath(target))
        try:
            _make_directories(directory)
            _refuse_special(target)
            local_directory.sync_file(source)
            permissions.adopt(source, _file_replaced_by(target))
            os.replace(source, target)
            sync_directory(directory)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise storage_error("write", target, error) from error
            super().put_file(source, target)

    def begin_directory(self, path: str, token: str) -> str:
        try:
            _make_directories(os.path.dirname(os.path.abspath(path)))
            _refuse_working_directory(
                path, "the checkpoint would replace", "save to a directory inside it, or change the working directory"
            )
            _refuse_special(path, is_directory=True)
            return self._staging.begin(path, token)
        except StorageError:
            raise
        except OSError as error:
            raise storage_error("write", path, error) from error

    def publish_directory(self, path: str, token: str, manifest: bytes, *, gone: Sequence[str] = ()) -> None:
        staging = self.begin_directory(path, token)
        try:
            super().publish_directory(staging, token, manifest)
            self._staging.publish(path, token, gone)
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise storage_error("commit", path, error) from error
        finally:
            self._staging.leave(path, token)

    def discard_directory(self, path: str, token: str, names: Sequence[str] = ()) -> None:
        try:
            self._staging.discard(path, token)
        except OSError as error:
            raise storage_error("remove", path, error) from error

    def leave_directory(self, path: str, token: str) -> None:
        self._staging.leave(path, token)

    def claim(self, directory: str) -> Claim | None:
        return DirectoryLock(directory, _make_directories)

    def remove_directory(self, path: str, *, names: Collection[str] = ()) -> None:
        self.remove(path)

    def subdirectories(self, directory: str) -> Sequence[str]:
        local_directory.restore(directory)
        found = []
        for entry in _entries(directory):
            with contextlib.suppress(OSError):  # an entry whose type cannot be read cannot be entered either
                if entry.is_dir() and entry.name != _OF_FILE_SYSTEM:
                    found.append(entry.path)
        return found


def _entries(directory: str) -> list[os.DirEntry[str]]:
    """Return the entries of a directory, without unfinished files and directories."""
    try:
        with os.scandir(directory) as entries:
            return [entry for entry in entries if not entry.name.endswith(SUFFIX)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise storage_error("list", directory, error) from error


def _lock(descriptor: int) -> bool:
    """Lock an unfinished file until this process closes it or dies; an unlocked one is the orphan of a dead process.

    Return False if another process took the file for an orphan before it was locked, and has deleted it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in CANNOT_LOCK:
            raise
        return True  # on a filesystem without locks, it is never taken for an orphan
    return os.fstat(descriptor).st_nlink > 0


def unfinished(directory: str) -> list[str]:
    """Return the paths of unfinished files and directories in a directory, including those that are being written."""
    try:
        with os.scandir(directory or ".") as entries:
            return [entry.path for entry in entries if entry.name.startswith(".") and entry.name.endswith(SUFFIX)]
    except OSError:
        return []


def files_of(path: str) -> Iterator[str]:
    """Yield the files of a local checkpoint: of a directory, all that are below it."""
    if not os.path.isdir(path):
        yield path
    for folder, _, names in os.walk(path):
        for name in names:
            yield os.path.join(folder, name)
