"""Track which samples a run hands out, and check that an elastic resume hands out each sample of the epoch once.

With a different number of ranks, every batch differs, so no steps can be compared, but the epoch can: the samples
before the save and those of all ranks after it must be those of an uninterrupted epoch.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset
from torch.utils.data import dataloader as torch_loader

_MANY = 6
_UNKNOWN = "?"


class Drawn:
    """Records the indices of batches in the order in which the loaders of this process draw them."""

    def __init__(self) -> None:
        self._ahead: dict[int, tuple[Any, collections.deque[Any]]] = {}
        iterators = torch_loader._BaseDataLoaderIter
        draw: Callable[[Any], Any] | None = getattr(iterators, "_next_index", None)
        self._is_known = draw is not None  # there is no public way to learn of indices
        if draw is None:
            return

        def note(iterator: Any) -> Any:
            indices = draw(iterator)
            one_pass, ahead = self._ahead.get(id(iterator._index_sampler), (None, None))
            if ahead is None or one_pass is not iterator._sampler_iter:
                ahead = collections.deque()
                self._ahead[id(iterator._index_sampler)] = iterator._sampler_iter, ahead
            ahead.append(indices)
            return indices

        iterators._next_index = note  # type: ignore[method-assign]

    def of_batch(self, loader: Any, batch: Mapping[str, Any], described: Callable[[Any], str], count: int) -> list[str]:
        """Return texts that identify the samples of the batch being handed out: their indices, or else their digests.

        ``batch`` has the parts by name; the loader has drawn ``count`` batches of indices to make it.
        """
        batches, sampler = getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)
        _, ahead = self._ahead.get(id(sampler if batches is None else batches), (None, None))
        if not self._is_known:
            return [_UNKNOWN]
        if ahead is None or isinstance(loader.dataset, IterableDataset):
            return _contents(batch, described)
        drawn = [ahead.popleft() for _ in range(min(count, len(ahead)))]
        return [str(i) for indices in drawn for i in (indices if isinstance(indices, (list, tuple)) else [indices])]


def _contents(batch: Mapping[str, Any], described: Callable[[Any], str]) -> list[str]:
    parts = [part for part in batch.values() if isinstance(part, (torch.Tensor, np.ndarray)) and part.ndim]
    rows = min((len(part) for part in parts), default=0)
    return [f"#{' '.join(described(part[row]) for part in parts)}" for row in range(rows)]


#: For each batch of a rank: the number of its epoch, and its samples.
Handed = Sequence[tuple[Any, Sequence[str]]]


def judge(
    whole: Sequence[Handed], before: Sequence[int], resumed: Sequence[Handed], *, drops: bool
) -> tuple[str, str | None]:
    """Return how the resumed ranks handed out the samples of the epoch, and the problem with that, if there is one.

    ``whole`` has the batches of each rank of the uninterrupted run, ``before`` how many of these came before the save,
    and ``resumed`` the batches of each resumed rank. With ``drops``, samples that do not fill a batch are left out.
    """
    passes = list(dict.fromkeys(number for number, _ in whole[0]))
    if len(passes) < 2:
        return "not known", "no epoch was over in the steps that were trained (--steps trains longer)"
    epoch = [[samples for number, samples in rank if number == passes[0]] for rank in whole]
    saved_in = whole[0][before[0] - 1][0] if before[0] else passes[0]
    is_over = all(number != saved_in for rank, count in zip(whole, before, strict=True) for number, _ in rank[count:])
    had = [[s for n, s in rank[:count] if n == saved_in] for rank, count in zip(whole, before, strict=True)]
    continued = [[samples for number, samples in rank if number == rank[0][0]] for rank in resumed]
    if not any(continued):
        return "-", None  # nothing was left to train
    found = [] if is_over else [key for rank in had for samples in rank for key in samples]
    early = collections.Counter(found + [key for rank in continued for samples in rank[:-1] for key in samples])
    times = early + collections.Counter(key for rank in continued for samples in rank[-1:] for key in samples)
    expected = collections.Counter(key for rank in epoch for samples in rank for key in samples)
    if _UNKNOWN in expected:
        return (
            "not known",
            "this release of torch does not reveal which samples its loaders draw: use a tested one",
        )
    row = len(resumed) * max(len(samples) for rank in continued for samples in rank)
    by_itself = collections.Counter(key for rank in epoch for samples in rank[:-1] for key in samples)
    is_unique = max(by_itself.values(), default=1) == 1
    if is_unique:  # samples are repeated only in the last batches, to give all ranks equally many
        expected = collections.Counter(dict.fromkeys(expected, 1))
    elif not any(key.startswith("#") for key in expected):
        return "not known", "an epoch repeats some samples by itself (its sampler draws with replacement?)"
    again, lost = times - expected, expected - times
    if drops:  # the left-out samples need not be those of the uninterrupted epoch
        again, left_out = times - collections.Counter(dict.fromkeys(times, 1)), expected.total() - len(times)
        lost = lost if left_out >= row else collections.Counter()
    is_made_even = is_unique and not lost and again.total() < row and max(early.values(), default=1) == 1
    if is_made_even or not (again or lost):
        return f"each once{f', {again.total()} again in the last batches' if again else ''}", None
    told = [f"{len(part)} {what} ({_some(part)})" for part, what in ((again, "AGAIN"), (lost, "LOST")) if part]
    return "; ".join(word.partition(" (")[0] for word in told), f"of {len(expected)} samples {', '.join(told)}"


def _some(samples: Mapping[str, int]) -> str:
    shown = ", ".join(sorted(samples, key=lambda key: (len(key), key))[:_MANY])
    return shown + (", ..." if len(samples) > _MANY else "")
