"""Wait until a small state is durable, even if saves are asynchronous; for the plugins."""

from __future__ import annotations

from collections.abc import Iterable

from ckpt_core.checkpointer import CheckpointerBase

# A state of this size is durable within milliseconds: waiting is cheap, and code that reads the directory between two
# saves, such as Lightning's ModelCheckpoint when it picks a name that is not taken, finds what it expects.
SMALL_STATE_BYTES = 256 * 1024
LONGEST_WAIT_FOR_SMALL_SECONDS = 1.0


def wait_if_small(checkpointer: CheckpointerBase, sizes: Iterable[int]) -> None:
    """Wait until a small state that was saved in the background is durable; at most one second, on slow storage.

    ``sizes`` are the bytes of its tensors, consumed only until the state is known to be too large.
    """
    total = 0
    for size in sizes:
        total += size
        if total > SMALL_STATE_BYTES:
            return
    checkpointer.drain(timeout=LONGEST_WAIT_FOR_SMALL_SECONDS)
