"""Stages tensors that are in host memory: the training thread and a few helpers copy them before anything is written.

Writing at the same time would take memory bandwidth from the copy, and training waits for the copy. torch's own thread
pool is not used: its threads wait for each other after every tensor, which takes milliseconds on busy processors, and
they read the memory that they are about to overwrite.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from ckpt_core._layouts.image import ImageAbandonedError
from ckpt_core.buffers import Move
from ckpt_core.process.threads import Latch, run_parallel

HOST_PIECE = 8 * 2**20  # bytes: takes about half a millisecond, so the threads end at most that far apart
_SMALL = 2**16  # bytes: below this, releasing the GIL takes longer than copying
_WORTH_THE_GIL = 2 * 2**20  # bytes: threads that copy less per call keep taking the GIL from the pickling thread
_FEW = 64  # copies
_MOST_THREADS = 8  # more threads do not copy faster

_move_small = ctypes.PyDLL(None).memmove  # PyDLL: keeps the GIL during the call
_move_small.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_move_small.restype = None


class HostCopy:
    """The copy of a state in host memory, made while the caller waits or does other work."""

    def __init__(self, moves: Iterable[Move]) -> None:
        self._moves = list(moves)
        self._is_whole = False
        self._ended = Latch()

    def hand_over(self, meanwhile: Callable[[], None] | None = None) -> None:
        """Copy everything; afterwards the caller may change the state.

        The calling thread calls ``meanwhile`` first and then helps to copy. Exceptions of both are raised.
        """
        moves, self._moves = self._moves, []
        threads = min(max(2, torch.get_num_threads()), _MOST_THREADS, 1 + len(moves))
        try:
            is_many = len(moves) > _FEW and sum(map(_size, moves)) < len(moves) * _WORTH_THE_GIL
            if meanwhile is not None and is_many:
                meanwhile()
                meanwhile = None
            run_parallel(_copy, _batches(moves), threads=threads, meanwhile=meanwhile)
            self._is_whole = True
        finally:
            self._ended.set()

    def abandon(self) -> None:
        """Declare that nothing will be copied any more; :meth:`hand_over` is not called after this."""
        self._moves = []
        self._ended.set()

    def settle(self) -> None:
        """Return when no copy is running any more."""
        self._ended.wait()

    def wait(self) -> bool:
        """Wait until the copy has ended, and return whether all bytes are copied; they are of one moment."""
        self._ended.wait()
        return self._is_whole

    def wait_until(self, offset: int) -> None:
        """Return when everything is copied, whatever ``offset`` is; raise if the copy failed."""
        if not self.wait():
            raise ImageAbandonedError("the state could not be copied")


def _size(move: Move) -> int:
    return move[2] if len(move) == 4 else move[1].nbytes


def _batches(moves: Sequence[Move]) -> Iterator[Sequence[Move]]:
    """Divide the copies into batches of about the same number of bytes."""
    begin, nbytes = 0, 0
    for index, move in enumerate(moves, start=1):
        nbytes += _size(move)
        if nbytes >= HOST_PIECE:
            yield moves[begin:index]
            begin, nbytes = index, 0
    yield moves[begin:]


def _copy(batch: Sequence[Move]) -> None:
    targets, sources = list[torch.Tensor](), list[torch.Tensor]()
    for move in batch:
        if len(move) == 2:
            targets.append(move[0])
            sources.append(move[1])
        else:
            target, source, nbytes, _ = move
            (_move_small if nbytes < _SMALL else ctypes.memmove)(target, source, nbytes)
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)
