"""Any store that fsspec knows (``s3://``, ``gs://``, ``memory://``, ...), by whole objects and ranged reads."""

from __future__ import annotations

import datetime
import io
from collections.abc import Sequence
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem

from ckpt_core.errors import CheckpointCorruptedError, CheckpointError, CheckpointNotFoundError, StorageError
from ckpt_core.storage.base import FileInfo, FileReader, FileWriter, Storage

__all__ = ["FsspecStorage"]

_PART = 16 * 2**20  # bytes of one part of a multipart upload


def _failure(action: str, path: str, error: Exception) -> CheckpointError:
    if isinstance(error, FileNotFoundError):
        return CheckpointNotFoundError(f"Checkpoint file not found: {path}", path=path)
    return StorageError(
        f"cannot {action} the checkpoint: {type(error).__name__}: {error}",
        path=path,
        remedy="check the URL, the credentials and the storage_options",
        errno=getattr(error, "errno", None),
    )


class _MultipartWriter(FileWriter):
    """Uploads parts as they come; the object exists only when the upload is completed by ``commit``."""

    def __init__(self, filesystem: Any, path: str) -> None:
        self._path = path
        self._position = 0
        self._file = filesystem.open(path, "wb", block_size=_PART)

    def write_at(self, offset: int, data: memoryview) -> None:
        assert offset == self._position
        try:
            self._file.write(bytes(data))
        except Exception as error:
            raise _failure("write", self._path, error) from error
        self._position += len(data)

    def commit(self, size: int) -> None:
        try:
            self._file.close()
        except Exception as error:
            raise _failure("commit", self._path, error) from error

    def abort(self) -> None:
        if not self._file.closed:
            # Closing would publish what has been written so far: mark it closed before anything can.
            self._file.closed = True
            self._file.discard()

    def __del__(self) -> None:
        # fsspec publishes a file that is merely forgotten, whole or not.
        if hasattr(self, "_file"):
            self._file.closed = True


class _WholeObjectWriter(FileWriter):
    """Collects the object in memory and stores it by one call, for stores that would show an unfinished file."""

    def __init__(self, filesystem: Any, path: str) -> None:
        self._filesystem = filesystem
        self._path = path
        self._buffer = io.BytesIO()

    def write_at(self, offset: int, data: memoryview) -> None:
        self._buffer.seek(offset)
        self._buffer.write(data)

    def commit(self, size: int) -> None:
        try:
            self._filesystem.makedirs(self._filesystem._parent(self._path), exist_ok=True)
            self._filesystem.pipe_file(self._path, self._buffer.getvalue()[:size])
        except Exception as error:
            raise _failure("commit", self._path, error) from error

    def abort(self) -> None:
        self._buffer = io.BytesIO()


class _FsspecReader(FileReader):
    def __init__(self, filesystem: Any, path: str) -> None:
        self.path = path
        self._filesystem = filesystem
        try:
            filesystem.invalidate_cache()  # another process may have replaced the object
            info = filesystem.info(path)
        except Exception as error:
            raise _failure("read", path, error) from error
        if info["type"] == "directory":
            raise StorageError("the path is a directory, not a checkpoint file", path=path)
        self.size = int(info["size"])
        self._whole: memoryview | None = None

    def read_into(self, offset: int, target: memoryview) -> None:
        end = offset + len(target)
        data = self._fetch(offset, end) if self._whole is None else self._whole[offset:end]
        if len(data) != len(target):
            raise CheckpointCorruptedError("the checkpoint is truncated", path=self.path)
        target[:] = data

    def _fetch(self, begin: int, end: int) -> memoryview:
        try:
            data = memoryview(self._filesystem.cat_file(self.path, start=begin, end=end))
        except Exception as error:
            raise _failure("read", self.path, error) from error
        if len(data) == self.size > end - begin:
            # An HTTP server that knows no ranges sends the whole file, whatever it is asked for: once is enough.
            self._whole = data
            return data[begin:end]
        return data

    def close(self) -> None:
        """Nothing is held open."""


class FsspecStorage(Storage):
    """A store reached through fsspec.

    Args:
        url: Any URL in the store; says which filesystem it is.
        storage_options: Passed to fsspec: endpoint, credentials and so on. Never logged.
    """

    def __init__(self, url: str, storage_options: dict[str, Any] | None = None) -> None:
        self._filesystem, _ = fsspec.core.url_to_fs(url, **(storage_options or {}))

    def create(self, path: str, expected_size: int) -> FileWriter:
        try:
            if isinstance(self._filesystem, AsyncFileSystem):
                return _MultipartWriter(self._filesystem, path)
            return _WholeObjectWriter(self._filesystem, path)
        except Exception as error:
            raise _failure("write", path, error) from error

    def open(self, path: str) -> FileReader:
        return _FsspecReader(self._filesystem, path)

    def exists(self, path: str) -> bool:
        try:
            self._filesystem.invalidate_cache()
            return bool(self._filesystem.exists(path))
        except Exception as error:
            raise _failure("find", path, error) from error

    def remove(self, path: str) -> None:
        try:
            if self._filesystem.exists(path):
                self._filesystem.rm(path, recursive=True)
        except Exception as error:
            raise _failure("remove", path, error) from error

    def copy(self, source: str, target: str) -> int:
        try:
            if source != target:  # S3 refuses to copy an object to itself
                self._filesystem.copy(source, target)
            return int(self._filesystem.info(target)["size"])
        except Exception as error:
            raise _failure("copy", target, error) from error

    def list(self, directory: str) -> Sequence[FileInfo]:
        try:
            self._filesystem.invalidate_cache()
            found = self._filesystem.ls(directory, detail=True)
        except FileNotFoundError:
            return []
        except Exception as error:
            raise _failure("list", directory, error) from error
        return [
            FileInfo(self._filesystem.unstrip_protocol(info["name"]), int(info["size"] or 0), _modified(info))
            for info in found
            if info["type"] == "file"
        ]

    def remove_orphans(self, directory: str) -> Sequence[str]:
        """Nothing to do: an unfinished object is not visible."""
        return []


def _modified(info: dict[str, Any]) -> float:
    for key in ("LastModified", "last_modified", "mtime", "updated", "created"):
        value = info.get(key)
        if isinstance(value, datetime.datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
        if isinstance(value, str):
            return datetime.datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
    return 0.0
