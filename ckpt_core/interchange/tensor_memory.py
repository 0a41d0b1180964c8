"""Memory for one tensor at a time, whoever still refers to the one before: a loop variable, a generator of DCP's."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

from ckpt_core._layouts.safetensors import TensorInfo

__all__ = ["TensorMemory"]

_ALIGNMENT = 64  # bytes


class TensorMemory:
    """Memory that is taken back when the next is asked for. It is the system's, so that giving it back does not wait."""

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None

    def tensors(self, infos: Sequence[TensorInfo]) -> list[torch.Tensor]:
        """Return tensors without values; those that were returned before have lost theirs."""
        sizes = [-(-info.nbytes // _ALIGNMENT) * _ALIGNMENT for info in infos]
        flat = self.flat(sum(sizes[:-1]) + infos[-1].nbytes) if infos else torch.empty(0, dtype=torch.uint8)
        found, begin = [], 0
        for info, size in zip(infos, sizes, strict=True):
            found.append(flat[begin : begin + info.nbytes].view(info.dtype).view(info.shape))
            begin += size
        return found

    def flat(self, nbytes: int) -> torch.Tensor:
        """Return bytes without values; the tensors that were returned before have lost theirs."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
        self._map = mmap.mmap(-1, max(1, nbytes))
        return (
            torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes)
            if nbytes
            else torch.empty(0, dtype=torch.uint8)
        )
