"""Copies of host memory: all of them before anything is written, by a few threads and the one that trains.

Writing at the same time would take memory's bandwidth from the copy, which is what training waits for. A batch is one
call without the GIL and without torch's threads: those wait for each other after every tensor, which takes
milliseconds where the processors have other work, and the GIL belongs to the thread that pickles meanwhile.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from ckpt_core._layouts.image import ImageAbandonedError
from ckpt_core.threads import Latch, run_parallel

_Piece = tuple[int, torch.Tensor, torch.Tensor]
_Batch = list[tuple[torch.Tensor, torch.Tensor]]
HOST_PIECE = 8 * 2**20  # bytes: about half a millisecond, which is what threads may end apart
_SMALL = 2**19  # bytes: what is larger is a batch of its own
_WIDE = torch.complex128
_MOST_THREADS = 8  # more do not copy faster


class HostCopy:
    """Copies tensors of the host while the caller waits, or does something else."""

    def __init__(self, pieces: Iterable[_Piece]) -> None:
        self._pieces = list(pieces)
        self._is_whole = False
        self._ended = Latch()

    def hand_over(self, meanwhile: Callable[[], None] | None = None) -> None:
        """Copy; the caller may change the state afterwards.

        The calling thread does ``meanwhile`` before it copies, too; what that or the copy raises is raised.
        """
        pieces, self._pieces = self._pieces, []
        threads = min(max(2, torch.get_num_threads()), _MOST_THREADS, 1 + len(pieces))
        try:
            run_parallel(_copy, _batches(pieces, threads), threads=threads, meanwhile=meanwhile)
            self._is_whole = True
        finally:
            self._ended.set()

    def abandon(self) -> None:
        """Declare that nothing is copied any more: the caller of :meth:`hand_over` does not call it now."""
        self._pieces = []
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


def _batches(pieces: Sequence[_Piece], threads: int) -> Iterator[_Batch]:
    """Divide pieces into batches, of small ones the longer the more are left: who copies them needs the GIL rarely."""
    left = sum(source.nbytes for _, _, source in pieces)
    small: _Batch = []
    nbytes = 0
    for _, target, source in pieces:
        left -= source.nbytes
        if source.nbytes > _SMALL:
            yield [(target, source)]
            continue
        small.append((target, source))
        nbytes += source.nbytes
        if nbytes >= max(HOST_PIECE, left // (2 * threads)):
            yield small
            small, nbytes = [], 0
    if small:
        yield small


def _copy(batch: _Batch) -> None:
    target, source = batch[0]
    # torch says what it thinks of freed memory.
    if len(batch) == 1 and source.dtype is torch.uint8 and source.is_contiguous() and source.data_ptr():
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
        return
    with torch.no_grad():
        pairs = [_in_wide_elements(*pair) for pair in batch]
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def _in_wide_elements(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same bytes as few elements, if that can be: torch uses its threads from 32768 elements on."""
    if (
        source.dtype is not torch.uint8
        or source.ndim != 1
        or source.stride() != (1,)
        or source.numel() % _WIDE.itemsize
    ):
        return target, source
    if any(
        tensor.data_ptr() % _WIDE.itemsize or tensor.storage_offset() % _WIDE.itemsize for tensor in (target, source)
    ):
        return target, source
    return target.view(_WIDE), source.view(_WIDE)
