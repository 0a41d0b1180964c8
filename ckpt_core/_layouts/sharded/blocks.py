"""The blocks of a safetensors file, each of which has a digest: the unit in which bytes are verified, and so read.

The header is one block. A tensor is cut, from its own beginning, into about 64 blocks, so that reading a part of it costs
little more than the part. Neighbouring tensors that are too small for that share a block.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

__all__ = ["DIGEST_BYTES", "LARGEST_BLOCK", "SMALLEST_BLOCK", "block_begins", "block_size"]

SMALLEST_BLOCK = 16 * 2**10
LARGEST_BLOCK = 128 * 2**10
DIGEST_BYTES = 8
_BLOCKS_OF_A_TENSOR = 64

IntArray = np.ndarray[Any, np.dtype[np.int64]]


def block_size(nbytes: int) -> int:
    """Return the size of the blocks of a tensor of ``nbytes``: a power of two."""
    share = max(1, -(-nbytes // _BLOCKS_OF_A_TENSOR))
    return min(max(1 << (share - 1).bit_length(), SMALLEST_BLOCK), LARGEST_BLOCK)


def block_begins(header_size: int, sizes: Iterable[int]) -> IntArray:
    """Return where the blocks of a file begin, and the file's size as the last number.

    Args:
        header_size: Where the first tensor begins.
        sizes: Bytes of each tensor, in file order.
    """
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
