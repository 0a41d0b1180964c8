"""State to host copy: a reused, page-aligned, pre-faulted buffer, and the guard against torn snapshots.

Copying into memory that is used again and again runs at memory speed; copying into fresh memory runs at a fifth of it,
because every page must first be found and cleared. So buffers are kept between saves.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from ckpt_core._layouts.image import ImageAbandonedError
from ckpt_core._layouts.torch_file.image import StateLayout
from ckpt_core.errors import OutOfMemoryError, SnapshotTornError
from ckpt_core.memory import StagingBuffer
from ckpt_core.parallel import wait_through

__all__ = ["COPY_GROUP", "BackgroundCopy", "BufferPool", "Snapshot", "TornSnapshotGuard", "wait_for_devices"]

COPY_GROUP = 64 * 2**20  # bytes copied by one call: long enough that taking the GIL between two does not count


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
        """Lend a buffer of at least ``nbytes``, waiting until one is free.

        Raises:
            OutOfMemoryError: There is no memory for it.
        """
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
            try:
                return StagingBuffer(nbytes, pinned=True)
            except OutOfMemoryError:
                self.close()  # of those that are too small
                return StagingBuffer(nbytes, pinned=True)
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


class BackgroundCopy:
    """Copies tensors into host memory on its own thread, in order, so that others can pickle and write meanwhile.

    Each group of pieces is one call into torch, which holds no GIL and uses torch's threads. CUDA tensors are copied on a
    side stream of their device, which starts after the work already queued on the current one; the training thread waits in
    :meth:`wait`.

    Args:
        pieces: ``(end, target, source)``: ``uint8`` tensors of the same size, and the offset that is reached with them.
    """

    def __init__(self, pieces: Iterable[tuple[int, torch.Tensor, torch.Tensor]]) -> None:
        self._pieces = list(pieces)
        self._reached = 0
        self._error: BaseException | None = None
        self._progress = threading.Condition()
        self._streams = []
        for device in _cuda_devices(source for _, _, source in self._pieces):
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            self._streams.append(stream)
        self._device = torch.cuda.current_device() if self._streams else None
        self._claim = threading.Lock()  # for the thread, or for whoever gives up on it, whichever comes first
        self._ended = threading.Event()
        try:
            threading.Thread(target=self._run, name="ckpt-staging").start()
        except RuntimeError:  # the interpreter is shutting down: no new threads
            self._run()
        except BaseException:  # Ctrl-C while the thread was starting: it may be writing to the targets already
            if not self._claim.acquire(blocking=False):
                wait_through(self._ended)
            raise

    def _run(self) -> None:
        if not self._claim.acquire(blocking=False):
            return
        try:
            if self._device is not None:
                # A thread begins on the first device, and to come back to that one would take memory there.
                torch.cuda.set_device(self._device)
            with torch.no_grad(), contextlib.ExitStack() as stack:
                for stream in self._streams:  # never stream(None), which starts CUDA in programs that do not use it
                    stack.enter_context(torch.cuda.stream(stream))
                for end, targets, sources in _groups(self._pieces):
                    # What does not block needs a stream to wait for afterwards.
                    torch._foreach_copy_(targets, sources, non_blocking=bool(self._streams))
                    if not self._streams:
                        self._advance(end)
            for stream in self._streams:
                stream.synchronize()
        except BaseException as error:  # noqa: BLE001 - raised again by wait()
            self._error = error
        finally:
            self._ended.set()
            self._advance(sys.maxsize)

    def _advance(self, offset: int) -> None:
        with self._progress:
            self._reached = offset
            self._progress.notify_all()

    def wait_until(self, offset: int) -> None:
        """Return when everything up to ``offset`` is copied.

        Raises:
            ImageAbandonedError: The copy has failed; :meth:`wait` raises why.
        """
        with self._progress:
            self._progress.wait_for(lambda: self._reached >= offset)
        if self._error is not None:
            raise ImageAbandonedError("the state could not be copied")

    def settle(self) -> None:
        """Return when nothing is copied any more, whatever has become of the copy."""
        wait_through(self._ended)

    def wait(self) -> None:
        """Return when all bytes are copied; raise what the copy raised."""
        self.settle()
        if self._error is not None:
            raise self._error


def wait_for_devices(tensors: Iterable[torch.Tensor]) -> None:
    """Return when what this thread has queued for CUDA tensors is done, so that other threads read what it has written."""
    for device in _cuda_devices(tensors):
        torch.cuda.current_stream(device).synchronize()


def _cuda_devices(tensors: Iterable[torch.Tensor]) -> Collection[torch.device]:
    return dict.fromkeys(tensor.device for tensor in tensors if tensor.is_cuda)


def _groups(
    pieces: Iterable[tuple[int, torch.Tensor, torch.Tensor]],
) -> Iterator[tuple[int, list[torch.Tensor], list[torch.Tensor]]]:
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    nbytes = end = 0
    for end, target, source in pieces:
        targets.append(target)
        sources.append(source)
        nbytes += source.numel()
        if nbytes >= COPY_GROUP:
            yield end, targets, sources
            targets, sources, nbytes = [], [], 0
    if targets:
        yield end, targets, sources


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
        changed = sum(tensor._version != version for tensor, version in zip(self._tensors, self._versions, strict=True))
        if changed:
            raise SnapshotTornError(
                f"{changed} of {len(self._tensors)} tensors changed while they were being copied; nothing was saved",
                path=path,
                remedy="do not let another thread train while a checkpoint is saved, or save between its steps",
            )


class Snapshot:
    """A copy of a state in a buffer, being made; its image can be written already, but not committed.

    Args:
        state: What ``torch.save`` would take.
        path: Where it will go, for messages.
        buffers: Lends the memory. It goes back by ``buffers.release(image.release())``.

    Attributes:
        image: The file's image.
    """

    def __init__(self, state: Any, *, path: str, buffers: BufferPool) -> None:
        self._state = state
        self._path = path
        self._layout = StateLayout(state)
        self._guard = TornSnapshotGuard(self._layout.tensors)
        buffer = buffers.acquire(self._layout.region_size)
        try:
            self._layout.fill_gaps(buffer)
            self._copy = BackgroundCopy(self._layout.pieces_in(buffer, COPY_GROUP))
        except BaseException:
            buffers.release(buffer)
            raise
        self.image = self._layout.staged_image(buffer, self._copy.wait_until)

    def finish(self) -> None:
        """Return when the copy is complete: the caller may change the state, and seal the image.

        Raises:
            SerializationError: An object cannot be pickled; the error names its key.
            SnapshotTornError: A tensor changed while it was being copied.
        """
        try:
            self._layout.pickle_into(self.image, self._state)
        finally:
            self.wait()
        self._guard.check(path=self._path)

    def wait(self) -> None:
        """Return when nothing is copied into the buffer any more; raise what the copy raised."""
        self._copy.wait()
