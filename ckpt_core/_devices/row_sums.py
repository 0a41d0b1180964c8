"""A guard against changes that nobody announces: sums over the bytes of tensors, computed on their device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

ROW = 64 * 2**10  # bytes: one sum of 8 bytes for each, so the sums take 1/8192 of what they are of
_JOINED = 32 * 2**20  # bytes that small tensors are joined to: a sum takes as long to be queued as 10 MB to be added up


class RowSums:
    """Whether bytes of devices are the same as before, by a sum for each row of 64 KiB.

    The sums are of integers of 8 bytes, modulo 2 ** 64: a number that changes alone always shows, and so does every
    change that does not happen to cancel out in each row. The signs of two numbers of 8 bytes each do: give it none of
    those. (Smaller integers would be copied by torch, to be added up in 8 bytes.) autograd's counters would miss what
    ``tensor.data``, a CUDA graph or another library writes.

    They are computed in the order of the streams that are current: those of before when this is made, the others when
    :meth:`add` is called. The host does not wait for them.
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
    for words in _joined(tensors):
        rows = words.view(-1, ROW // words.itemsize)
        begin = position[words.device]
        position[words.device] = end = begin + rows.shape[0]
        torch.sum(rows, dim=1, dtype=torch.int64, out=into[words.device][begin:end])


def _joined(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield tensors as words of 8 bytes; those that continue each other as one, and small ones together."""
    small: list[torch.Tensor] = []
    nbytes = 0
    for tensor in _runs(tensors):
        if small and (small[0].device != tensor.device or nbytes + tensor.numel() > _JOINED):
            yield small[0] if len(small) == 1 else torch.cat(small)
            small, nbytes = [], 0
        small.append(tensor.view(torch.int64))
        nbytes += tensor.numel()
    if small:
        yield small[0] if len(small) == 1 else torch.cat(small)


def _runs(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    run: torch.Tensor | None = None
    for tensor in tensors:
        if run is not None and _continues(run, tensor):
            run = run.as_strided((run.numel() + tensor.numel(),), (1,))
            continue
        if run is not None:
            yield run
        run = tensor
    if run is not None:
        yield run


def _continues(first: torch.Tensor, second: torch.Tensor) -> bool:
    return (
        first.data_ptr() + first.numel() == second.data_ptr()
        and first.untyped_storage()._cdata == second.untyped_storage()._cdata
    )
