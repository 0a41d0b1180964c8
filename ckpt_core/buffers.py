"""Page-aligned, prefaulted host buffers for staging and loading, pinned where a device copies, and pools of them."""

from __future__ import annotations

import collections
import contextlib
import mmap
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch

from ckpt_core._devices.pinning import pin
from ckpt_core._devices.streams import Events, can_copy_late, events_of_current_streams
from ckpt_core.errors import OutOfMemoryError, SerializationError

_PAGE = mmap.PAGESIZE
_MOST_PINNED = 6  # four threads read from the disk, and the device copies from two more buffers
_WORTH_PINNING = 64 * 2**20  # bytes; for less, pinning the buffers takes longer than copying from unpinned memory


class StagingBuffer:
    """Page-aligned host memory of a fixed size, all of its pages present, as a ``uint8`` tensor and a ``memoryview``.

    ``pinned`` locks the pages if an accelerator is in use. Create a pinned buffer on the training thread: on another
    thread, CUDA would allocate memory on the first device, even if the process uses a different one.
    """

    def __init__(self, nbytes: int, *, pinned: bool = False) -> None:
        self.nbytes = max(_PAGE, -(-nbytes // _PAGE) * _PAGE)
        self.is_lent = False  # set by the pool that lends it
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
        # Not an inference tensor, which only inference mode can write to: validation saves in that mode, training does
        # not.
        with torch.inference_mode(False):
            self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.tensor.zero_()
        unpin = pin(self.tensor) if pinned else None
        # Also if it is never closed: memory that is returned to the system must not stay registered with the device.
        self._unpin = None if unpin is None else weakref.finalize(self, unpin)
        if self._unpin is not None:
            self._unpin.atexit = False

    @property
    def is_pinned(self) -> bool:
        """Whether devices copy from and to it without blocking the host."""
        return self._unpin is not None

    def close(self) -> None:
        """Return the memory to the system (views that still exist keep it until they are freed)."""
        if self._unpin is not None:
            self._unpin()
        self.memory.release()
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self.__dict__.pop("_map", None)  # no error if missing: after Ctrl-C, close is called twice


class ScratchBuffers:
    """Pool of a few small buffers that several threads borrow and return, kept until :meth:`close`.

    ``most_pinned`` is the maximum number of pinned buffers for copies to devices. A buffer is lent again when its
    copies are done; others are filled meanwhile. With 0, buffers are not pinned, and are as many as are lent at a time.
    """

    def __init__(self, most_pinned: int = 0) -> None:
        self._most_pinned = most_pinned
        self._idle: collections.deque[tuple[StagingBuffer, Events]] = collections.deque()  # oldest copies first
        self._lent = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def lent(self, nbytes: int, filled: Sequence[torch.Tensor] = ()) -> Iterator[StagingBuffer]:
        """Lend a buffer of at least ``nbytes``, from which the body may queue copies to the tensors ``filled``.

        If there is no memory for another buffer, wait until one is returned.
        """
        buffer = self._take(nbytes)
        try:
            yield buffer
        finally:
            self._give(buffer, filled)

    def _take(self, nbytes: int) -> StagingBuffer:
        while True:
            with self._changed:
                found = self._find()
                self._lent += 1
            if found is not None and found.nbytes >= nbytes:
                return found
            if found is not None:
                found.close()
            try:
                return StagingBuffer(nbytes, pinned=self._most_pinned > 0)
            except BaseException as error:
                with self._changed:
                    self._lent -= 1
                    # From now on, the existing buffers have to suffice: wait for one that is still being copied from.
                    self._most_pinned = min(self._most_pinned, max(1, self._lent + len(self._idle)))
                    self._changed.notify_all()  # other threads wait as long as this one counts as a borrower
                    if not isinstance(error, OutOfMemoryError) or not (self._lent or self._idle):
                        raise
                    self._changed.wait_for(lambda: self._idle or not self._lent)

    def _find(self) -> StagingBuffer | None:
        """Return an idle buffer once its copies are done; None if the caller should allocate another buffer."""
        if not self._idle:
            return None
        buffer, events = self._idle[0]
        is_done = all(event.query() for event in events.values())
        if not is_done and self._lent + len(self._idle) < self._most_pinned:
            return None
        self._idle.popleft()
        _wait(events)
        return buffer

    def _give(self, buffer: StagingBuffer, filled: Sequence[torch.Tensor]) -> None:
        events = events_of_current_streams(filled) if buffer.is_pinned else {}
        with self._changed:
            self._lent -= 1
            self._idle.append((buffer, events))
            self._changed.notify_all()

    def close(self) -> None:
        """Free the buffers that are not lent, once their copies are done."""
        with self._changed:
            while self._idle:
                buffer, events = self._idle.popleft()
                _wait(events)
                buffer.close()


def _wait(events: Events) -> None:
    for event in events.values():
        event.synchronize()


def buffers_for(targets: Iterable[torch.Tensor]) -> ScratchBuffers:
    """Return buffers for a load into ``targets``; pinned ones if at least 64 MiB go to devices."""
    nbytes = sum(target.nbytes for target in targets if not (target.is_cpu or target.is_meta))
    return ScratchBuffers(_MOST_PINNED if nbytes >= _WORTH_PINNING else 0)


def copy_late(target: torch.Tensor, found: torch.Tensor, buffer: StagingBuffer) -> None:
    """Copy ``found``, a view of a buffer lent with ``target`` among ``filled``; only queue the copy if possible."""
    target.copy_(found, non_blocking=buffer.is_pinned and can_copy_late(target))


# A copy in host memory: address of the target, address of the source, number of bytes, and an object that keeps the
# source alive; or target and source tensors, if their bytes cannot be copied as they are.
Move = tuple[int, int, int, object] | tuple[torch.Tensor, torch.Tensor]


def move_of(target: torch.Tensor, source: torch.Tensor) -> Move:
    """Return the :data:`Move` that copies one host tensor into another."""
    address = source.data_ptr()
    # The address is 0 if the memory was freed, or has no bytes: leave such a copy to torch.
    if address and source.dtype is target.dtype is torch.uint8 and source.is_contiguous() and target.is_contiguous():
        return target.data_ptr(), address, source.nbytes, source
    return target, source


def storage_of(tensor: torch.Tensor, *, key: str | None = None) -> torch.UntypedStorage:
    """Return the storage of a dense tensor; refuse a tensor without memory, or with less than its elements need."""
    what = "a tensor" if key is None else f"the tensor at {key}"
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError as error:
        raise SerializationError(
            f"{what} has no memory: {error}",
            key=key,
            remedy="save outside of torch.func's transforms, such as grad and vmap",
        ) from error
    if storage.nbytes() < tensor.nbytes and storage.nbytes() < _bytes_needed(tensor):
        raise SerializationError(
            f"{what} has a memory of {storage.nbytes()} bytes, which was freed or is too small for its shape "
            f"{list(tensor.shape)}",
            key=key,
            remedy="gather or materialize it before it is saved (FSDP frees parameters between steps)",
        )
    return storage


def _bytes_needed(tensor: torch.Tensor) -> int:
    if tensor.is_nested or tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + last + 1) * tensor.itemsize


def bytes_of(storages: Iterable[torch.UntypedStorage]) -> list[torch.Tensor]:
    """Return the bytes of storages as one-dimensional ``uint8`` tensors that share their memory."""
    with torch.inference_mode(False):  # so that other threads, which are not in that mode, can write to them
        return [torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage) for storage in storages]
