"""Host memory that bytes pass through on their way to storage: page-aligned, and with all of its pages present."""

from __future__ import annotations

import contextlib
import mmap
import threading

import torch

__all__ = ["ScratchBuffers", "StagingBuffer", "bytes_of"]

_PAGE = mmap.PAGESIZE


class StagingBuffer:
    """Page-aligned host memory of a fixed size, all of its pages present.

    Args:
        nbytes: Size in bytes; rounded up to whole pages.
        pinned: Whether to lock the pages where CUDA is in use. On the thread that trains: on another one, CUDA would take
            memory on the first device, whichever the process uses.

    Attributes:
        tensor: The memory as a one-dimensional ``uint8`` tensor.
        memory: The memory as a writable ``memoryview``.
    """

    def __init__(self, nbytes: int, *, pinned: bool = False) -> None:
        self.nbytes = max(_PAGE, -(-nbytes // _PAGE) * _PAGE)
        self._map = mmap.mmap(-1, self.nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.memory = memoryview(self._map)
        # Not a tensor of inference mode, which could not be written to outside it: validation saves inside, training out.
        with torch.inference_mode(False):
            self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.tensor.zero_()
        self._pinned = pinned and _pin(self.tensor)

    def close(self) -> None:
        """Give the memory back to the system (views that are still held keep it until they go)."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
            self._pinned = False
        self.memory.release()
        self.tensor = torch.empty(0, dtype=torch.uint8)
        del self._map


class ScratchBuffers:
    """A few small buffers that several threads take and give back, kept until :meth:`close`."""

    def __init__(self) -> None:
        self._idle: list[StagingBuffer] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> StagingBuffer:
        """Return a buffer of at least ``nbytes``."""
        with self._lock:
            found = self._idle.pop() if self._idle else None
        if found is not None and found.nbytes < nbytes:
            found.close()
            found = None
        return found if found is not None else StagingBuffer(nbytes)

    def give(self, buffer: StagingBuffer) -> None:
        """Take a buffer back."""
        with self._lock:
            self._idle.append(buffer)

    def close(self) -> None:
        """Free the buffers that are not in use."""
        with self._lock:
            while self._idle:
                self._idle.pop().close()


def _pin(memory: torch.Tensor) -> bool:
    # Only page-locked memory can be copied to from a CUDA device without blocking the host.
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return False
    if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) == 0:
        return True
    # CUDA remembers the error, and the next kernel to be launched would be blamed for it: let it be one of ours.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return False


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the bytes of ``storage`` as a one-dimensional ``uint8`` tensor that shares its memory."""
    with torch.inference_mode(False):  # for other threads, which are not in that mode
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
