"""State to host copy: a reused, page-aligned, pre-faulted buffer, and the guard against torn snapshots.

Copying into memory that is used again and again runs at memory speed; copying into fresh memory runs at a fifth of it,
because every page must first be found and cleared. So buffers are kept between saves.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence

import torch

from ckpt_core.errors import SnapshotTornError

__all__ = ["BackgroundCopy", "BufferPool", "StagingBuffer", "TornSnapshotGuard", "bytes_of"]

_PAGE = mmap.PAGESIZE


class StagingBuffer:
    """Page-aligned host memory of a fixed size, all of its pages present.

    Args:
        nbytes: Size in bytes; rounded up to whole pages.

    Attributes:
        tensor: The memory as a one-dimensional ``uint8`` tensor.
        memory: The memory as a writable ``memoryview``.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = max(_PAGE, -(-nbytes // _PAGE) * _PAGE)
        self._map = mmap.mmap(-1, self.nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.memory = memoryview(self._map)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.tensor.zero_()
        self._pinned = _pin(self.tensor)

    def close(self) -> None:
        """Give the memory back to the system (views that are still held keep it until they go)."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
            self._pinned = False
        self.memory.release()
        self.tensor = torch.empty(0, dtype=torch.uint8)


def _pin(memory: torch.Tensor) -> bool:
    # Only page-locked memory can be copied to from a CUDA device without blocking the host.
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return False
    return int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) == 0


class BufferPool:
    """At most ``limit`` staging buffers, lent one by one and kept for the next save.

    Args:
        limit: How many may be lent at the same time.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lent = 0
        self._idle: list[StagingBuffer] = []
        self._changed = threading.Condition()

    @property
    def exhausted(self) -> bool:
        """Whether the next :meth:`acquire` would have to wait."""
        return self._lent >= self._limit

    def acquire(self, nbytes: int) -> StagingBuffer:
        """Lend a buffer of at least ``nbytes``, waiting until one is free."""
        with self._changed:
            self._changed.wait_for(lambda: self._lent < self._limit)
            self._lent += 1
            idle = sorted(self._idle, key=lambda buffer: buffer.nbytes)
            buffer = next((b for b in idle if b.nbytes >= nbytes), None)
            if buffer is not None:
                self._idle.remove(buffer)
                return buffer
            if len(idle) + self._lent > self._limit:
                # Replace one that is too small, so that memory never exceeds the limit.
                self._idle.remove(idle[0])
                idle[0].close()
        try:
            return StagingBuffer(nbytes)
        except BaseException:
            with self._changed:
                self._lent -= 1
                self._changed.notify()
            raise

    def wait(self) -> None:
        """Return when a buffer is free."""
        with self._changed:
            self._changed.wait_for(lambda: self._lent < self._limit)

    def release(self, buffer: StagingBuffer) -> None:
        """Take a lent buffer back."""
        with self._changed:
            self._lent -= 1
            self._idle.append(buffer)
            self._changed.notify()

    def close(self) -> None:
        """Free the buffers that are not lent."""
        with self._changed:
            for buffer in self._idle:
                buffer.close()
            self._idle.clear()


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the bytes of ``storage`` as a one-dimensional ``uint8`` tensor that shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class BackgroundCopy:
    """Copies tensors into host memory on its own thread, so that the caller can pickle meanwhile.

    The whole copy is one call into torch, which holds no GIL and uses torch's threads. CUDA tensors are copied on a side
    stream that starts after the work already queued on the current one; the training thread waits for it in :meth:`wait`.

    Args:
        targets: ``uint8`` host tensors.
        sources: Tensors of the same sizes on any device.
    """

    def __init__(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        self._targets = list(targets)
        self._sources = list(sources)
        self._error: BaseException | None = None
        self._stream = None
        if any(source.is_cuda for source in self._sources):
            self._stream = torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
        self._thread = threading.Thread(target=self._run, name="ckpt-staging")
        self._thread.start()

    def _run(self) -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(self._stream):  # a None stream changes nothing
                if self._targets:
                    torch._foreach_copy_(self._targets, self._sources, non_blocking=True)
            if self._stream is not None:
                self._stream.synchronize()
        except BaseException as error:  # noqa: BLE001 - raised again by wait()
            self._error = error

    def wait(self) -> None:
        """Return when all bytes are copied; raise what the copy raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error


class TornSnapshotGuard:
    """Detects that a tensor was changed, through torch, between the beginning and the end of a snapshot.

    Compares the version counters that autograd keeps; changes through ``tensor.data`` or through a NumPy view do not
    count there and are not seen.

    Args:
        tensors: The tensors that are being copied.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [tensor for tensor in tensors if not tensor.is_inference()]
        self._versions = [tensor._version for tensor in self._tensors]

    def check(self, *, path: str) -> None:
        """Raise if a tensor has changed since this guard was made.

        Raises:
            SnapshotTornError: At least one tensor has.
        """
        changed = sum(
            tensor._version != version for tensor, version in zip(self._tensors, self._versions, strict=True)
        )
        if changed:
            raise SnapshotTornError(
                f"{changed} of {len(self._tensors)} tensors changed while they were being copied; nothing was saved",
                path=path,
                remedy="do not let another thread train while a checkpoint is saved, or save between its steps",
            )
