"""What a file of any layout is to those who write it."""

from __future__ import annotations

from typing import Protocol

import torch

from ckpt_core.errors import CheckpointError

WINDOW = 16 * 2**20  # bytes: a digest never spans a multiple of this, so windows are hashed and checked in parallel


class ImageAbandonedError(CheckpointError):
    """Whoever was making the image has given up; the reason was raised there."""


class Memory(Protocol):
    """Host memory that a window is assembled in."""

    @property
    def tensor(self) -> torch.Tensor:
        """It as a one-dimensional ``uint8`` tensor."""

    @property
    def memory(self) -> memoryview:
        """It as a writable ``memoryview``."""


class Image(Protocol):
    """The bytes of a file in the making: windows of equal size, then the few bytes that are left."""

    @property
    def region_size(self) -> int:
        """Length in bytes of the first part of the file, which :meth:`digested_window` gives; a multiple of 4096."""

    @property
    def approximate_size(self) -> int:
        """The file's size in bytes, or about that while it is not known."""

    @property
    def is_staged(self) -> bool:
        """Whether the bytes are in a buffer of ours, so that the live tensors may change."""

    def digested_window(self, begin: int, scratch: Memory | None) -> memoryview:
        """Return the page-aligned bytes of the window at ``begin``, waiting for them if need be; keep their digests.

        ``scratch`` is memory of at least ``WINDOW`` bytes to assemble it in; a staged image needs none.
        """

    def tail(self) -> bytes:
        """Return the rest of the file, from ``region_size`` on; every window must have been taken before."""

    def forget_sources(self) -> None:
        """Take what is left of the live tensors, and let go of them; called when every window was taken."""
