"""Which samples a run hands out, and whether ranks of another number continue an epoch with each of them once.

With another number of ranks, every batch is another one, so that no step can be compared. What can be is the epoch:
what was handed out before the save, and by all ranks after it, is what an epoch without interruption hands out.
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
    """Knows the indices of the batches that loaders of this process hand out, in the order in which they draw them."""

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
        """Return what tells the samples of the batch that is handed out now: indices, or else a digest of each.

        ``batch`` has the parts by name; the loader has drawn for ``count`` batches of its own to make it.
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


#: For each batch of a rank: its pass, and its samples.
Handed = Sequence[tuple[Any, Sequence[str]]]


def judge(
    whole: Sequence[Handed], before: Sequence[int], resumed: Sequence[Handed], *, drops: bool
) -> tuple[str, str | None]:
    """Return what became of the samples of the epoch that others have continued, and what is wrong with it.

    ``whole`` has what each rank was handed out without interruption, ``before`` how many batches of these before the
    save, and ``resumed`` what each of the other ranks was handed out. With ``drops``, what makes no whole batch is left
    out.
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
    if is_unique:  # what the last batches have again makes the ranks even
        expected = collections.Counter(dict.fromkeys(expected, 1))
    elif not any(key.startswith("#") for key in expected):
        return "not known", "an epoch repeats some samples by itself (its sampler draws with replacement?)"
    again, lost = times - expected, expected - times
    if drops:  # others than in that epoch
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
