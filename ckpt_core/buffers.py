"""Host memory that bytes pass through on their way to storage: page-aligned, and with all of its pages present."""

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
_MOST_PINNED = 6  # a disk is read by four threads, and two buffers more are being copied from
_WORTH_PINNING = 64 * 2**20  # bytes: to pin the buffers takes longer than to copy less


class StagingBuffer:
    """Page-aligned host memory of a fixed size, all of its pages present, as a ``uint8`` tensor and a ``memoryview``.

    ``pinned`` locks the pages where an accelerator is in use. On the thread that trains: on another one, CUDA would
    take memory on the first device, whichever the process uses.
    """

    def __init__(self, nbytes: int, *, pinned: bool = False) -> None:
        self.nbytes = max(_PAGE, -(-nbytes // _PAGE) * _PAGE)
        self.is_lent = False  # by a pool that notes it
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

    @property
    def is_pinned(self) -> bool:
        """Whether devices copy from and to it without blocking the host."""
        return self._unpin is not None

    def close(self) -> None:
        """Give the memory back to the system (views that are still held keep it until they go)."""
        if self._unpin is not None:
            self._unpin()
        self.memory.release()
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self.__dict__.pop("_map", None)  # done twice after Ctrl-C


class ScratchBuffers:
    """A few small buffers that several threads take and give back, kept until :meth:`close`.

    ``most_pinned`` is the number of pinned buffers for copies to devices. One is lent again when its copies are done;
    others are filled meanwhile. With 0, buffers are not pinned, and there are as many as are lent at a time.
    """

    def __init__(self, most_pinned: int = 0) -> None:
        self._most_pinned = most_pinned
        self._idle: collections.deque[tuple[StagingBuffer, Events]] = collections.deque()  # the oldest copies first
        self._lent = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def lent(self, nbytes: int, filled: Sequence[torch.Tensor] = ()) -> Iterator[StagingBuffer]:
        """Lend a buffer of at least ``nbytes``, from which the body may queue copies to ``filled``.

        Where there is no memory for one more, wait for one to come back.
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
                    # Those that there are have to do: one that is being copied from is waited for.
                    self._most_pinned = min(self._most_pinned, max(1, self._lent + len(self._idle)))
                    self._changed.notify_all()  # who waits for what this thread asked for, and does not get
                    if not isinstance(error, OutOfMemoryError) or not (self._lent or self._idle):
                        raise
                    self._changed.wait_for(lambda: self._idle or not self._lent)

    def _find(self) -> StagingBuffer | None:
        """Return an idle buffer, when its copies are done; None if there is to be one more."""
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
        """Free the buffers that are not in use, when their copies are done."""
        with self._changed:
            while self._idle:
                buffer, events = self._idle.popleft()
                _wait(events)
                buffer.close()


def _wait(events: Events) -> None:
    for event in events.values():
        event.synchronize()


def buffers_for(targets: Iterable[torch.Tensor]) -> ScratchBuffers:
    """Return buffers for a load, pinned ones where much goes to devices."""
    nbytes = sum(target.nbytes for target in targets if not (target.is_cpu or target.is_meta))
    return ScratchBuffers(_MOST_PINNED if nbytes >= _WORTH_PINNING else 0)


def copy_late(target: torch.Tensor, found: torch.Tensor, buffer: StagingBuffer) -> None:
    """Copy from ``buffer``, which is given back with the target; late, if both allow it."""
    target.copy_(found, non_blocking=buffer.is_pinned and can_copy_late(target))


# Bytes of the host to copy: addresses of target and source, how many, and what keeps the source where it is; or two
# tensors, where that is not all.
Move = tuple[int, int, int, object] | tuple[torch.Tensor, torch.Tensor]


def move_of(target: torch.Tensor, source: torch.Tensor) -> Move:
    """Return what is to be done to copy one tensor of the host into another."""
    address = source.data_ptr()
    # Of freed memory, torch says what it thinks.
    if address and source.dtype is target.dtype is torch.uint8 and source.is_contiguous() and target.is_contiguous():
        return target.data_ptr(), address, source.nbytes, source
    return target, source


def storage_of(tensor: torch.Tensor, *, key: str | None = None) -> torch.UntypedStorage:
    """Return the memory of a dense tensor; refuse one that has none, or less than its elements need."""
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
    with torch.inference_mode(False):  # for other threads, which are not in that mode
        return [torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage) for storage in storages]
