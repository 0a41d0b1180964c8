"""Boxes (rectangular parts) of a tensor: where their bytes are, and how writers and device meshes cut a tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Cuts along an earlier dimension leave longer runs of bytes, so the largest part may be this many times the mean.
TOLERATED_UNEVENNESS = 1.125


class Box(NamedTuple):
    """A rectangular part of a tensor.

    Examples:
        >>> Box((2, 0), (4, 8)).intersection(Box((0, 0), (3, 3)))
        Box(offset=(2, 0), shape=(1, 3))
    """

    offset: tuple[int, ...]  # index of its first element, one number for each dimension
    shape: tuple[int, ...]  # its extent, in elements

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box that covers a whole tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar, 0 for an empty box."""
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        """Index after the last element, one number for each dimension."""
        return tuple(begin + size for begin, size in zip(self.offset, self.shape, strict=True))

    def intersection(self, other: Box) -> Box | None:
        """Return the box of the elements that are in both boxes, or None if there are none."""
        offset = tuple(map(max, self.offset, other.offset))
        shape = tuple(end - begin for begin, end in zip(offset, map(min, self.end, other.end), strict=True))
        return Box(offset, shape) if all(size > 0 for size in shape) else None

    def relative_to(self, other: Box) -> Box:
        """Return the same box with its offset counted from the beginning of ``other``."""
        return Box(tuple(mine - its for mine, its in zip(self.offset, other.offset, strict=True)), self.shape)

    def along(self, dimension: int, begin: int, end: int) -> Box:
        """Return the part from ``begin`` up to ``end`` (exclusive) of one dimension, relative to the box's offset."""
        offset, shape = list(self.offset), list(self.shape)
        offset[dimension] += begin
        shape[dimension] = end - begin
        return Box(tuple(offset), tuple(shape))


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of a shape, in elements."""
    strides = [1] * len(shape)
    for dimension in range(len(shape) - 1, 0, -1):
        strides[dimension - 1] = strides[dimension] * shape[dimension]
    return tuple(strides)


def byte_runs(shape: Sequence[int], box: Box, itemsize: int) -> Iterator[tuple[int, int]]:
    """Yield the bytes of ``box`` in a contiguous tensor of a shape, as the fewest possible runs ``(begin, nbytes)``.

    Examples:
        >>> list(byte_runs((4, 6), Box((1, 2), (2, 3)), itemsize=1))
        [(8, 3), (14, 3)]
    """
    if box.numel == 0:
        return
    strides = [stride * itemsize for stride in strides_of(shape)]
    # All dimensions after `inner` are covered in full, so a run consists of whole slices of dimension `inner`.
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


def cut_dimension(box: Box, parts: int) -> int:
    """Return the dimension along which to cut a non-empty box with at least one dimension into about equal parts.

    That is the first dimension that gives parts of nearly equal size, since cuts along rows keep bytes together, or
    else the one that gives the most equal parts.
    """
    unevenness = [-(-size // parts) * parts / size for size in box.shape]
    for dimension, value in enumerate(unevenness):
        if value <= TOLERATED_UNEVENNESS:
            return dimension
    return unevenness.index(min(unevenness))


@dataclass(frozen=True, slots=True)
class Sharding:
    """How one dimension of a device mesh cuts a tensor."""

    dimension: int  # the dimension of the tensor that is cut
    # If more than 1, that dimension is first cut into this many sections, and each rank gets its part of every section.
    # This allows a mesh dimension further right to cut first: FSDP on top of tensor parallelism.
    split_factor: int = 1


Interval = tuple[int, int]


def sharded_boxes(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], shardings: Sequence[Sharding | None]
) -> list[tuple[Box, Box]]:
    """Return which elements of a tensor are on the rank at ``coordinate`` of a mesh.

    ``shardings`` has, for each dimension of the mesh, how it cuts the tensor, or None if it replicates it. The cuts
    are those of ``torch.chunk``: equal parts, then a smaller one, then empty ones. Returns pairs of non-empty boxes:
    the box in the whole tensor, and the same elements in the rank's local tensor. Strided cuts can give several pairs,
    in the order of the elements.
    """
    # The intervals of each dimension that the rank holds: in order, disjoint.
    held: list[list[Interval]] = [[(0, size)] if size else [] for size in shape]
    for mesh_dimension, sharding in _cuts_in_order(mesh_shape, shardings):
        parts, index = mesh_shape[mesh_dimension], coordinate[mesh_dimension]
        held[sharding.dimension] = _share(held[sharding.dimension], sharding.split_factor, parts, index)
    positions = [list(itertools.accumulate((end - begin for begin, end in row), initial=0)) for row in held]
    boxes = []
    for choice in itertools.product(*(range(len(row)) for row in held)):
        intervals = [row[index] for row, index in zip(held, choice, strict=True)]
        box_shape = tuple(end - begin for begin, end in intervals)
        local_offset = tuple(row[index] for row, index in zip(positions, choice, strict=True))
        boxes.append((Box(tuple(begin for begin, _ in intervals), box_shape), Box(local_offset, box_shape)))
    return boxes


def _cuts_in_order(mesh_shape: Sequence[int], shardings: Sequence[Sharding | None]) -> list[tuple[int, Sharding]]:
    """Return the dimensions of the mesh that cut the tensor, and how, in the order in which the cuts are applied.

    That is from left to right, with one exception: a strided cut whose factor is the number of all parts cut further
    right becomes a plain cut applied after them, because that is how ``fully_shard`` cuts. Applied as a strided cut, it
    would give the same parts if sizes divide evenly, but different parts than the ranks hold if they do not.
    """
    order: list[tuple[int, Sharding]] = []
    for number, sharding in reversed(list(enumerate(shardings))):
        if sharding is not None:
            parts = [mesh_shape[later] for later, cut in order if cut.dimension == sharding.dimension]
            if sharding.split_factor == math.prod(parts):
                order.append((number, Sharding(sharding.dimension)))
            else:
                order.insert(0, (number, sharding))
    return order


def _share(intervals: list[Interval], sections: int, parts: int, index: int) -> list[Interval]:
    total = sum(end - begin for begin, end in intervals)
    section_size = -(-total // sections)
    shared: list[Interval] = []
    for section in range(sections):
        section_begin = min(section * section_size, total)
        section_end = min(section_begin + section_size, total)
        part_size = -(-(section_end - section_begin) // parts)
        begin = min(section_begin + index * part_size, section_end)
        for interval in _part(intervals, begin, min(begin + part_size, section_end)):
            if shared and shared[-1][1] == interval[0]:
                interval = (shared.pop()[0], interval[1])  # noqa: PLW2901 - joined with its neighbour
            shared.append(interval)
    return shared


def _part(intervals: list[Interval], begin: int, end: int) -> Iterator[Interval]:
    """Yield the intervals of the elements from ``begin`` up to ``end`` (exclusive) of the concatenated intervals."""
    position = 0
    for first, last in intervals:
        low, high = max(begin - position, 0), min(end - position, last - first)
        if low < high:
            yield first + low, first + high
        position += last - first


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges in ascending order, with those that overlap or touch joined into one."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found
