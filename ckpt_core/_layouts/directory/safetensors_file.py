"""Writes safetensors files: lays out the tensors, computes a digest for each block, and produces the bytes.

The header is padded so that the first tensor begins at a multiple of 4096. Tensors whose size is not a multiple of 64
come last, so that most begin at one: copies between addresses that differ modulo 64 take 1.5 times as long.

A block is the unit in which bytes are verified, and so read. The header is one block. A tensor is cut, from its own
beginning, into about 64 blocks, so that reading a part of it costs little more than the part. Neighbouring tensors that
are too small for that share a block.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ckpt_core._layouts.image import WINDOW, Memory
from ckpt_core._layouts.safetensors import (
    LARGEST_HEADER,
    TensorInfo,
    bits_of,
    bytes_in,
    header_size,
    header_text,
    is_memory,
    packed_header,
    resolved,
)
from ckpt_core.buffers import StagingBuffer
from ckpt_core.digest import digest
from ckpt_core.errors import SerializationError

ALIGNMENT = 4096  # bytes: windows of the file can be written by direct I/O, and elements are aligned in memory
SMALLEST_BLOCK = 16 * 2**10  # bytes
LARGEST_BLOCK = 128 * 2**10  # bytes
DIGEST_BYTES = 8
LONGEST_SAVE_ID = 64
_BLOCKS_OF_A_TENSOR = 64
_CACHE_LINE = 64  # bytes
_PLACEHOLDER = "@" * LONGEST_SAVE_ID  # replaced by the save's id, without changing the header's length

IntArray = np.ndarray[Any, np.dtype[np.int64]]


def block_size(nbytes: int) -> int:
    """Return the size of the blocks of a tensor of ``nbytes``: a power of two."""
    share = max(1, -(-nbytes // _BLOCKS_OF_A_TENSOR))
    return min(max(1 << (share - 1).bit_length(), SMALLEST_BLOCK), LARGEST_BLOCK)


def block_begins(header_size: int, sizes: Iterable[int]) -> IntArray:
    """Return the offsets of the blocks of a file, and the file's size as the last number."""
    begins = [0]
    position = header_size
    room = 0  # bytes that still fit into the block that small tensors share
    for size in sizes:
        if size >= SMALLEST_BLOCK:
            begins.extend(range(position, position + size, block_size(size)))
            room = 0
        elif size > 0:
            if size > room:
                begins.append(position)
                room = SMALLEST_BLOCK
            room -= size
        position += size
    begins.append(position)
    return np.array(begins, dtype=np.int64)


def file_order(tensors: Sequence[TensorInfo]) -> list[int]:
    """Return the indices of tensors in the order in which they are stored in a file.

    Tensors that fill whole cache lines come first, in the given order, then the others by descending itemsize. So
    every element is aligned, and every tensor of the first group is aligned to a cache line.
    """

    def place(index: int) -> int:
        info = tensors[index]
        return -info.dtype.itemsize if info.nbytes % _CACHE_LINE else -_CACHE_LINE

    return sorted(range(len(tensors)), key=place)


@dataclasses.dataclass(frozen=True)
class FileLayout:
    """The offsets of the tensors and blocks in a file, and its header."""

    begins: tuple[int, ...]  # offset of each tensor, in file order
    sizes: tuple[int, ...]  # bytes of each tensor
    blocks: IntArray  # offsets of the blocks, and the file's size
    header_size: int  # bytes before the first tensor
    size: int  # bytes of the file
    _header: bytes

    def header(self, save_id: str) -> bytes:
        """Return the first ``header_size`` bytes of the file."""
        text = self._header.replace(json.dumps(_PLACEHOLDER).encode(), json.dumps(save_id).encode(), 1)
        return packed_header(text, self.header_size)


@functools.lru_cache(maxsize=32)
def file_layout(tensors: tuple[tuple[str, TensorInfo], ...], metadata: tuple[tuple[str, str], ...]) -> FileLayout:
    """Lay out a file; ``tensors`` have unique names and are in file order, ``metadata`` is added to the header."""
    # transformers requires the format "pt".
    text = header_text(tensors, {"format": "pt", **dict(metadata), "save": _PLACEHOLDER})
    sizes = tuple([info.nbytes for _, info in tensors])
    first = header_size(text, ALIGNMENT)
    if first > LARGEST_HEADER:
        raise SerializationError(
            f"{len(tensors)} tensors in one file need a header of {first} bytes; safetensors reads at most "
            f"{LARGEST_HEADER}",
            remedy="save fewer tensors in one part, or let more ranks share the work",
        )
    places = np.cumsum((first, *sizes), dtype=np.int64).tolist()
    return FileLayout(tuple(places[:-1]), sizes, block_begins(first, sizes), first, places[-1], text)


class SafetensorsImage:
    """The bytes of a safetensors file, either staged in a buffer or still in the live tensors.

    ``staged`` holds the header and the tensors from ``base`` (a multiple of 4096) on, or is still being filled with
    them: ``wait_staged(offset)`` returns when it is filled up to an offset. ``digests`` has the digest of each block,
    or ``b""`` until the bytes of the block were taken.
    """

    def __init__(
        self,
        layout: FileLayout,
        header: bytes,
        sources: Sequence[torch.Tensor] = (),
        staged: StagingBuffer | None = None,
        base: int = 0,
        wait_staged: Callable[[int], None] | None = None,
    ) -> None:
        self.region_size = layout.size // ALIGNMENT * ALIGNMENT
        self.digests = [b""] * (len(layout.blocks) - 1)
        self._layout = layout
        self._header = header
        self._sources = sources
        self._staged = staged
        self._base = base
        self._wait_staged = wait_staged
        self._tail: bytes | None = None

    @property
    def is_staged(self) -> bool:
        return self._staged is not None

    @property
    def approximate_size(self) -> int:
        return self._layout.size

    def digested_window(self, begin: int, scratch: Memory | None) -> memoryview:
        """Return the page-aligned bytes of the window at ``begin``, and keep digests of the blocks that end in it."""
        return self._bytes(begin, min(begin + WINDOW, self.region_size), scratch)

    def tail(self) -> bytes:
        """Return the rest of the file, from ``region_size`` on."""
        if self._tail is not None:
            return self._tail
        scratch = None if self.is_staged else StagingBuffer(ALIGNMENT)
        try:
            return bytes(self._bytes(self.region_size, self._layout.size, scratch))
        finally:
            if scratch is not None:
                scratch.close()

    def forget_sources(self) -> None:
        """Copy the tail from the live tensors, and release them."""
        self._tail = self.tail()
        self._sources = ()

    def _bytes(self, begin: int, end: int, scratch: Memory | None) -> memoryview:
        if self._staged is not None:
            if self._wait_staged is not None:
                self._wait_staged(self._base + end)
            memory = self._staged.memory[self._base + begin : self._base + end]
        else:
            assert scratch is not None
            self._assemble(begin, end, scratch.tensor)
            memory = scratch.memory[: end - begin]
        low, high = np.searchsorted(self._layout.blocks[1:], (begin, end), side="right").tolist()
        bounds = self._layout.blocks[low : high + 1].tolist()
        for index, (first, last) in enumerate(itertools.pairwise(bounds), start=low):
            self.digests[index] = bytes.fromhex(digest(self._block(first, last, begin, memory)))
        return memory

    def _block(self, first: int, last: int, begin: int, memory: memoryview) -> memoryview:
        if self._staged is not None:
            return self._staged.memory[self._base + first : self._base + last]
        if first >= begin:
            return memory[first - begin : last - begin]
        # The block began in the previous window, whose memory another thread may have reused already.
        block = torch.empty(last - first, dtype=torch.uint8)
        self._assemble(first, last, block)
        view: memoryview = block.numpy().data
        return view

    def _assemble(self, begin: int, end: int, target: torch.Tensor) -> None:
        header_end = min(end, self._layout.header_size)
        if begin < header_end:
            target[: header_end - begin].numpy()[:] = np.frombuffer(self._header[begin:header_end], np.uint8)
        begins = self._layout.begins
        index = max(0, int(np.searchsorted(begins, begin, side="right")) - 1)
        while index < len(begins) and begins[index] < end:
            offset, size = begins[index], self._layout.sizes[index]
            first, last = max(begin, offset), min(end, offset + size)
            if first < last:
                source, at = self._sources[index], first - begin
                if not copy_now(source, first - offset, last - offset, target, at):
                    for part, piece in byte_pieces(source, first - offset, last - offset, target[at : last - begin]):
                        part.copy_(resolved(piece))
            index += 1


def copy_now(source: torch.Tensor, begin: int, end: int, target: torch.Tensor, at: int) -> bool:
    """Copy bytes of a tensor to offset ``at`` of ``target``; return False if they are not one piece of host memory.

    Does not use torch, which takes five times as long for a small tensor, and whose threads would compete with ours.
    """
    if not (source.is_cpu and is_memory(source) and source.data_ptr()):  # torch raises its own error for freed memory
        return False
    ctypes.memmove(target.data_ptr() + at, source.data_ptr() + begin, end - begin)
    return True


def byte_pieces(
    source: torch.Tensor, begin: int, end: int, target: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pairs ``(part of target, part of source)`` to copy, so that the source's bytes are in row-major order.

    ``begin`` must be the first byte of an element. ``target`` is ``uint8``, ``end - begin`` long, and aligned for the
    elements of ``source``.
    """
    bits = bits_of(source)
    memory = bytes_in(bits)
    if memory is not None:
        yield target, memory[begin:end]
        return
    itemsize = source.dtype.itemsize
    into = target.view(bits.dtype)
    for position, view in _rows(bits, begin // itemsize, end // itemsize):
        first = position - begin // itemsize
        yield into[first : first + view.numel()].view(view.shape), view


def _rows(tensor: torch.Tensor, begin: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield elements ``begin`` to ``end`` of a tensor as ``(position, view)``: as few rectangular views as possible."""
    if tensor.ndim == 0:
        yield begin, tensor
        return
    row = tensor.numel() // tensor.shape[0]
    first, last = -(-begin // row), end // row
    if first > last:
        pieces = [(begin // row, begin, end)]
    else:
        if begin < first * row:
            yield from _rows_of(tensor, first - 1, begin, first * row, row)
        if first < last:
            yield first * row, tensor[first:last]
        pieces = [(last, last * row, end)] if last * row < end else []
    for index, low, high in pieces:
        yield from _rows_of(tensor, index, low, high, row)


def _rows_of(tensor: torch.Tensor, index: int, begin: int, end: int, row: int) -> Iterator[tuple[int, torch.Tensor]]:
    start = index * row
    return ((start + position, view) for position, view in _rows(tensor[index], begin - start, end - start))


class DigestsImage:
    """The file with the digests of the blocks of a rank's files, all of which must have been written before."""

    is_staged = True
    region_size = 0

    def __init__(self, images: Sequence[SafetensorsImage]) -> None:
        self._images = list(images)
        self.approximate_size = sum(len(image.digests) for image in images) * DIGEST_BYTES

    def digested_window(self, begin: int, scratch: Memory | None) -> memoryview:
        """Raise: this is never called, because ``region_size`` is 0 and there are no windows."""
        raise IndexError(begin)

    def forget_sources(self) -> None:
        """Do nothing: there are no live tensors."""

    def tail(self) -> bytes:
        data = b"".join(digest for image in self._images for digest in image.digests)
        if len(data) != self.approximate_size:
            raise RuntimeError("the digests are written last, when all bytes of the other files have been taken")
        return data
