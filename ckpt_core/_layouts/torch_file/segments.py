"""Presents the parts of a file that were already read as a file object, from which torch builds a state's objects."""

from __future__ import annotations

import bisect
from typing import Any

from ckpt_core.storage.base import RandomAccessIO

Segments = list[tuple[int, bytes]]  # offset in the file, bytes


class SegmentIO(RandomAccessIO):
    """A read-only file of which only some segments are known; the rest reads as zeros."""

    def __init__(self, segments: Segments, size: int) -> None:
        super().__init__(size)
        self._segments = sorted(segments)
        self._offsets = [offset for offset, _ in self._segments]

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        begin, end = self._position, min(self._size, self._position + len(view))
        count = max(0, end - begin)
        view[:count] = bytes(count)
        index = max(0, bisect.bisect_right(self._offsets, begin) - 1)
        while index < len(self._segments) and self._offsets[index] < end:
            offset, data = self._segments[index]
            first, last = max(begin, offset), min(end, offset + len(data))
            if first < last:
                view[first - begin : last - begin] = data[first - offset : last - offset]
            index += 1
        self._position += count
        return count
