"""Reading of local files: by direct I/O, past the page cache, if that is faster and the target memory is aligned."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import stat
import threading

from ckpt_core.errors import CheckpointCorruptedError, CheckpointNotFoundError, StorageError
from ckpt_core.process.threads import IO_THREADS
from ckpt_core.storage.base import FileReader
from ckpt_core.storage.failures import storage_error

BLOCK = 4096  # bytes: alignment and unit of direct I/O
_SMALLEST_DIRECT = 256 * 2**10  # bytes: smaller reads profit from the kernel's read-ahead, which direct I/O lacks
_SMALLEST_FILE = 8 * 2**20  # bytes: for smaller files, the second open costs more than the page cache
_SAMPLES = 8  # number of pages that are looked up in the page cache
_DIRECT_THREADS = 4  # so that the disk is busy while other threads process what they have read


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def close(descriptor: int) -> None:
    """Close a file descriptor, ignoring errors."""
    with contextlib.suppress(OSError):  # the data is durable or read by now, and the descriptor is closed in any case
        os.close(descriptor)


def address(data: memoryview) -> int:
    """Return the address of a memoryview; 1, which is never aligned, if it is read-only."""
    if data.readonly:
        return 1
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


def _may_be_cached(descriptor: int, offset: int) -> bool:
    """Return whether the page at ``offset`` may be cached; True for another user's file that we may not write."""
    found = ctypes.create_string_buffer(1)
    page = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    try:
        with mmap.mmap(descriptor, BLOCK, access=mmap.ACCESS_COPY, offset=page) as memory:
            failed = _libc().mincore(ctypes.c_void_p(address(memoryview(memory))), ctypes.c_size_t(BLOCK), found)
    except (OSError, ValueError, AttributeError):
        return True
    return bool(failed or found.raw[0] & 1)


class LocalFileReader(FileReader):
    """A regular file that is open for reading."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._direct: int | None = None
        self._lock = threading.Lock()
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
            close(self._descriptor)
            raise storage_error("read", path, error) from error
        if not stat.S_ISREG(status.st_mode):
            os.close(self._descriptor)
            if not stat.S_ISDIR(status.st_mode):
                raise StorageError(
                    "the path is not a regular file", path=path, remedy="give a checkpoint file", errno=errno.ENXIO
                )
            raise StorageError(
                "the path is a directory, not a checkpoint file",
                path=path,
                remedy="give the file inside it, or load it with the strategy that wrote it",
                errno=errno.EISDIR,
            )
        self.size = status.st_size

    @property
    def passes_cache(self) -> bool:
        """Whether large aligned reads use direct I/O: not if the filesystem cannot, or if the file is cached."""
        with self._lock:
            if self._direct is None:
                self._direct = -1 if self.size < _SMALLEST_FILE or self._is_cached() else self._open_direct()
            return self._direct >= 0

    @property
    def threads(self) -> int:
        return max(IO_THREADS, _DIRECT_THREADS) if self.passes_cache else IO_THREADS

    def _open_direct(self) -> int:
        if not hasattr(os, "O_DIRECT"):
            return -1
        try:
            # Not by its path: that may be another file by now.
            return os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:
            return -1  # an ordinary read will raise the error, if there is one

    def _is_cached(self) -> bool:
        samples = [self.size * (2 * sample + 1) // (2 * _SAMPLES) for sample in range(_SAMPLES)]
        if not all(_may_be_cached(self._descriptor, at) for at in samples):
            return False
        page = bytearray(BLOCK)
        for at in samples:
            try:
                # Only after mincore: this read starts the kernel's read-ahead, which a fast disk may finish meanwhile.
                os.preadv(self._descriptor, [page], at // BLOCK * BLOCK, os.RWF_NOWAIT)
            except (OSError, AttributeError):
                return False  # not cached, or not known
        return True

    def read_into(self, offset: int, target: memoryview) -> None:
        whole = len(target) // BLOCK * BLOCK
        aligned = whole >= _SMALLEST_DIRECT and offset % BLOCK == 0 and address(target) % BLOCK == 0
        if aligned and self.passes_cache:
            count = self._read_direct(offset, target[:whole])
            offset, target = offset + count, target[count:]
        while target:
            try:
                count = os.preadv(self._descriptor, [target], offset)
            except OSError as error:
                raise storage_error("read", self.path, error) from error
            if count == 0:
                raise CheckpointCorruptedError("the checkpoint is truncated", path=self.path)
            target, offset = target[count:], offset + count

    def _read_direct(self, offset: int, target: memoryview) -> int:
        """Fill ``target`` by direct I/O as far as that works, and return the number of bytes read."""
        assert self._direct is not None
        done = 0
        while done < len(target) and done % BLOCK == 0:
            try:
                count = os.preadv(self._direct, [target[done:]], offset + done)
            except OSError:
                break  # an ordinary read will raise the error, if there is one
            if count == 0:
                break
            done += count
        return done

    def close(self) -> None:
        close(self._descriptor)
        if self._direct is not None and self._direct >= 0:
            close(self._direct)
            self._direct = -1
