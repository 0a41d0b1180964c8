"""Copies of host memory: all of them before anything is written, by a few threads and the one that trains.

Writing at the same time would take memory's bandwidth from the copy, which is what training waits for. Nor do torch's
own threads copy: those wait for each other after every tensor, which takes milliseconds where the processors have other
work, and read what they are about to overwrite.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from ckpt_core._layouts.image import ImageAbandonedError
from ckpt_core.buffers import Move
from ckpt_core.process.threads import Latch, run_parallel

HOST_PIECE = 8 * 2**20  # bytes: about half a millisecond, which is what threads may end apart
_SMALL = 2**16  # bytes: to let go of the GIL for less takes longer than to copy it
_WORTH_THE_GIL = 2 * 2**20  # bytes: threads that copy less at a time keep taking the GIL from the one that pickles
_FEW = 64  # copies
_MOST_THREADS = 8  # more do not copy faster

_move_small = ctypes.PyDLL(None).memmove  # which keeps the GIL
_move_small.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_move_small.restype = None


class HostCopy:
    """Copies tensors of the host while the caller waits, or does something else."""

    def __init__(self, moves: Iterable[Move]) -> None:
        self._moves = list(moves)
        self._is_whole = False
        self._ended = Latch()

    def hand_over(self, meanwhile: Callable[[], None] | None = None) -> None:
        """Copy; the caller may change the state afterwards.

        The calling thread does ``meanwhile`` before it copies, too; what that or the copy raises is raised.
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
        """Declare that nothing is copied any more: the caller of :meth:`hand_over` does not call it now."""
        self._moves = []
        self._ended.set()

    def settle(self) -> None:
        """Return when nothing is copied any more."""
        self._ended.wait()

    def wait(self) -> bool:
        """Return whether all bytes are copied, when that is known; they are of one moment."""
        self._ended.wait()
        return self._is_whole

    def wait_until(self, offset: int) -> None:
        """Return when everything is copied, of which ``offset`` is a part."""
        if not self.wait():
            raise ImageAbandonedError("the state could not be copied")


def _size(move: Move) -> int:
    return move[2] if len(move) == 4 else move[1].nbytes


def _batches(moves: Sequence[Move]) -> Iterator[Sequence[Move]]:
    """Divide what is to be copied into batches that take about as long."""
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
