"""Local disks: direct I/O where the filesystem has it, and files that appear whole and durable or not at all.

A file is written under a temporary name in its own directory, synced, renamed, and the directory synced. Direct I/O from
page-aligned memory bypasses the page cache: about four times less processor time, no cold-cache penalty after idling, and
nothing evicted that the training's data loading wants.
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
from collections.abc import Sequence

from ckpt_core.errors import CheckpointCorruptedError, CheckpointNotFoundError, StorageError
from ckpt_core.storage import local_directory
from ckpt_core.storage.base import FileInfo, FileReader, FileWriter, Storage
from ckpt_core.storage.local_directory import CANNOT_LINK as _CANNOT_LINK
from ckpt_core.storage.local_directory import CANNOT_LOCK as _CANNOT_LOCK
from ckpt_core.storage.local_directory import SUFFIX as _SUFFIX
from ckpt_core.storage.local_directory import sync_directory as _sync_directory

__all__ = ["LocalStorage", "storage_error"]

_BLOCK = 4096
_REMEDIES = {
    errno.ENOSPC: "free some space, keep fewer checkpoints, or save to another disk",
    errno.EDQUOT: "your disk quota is used up: delete something or save to another disk",
    errno.EROFS: "the filesystem is mounted read-only: save to another directory",
    errno.EACCES: "you may not write there: change the directory or its permissions",
    errno.EPERM: "you may not write there: change the directory or its permissions",
    errno.EIO: "the disk reports an error: check it, and save to another one",
    errno.EISDIR: "there is a directory of that name: choose another path or delete it",
    errno.ENOTDIR: "a part of the path is a file: choose another path",
    errno.EEXIST: "a part of the path is a file: choose another path",
    errno.ENAMETOOLONG: "choose a shorter file name",
    errno.ECONNRESET: "the storage broke the connection: check the network and that it is up, then save again",
    errno.ETIMEDOUT: "the storage does not answer: check the network and that it is up, then save again",
}


def storage_error(action: str, path: str, error: OSError, needed: int | None = None) -> StorageError:
    """Return the error for the user that an operating system's ``error`` stands for, with a remedy where one is known."""
    detail = error.strerror or str(error) or type(error).__name__
    if error.errno == errno.ENOSPC and needed is not None:
        free = shutil.disk_usage(_existing_directory(os.path.dirname(os.path.abspath(path)))).free
        detail += f": {needed} bytes needed, {free} free"
    return StorageError(
        f"cannot {action} the checkpoint: {detail}",
        path=path,
        remedy=_REMEDIES.get(error.errno or 0),
        errno=error.errno,
    )


class _LocalFileWriter(FileWriter):
    parallel = True

    def __init__(self, path: str, expected_size: int) -> None:
        self._path = path
        self._expected_size = expected_size
        self._directory = os.path.dirname(os.path.abspath(path))
        self._part = _part_name(path)
        self._direct = False
        self._descriptor = -1
        try:
            _make_directories(self._directory)
            if os.path.isdir(path) and not os.path.islink(path):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            self._open()
            while not _claim(self._descriptor):
                self._close()
                self._open()
            _reserve(self._descriptor, expected_size)
        except OSError as error:
            self.abort()
            raise storage_error("write", path, error, expected_size) from error

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        if hasattr(os, "O_DIRECT"):
            try:
                self._descriptor = os.open(self._part, flags | os.O_DIRECT, 0o666)
                self._direct = True
                return
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                if os.path.exists(self._part):
                    os.unlink(self._part)
        self._descriptor = os.open(self._part, flags, 0o666)

    def write_at(self, offset: int, data: memoryview) -> None:
        try:
            if self._direct and (len(data) % _BLOCK or _address(data) % _BLOCK):
                self._write_unaligned(offset, data)
            else:
                self._write(offset, data)
        except OSError as error:
            raise storage_error("write", self._path, error, self._expected_size) from error

    def _write(self, offset: int, data: memoryview) -> None:
        while data:
            try:
                written = os.pwrite(self._descriptor, data, offset)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._leave_direct()
                continue
            data, offset = data[written:], offset + written

    def _write_unaligned(self, offset: int, data: memoryview) -> None:
        self._leave_direct()
        self._write(offset, data)

    def _leave_direct(self) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._direct = False

    def commit(self, size: int) -> None:
        try:
            os.ftruncate(self._descriptor, size)
            os.fsync(self._descriptor)
            os.replace(self._part, self._path)
            _sync_directory(self._directory)
        except OSError as error:
            raise storage_error("commit", self._path, error, self._expected_size) from error
        self._close()

    def abort(self) -> None:
        if self._descriptor != -1:
            # It is gone already when the directory could not be synced. What a failing disk does not let go of is an
            # orphan: the next save removes it, and the failure that led here is the one to be told.
            with contextlib.suppress(OSError):
                os.unlink(self._part)
            self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        _close(descriptor)


def _close(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # what counts is durable or read by now, and the descriptor is gone in any case
        os.close(descriptor)


def _part_name(path: str) -> str:
    directory, name = os.path.split(os.path.abspath(path))
    start = os.fsdecode(os.fsencode(name)[:200])  # a name has at most 255 bytes
    return os.path.join(directory, f".{start}.{uuid.uuid4().hex[:12]}{_SUFFIX}")


def _copy_durably(source: str, target: str) -> None:
    shutil.copyfile(source, target)
    descriptor = os.open(target, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _address(data: memoryview) -> int:
    if data.readonly:
        return 1  # unknown: never taken for aligned
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


def _reserve(descriptor: int, size: int) -> None:
    # posix_fallocate would write zeros where the filesystem cannot reserve; the bare call says so instead.
    allocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if allocate is None or size == 0:
        return
    if allocate(descriptor, 0, ctypes.c_long(0), ctypes.c_long(size)) != 0:
        code = ctypes.get_errno()
        if code not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise OSError(code, os.strerror(code))


def _make_directories(directory: str) -> None:
    while (existing := _existing_directory(directory)) != directory:
        missing = os.path.relpath(directory, existing).split(os.sep)[0]
        os.makedirs(os.path.join(existing, missing), exist_ok=True)
        _sync_directory(existing)


def _existing_directory(path: str) -> str:
    while not os.path.isdir(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return path


class _LocalFileReader(FileReader):
    def __init__(self, path: str) -> None:
        self.path = path
        try:
            # Opening a named pipe would wait for a writer.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(f"Checkpoint file not found: {path}", path=path) from error
        except OSError as error:
            raise storage_error("read", path, error) from error
        try:
            status = os.fstat(self._descriptor)
        except OSError as error:
            _close(self._descriptor)
            raise storage_error("read", path, error) from error
        if not stat.S_ISREG(status.st_mode):
            os.close(self._descriptor)
            if not stat.S_ISDIR(status.st_mode):
                raise StorageError("the path is not a regular file", path=path, remedy="give a checkpoint file")
            raise StorageError(
                "the path is a directory, not a checkpoint file",
                path=path,
                remedy="give the file inside it, or load it with the strategy that wrote it",
                errno=errno.EISDIR,
            )
        self.size = status.st_size

    def read_into(self, offset: int, target: memoryview) -> None:
        while target:
            try:
                count = os.preadv(self._descriptor, [target], offset)
            except OSError as error:
                raise storage_error("read", self.path, error) from error
            if count == 0:
                raise CheckpointCorruptedError("the checkpoint is truncated", path=self.path)
            target, offset = target[count:], offset + count

    def close(self) -> None:
        _close(self._descriptor)


class LocalStorage(Storage):
    """Files on a local (or mounted) filesystem."""

    def __init__(self) -> None:
        self._staging = local_directory.StagingDirectories()

    def __reduce__(self) -> tuple[type[LocalStorage], tuple[()]]:
        """A copy, and what a spawned process gets, has no directories in the making."""
        return LocalStorage, ()

    def create(self, path: str, expected_size: int) -> FileWriter:
        return _LocalFileWriter(path, expected_size)

    def open(self, path: str) -> FileReader:
        return _LocalFileReader(path)

    def exists(self, path: str) -> bool:
        return os.path.lexists(path)

    def remove(self, path: str) -> None:
        try:
            if os.path.isdir(path) and not os.path.islink(path):
                local_directory.delete_directory(path)
            else:
                os.unlink(path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise storage_error("remove", path, error) from error

    def copy(self, source: str, target: str) -> int:
        directory = os.path.dirname(os.path.abspath(target))
        part = _part_name(target)
        try:
            _make_directories(directory)
            try:
                os.link(os.path.realpath(source), part)
            except OSError as error:
                if error.errno not in _CANNOT_LINK:
                    raise
                _copy_durably(source, part)
            size = os.stat(part).st_size
            os.replace(part, target)
            _sync_directory(directory)
        except FileNotFoundError as error:
            raise CheckpointNotFoundError("there is no checkpoint to copy", path=source) from error
        except OSError as error:
            raise storage_error("copy", target, error) from error
        finally:
            # Still there after a failure, and after a rename onto another link of the same file, which does nothing.
            with contextlib.suppress(OSError):
                os.unlink(part)
        return size

    def list(self, directory: str) -> Sequence[FileInfo]:
        try:
            with os.scandir(directory) as entries:
                found = [entry for entry in entries if not entry.name.endswith(_SUFFIX)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise storage_error("list", directory, error) from error
        infos = []
        for entry in found:
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                if entry.is_file():
                    status = entry.stat()
                    infos.append(FileInfo(entry.path, status.st_size, status.st_mtime))
        return infos

    def remove_orphans(self, directory: str) -> Sequence[str]:
        try:
            with os.scandir(directory or ".") as entries:
                parts = [entry.path for entry in entries if entry.name.startswith(".") and entry.name.endswith(_SUFFIX)]
        except OSError:
            return []
        local_directory.restore(directory)
        return [path for path in parts if local_directory.remove_if_abandoned(path)]

    def put_file(self, source: str, target: str) -> None:
        directory = os.path.dirname(os.path.abspath(target))
        try:
            _make_directories(directory)
            descriptor = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                _close(descriptor)
            os.replace(source, target)
            _sync_directory(directory)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise storage_error("write", target, error) from error
            super().put_file(source, target)

    def begin_directory(self, path: str, token: str) -> str:
        try:
            _make_directories(os.path.dirname(os.path.abspath(path)))
            return self._staging.begin(path, token)
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

    def remove_directory(self, path: str) -> None:
        self.remove(path)

    def subdirectories(self, directory: str) -> Sequence[str]:
        local_directory.restore(directory)
        try:
            with os.scandir(directory) as entries:
                return [entry.path for entry in entries if entry.is_dir() and not entry.name.endswith(_SUFFIX)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise storage_error("list", directory, error) from error


def _claim(descriptor: int) -> bool:
    """Lock an unfinished file until this process closes it or dies: it tells the orphan of a dead process from work.

    Returns:
        False if another process took the file for an orphan before it was locked, and has deleted it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _CANNOT_LOCK:
            raise
        return True  # where nobody can lock, nobody takes it for an orphan
    return os.fstat(descriptor).st_nlink > 0
