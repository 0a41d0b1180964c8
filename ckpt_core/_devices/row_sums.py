"""A guard against changes that nobody announces: sums over the bytes of tensors, computed on their device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

ROW = 64 * 2**10  # bytes: one sum of 8 bytes for each, so the sums take 1/8192 of what they are of
_WORD = 4  # bytes


class RowSums:
    """Whether bytes of devices are the same as before, by a sum for each row of 64 KiB.

    The sums are of integers: a number that changes alone always shows, and so does every change that does not happen to
    cancel out in each row. autograd's counters would miss what ``tensor.data``, a CUDA graph or another library writes.

    They are computed in the order of the streams that are current: those of before when this is made, the others when
    :meth:`add` is called. The host does not wait for them.

    Args:
        tensors: ``uint8``, of one dimension and dense, whole rows, at offsets that are multiples of 4.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        rows: dict[torch.device, int] = {}
        for tensor in tensors:
            rows[tensor.device] = rows.get(tensor.device, 0) + tensor.numel() // ROW
        with torch.inference_mode(False), torch.no_grad():
            self._before, self._after = (
                {device: torch.empty(count, dtype=torch.int64, device=device) for device, count in rows.items()}
                for _ in range(2)
            )
            _sum_up(tensors, self._before, dict.fromkeys(rows, 0))
        self._position = dict.fromkeys(rows, 0)

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Compute the sums of the next of the tensors again, on the streams that are current now."""
        _sum_up(tensors, self._after, self._position)

    def differ(self) -> bool:
        """Return whether a tensor has changed in between; waits for the streams that are current now."""
        return any(not torch.equal(sums.cpu(), self._after[device].cpu()) for device, sums in self._before.items())


def _sum_up(
    tensors: Iterable[torch.Tensor], into: dict[torch.device, torch.Tensor], position: dict[torch.device, int]
) -> None:
    for tensor in tensors:
        words = tensor.view(torch.int32).view(-1, ROW // _WORD)
        begin = position[tensor.device]
        position[tensor.device] = end = begin + words.shape[0]
        torch.sum(words, dim=1, dtype=torch.int64, out=into[tensor.device][begin:end])
