"""State to host copy: a reused, page-aligned, pre-faulted buffer, and the guard against torn snapshots.

Copying into memory that is used again and again runs at memory speed; copying into fresh memory runs at a fifth of it,
because every page must first be found and cleared. So buffers are kept between saves.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch

from ckpt_core._devices import SideStreams, wait_for_devices
from ckpt_core._layouts.image import ImageAbandonedError
from ckpt_core.errors import CheckpointError, OutOfMemoryError, SnapshotTornError
from ckpt_core.memory import StagingBuffer
from ckpt_core.parallel import wait_through

__all__ = [
    "COPY_GROUP",
    "BackgroundCopy",
    "BufferPool",
    "Layout",
    "Snapshot",
    "TornSnapshotGuard",
    "given_up",
]

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
        self._outside: list[StagingBuffer] = []  # those that are lent and may be kept when they come back
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
                self._outside.append(buffer)
                return buffer
            if len(idle) + self._lent > self._limit:
                # Replace one that is too small, so that memory never exceeds the limit.
                self._idle.remove(idle[0])
                idle[0].close()
        try:
            try:
                buffer = StagingBuffer(nbytes, pinned=True)
            except OutOfMemoryError:
                with self._changed:
                    self._free_idle()  # those that are too small
                buffer = StagingBuffer(nbytes, pinned=True)
        except BaseException:
            with self._changed:
                self._lent -= 1
                self._changed.notify()
            raise
        self._outside.append(buffer)
        return buffer

    def wait(self) -> None:
        """Return when a buffer is free."""
        with self._changed:
            self._changed.wait_for(lambda: self._lent < self._limit)

    def release(self, buffer: StagingBuffer) -> None:
        """Take a lent buffer back."""
        with self._changed:
            self._lent -= 1
            if buffer in self._outside:
                self._outside.remove(buffer)
                self._idle.append(buffer)
            else:
                buffer.close()
            self._changed.notify()

    def close(self) -> None:
        """Free the buffers, those that are lent when they come back."""
        with self._changed:
            self._outside.clear()
            self._free_idle()

    def _free_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()


class BackgroundCopy:
    """Copies tensors into host memory on its own thread, in order, so that others can pickle and write meanwhile.

    Each group of pieces is one call into torch, which holds no GIL and uses torch's threads. Tensors of accelerators
    are copied on a side stream of their device, which starts after the work already queued on the current one; the
    training thread waits in :meth:`wait`. However it ends, nothing is written to the targets afterwards, and no tensor
    is held.

    Args:
        pieces: ``(end, target, source)``: ``uint8`` tensors of the same size, and the offset that is reached with them.
    """

    def __init__(self, pieces: Iterable[tuple[int, torch.Tensor, torch.Tensor]]) -> None:
        self._pieces = list(pieces)
        self._reached = 0
        self._error: BaseException | None = None
        self._progress = threading.Condition()
        self._streams = SideStreams(source for _, _, source in self._pieces)
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
            with self._streams.entered(), torch.no_grad():
                try:
                    self._copy()
                finally:
                    self._streams.synchronize()  # whatever has failed: the targets are about to be used again
        except BaseException as error:  # noqa: BLE001 - raised again by wait()
            self._error = error
        finally:
            self._pieces = []  # what the caller has let go of is free from now on
            self._ended.set()
            self._advance(sys.maxsize)

    def _copy(self) -> None:
        queued = []
        for end, targets, sources in _groups(self._pieces):
            # What does not block needs a stream to wait for afterwards.
            torch._foreach_copy_(targets, sources, non_blocking=self._streams.may_be_late)
            if self._streams:
                queued.append((end, self._streams.record(sources)))
            else:
                self._advance(end)
        for end, events in queued:
            for event in events:
                event.synchronize()
            self._advance(end)

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


class Layout(Protocol):
    """Which tensors a state has, and where in a buffer they go."""

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The live tensors that are written."""

    @property
    def staged_size(self) -> int:
        """Bytes of the buffer that all of them need; 0 if they need none."""

    def pieces_in(self, buffer: StagingBuffer, nbytes: int) -> Iterable[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield what is to be copied into ``buffer`` as ``(end, target, source)``, in order.

        Args:
            buffer: At least ``staged_size`` bytes.
            nbytes: Largest size of a piece; ``end`` is the offset in the buffer at which it ends.
        """


class Snapshot:
    """The tensors of one save: being copied into a buffer of ours, or live while training waits.

    Two threads share it. The training thread takes the state, and seals it or gives up; the other one writes what is
    there already, and gives the buffer back, whatever has happened. In the foreground both are one thread.

    Args:
        path: The checkpoint, for messages.
        buffers: Lends the memory; None for live tensors, in the foreground.

    Attributes:
        is_live: Whether the save is in the foreground.
        buffer: What the tensors are copied into, if they are.
        not_copied: Why there is no copy, in the background: there is no memory for it. Training has to wait for the
            save.
        sealed_at: ``time.perf_counter()`` of the moment in which it was complete.
    """

    def __init__(self, path: str, buffers: BufferPool | None = None) -> None:
        self.is_live = buffers is None
        self.buffer: StagingBuffer | None = None
        self.not_copied: OutOfMemoryError | None = None
        self.sealed_at = 0.0
        self._path = path
        self._buffers = buffers
        self._guard = TornSnapshotGuard(())
        self._copy: BackgroundCopy | None = None
        self._failure: CheckpointError | None = None
        self._taken = threading.Event()
        self._sealed = threading.Event()

    # ---- the training thread -----------------------------------------------------------------------------------------

    def take(self, layout: Layout) -> None:
        """Begin to copy the tensors; those that are not copied may be read by other threads from now on."""
        self._guard = TornSnapshotGuard(layout.tensors)
        if self._buffers is not None and layout.staged_size:
            try:
                self.buffer = self._buffers.acquire(layout.staged_size)
            except OutOfMemoryError as error:
                self.not_copied = error
        if self.buffer is None:
            wait_for_devices(layout.tensors)
        else:
            self._copy = BackgroundCopy(layout.pieces_in(self.buffer, COPY_GROUP))

    def begin_writing(self) -> None:
        """Let the other thread write what there is already."""
        self._taken.set()

    def finish(self) -> None:
        """Return when the caller may change the state: it is copied, if it is to be, and its tensors are not held.

        Raises:
            SnapshotTornError: A tensor changed while it was being copied.
        """
        if self._copy is not None:
            self._copy.wait()
            self._guard.check(path=self._path)
            self._guard = TornSnapshotGuard(())

    def seal(self) -> None:
        """Declare that all is there: it may be committed."""
        self.sealed_at = time.perf_counter()
        self._sealed.set()

    def give_up(self, error: BaseException) -> None:
        """Declare that there is nothing to save; returns when nothing is copied any more.

        Args:
            error: Why.
        """
        self._failure = given_up(error, self._path)
        try:
            if self._copy is not None:
                self._copy.settle()
        finally:
            self._taken.set()
            self._sealed.set()

    @property
    def is_given_up(self) -> bool:
        """Whether there is nothing to save."""
        return self._failure is not None

    # ---- the thread that writes --------------------------------------------------------------------------------------

    def wait_taken(self) -> None:
        """Return when it is known what is to be written; raise if that is nothing."""
        self._taken.wait()
        self._raise_failure()

    def wait_until(self, offset: int) -> None:
        """Return when everything up to ``offset`` of the buffer is copied; raise if there is nothing to save."""
        self._raise_failure()
        assert self._copy is not None
        try:
            self._copy.wait_until(offset)
        except ImageAbandonedError:
            self._sealed.wait()  # the training thread is about to say why
            self._raise_failure()
            raise

    def wait_sealed(self) -> None:
        """Return when the whole state was taken; called when all tensors that were not copied have been written.

        Raises:
            SnapshotTornError: One of them was changed meanwhile.
            CheckpointError: There is nothing to save.
        """
        if not self.is_live:
            self._sealed.wait()
        self._raise_failure()
        if self._copy is None:
            self._guard.check(path=self._path)

    def release(self) -> None:
        """Give the buffer back when nothing is copied into it any more."""
        if not self.is_live:
            self._sealed.wait()
        buffer, self.buffer = self.buffer, None
        if buffer is not None and self._buffers is not None:
            self._buffers.release(buffer)
        self._guard = TornSnapshotGuard(())  # lets go of the tensors
        self._copy = None

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def given_up(error: BaseException, path: str) -> CheckpointError:
    """Return the error that other ranks raise for an exception that ended the save on one."""
    if isinstance(error, CheckpointError):
        return error
    failure = CheckpointError(f"the save failed: {type(error).__name__}: {error}", path=path)
    failure.__cause__ = error
    return failure
