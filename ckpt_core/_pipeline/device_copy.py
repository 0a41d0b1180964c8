"""Stages tensors of accelerators: copies them into a host buffer on side streams, optionally overlapped with training.

Copies run on a side stream, after the work already queued. Where they overlap with training, the training thread waits
for none of them, and the devices wait as late as is correct:

- What only an optimizer step changes (the parameters of the optimizer and their state) is copied late: during the next
  forward and backward pass. The step's stream waits for it, in a hook that torch calls before every optimizer step.
- Everything else is copied early: the streams of the saving thread wait for it when the save returns. So no rule is
  needed for buffers, gradients and averages of weights, which change without any hook being called.
- Whether anything but the optimizer has written to what is copied late is checked, by sums over its bytes: taken before
  any work queued after the save, and again after the copy. If the sums differ, the save fails.
"""

from __future__ import annotations

import bisect
import collections
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckpt_core._devices.row_sums import WORD, RowSums
from ckpt_core._devices.streams import Events, SideStreams, let_devices_wait
from ckpt_core._layouts.image import ImageAbandonedError
from ckpt_core._layouts.safetensors import resolved
from ckpt_core.geometry import merged
from ckpt_core.process.threads import Latch, start, wait_uninterrupted

COPY_GROUP = 64 * 2**20  # bytes copied by one call: takes so long that acquiring the GIL between calls is negligible
LATE_PIECE = 2**20  # bytes: copying less takes no longer than queueing the sums over it
_WIDEST = 4  # bytes per element: in wider ones, the sums miss it if the signs of two change
EARLY_BYTES = 64 * 2**20  # device memory that a save may still hold when it returns, in addition to what is copied late

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)

Piece = tuple[int, torch.Tensor, torch.Tensor]
_Ranges = dict[torch.device, list[tuple[int, int]]]

_lock = threading.RLock()  # a signal handler that saves may interrupt the step of an optimizer
_hooks: list[Any] = []  # the handle of the global hook, once a checkpointer overlaps its copies
# Optimizers for which the global hook was called, each with the handle of the hook that we registered last on it.
_stepped: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()
_under_way: list[BackgroundCopy] = []  # unfinished copies that copy something late


class BackgroundCopy:
    """The copy of a state from accelerators into host memory, made after the queued work and while the caller pickles.

    Tensors are copied on a side stream of their device, after the work already queued on the current stream. The
    calling thread queues the early copies, for which it (with ``overlaps``: its devices) has to wait. A thread of this
    object queues the late copies, and waits for all; it starts after the caller has pickled, to avoid competing for the
    GIL. However the copy ends, nothing is written to the targets afterwards, and no tensor is referenced.

    ``pieces`` are ``(end, target, source)``: two ``uint8`` tensors of the same size, and the offset where they end.
    """

    def __init__(self, pieces: Iterable[Piece], *, overlaps: bool = False) -> None:
        early, late = list(pieces), list[Piece]()
        if overlaps:
            early, late = _divide(early)
        # In this order, because the copies have to run after the sums.
        self._sums = RowSums(sources for _, _, sources in _groups(late))
        self._streams = SideStreams(source for _, _, source in [*early, *late])
        self._overlaps = overlaps and self._streams.may_be_late
        if late and not self._overlaps:  # a device without streams, which the host has already waited for
            early, late = sorted([*early, *late], key=_end), []
            self._sums = RowSums([])
        self._late = late
        self._reached = 0
        self._error: BaseException | None = None
        self._is_torn = False
        self._progress = threading.Condition()
        self._late_events: Events = {}
        self._is_late_queued = Latch()
        # Acquired by _run on its thread or by abandon, whichever is first. Reentrant: abandon may run twice (Ctrl-C).
        self._claim = threading.RLock()
        self._ended = Latch()
        # Much device memory that only the save holds must be free again when the save returns.
        self._waits_for_early = sum(source.numel() for _, _, source in early if not source.is_cpu) > EARLY_BYTES
        try:
            with self._streams.entered(), torch.inference_mode(False), torch.no_grad():
                self._queued = self._queue(early)
                self._early_events = self._streams.record(source for _, _, source in early)
        except BaseException:
            self._streams.synchronize()
            raise
        if late:
            _under_way.append(self)

    # ---- the thread that copies --------------------------------------------------------------------------------------

    def _run(self) -> None:
        if not self._claim.acquire(blocking=False):
            return
        try:
            with self._streams.entered(), torch.no_grad():
                try:
                    self._copy_late()
                    self._is_torn = self._sums.differ()
                finally:
                    self._streams.synchronize()  # also after an error: the targets are about to be reused
        except BaseException as error:  # noqa: BLE001 - raised again by wait()
            self._error = error
        finally:
            self._end()

    def _copy_late(self) -> None:
        late, self._late = self._late, []
        queued = self._queue(late, sums=self._sums)
        self._late_events = self._streams.record(source for _, _, source in late)
        self._is_late_queued.set()
        # With late pieces, the early ones are not contiguous in the buffer, so no offset can be reported for them.
        self._follow(self._queued, advances=not late)
        late = []
        self._follow(queued)

    def _end(self) -> None:
        self._late = []  # release the tensors: this may be the last reference
        self._queued.clear()
        self._sums = RowSums([])
        self._is_late_queued.set()
        self._ended.set()
        if self in _under_way:
            _under_way.remove(self)
        self._advance(sys.maxsize)

    def _queue(self, pieces: list[Piece], *, sums: RowSums | None = None) -> _Queued:
        """Queue the copies, group by group; without streams, make them at once."""
        queued: _Queued = collections.deque()
        for end, targets, sources in _groups(pieces):
            # A non-blocking copy can only be waited for on a stream.
            torch._foreach_copy_(targets, list(map(resolved, sources)), non_blocking=self._streams.may_be_late)
            if sums is not None:
                sums.add(sources)
            queued.append((end, self._streams.record(sources), sources))
        return queued

    def _follow(self, queued: _Queued, *, advances: bool = True) -> None:
        """Wait for queued copies, and release the tensors that they have copied."""
        while queued:
            end, events, _ = queued.popleft()
            for event in events.values():
                event.synchronize()
            if advances:
                self._advance(end)

    def _advance(self, offset: int) -> None:
        with self._progress:
            self._reached = offset
            self._progress.notify_all()

    # ---- the thread that trains --------------------------------------------------------------------------------------

    def hand_over(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Return when the caller may change the state; what is copied late, only by an optimizer step.

        The calling thread calls ``meanwhile`` first. Errors of ``meanwhile`` and of the copy are raised here, except
        with ``overlaps`` those of the background thread, which :meth:`wait` raises.
        """
        meanwhile()
        if self._overlaps and self._waits_for_early:
            self._follow(self._queued, advances=False)
        try:
            start(threading.Thread(target=self._run, name="ckpt-staging"))
        except RuntimeError:  # no memory, or the interpreter is shutting down
            self._run()
        if self._overlaps:
            let_devices_wait(self._early_events)
        else:
            self.wait()

    def let_training_wait(self) -> None:
        """Make what this thread queues on devices from now on wait for the late copies, too."""
        wait_uninterrupted(self._is_late_queued)
        let_devices_wait(self._late_events)

    def abandon(self) -> None:
        """Return when no copy is running any more; for when :meth:`hand_over` has raised or will not be called."""
        if not self._claim.acquire(blocking=False):
            self.settle()
            return
        self._error = ImageAbandonedError("the save was given up")
        try:
            self._streams.synchronize()
        finally:
            self._end()

    def settle(self) -> None:
        """Return when no copy is running any more, even if the copy failed."""
        wait_uninterrupted(self._ended)

    def wait(self) -> bool:
        """Wait until the copy has ended; return whether all bytes are of one moment, or raise what the copy raised."""
        self.settle()
        if self._error is not None:
            raise self._error
        return not self._is_torn

    # ---- the thread that writes --------------------------------------------------------------------------------------

    def wait_until(self, offset: int) -> None:
        """Return when everything up to ``offset`` is copied; raise if the copy failed (:meth:`wait` raises why)."""
        with self._progress:
            self._progress.wait_for(lambda: self._reached >= offset)
        if self._error is not None:
            raise ImageAbandonedError("the state could not be copied")


_Queued = collections.deque[tuple[int, Events, list[torch.Tensor]]]


def _end(piece: Piece) -> int:
    return piece[0]


def _groups(pieces: Iterable[Piece]) -> Iterator[tuple[int, list[torch.Tensor], list[torch.Tensor]]]:
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    nbytes = end = 0
    for end, target, source in _divided(pieces):
        targets.append(target)
        sources.append(source)
        nbytes += source.numel()
        if nbytes >= COPY_GROUP:
            yield end, targets, sources
            targets, sources, nbytes = [], [], 0
    if targets:
        yield end, targets, sources


def _divided(pieces: Iterable[Piece]) -> Iterator[Piece]:
    for end, target, source in pieces:
        size = source.numel()
        if size <= COPY_GROUP or source.ndim != 1 or source.dtype is not torch.uint8:
            yield end, target, source
            continue
        parts = zip(target.split(COPY_GROUP), source.split(COPY_GROUP), strict=True)
        for number, (into, part) in enumerate(parts, start=1):
            yield end - size + min(number * COPY_GROUP, size), into, part


# ---- what is copied late ---------------------------------------------------------------------------------------------


def _divide(pieces: Iterable[Piece]) -> tuple[list[Piece], list[Piece]]:
    """Divide pieces into those to copy early, and those to copy late because only an optimizer step changes them."""
    ranges = _ranges_of_optimizers()
    early, late = list[Piece](), list[Piece]()
    for piece in pieces:
        end, target, source = piece
        if not _may_be_late(source, ranges):
            early.append(piece)
        elif rest := source.numel() % WORD:
            late.append((end - rest, target[:-rest], source[:-rest]))
            early.append((end, target[-rest:], source[-rest:]))
        else:
            late.append(piece)
    return early, late


def _may_be_late(source: torch.Tensor, ranges: _Ranges) -> bool:
    known, size = ranges.get(source.device), source.numel()
    if not known or size < LATE_PIECE or source.dtype is not torch.uint8 or source.stride() != (1,):
        return False
    begin = source.data_ptr()
    if begin % WORD or source.storage_offset() % WORD:
        return False
    index = bisect.bisect_right(known, (begin, sys.maxsize)) - 1
    return index >= 0 and begin + size <= known[index][1]


def _ranges_of_optimizers() -> _Ranges:
    """Return the address ranges, per device, that watched optimizers change; adjacent ranges are merged."""
    with _lock:
        optimizers = list(_stepped)
    found: dict[torch.device, list[tuple[int, int]]] = {}
    for optimizer in optimizers:
        for tensor in _tensors_of(optimizer):
            if tensor.is_cpu or tensor.is_meta or tensor.layout is not torch.strided or tensor.itemsize > _WIDEST:
                continue
            if not tensor.is_contiguous() and not _is_dense(tensor):
                continue
            begin = tensor.data_ptr()
            found.setdefault(tensor.device, []).append((begin, begin + tensor.nbytes))
    return {device: merged(ranges) for device, ranges in found.items()}


def _tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            for tensor in (parameter, *(state.values() if isinstance(state, dict) else ())):
                if type(tensor) in _PLAIN_TYPES:
                    yield tensor
                # Of a DTensor, the local part.
                elif hasattr(tensor, "to_local") and type(local := tensor.to_local().detach()) in _PLAIN_TYPES:
                    yield local


def _is_dense(tensor: torch.Tensor) -> bool:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() == last + 1


# ---- who waits for it ------------------------------------------------------------------------------------------------


def watch_optimizers() -> None:
    """Register a hook on all optimizers, so that every step from now on waits for what is copied late."""
    with _lock:
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_before_step))
            os.register_at_fork(after_in_child=_under_way.clear)  # a forked child has neither streams nor the thread


def wait_staged() -> None:
    """Make what the caller queues on accelerators from now on wait until the state of all saves so far is copied.

    To be called, where saves overlap with training, before anything other than a step of a ``torch.optim.Optimizer``
    changes parameters or optimizer state. The devices wait; this function returns at once.
    """
    for copy in tuple(_under_way):
        copy.let_training_wait()


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():  # it is only traced: the compiled step would not wait
        return
    # The optimizer's own hooks run after this one, and may save: the step waits again in the last hook, re-registered.
    with _lock:
        if (last := _stepped.pop(optimizer, None)) is not None:
            last.remove()
        _stepped[optimizer] = optimizer.register_step_pre_hook(_after_other_hooks)
    if not _calls_closure_first(optimizer, args, kwargs):
        wait_staged()


def _after_other_hooks(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    if torch.compiler.is_compiling():
        return None
    if not _calls_closure_first(optimizer, args, kwargs):
        wait_staged()
        return None
    closure = _closure(args, kwargs)

    def closure_then_wait() -> Any:
        result = closure()
        wait_staged()
        return result

    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure_then_wait}
    return (args[0], closure_then_wait, *args[2:]), kwargs


def _closure(args: Any, kwargs: Any) -> Any:
    return kwargs["closure"] if "closure" in kwargs else next(iter(args[1:]), None)


def _calls_closure_first(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> bool:
    """Return whether the step calls a closure before it changes anything: Lightning's closure may save."""
    return callable(_closure(args, kwargs)) and type(optimizer).__module__.startswith("torch.optim.")
