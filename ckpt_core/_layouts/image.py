"""The interface between the layouts and the writer: an image, the bytes of one file to write."""

from __future__ import annotations

from typing import Protocol

import torch

from ckpt_core.errors import CheckpointError

WINDOW = 16 * 2**20  # bytes: a digest never spans a multiple of this, so windows are hashed and checked in parallel


class ImageAbandonedError(CheckpointError):
    """The image was abandoned by the thread that was making it; that thread raised the reason."""


class Memory(Protocol):
    """Host memory that a window is assembled in."""

    @property
    def tensor(self) -> torch.Tensor:
        """The memory as a one-dimensional ``uint8`` tensor."""

    @property
    def memory(self) -> memoryview:
        """The memory as a writable ``memoryview``."""


class Image(Protocol):
    """The bytes of one file to write: windows of ``WINDOW`` bytes (the last may have fewer), then a tail."""

    @property
    def region_size(self) -> int:
        """Length in bytes of the part of the file that is made of windows; a multiple of 4096."""

    @property
    def approximate_size(self) -> int:
        """The file's size in bytes; an estimate until the size is known."""

    @property
    def is_staged(self) -> bool:
        """Whether the bytes are in a staging buffer, so that the live tensors may change."""

    def digested_window(self, begin: int, scratch: Memory | None) -> memoryview:
        """Return the page-aligned bytes of the window at ``begin``, once they are available, and keep their digests.

        ``scratch`` is memory, at least as large as the window, to assemble it in; a staged image needs none.
        """

    def tail(self) -> bytes:
        """Return the rest of the file, from ``region_size`` on; every window must have been taken before."""

    def forget_sources(self) -> None:
        """Copy what is still needed of the live tensors, and release them; called when every window was taken."""
