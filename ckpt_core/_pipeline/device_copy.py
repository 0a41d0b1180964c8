"""Copies of a state into a staging buffer: in which order, on which streams, and who waits for them.

Tensors of accelerators are copied on a side stream behind the work that is queued. Where copies overlap with training,
the training thread waits for none of them, and the devices wait as late as is right:

- What only an optimizer's step changes, its parameters and their state, is copied late: while the next forward and
  backward pass run. The step's stream waits for it, in a hook that torch calls before every step of every optimizer.
- Everything else is copied early: the streams of the thread that saves wait for it when the save returns. So no rule
  is needed for buffers, gradients and averages of weights, whose changes nobody announces.
- That nothing else has written to what is copied late is not believed but checked, by sums over its bytes: before
  anything that comes after the save, and after the copy. If they differ, the save fails.
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
from ckpt_core.process.threads import Latch, start, wait_through

COPY_GROUP = 64 * 2**20  # bytes copied by one call: long enough that taking the GIL between two does not count
LATE_PIECE = 2**20  # bytes: to copy less takes no longer than to queue its sums
_WIDEST = 4  # bytes of a number: of wider ones, the sums do not see the signs
EARLY_BYTES = 64 * 2**20  # of devices that a save may hold when it returns; what is copied late stays there anyway

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)

Piece = tuple[int, torch.Tensor, torch.Tensor]
_Ranges = dict[torch.device, list[tuple[int, int]]]

_lock = threading.RLock()  # a signal handler that saves may interrupt the step of an optimizer
_hooks: list[Any] = []  # one, when there is a checkpointer that overlaps
# Those that have stepped since they are watched, which the hook reaches, with the handle of their own last hook.
_stepped: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()
_under_way: list[BackgroundCopy] = []  # those that copy something late


class BackgroundCopy:
    """Copies tensors of accelerators into host memory, behind the work that is queued, while the caller pickles.

    They are copied on a side stream of their device, which starts after the work already queued on the current one. The
    calling thread queues what it has to wait for, or its devices have to (with ``overlaps``); a thread of this class
    queues the rest, and waits. It starts when the caller has pickled: both would take the GIL from each other, at every
    tensor. However it ends, nothing is written to the targets afterwards, and no tensor is held.

    ``pieces`` are ``(end, target, source)``: ``uint8`` tensors of the same size, and the offset that is reached with
    them.
    """

    def __init__(self, pieces: Iterable[Piece], *, overlaps: bool = False) -> None:
        early, late = list(pieces), list[Piece]()
        if overlaps:
            early, late = _divide(early)
        # In this order: the copies begin behind the sums.
        self._sums = RowSums(sources for _, _, sources in _groups(late))
        self._streams = SideStreams(source for _, _, source in [*early, *late])
        self._overlaps = overlaps and self._streams.may_be_late
        if late and not self._overlaps:  # a device without streams, for which the host has waited
            early, late = sorted([*early, *late], key=_end), []
            self._sums = RowSums([])
        self._late = late
        self._reached = 0
        self._error: BaseException | None = None
        self._is_torn = False
        self._progress = threading.Condition()
        self._late_events: Events = {}
        self._is_late_queued = Latch()
        # For the thread, or for whoever gives up on it, whichever comes first; the latter twice where Ctrl-C ends it.
        self._claim = threading.RLock()
        self._ended = Latch()
        # What a save holds for its own sake must not stay when it returns, if it is much.
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
                    self._streams.synchronize()  # whatever has failed: the targets are about to be used again
        except BaseException as error:  # noqa: BLE001 - raised again by wait()
            self._error = error
        finally:
            self._end()

    def _copy_late(self) -> None:
        late, self._late = self._late, []
        queued = self._queue(late, sums=self._sums)
        self._late_events = self._streams.record(source for _, _, source in late)
        self._is_late_queued.set()
        # Early ones are not in the order of the buffer where there are late ones.
        self._follow(self._queued, advances=not late)
        late = []
        self._follow(queued)

    def _end(self) -> None:
        self._late = []  # what the caller has let go of is free from now on
        self._queued.clear()
        self._sums = RowSums([])
        self._is_late_queued.set()
        self._ended.set()
        if self in _under_way:
            _under_way.remove(self)
        self._advance(sys.maxsize)

    def _queue(self, pieces: list[Piece], *, sums: RowSums | None = None) -> _Queued:
        """Queue copies, group by group, or make those that no stream is needed for."""
        queued: _Queued = collections.deque()
        for end, targets, sources in _groups(pieces):
            # What does not block needs a stream to wait for afterwards.
            torch._foreach_copy_(targets, list(map(resolved, sources)), non_blocking=self._streams.may_be_late)
            if sums is not None:
                sums.add(sources)
            queued.append((end, self._streams.record(sources), sources))
        return queued

    def _follow(self, queued: _Queued, *, advances: bool = True) -> None:
        """Wait for queued copies, and let go of what they have copied."""
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
        """Return when the caller may change the state, by a step of an optimizer what is copied late.

        The calling thread does ``meanwhile`` first. What that or the copy raises is raised, but for what is copied
        late: :meth:`wait` does.
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
        """Let what this thread queues from now on wait for the late copies, too."""
        wait_through(self._is_late_queued)
        let_devices_wait(self._late_events)

    def abandon(self) -> None:
        """Return when nothing is copied any more; :meth:`hand_over` has raised, or is never called."""
        if not self._claim.acquire(blocking=False):
            self.settle()
            return
        self._error = ImageAbandonedError("the save was given up")
        try:
            self._streams.synchronize()
        finally:
            self._end()

    def settle(self) -> None:
        """Return when nothing is copied any more, whatever has become of the copy."""
        wait_through(self._ended)

    def wait(self) -> bool:
        """Return when all bytes are copied: whether they are the bytes of one moment; raise what the copy raised."""
        self.settle()
        if self._error is not None:
            raise self._error
        return not self._is_torn

    # ---- the thread that writes --------------------------------------------------------------------------------------

    def wait_until(self, offset: int) -> None:
        """Return when everything up to ``offset`` is copied; if that failed, :meth:`wait` raises why."""
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
    """Divide pieces into what is copied early, and what only the step of an optimizer changes."""
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
    """Return the addresses of what the optimizers change whose steps the hook sees; those that touch are one."""
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
                # Of a DTensor, what this process has of it.
                elif hasattr(tensor, "to_local") and type(local := tensor.to_local().detach()) in _PLAIN_TYPES:
                    yield local


def _is_dense(tensor: torch.Tensor) -> bool:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() == last + 1


# ---- who waits for it ------------------------------------------------------------------------------------------------


def watch_optimizers() -> None:
    """Learn of every optimizer that steps from now on, so that a step can wait for what is copied late."""
    with _lock:
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_before_step))
            os.register_at_fork(after_in_child=_under_way.clear)  # a forked child has no streams, and no such thread


def wait_staged() -> None:
    """Let what the caller queues on accelerators from now on wait until the state of the saves so far is copied.

    For what changes parameters or an optimizer's state, and is no step of a ``torch.optim.Optimizer``, where saves
    overlap with training. The devices wait; this returns at once.
    """
    for copy in tuple(_under_way):
        copy.let_training_wait()


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():  # it would not be called again
        return
    # An optimizer's own hooks are called after this one, and may save: whoever changes the state waits after them, too.
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
    """Whether the step calls a closure before it changes anything, in which Lightning computes all, and may save."""
    return callable(_closure(args, kwargs)) and type(optimizer).__module__.startswith("torch.optim.")
