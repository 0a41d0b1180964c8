"""The storage protocol: base classes of storages, and of the files that they write and read.

The protocol is small on purpose: a storage writes files atomically, reads ranges, lists and deletes. To add a storage,
derive from :class:`Storage` and pass ``tests/ckpt_core/storage/test_storage.py``.

The methods for directory checkpoints have defaults that suit object stores: files are written below the final name,
under names that no committed checkpoint uses, and the manifest, which is written last, commits them. A storage that can
rename a directory overrides them.
"""

from __future__ import annotations

import abc
import dataclasses
import io
import logging
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from ckpt_core.errors import CheckpointError, CheckpointFormatError
from ckpt_core.process.threads import IO_THREADS

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

MANIFEST_NAME = "manifest.json"  # a directory with this file is a checkpoint
PROBE_NAME = ".ckpt-preflight"  # an object that a run writes into a store, to see whether it can, and deletes
# Chosen for a store that answers after about 10 ms and then sends about 100 MB/s.
REMOTE_REQUEST_BYTES = 512 * 1024
REMOTE_THREADS = 8
_LARGEST_WHOLE = 2**30  # bytes; larger files are read in parts
_CHUNK = 16 * 2**20  # bytes


@dataclasses.dataclass(frozen=True)
class FileInfo:
    """A file in a listing.

    Attributes:
        path: Full path or URL.
        size: Length in bytes.
        modified: Unix time of its last change in seconds; 0.0 if the store does not report it.
    """

    path: str
    size: int
    modified: float


class FileWriter(abc.ABC):
    """A file being written. Nothing is visible under its final name before :meth:`commit`.

    Attributes:
        parallel: Whether :meth:`write_at` may be called from several threads and in any order. If not, it is called
            from one thread with offsets that follow each other.
        threads: How many threads should call it at a time.
    """

    parallel: bool = False
    threads: int = IO_THREADS

    @abc.abstractmethod
    def write_at(self, offset: int, data: memoryview) -> None:
        """Write ``data`` at ``offset`` bytes; all but the last piece of a file are multiples of 4096 bytes."""

    @abc.abstractmethod
    def commit(self, size: int) -> None:
        """Make the file durable, ``size`` bytes long, and visible under its final name, replacing what was there."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Discard the file without a trace. Does nothing after :meth:`commit`."""

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abort()


class FileReader(abc.ABC):
    """An open file to read ranges from.

    Attributes:
        path: Its path or URL.
        size: Its length in bytes.
        request_bytes: About how many bytes can be read in the time that a request takes. To save a request, up to this
            many bytes that are not needed are read.
    """

    path: str
    size: int
    request_bytes: int = 0

    @property
    def threads(self) -> int:
        """How many threads should read at a time."""
        return IO_THREADS

    @property
    def passes_cache(self) -> bool:
        """Whether reading whole pages into page-aligned memory and copying them is faster than reading in place."""
        return False

    @abc.abstractmethod
    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes from ``offset`` on; may be called from several threads.

        Raises:
            CheckpointCorruptedError: The file is shorter.
        """

    def read_parts(self, offset: int, targets: Sequence[memoryview]) -> None:
        """Fill several targets, one after the other, with the bytes from ``offset`` on; by one request to a store.

        Raises:
            CheckpointCorruptedError: The file is shorter.
        """
        if self.request_bytes > 0 and len(targets) > 1:
            import numpy as np  # imported here, as in divide_into, because the import takes time

            merged = np.empty(sum(map(len, targets)), np.uint8).data
            self.read_into(offset, merged)
            divide_into(merged, targets)
            return
        for target in targets:
            self.read_into(offset, target)
            offset += len(target)

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes from ``begin`` up to ``end``."""
        data = bytearray(end - begin)
        if data:
            self.read_into(begin, memoryview(data))
        return bytes(data)

    def read_whole(self, most: int = _LARGEST_WHOLE) -> bytes:
        """Return the bytes of a small file.

        Raises:
            CheckpointFormatError: It has more than ``most`` bytes, so it is not what its name says.
        """
        if self.size > most:
            raise CheckpointFormatError(
                f"a {os.path.basename(self.path)} of {self.size} bytes is not valid: at most {most} are read",
                path=self.path,
                remedy="check the path: another program may have written the file",
            )
        return self.read(0, self.size)

    @abc.abstractmethod
    def close(self) -> None:
        """Close the file."""

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def divide_into(data: memoryview, targets: Sequence[memoryview]) -> None:
    """Copy bytes into targets, one after the other."""
    import numpy as np

    for target in targets:
        # numpy copies without the GIL; a slice assignment holds it.
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(data[: len(target)], np.uint8))
        data = data[len(target) :]


class CountingReader(FileReader):
    """Wraps another reader, and calls ``count`` with the number of bytes of each read when done, on any thread."""

    def __init__(self, reader: FileReader, count: Callable[[int], None]) -> None:
        self.path = reader.path
        self.size = reader.size
        self.request_bytes = reader.request_bytes
        self._reader = reader
        self._count = count

    @property
    def threads(self) -> int:
        return self._reader.threads

    @property
    def passes_cache(self) -> bool:
        return self._reader.passes_cache

    def read_into(self, offset: int, target: memoryview) -> None:
        self._reader.read_into(offset, target)
        self._count(len(target))

    def close(self) -> None:
        self._reader.close()


class Claim(abc.ABC):
    """This process's claim on a directory, at a path or URL, by which other jobs know that it saves there."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._has_told = False

    @abc.abstractmethod
    def renew(self) -> None:
        """Make the claim, or renew it, at the beginning of each save into the directory; returns at once."""

    def is_alone(self) -> bool:
        """Return whether certainly no other job is writing files of the same names; may wait to find out."""
        return True

    @abc.abstractmethod
    def release(self, *, wait: bool = True) -> None:
        """End the claim; with ``wait``, return only when other jobs can see that."""

    @abc.abstractmethod
    def forget(self) -> None:
        """Drop the claim, in a forked process, without ending it: it belongs to the parent."""

    def tell(self, other: str) -> None:
        """Log a warning, once, that another job, described by ``other``, had the directory first."""
        if self._has_told:
            return
        self._has_told = True
        logger.warning(
            "another job saves checkpoints into %s: %s. Neither damages a checkpoint of the other, but where the names "
            "are the same, the later save replaces the earlier one, and one job's retention deletes what the other has "
            "saved. "
            "What to do: end one of the two, or give it a directory of its own",
            self.directory,
            other,
        )


class Storage(abc.ABC):
    """A place that keeps files. All paths are full paths or URLs of this storage.

    Attributes:
        has_given_up: Whether the store has failed for so long that no request is retried.
    """

    has_given_up = False

    @abc.abstractmethod
    def create(self, path: str, expected_size: int) -> FileWriter:
        """Begin a file of ``expected_size`` bytes, or a little more; space is reserved where that is possible.

        Raises:
            StorageError: There is no space, no permission, or ``path`` is a directory.
        """

    def write_whole(self, path: str, data: bytes) -> None:
        """Write a small file durably and atomically, replacing what was there.

        Args:
            path: The file.
            data: Its bytes.

        Raises:
            StorageError: The storage refused.
        """
        with self.create(path, len(data)) as writer:
            writer.write_at(0, memoryview(bytearray(data)))
            writer.commit(len(data))

    @abc.abstractmethod
    def open(self, path: str) -> FileReader:
        """Open a file.

        Raises:
            CheckpointNotFoundError: There is no such file.
            StorageError: ``path`` is a directory or cannot be read.
        """

    def open_inside(self, directory: str, name: str) -> FileReader:
        """Open a file of a directory checkpoint, if it really is in the directory.

        Args:
            directory: The checkpoint, which may itself be reached by a link.
            name: Relative to it, with ``/`` between folders.

        Raises:
            CheckpointNotFoundError: There is no such file.
            CheckpointCorruptedError: It is a symbolic link, or in a folder that is one.
        """
        return self.open(f"{directory}/{name}")

    @abc.abstractmethod
    def exists(self, path: str) -> bool:
        """Return whether there is a file or directory at ``path``."""

    @abc.abstractmethod
    def remove(self, path: str) -> None:
        """Delete the file or the directory tree at ``path``; do nothing if there is none."""

    @abc.abstractmethod
    def copy(self, source: str, target: str) -> int:
        """Make ``target`` a durable copy of ``source``, replacing what was there; return its size in bytes.

        If possible, no bytes are moved (hard link, server-side copy). Deleting or replacing one of the two leaves the
        other.

        Raises:
            CheckpointNotFoundError: There is no ``source``.
            StorageError: The storage refused.
        """

    @abc.abstractmethod
    def list(self, directory: str) -> Sequence[FileInfo]:
        """Return the committed files directly in ``directory``; none if it does not exist."""

    @abc.abstractmethod
    def remove_orphans(self, directory: str) -> Sequence[str]:
        """Delete the unfinished files and directories that dead processes left in ``directory``; return their paths."""

    def orphans(self, directory: str) -> Sequence[str]:
        """Return what :meth:`remove_orphans` would delete now, as far as the storage knows; deletes nothing."""
        return []

    def subdirectories(self, directory: str) -> Sequence[str]:
        """Return the paths of the directories directly in ``directory``; none if it does not exist."""
        return []

    def nearest(self, path: str, read: Callable[[Storage, str], Result]) -> Result:
        """Call ``read`` on a checkpoint, of several copies on the nearest that is intact, and return its result.

        Args:
            path: The checkpoint.
            read: Called with the storage that has a copy, and the copy's path there; called again with another copy if
                it raises because the first one is damaged.
        """
        return read(self, path)

    def put_file(self, source: str, target: str) -> None:
        """Store the local file ``source``, which may be moved, as ``target``, durably.

        Raises:
            StorageError: The storage refused.
        """
        size = os.path.getsize(source)
        with self.create(target, size) as writer, open(source, "rb") as file:
            for offset in range(0, size, _CHUNK):
                writer.write_at(offset, memoryview(bytearray(file.read(_CHUNK))))
            writer.commit(size)

    def begin_directory(self, path: str, token: str) -> str:
        """Begin a directory checkpoint, in each process that writes into it; ended by ``leave_directory``.

        Args:
            path: The directory's final path.
            token: Equal in all processes that write this checkpoint, and never used for any other.

        Returns:
            The directory in which its files are to be created, by :meth:`create` and :meth:`put_file`. If this is
            ``path`` itself, they must have names that the checkpoint which is there now does not use.
        """
        return path

    def publish_directory(self, path: str, token: str, manifest: bytes, *, gone: Sequence[str] = ()) -> None:
        """Commit the checkpoint, which replaces the one that was there; called by one process.

        Args:
            path: The directory's final path.
            token: As for :meth:`begin_directory`.
            manifest: The bytes of its manifest; all files that it names are durable.
            gone: Relative names of files at ``path`` that belong to the replaced checkpoint, and not to this one. All
                other files there stay.

        A file of ``gone`` that cannot be deleted stays, with a warning.

        Raises:
            StorageError: The storage refused; what was at ``path`` before is untouched.
        """
        self.write_whole(f"{path}/{MANIFEST_NAME}", manifest)
        try:
            self._remove_files(path, gone)
        except CheckpointError as error:
            logger.warning("could not delete what was at %s before: %s", path, error)

    def discard_directory(self, path: str, token: str, names: Sequence[str] = ()) -> None:
        """Delete the files written for a checkpoint that will never be published.

        Args:
            path: The directory's final path.
            token: As for :meth:`begin_directory`.
            names: The files that this process has created.
        """
        self._remove_files(path, names)

    def _remove_files(self, path: str, names: Sequence[str]) -> None:
        for name in names:
            self.remove(f"{path}/{name}")

    def leave_directory(self, path: str, token: str) -> None:  # noqa: B027 - most storages have nothing to do
        """End what :meth:`begin_directory` began in this process, after the checkpoint was published or discarded."""

    def claim(self, directory: str) -> Claim | None:
        """Return a claim on ``directory``, not made yet, by which other jobs know that this process saves there.

        None if the storage has no claims. Then no job is warned, and saves of the same names may damage each other,
        unless the storage keeps their unfinished files apart.
        """
        return None

    def remove_directory(self, path: str, *, names: Collection[str] = ()) -> None:
        """Delete the directory checkpoint at ``path``, its manifest first.

        Args:
            path: The directory.
            names: The files that the checkpoint consists of. If another job may be writing into the same directory,
                only these are deleted.
        """
        self.remove(f"{path}/{MANIFEST_NAME}")
        self.remove(path)

    def list_directories(self, directory: str) -> Sequence[FileInfo]:
        """Return the directory checkpoints directly in ``directory``, and directories that may be one.

        The size is that of all files directly in the checkpoint, the time that of its commit. On a local disk, a
        checkpoint that this user may not read has the size 0.
        """
        return [found for path in self.subdirectories(directory) for found in self._committed(path)]

    def _committed(self, path: str) -> Sequence[FileInfo]:
        """Return the directory ``path`` as the only entry; no entry if it is not a checkpoint."""
        files = self.list(path)
        commits = [file.modified for file in files if os.path.basename(file.path) == MANIFEST_NAME]
        return [FileInfo(path, sum(file.size for file in files), modified) for modified in commits]


def transfer(
    source_storage: Storage,
    source: str,
    target_storage: Storage,
    target: str,
    *,
    when_open: Callable[[], None] = lambda: None,
) -> int:
    """Copy the file ``source`` to ``target``, durably, replacing what was there; return its size in bytes.

    The copy needs 16 MiB of memory, whatever the file's size, in addition to what the target storage needs.
    ``when_open`` is called when ``source`` is open; renaming or deleting ``source`` does not matter from then on.
    """
    with source_storage.open(source) as reader:
        when_open()
        return write_from(reader, target_storage, target)


def write_from(reader: FileReader, storage: Storage, target: str) -> int:
    """Copy an open file to ``target``, as :func:`transfer` does."""
    with storage.create(target, reader.size) as writer:
        memory = memoryview(bytearray(min(_CHUNK, reader.size)))
        for offset in range(0, reader.size, _CHUNK):
            chunk = memory[: reader.size - offset]
            reader.read_into(offset, chunk)
            writer.write_at(offset, chunk)
        writer.commit(reader.size)
    return reader.size


class RandomAccessIO(io.RawIOBase):
    """A seekable, read-only Python file of known size; subclasses implement :meth:`readinto`."""

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


def is_directory_checkpoint(storage: Storage, path: str) -> bool:
    """Return whether ``path`` is a directory with a manifest."""
    return storage.exists(f"{path}/{MANIFEST_NAME}")
