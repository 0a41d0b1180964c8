"""Boxes: the rectangular parts of a tensor, and where their bytes are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = ["Box", "byte_runs"]


class Box(NamedTuple):
    """A rectangular part of a tensor.

    Args:
        offset: Index of its first element, one number for each dimension.
        shape: Its extent, in elements.

    Example:
        >>> Box((2, 0), (4, 8)).intersection(Box((0, 0), (3, 3)))
        Box(offset=(2, 0), shape=(1, 3))
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box that is all of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar, 0 for an empty box."""
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        """Index behind the last element, one number for each dimension."""
        return tuple(begin + size for begin, size in zip(self.offset, self.shape, strict=True))

    def intersection(self, other: Box) -> Box | None:
        """Return the elements that both boxes have, or None where there are none."""
        offset = tuple(map(max, self.offset, other.offset))
        shape = tuple(end - begin for begin, end in zip(offset, map(min, self.end, other.end), strict=True))
        return Box(offset, shape) if all(size > 0 for size in shape) else None

    def relative_to(self, other: Box) -> Box:
        """Return the same elements counted from where ``other`` begins."""
        return Box(tuple(mine - its for mine, its in zip(self.offset, other.offset, strict=True)), self.shape)

    def along(self, dimension: int, begin: int, end: int) -> Box:
        """Return the part from ``begin`` to before ``end`` of one dimension, both counted from where the box begins."""
        offset, shape = list(self.offset), list(self.shape)
        offset[dimension] += begin
        shape[dimension] = end - begin
        return Box(tuple(offset), tuple(shape))


def byte_runs(shape: Sequence[int], box: Box, itemsize: int) -> Iterator[tuple[int, int]]:
    """Yield where the bytes of ``box`` are in a contiguous (row-major) tensor.

    Args:
        shape: Shape of the tensor.
        box: The part that is asked for; inside ``shape``.
        itemsize: Bytes of an element.

    Yields:
        ``(begin, nbytes)`` of each contiguous run, ascending and as long as can be.

    Example:
        >>> list(byte_runs((4, 6), Box((1, 2), (2, 3)), itemsize=1))
        [(8, 3), (14, 3)]
    """
    if box.numel == 0:
        return
    strides = [itemsize] * len(shape)
    for dimension in range(len(shape) - 1, 0, -1):
        strides[dimension - 1] = strides[dimension] * shape[dimension]
    # Everything below `inner` is wanted in full, so a run is made of whole slices of dimension `inner`.
    inner = len(shape) - 1
    while inner > 0 and box.shape[inner] == shape[inner]:
        inner -= 1
    first = sum(map(int.__mul__, box.offset, strides))
    if inner <= 0:
        yield first, box.numel * itemsize
        return
    nbytes = box.shape[inner] * strides[inner]
    outer = [range(0, size * stride, stride) for size, stride in zip(box.shape[:inner], strides, strict=False)]
    for steps in itertools.product(*outer):
        yield first + sum(steps), nbytes
