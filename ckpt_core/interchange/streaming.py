"""Stream tensors between files with one in memory at a time, and create export directories atomically."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import overload

import torch

from ckpt_core._layouts.safetensors import TensorInfo
from ckpt_core.errors import CheckpointError, StorageError
from ckpt_core.paths import StrPath
from ckpt_core.storage import is_remote, local_path, storage_for
from ckpt_core.storage.failures import storage_error
from ckpt_core.storage.local_directory import sync_file

_ALIGNMENT = 64  # bytes
_LARGE = 2**20  # bytes; tensors from this size on are kept in the file


class TensorMemory:
    """Memory for one tensor at a time: each request frees the memory of the last one, even if it is still referenced.

    A loop variable or a generator of DCP may still hold the last tensor. The memory is mapped directly, so that it is
    freed at once.
    """

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None

    def tensors(self, infos: Sequence[TensorInfo]) -> list[torch.Tensor]:
        """Return uninitialized tensors; those returned before lose their values."""
        sizes = [-(-info.nbytes // _ALIGNMENT) * _ALIGNMENT for info in infos]
        flat = self.flat(sum(sizes[:-1]) + infos[-1].nbytes) if infos else torch.empty(0, dtype=torch.uint8)
        found, begin = [], 0
        for info, size in zip(infos, sizes, strict=True):
            found.append(flat[begin : begin + info.nbytes].view(info.dtype).view(info.shape))
            begin += size
        return found

    def flat(self, nbytes: int) -> torch.Tensor:
        """Return an uninitialized byte tensor; the tensors returned before lose their values."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)
        self._map = mmap.mmap(-1, max(1, nbytes))
        return (
            torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes)
            if nbytes
            else torch.empty(0, dtype=torch.uint8)
        )


class DiskMemory:
    """Memory for a state that may be larger than the machine's memory, backed by a temporary file on a local disk.

    The tensors are mapped from a file without a name in the directory of ``target``. If the disk is full, ordinary
    memory is used instead.
    """

    def __init__(self, target: str) -> None:
        directory = None if is_remote(target) else os.path.dirname(os.path.abspath(local_path(target)))
        try:
            if directory is not None:
                os.makedirs(directory, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - closed by close
        except OSError as error:
            raise storage_error("write", target, error) from error
        self._size = 0

    def close(self) -> None:
        """Close the file; the disk space is freed with the last tensor."""
        self._file.close()

    def flat(self, nbytes: int) -> torch.Tensor:
        """Return an uninitialized byte tensor."""
        if nbytes >= _LARGE:
            begin = self._size
            self._size += -(-nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
            try:
                os.posix_fallocate(self._file.fileno(), begin, self._size - begin)  # else SIGBUS on a full disk, later
                pages = mmap.mmap(self._file.fileno(), nbytes, offset=begin)
            except OSError:
                self._size = begin
            else:
                return torch.frombuffer(pages, dtype=torch.uint8)
        return torch.empty(nbytes, dtype=torch.uint8)

    def empty(self, info: TensorInfo) -> torch.Tensor:
        """Return an uninitialized tensor."""
        return self.flat(info.nbytes).view(info.dtype).view(info.shape)

    def restore(self, storage: torch.UntypedStorage, _location: str) -> torch.UntypedStorage:
        """Move a large storage into the file; for use as ``map_location`` of ``torch.load``."""
        if storage.nbytes() < _LARGE:
            return storage
        flat = self.flat(storage.nbytes())
        flat.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
        return flat.untyped_storage()


def given(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a load function for a tensor that is in memory already."""
    return lambda: tensor


class LazyTensors(Sequence[torch.Tensor]):
    """Sequence of tensors that are loaded on access, by one thread; only the last one is kept."""

    def __init__(self, loads: Sequence[Callable[[], torch.Tensor]]) -> None:
        self._loads = loads
        self._kept: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._loads)

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[torch.Tensor]: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | Sequence[torch.Tensor]:
        if isinstance(index, slice):
            return LazyTensors(self._loads[index])
        if index not in self._kept:
            self._kept.clear()  # before the next one is loaded
            self._kept[index] = self._loads[index]()
        return self._kept[index]


@contextlib.contextmanager
def scratch_directory(target: StrPath) -> Iterator[str]:
    """Create a hidden directory next to ``target``, which must be empty or missing, and delete it at the end.

    It is locked like an unfinished checkpoint, so that the next save there and ``ckpt clean`` delete it if this process
    was killed.
    """
    if is_remote(target):
        raise StorageError(
            "other programs' formats are written to local directories only",
            path=os.fspath(target),
            remedy="export to a local directory, and upload that",
        )
    path = os.path.abspath(local_path(target))
    if os.path.lexists(path) and not (os.path.isdir(path) and not os.listdir(path)):
        remedy = "delete it yourself, or export to a path where there is nothing"
        raise StorageError("something is already there", path=path, remedy=remedy)
    storage, token = storage_for(path), uuid.uuid4().hex[:12]
    hidden = storage.begin_directory(path, token)
    try:
        yield hidden
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
        storage.leave_directory(path, token)


@contextlib.contextmanager
def new_directory(target: StrPath) -> Iterator[str]:
    """Yield a directory to fill, and rename it to ``target`` at the end; if the body raises, nothing is left."""
    path = os.path.abspath(local_path(target))
    try:
        with scratch_directory(target) as hidden:
            yield hidden
            os.chmod(hidden, 0o777 & ~_umask())
            _sync(hidden)
            os.rename(hidden, path)
            sync_file(os.path.dirname(path))
    except CheckpointError:
        raise
    except (OSError, RuntimeError) as error:
        if not isinstance(error, OSError) and "inline_container" not in str(error):  # torch's, on a full disk
            raise
        raise StorageError(
            f"the export could not be written: {error}",
            path=path,
            remedy="make room, change the permissions, or export to another place",
        ) from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync(directory: str) -> None:
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            sync_file(os.path.join(folder, name))
        sync_file(folder)
