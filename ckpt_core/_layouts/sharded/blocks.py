"""Where this was before; to be removed."""

from ckpt_core._layouts.sharded.safetensors_file import (
    DIGEST_BYTES,
    LARGEST_BLOCK,
    SMALLEST_BLOCK,
    IntArray,
    block_begins,
    block_size,
)

__all__ = ["DIGEST_BYTES", "LARGEST_BLOCK", "SMALLEST_BLOCK", "IntArray", "block_begins", "block_size"]
