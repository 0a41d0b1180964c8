"""Host memory that bytes pass through on their way to storage: page-aligned, and with all of its pages present."""

from __future__ import annotations

import mmap
import threading
import weakref

import torch

from ckpt_core._devices import pin
from ckpt_core.errors import OutOfMemoryError, SerializationError

__all__ = ["ScratchBuffers", "StagingBuffer", "bytes_of", "storage_of"]

_PAGE = mmap.PAGESIZE


class StagingBuffer:
    """Page-aligned host memory of a fixed size, all of its pages present.

    Args:
        nbytes: Size in bytes; rounded up to whole pages.
        pinned: Whether to lock the pages where an accelerator is in use. On the thread that trains: on another one,
            CUDA would take memory on the first device, whichever the process uses.

    Raises:
        OutOfMemoryError: The system refuses so much.

    Attributes:
        tensor: The memory as a one-dimensional ``uint8`` tensor.
        memory: The memory as a writable ``memoryview``.
    """

    def __init__(self, nbytes: int, *, pinned: bool = False) -> None:
        self.nbytes = max(_PAGE, -(-nbytes // _PAGE) * _PAGE)
        try:
            self._map = mmap.mmap(-1, self.nbytes)
        except (OSError, MemoryError, OverflowError) as error:
            raise OutOfMemoryError(
                f"there is no memory for a buffer of {self.nbytes} bytes: {error}",
                remedy="free memory or raise its limit (ulimit -v, the job's or the container's); strategy='sync' "
                "needs 112 MiB instead of a copy of the state",
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.memory = memoryview(self._map)
        # Not a tensor of inference mode, which could not be written to outside it: validation saves inside, training
        # out.
        with torch.inference_mode(False):
            self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.tensor.zero_()
        unpin = pin(self.tensor) if pinned else None
        # Also where nobody closes it: a device must not know memory that the system has taken back.
        self._unpin = None if unpin is None else weakref.finalize(self, unpin)
        if self._unpin is not None:
            self._unpin.atexit = False

    def close(self) -> None:
        """Give the memory back to the system (views that are still held keep it until they go)."""
        if self._unpin is not None:
            self._unpin()
        self.memory.release()
        self.tensor = torch.empty(0, dtype=torch.uint8)
        del self._map


class ScratchBuffers:
    """A few small buffers that several threads take and give back, kept until :meth:`close`."""

    def __init__(self) -> None:
        self._idle: list[StagingBuffer] = []
        self._lent = 0
        self._changed = threading.Condition()

    def take(self, nbytes: int) -> StagingBuffer:
        """Return a buffer of at least ``nbytes``; where there is no memory for one more, wait for one to come back.

        Raises:
            OutOfMemoryError: There is no memory for a single one.
        """
        while True:
            with self._changed:
                found = self._idle.pop() if self._idle else None
                self._lent += 1
            if found is not None and found.nbytes >= nbytes:
                return found
            if found is not None:
                found.close()
            try:
                return StagingBuffer(nbytes)
            except BaseException as error:
                with self._changed:
                    self._lent -= 1
                    self._changed.notify_all()  # who waits for what this thread asked for, and does not get
                    if not isinstance(error, OutOfMemoryError) or not (self._lent or self._idle):
                        raise
                    self._changed.wait_for(lambda: self._idle or not self._lent)

    def give(self, buffer: StagingBuffer) -> None:
        """Take a buffer back."""
        with self._changed:
            self._lent -= 1
            self._idle.append(buffer)
            self._changed.notify_all()

    def close(self) -> None:
        """Free the buffers that are not in use."""
        with self._changed:
            while self._idle:
                self._idle.pop().close()


def storage_of(tensor: torch.Tensor, *, key: str) -> torch.UntypedStorage:
    """Return the memory of a dense tensor.

    Raises:
        SerializationError: It has none, or less than its elements need; the error names ``key``.
    """
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError as error:
        raise SerializationError(
            f"the tensor at {key} has no memory: {error}",
            key=key,
            remedy="save outside of torch.func's transforms, such as grad and vmap",
        ) from error
    if storage.nbytes() < tensor.nbytes and storage.nbytes() < _bytes_needed(tensor):
        raise SerializationError(
            f"the tensor at {key} has a memory of {storage.nbytes()} bytes, which was freed or is too small for its "
            f"shape {list(tensor.shape)}",
            key=key,
            remedy="gather or materialize it before it is saved (FSDP frees parameters between steps)",
        )
    return storage


def _bytes_needed(tensor: torch.Tensor) -> int:
    if tensor.is_nested or tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + last + 1) * tensor.itemsize


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the bytes of ``storage`` as a one-dimensional ``uint8`` tensor that shares its memory."""
    with torch.inference_mode(False):  # for other threads, which are not in that mode
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
