"""Finds open iterations over loaders that the script has not prepared: no checkpoint holds their position."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from accelerate.data_loader import SkipBatchSampler
from torch.utils import data

from ckpt_core.state.samplers import RecordingSampler, handed_out

# samplers with a safe len(): that of others may have side effects
_COUNTED = (
    *(data.BatchSampler, data.RandomSampler, data.SequentialSampler, data.SubsetRandomSampler),
    *(data.WeightedRandomSampler, data.DistributedSampler, SkipBatchSampler),
)
_passes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # number of iterations of each loader
# Open iterators, each with its loader, the number of the iteration, and the number of batches in it
_iterators: weakref.WeakKeyDictionary[Any, tuple[Any, int, float]] = weakref.WeakKeyDictionary()


def iterate(original: Any, loader: Any) -> Iterator[Any]:
    """Do what ``DataLoader.__iter__`` does, and remember the iterator for as long as the script references it.

    Iterators with persistent workers are left out, because their loader references them, too.
    """
    iterator: Iterator[Any] = original(loader)
    with contextlib.suppress(Exception):  # e.g. the class has no hash, or the dataset no length
        is_prepared = any(isinstance(one, RecordingSampler) for one in (loader.batch_sampler, loader.sampler))
        if handed_out(iterator) is not None and not is_prepared and not loader.persistent_workers:
            _passes[loader] = _passes.get(loader, 0) + 1
            _iterators[iterator] = loader, _passes[loader], _length(loader)
    return iterator


def iterators() -> list[tuple[Any, str, Any]]:
    """Return the iterators that are not at their end: each with its name for the user, and its pass and position."""
    found: list[tuple[Any, str, Any]] = []
    for reference in _iterators.keyrefs():  # a copy, because other threads may start iterations meanwhile
        iterator = reference()
        known = None if iterator is None else _iterators.get(iterator)
        if iterator is None or known is None:
            continue
        loader, number, length = known
        batches = handed_out(iterator)
        if batches is not None and batches < length:
            # including the batches that the script has skipped by Accelerate's ``skip_first_batches``
            done = batches + getattr(loader.batch_sampler, "skip_batches", 0)
            told_by = f"`iteration {len(found) + 1}` over a DataLoader that was not prepared"
            found.append((iterator, told_by, [number, done]))
    return found


def _length(loader: Any) -> float:
    samplers = [one for one in (loader.batch_sampler, loader.sampler) if one is not None]
    is_counted = samplers and all(type(one) in _COUNTED for one in samplers)
    return float(len(samplers[0])) if is_counted else float("inf")
