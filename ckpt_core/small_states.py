"""Plugins wait until a small state is durable, also where saves are asynchronous."""

from __future__ import annotations

from collections.abc import Iterable

from ckpt_core.checkpointer import CheckpointerBase

# Durable in some milliseconds: waiting for it is cheap, and readers of the directory between two saves, such
# as Lightning's ModelCheckpoint when it picks a name that is not taken, find what they expect.
SMALL_STATE_BYTES = 256 * 1024
LONGEST_WAIT_FOR_SMALL_SECONDS = 1.0


def wait_if_small(checkpointer: CheckpointerBase, sizes: Iterable[int]) -> None:
    """Wait until a small state that was saved in the background is durable, unless the storage is slow.

    ``sizes``, the bytes of its tensors, are looked at until they are too many.
    """
    total = 0
    for size in sizes:
        total += size
        if total > SMALL_STATE_BYTES:
            return
    if total <= SMALL_STATE_BYTES:
        checkpointer.drain(timeout=LONGEST_WAIT_FOR_SMALL_SECONDS)
