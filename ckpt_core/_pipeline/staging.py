"""Stages one state: copies it into a host buffer while another thread writes from it; fails if the copy is torn."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from ckpt_core._devices.streams import is_capturing, wait_for_devices
from ckpt_core._layouts.image import Image, ImageAbandonedError
from ckpt_core._pipeline.buffer_pool import BufferPool
from ckpt_core._pipeline.device_copy import COPY_GROUP, BackgroundCopy, Piece
from ckpt_core._pipeline.host_copy import HOST_PIECE, HostCopy
from ckpt_core._pipeline.low_memory_copy import RelayedImage, WindowRelay
from ckpt_core.buffers import Move, StagingBuffer
from ckpt_core.errors import CheckpointError, OutOfMemoryError, SnapshotTornError
from ckpt_core.process.threads import Latch


class TornSnapshotGuard:
    """Detects tensors that were modified, through torch, between the beginning and the end of a snapshot.

    Compares autograd's version counters. Changes through ``tensor.data`` or a NumPy view do not increment them and are
    not detected.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        try:
            self._tensors, self._versions = list(tensors), [tensor._version for tensor in tensors]
        except RuntimeError:  # tensors made in inference mode have no version counter
            self._tensors = [tensor for tensor in tensors if not tensor.is_inference()]
            self._versions = [tensor._version for tensor in self._tensors]

    def check(self, *, path: str) -> None:
        """Raise a ``SnapshotTornError`` if a tensor has changed since this guard was made."""
        versions = [tensor._version for tensor in self._tensors]
        if versions != self._versions:
            changed = sum(map(operator.ne, versions, self._versions))
            raise SnapshotTornError(
                f"{changed} of {len(self._tensors)} tensors changed while they were being copied; nothing was saved",
                path=path,
                remedy="do not let another thread train while a checkpoint is saved, or save between its steps",
            )


class Layout(Protocol):
    """The tensors of a state, and the offset of each in the staging buffer."""

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The live tensors to save."""

    @property
    def staged_size(self) -> int:
        """Size in bytes of the buffer that all tensors need; 0 if they need none."""

    def pieces_in(self, buffer: StagingBuffer, nbytes: int) -> Iterable[Piece]:
        """Yield the pieces to copy into ``buffer``, in order, as ``(end, target, source)``.

        ``end`` is the offset in the buffer at which the piece ends. A piece has at most ``nbytes``, except where a
        device holds the bytes exactly as they are saved: such a piece is split later, when it is copied.
        """

    def moves_in(self, buffer: StagingBuffer, nbytes: int) -> Iterable[Move]:
        """Yield the same copies as :meth:`pieces_in`, in any order; only for tensors that are all in host memory."""


class Snapshot:
    """The tensors of one save: copied into a staging buffer, or read live while training waits.

    Two threads share a snapshot. The training thread takes the state, then seals the snapshot or gives it up. The
    writer thread writes what is already copied, and always releases the buffer at the end. In the foreground (without
    ``buffers``), one thread does both. With ``overlaps``, copies from an accelerator continue after :meth:`finish`,
    until the next optimizer step (:mod:`ckpt_core._pipeline.device_copy`).
    """

    def __init__(self, path: str, buffers: BufferPool | None = None, *, overlaps: bool = False) -> None:
        self.is_live = buffers is None  # the save is in the foreground
        self.buffer: StagingBuffer | None = None  # where all tensors are copied, if one buffer holds them all
        self.not_copied: OutOfMemoryError | None = None  # no memory for a copy: training waits until all is written
        self.may_relay = True  # whether a smaller buffer will do, because another thread writes and frees its windows
        self.failure: CheckpointError | None = None  # why there is nothing to save, if the save was given up
        self.sealed_at = 0.0  # by time.perf_counter()
        self._path = path
        self._buffers = buffers
        self._overlaps = overlaps
        self._guard = TornSnapshotGuard(())
        self._copy: BackgroundCopy | HostCopy | None = None
        self._lent: StagingBuffer | None = None
        self._passing: WindowRelay | None = None
        self._taken = Latch()
        self._sealed = Latch()

    # ---- the training thread -----------------------------------------------------------------------------------------

    def take(self, layout: Layout) -> None:
        """Begin to copy the tensors; those that are not going to be copied may now be read by other threads."""
        if is_capturing(layout.tensors):
            raise CheckpointError(
                "save was called while a CUDA graph is being captured: the work that computes the state is only "
                "recorded, and nothing of it was done",
                path=self._path,
                remedy="save outside of torch.cuda.graph(), before the capture or after a replay",
            )
        self._guard = TornSnapshotGuard(layout.tensors)
        if self._buffers is not None and layout.staged_size:
            try:
                self._lent = self._buffers.acquire(layout.staged_size)
                self._use(self._lent, layout.staged_size)
            except OutOfMemoryError as error:
                self.not_copied = error
        if self.buffer is None:
            wait_for_devices(layout.tensors)
        elif all(tensor.is_cpu for tensor in layout.tensors):
            self._copy = HostCopy(layout.moves_in(self.buffer, HOST_PIECE))
        else:
            self._copy = BackgroundCopy(layout.pieces_in(self.buffer, COPY_GROUP), overlaps=self._overlaps)

    def _use(self, buffer: StagingBuffer, nbytes: int) -> None:
        if buffer.nbytes >= nbytes:
            self.buffer = buffer
        elif self.may_relay:
            self._passing = WindowRelay(buffer, self._raise_why_not_copied)
        else:
            raise OutOfMemoryError(
                f"the state has {nbytes} bytes, and max_host_bytes leaves {buffer.nbytes} for a copy",
                remedy="raise max_host_bytes, or leave it out",
            )

    @property
    def is_copied(self) -> bool:
        """Whether the save no longer needs the live tensors once :meth:`finish` has returned."""
        return self._lent is not None and self.not_copied is None

    @property
    def seconds_without_memory(self) -> float:
        """Seconds for which the copy has waited for memory, because ``max_host_bytes`` is less than the state."""
        return 0.0 if self._passing is None else self._passing.seconds_without_room

    def begin_writing(self) -> None:
        """Let the writer thread begin to write what is copied so far."""
        self._taken.set()

    def finish(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Return when the caller may change the state; if the copy overlaps, only by an optimizer step.

        The calling thread calls ``meanwhile`` while the state is being copied. The writer thread begins once that call
        has ended, or with :meth:`seal` if the copy overlaps: earlier, the two threads would compete for the GIL and
        delay training. For host memory, the writer begins once all is copied: some file systems (tmpfs) fill a file
        with zeros to allocate it, which would take memory bandwidth from the copy.
        """

        def then_write() -> None:
            meanwhile()
            if not self._overlaps or self._copy is None:
                self.begin_writing()

        if self._passing is not None:
            then_write()
            self._passing.copy()
        elif isinstance(self._copy, HostCopy):
            self._copy.hand_over(meanwhile)
            if not self._overlaps:
                self.begin_writing()
        elif self._copy is not None:
            self._copy.hand_over(then_write)
        else:
            then_write()
            return
        self._guard.check(path=self._path)
        self._guard = TornSnapshotGuard(())

    def seal(self) -> None:
        """Declare the snapshot complete, so that it may be committed."""
        self.sealed_at = time.perf_counter()
        self._taken.set()
        self._sealed.set()

    def give_up(self, error: BaseException) -> None:
        """Declare that there is nothing to save because of ``error``; return when no copy is running any more."""
        self.failure = given_up(error, self._path)
        self.failure.raised_at_once = True
        try:
            if self._copy is not None:
                self._copy.abandon()
            if self._passing is not None:
                self._passing.give_up()
        finally:
            self._taken.set()
            self._sealed.set()

    @property
    def is_sealed(self) -> bool:
        """Whether the writer no longer waits for the training thread; a signal handler on that thread may ask, too."""
        if not self._sealed.is_set():
            return False
        self._sealed.set()  # again: the handler may have interrupted the first call before it released all waiters
        return True

    # ---- the thread that writes --------------------------------------------------------------------------------------

    def wait_begun(self) -> None:
        """Return when there is something to write, or when it is known that there will not be."""
        self._taken.wait()

    def wait_taken(self) -> None:
        """Return when it is known what to write; raise if the save was given up."""
        self._taken.wait()
        self._raise_failure()

    def pass_through(
        self, files: Sequence[tuple[str, Image]], is_there: Callable[[str, Image], bool] = lambda *_: False
    ) -> list[tuple[str, RelayedImage]] | None:
        """Begin to copy ``files`` through a buffer smaller than the state; return None if the buffer is not smaller.

        ``files`` are in writing order. ``is_there``, called before each is copied, says if it need not be written.
        """
        return None if self._passing is None else self._passing.begin(files, is_there)

    def wait_until(self, offset: int) -> None:
        """Return when everything up to ``offset`` in the buffer is copied; raise if there is nothing to save."""
        self._raise_failure()
        assert self._copy is not None
        try:
            self._copy.wait_until(offset)
        except ImageAbandonedError:
            self._raise_why_not_copied()
            self._check_copy(self._copy)
            raise

    def _raise_why_not_copied(self) -> None:
        self._sealed.wait()  # until the training thread has sealed the snapshot, or set the failure
        self._raise_failure()

    def wait_sealed(self) -> None:
        """Return when the whole state is taken; called when the tensors that were not copied have been written."""
        if not self.is_live:
            self._sealed.wait()
        self._raise_failure()
        if self._copy is None:
            self._guard.check(path=self._path)
        else:
            self._check_copy(self._copy)

    def _check_copy(self, copy: BackgroundCopy | HostCopy) -> None:
        try:
            is_whole = copy.wait()
        except BaseException as error:  # the copying thread has ended, so its error is raised here
            raise given_up(error, self._path) from error
        if not is_whole:
            raise SnapshotTornError(
                "parameters or an optimizer's state were changed by something else than the optimizer's step while "
                "they were being copied; nothing was saved, and later saves wait for their copies",
                path=self._path,
                remedy="call wait_staged() of the checkpointer before you change them (weights that are swapped for "
                "validation, clamped or loaded, replays of CUDA graphs), or set overlap=False",
            )

    def release(self) -> None:
        """Give the buffer back once nothing is copied into it any more; safe to call twice."""
        if self._passing is not None:
            self._passing.abandon()  # no window will be written any more, so training must not wait for one
        if not self.is_live:
            self._sealed.wait()
        if self._copy is not None:
            self._copy.settle()
        if self._passing is not None:
            self._passing.settle()
        if self._lent is not None and self._buffers is not None:
            self._buffers.release(self._lent)
        self._lent = self.buffer = None
        self._guard = TornSnapshotGuard(())  # releases the references to the tensors
        self._copy = None

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure


def given_up(error: BaseException, path: str) -> CheckpointError:
    """Return the error that other ranks raise for the exception that ended the save on this rank."""
    if isinstance(error, CheckpointError):
        return error
    failure = CheckpointError(f"the save failed: {type(error).__name__}: {error}", path=path)
    failure.__cause__ = error
    return failure
