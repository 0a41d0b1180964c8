"""Detects unannounced changes of device tensors, by sums over their bytes that are computed on the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

ROW = 64 * 2**10  # bytes per sum; a sum has 8 bytes, so the sums take 1/8192 of the memory of the tensors
WORD = 8  # bytes per summed integer; sizes of tensors must be multiples of it
_JOINED = 32 * 2**20  # bytes: small tensors are joined up to this; queueing a sum takes as long as adding up 10 MB


class RowSums:
    """Sums over the bytes of device tensors, one per row of 64 KiB, taken twice to detect changes in between.

    Bytes are added as 8-byte integers, modulo 2 ** 64. A change is detected unless it cancels out in every row, which a
    change of a single number never does. Two flipped signs of 8-byte numbers do cancel out, so tensors of those must
    not be given. (Smaller integers would be copied by torch first, to be added up as 8-byte ones.) autograd's version
    counters would miss writes through ``tensor.data``, by a CUDA graph or by another library.

    Sums are computed on the current streams: the first ones when this object is made, the second ones in :meth:`add`,
    which must be called with the same ``groups`` of tensors in the same order. The host does not wait for them. Tensors
    must be flat, ``uint8``, and a multiple of 8 bytes long.
    """

    def __init__(self, groups: Iterable[Sequence[torch.Tensor]]) -> None:
        self._before: list[torch.Tensor] = []
        self._after: list[torch.Tensor] = []
        self._zeros: dict[torch.device, torch.Tensor] = {}  # zeros that pad the last row
        with torch.inference_mode(False), torch.no_grad():
            for group in groups:
                self._sum_up(group, self._before)

    def add(self, group: Iterable[torch.Tensor]) -> None:
        """Compute the sums of the next group for the second time, on the streams that are current now."""
        self._sum_up(group, self._after)

    def differ(self) -> bool:
        """Return whether a tensor has changed between the two sums; waits for the streams that are current now."""
        return any(not torch.equal(a, b) for a, b in zip(_on_host(self._before), _on_host(self._after), strict=True))

    def _sum_up(self, group: Iterable[torch.Tensor], into: list[torch.Tensor]) -> None:
        for words in self._joined(group):
            rows = words.view(-1, ROW // WORD)
            into.append(torch.empty(rows.shape[0], dtype=torch.int64, device=words.device))
            torch.sum(rows, dim=1, dtype=torch.int64, out=into[-1])

    def _joined(self, group: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield the tensors as words in whole rows; adjacent tensors are merged, and small ones are concatenated."""
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
        """Concatenate parts, which have ``nbytes`` in total, and pad them with zeros to whole rows."""
        device = parts[0].device
        if missing := -nbytes % ROW:
            if device not in self._zeros:
                self._zeros[device] = torch.zeros(ROW // WORD, dtype=torch.int64, device=device)
            parts.append(self._zeros[device][: missing // WORD])
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _on_host(sums: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the sums on the CPU, as one tensor for each device."""
    devices = dict.fromkeys(each.device for each in sums)
    return [torch.cat([each for each in sums if each.device == device]).cpu() for device in devices]


def _runs(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield tensors and their sizes in bytes; adjacent tensors of one storage are merged into one."""
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
