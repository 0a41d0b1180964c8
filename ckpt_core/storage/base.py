"""Where bytes live: the protocol that a storage implements.

A storage is small on purpose: it writes one file so that it appears whole or not at all, reads ranges, lists and deletes.
A third party's storage derives from :class:`Storage` and passes ``tests/core/test_storage.py``.
"""

from __future__ import annotations

import abc
import dataclasses
import io
from collections.abc import Sequence
from typing import Any

__all__ = ["FileInfo", "FileReader", "FileWriter", "RandomAccessIO", "ReaderIO", "Storage"]


@dataclasses.dataclass(frozen=True)
class FileInfo:
    """A file in a listing.

    Attributes:
        path: Full path or URL.
        size: Length in bytes.
        modified: Unix time of its last change in seconds; 0.0 where the store does not tell.
    """

    path: str
    size: int
    modified: float


class FileWriter(abc.ABC):
    """A file being written. Nothing is visible under its final name before :meth:`commit`.

    Attributes:
        parallel: Whether :meth:`write_at` may be called from several threads and in any order. If not, it is called from
            one thread with offsets that follow each other.
    """

    parallel: bool = False

    @abc.abstractmethod
    def write_at(self, offset: int, data: memoryview) -> None:
        """Write ``data`` at ``offset`` bytes; all but the last piece of a file are multiples of 4096 bytes."""

    @abc.abstractmethod
    def commit(self, size: int) -> None:
        """Make the file durable, ``size`` bytes long, and visible under its final name, replacing what was there."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Leave no trace of the file. Does nothing after :meth:`commit`."""


class FileReader(abc.ABC):
    """An open file to read ranges from.

    Attributes:
        path: Its path or URL.
        size: Its length in bytes.
    """

    path: str
    size: int

    @abc.abstractmethod
    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes from ``offset`` on; may be called from several threads.

        Raises:
            CheckpointCorruptedError: The file ends before.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Close the file."""

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Storage(abc.ABC):
    """A place that keeps files. All paths are full paths or URLs of this storage."""

    @abc.abstractmethod
    def create(self, path: str, expected_size: int) -> FileWriter:
        """Begin a file that will be about ``expected_size`` bytes long; room for it is reserved where that is possible.

        Raises:
            StorageError: There is no room, no permission, or ``path`` is a directory.
        """

    @abc.abstractmethod
    def open(self, path: str) -> FileReader:
        """Open a file.

        Raises:
            CheckpointNotFoundError: There is no such file.
            StorageError: ``path`` is a directory or cannot be read.
        """

    @abc.abstractmethod
    def exists(self, path: str) -> bool:
        """Return whether there is a file or directory at ``path``."""

    @abc.abstractmethod
    def remove(self, path: str) -> None:
        """Delete the file or the directory tree at ``path``; do nothing if there is none."""

    @abc.abstractmethod
    def copy(self, source: str, target: str) -> int:
        """Make ``target`` a file with the bytes of ``source``, durable, replacing what was there; return its size.

        No bytes are moved where the storage can do without (hard link, server-side copy). The two do not depend on each
        other: deleting or replacing one leaves the other.

        Raises:
            CheckpointNotFoundError: There is no ``source``.
            StorageError: The storage refused.
        """

    @abc.abstractmethod
    def list(self, directory: str) -> Sequence[FileInfo]:
        """Return the committed files directly in ``directory``; none if it does not exist."""

    @abc.abstractmethod
    def remove_orphans(self, directory: str) -> Sequence[str]:
        """Delete the unfinished files that dead processes left in ``directory``; return their paths."""


class RandomAccessIO(io.RawIOBase):
    """A seekable, read-only Python file of known size; a subclass gives :meth:`readinto`.

    Args:
        size: Length in bytes.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def tell(self) -> int:
        return self._position


class ReaderIO(RandomAccessIO):
    """A :class:`FileReader` as a seekable, read-only Python file."""

    def __init__(self, reader: FileReader) -> None:
        super().__init__(reader.size)
        self._reader = reader

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._size - self._position))
        if count:
            self._reader.read_into(self._position, view[:count])
            self._position += count
        return count
