"""State to host copy: a reused, page-aligned, pre-faulted buffer, and the guard against torn snapshots.

Copying into memory that is used again and again runs at memory speed; copying into fresh memory runs at a fifth of it,
because every page must first be found and cleared. So buffers are kept between saves.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from ckpt_core.errors import SnapshotTornError
from ckpt_core.layouts.torch_file.image import FileImage, StateLayout
from ckpt_core.memory import StagingBuffer
from ckpt_core.parallel import wait_through

__all__ = ["BackgroundCopy", "BufferPool", "TornSnapshotGuard", "take_snapshot"]


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
            with torch.no_grad(), torch.cuda.stream(self._stream):  # a None stream changes nothing
                if self._targets:
                    torch._foreach_copy_(self._targets, self._sources, non_blocking=True)
            if self._stream is not None:
                self._stream.synchronize()
        except BaseException as error:  # noqa: BLE001 - raised again by wait()
            self._error = error
        finally:
            self._ended.set()

    def wait(self) -> None:
        """Return when all bytes are copied; raise what the copy raised."""
        wait_through(self._ended)
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
        changed = sum(tensor._version != version for tensor, version in zip(self._tensors, self._versions, strict=True))
        if changed:
            raise SnapshotTornError(
                f"{changed} of {len(self._tensors)} tensors changed while they were being copied; nothing was saved",
                path=path,
                remedy="do not let another thread train while a checkpoint is saved, or save between its steps",
            )


def take_snapshot(state: Any, *, path: str, buffers: BufferPool) -> FileImage:
    """Copy ``state`` into a buffer, as the image of a torch file; the caller may change it as soon as this returns.

    Args:
        state: What ``torch.save`` would take.
        path: Where it will go, for messages.
        buffers: Lends the memory. It goes back by ``buffers.release(image.release())``.

    Raises:
        SerializationError: An object cannot be pickled; the error names its key.
        SnapshotTornError: A tensor changed while it was being copied.
    """
    layout = StateLayout(state)
    guard = TornSnapshotGuard(layout.tensors)
    buffer = buffers.acquire(layout.region_size)
    try:
        copy = BackgroundCopy(layout.targets_in(buffer), layout.sources)
        try:
            layout.fill_gaps(buffer)
            image = layout.image(state, staged=buffer)
        finally:
            copy.wait()
        guard.check(path=path)
    except BaseException:
        buffers.release(buffer)
        raise
    return image
