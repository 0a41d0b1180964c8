"""A guard against changes that nobody announces: sums over the bytes of tensors, computed on their device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

ROW = 64 * 2**10  # bytes: one sum of 8 bytes for each, so the sums take 1/8192 of what they are of
WORD = 8  # bytes: what is summed up has whole ones
_JOINED = 32 * 2**20  # bytes that small tensors are joined to: a sum takes as long to be queued as 10 MB to be added up


class RowSums:
    """Whether bytes of devices are the same as before, by a sum for each row of 64 KiB.

    The sums are of integers of 8 bytes, modulo 2 ** 64: a number that changes alone always shows, and so does every
    change that does not happen to cancel out in each row. The signs of two numbers of 8 bytes each do: give it none of
    those. (Smaller integers would be copied by torch, to be added up in 8 bytes.) autograd's counters would miss what
    ``tensor.data``, a CUDA graph or another library writes.

    They are computed in the order of the streams that are current: those of before when this is made, the others when
    :meth:`add` is called, with the same ``groups`` of tensors in the same order. The host does not wait for them. The
    tensors are flat ``uint8`` ones of whole words of 8 bytes.
    """

    def __init__(self, groups: Iterable[Sequence[torch.Tensor]]) -> None:
        self._before: list[torch.Tensor] = []
        self._after: list[torch.Tensor] = []
        self._zeros: dict[torch.device, torch.Tensor] = {}  # that fill up the last row
        with torch.inference_mode(False), torch.no_grad():
            for group in groups:
                self._sum_up(group, self._before)

    def add(self, group: Iterable[torch.Tensor]) -> None:
        """Compute the sums of the next group again, on the streams that are current now."""
        self._sum_up(group, self._after)

    def differ(self) -> bool:
        """Return whether a tensor has changed in between; waits for the streams that are current now."""
        return any(not torch.equal(a, b) for a, b in zip(_on_host(self._before), _on_host(self._after), strict=True))

    def _sum_up(self, group: Iterable[torch.Tensor], into: list[torch.Tensor]) -> None:
        for words in self._joined(group):
            rows = words.view(-1, ROW // WORD)
            into.append(torch.empty(rows.shape[0], dtype=torch.int64, device=words.device))
            torch.sum(rows, dim=1, dtype=torch.int64, out=into[-1])

    def _joined(self, group: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield tensors as rows of words; those that continue each other as one, and small ones together."""
        small: list[torch.Tensor] = []
        nbytes = 0
        for tensor, size in _runs(group):
            words, rest = tensor.view(torch.int64), size
            if size > _JOINED:
                rest = size % ROW
                yield words[: (size - rest) // WORD]
                words = words[(size - rest) // WORD :]
            if small and (nbytes + rest > _JOINED or small[0].device != tensor.device):
                yield self._filled_up(small, nbytes)
                small, nbytes = [], 0
            if rest:
                small.append(words)
                nbytes += rest
        if small:
            yield self._filled_up(small, nbytes)

    def _filled_up(self, parts: list[torch.Tensor], nbytes: int) -> torch.Tensor:
        """Return parts of so many bytes as one tensor of whole rows."""
        device = parts[0].device
        if missing := -nbytes % ROW:
            if device not in self._zeros:
                self._zeros[device] = torch.zeros(ROW // WORD, dtype=torch.int64, device=device)
            parts.append(self._zeros[device][: missing // WORD])
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _on_host(sums: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return sums as one tensor for each device."""
    devices = dict.fromkeys(each.device for each in sums)
    return [torch.cat([each for each in sums if each.device == device]).cpu() for device in devices]


def _runs(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield tensors and their sizes in bytes; those of one storage that continue each other as one."""
    run: torch.Tensor | None = None
    end = nbytes = 0
    for tensor in tensors:
        begin, size = tensor.data_ptr(), tensor.numel()
        if run is not None and begin == end and _share_storage(run, tensor):
            nbytes += size
            run = run.as_strided((nbytes,), (1,))
        else:
            if run is not None:
                yield run, nbytes
            run, nbytes = tensor, size
        end = begin + size
    if run is not None:
        yield run, nbytes


def _share_storage(first: torch.Tensor, second: torch.Tensor) -> bool:
    return bool(first.untyped_storage()._cdata == second.untyped_storage()._cdata)
