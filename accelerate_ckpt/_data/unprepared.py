"""Data loaders that the script has not prepared: no checkpoint knows how far it is in them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from ckpt_core.state.samplers import RecordingSampler

_passes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # how often each loader was begun
_iterators: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # what is under way: whose, which pass


def iterate(original: Any, loader: Any) -> Iterator[Any]:
    """Do what ``DataLoader.__iter__`` does, and remember the iterator for as long as somebody has it."""
    iterator: Iterator[Any] = original(loader)
    is_prepared = any(isinstance(one, RecordingSampler) for one in (loader.batch_sampler, loader.sampler))
    if hasattr(iterator, "_num_yielded") and not is_prepared:
        with contextlib.suppress(TypeError):  # of a class without a hash
            _passes[loader] = _passes.get(loader, 0) + 1
            _iterators[iterator] = weakref.ref(loader), _passes[loader]
    return iterator


def iterators() -> list[tuple[Any, str, Any]]:
    """Return the iterators that have not come to their end: each, what it is told by, which pass, and how far it is."""
    found: list[tuple[Any, str, Any]] = []
    for iterator, (reference, number) in list(_iterators.items()):
        loader = reference()
        if loader is None:
            continue
        if iterator._num_yielded < _length(loader):
            # with what the script itself has left out by Accelerate's ``skip_first_batches``
            done = iterator._num_yielded + getattr(loader.batch_sampler, "skip_batches", 0)
            told_by = f"`iteration {len(found) + 1}` over a DataLoader that was not prepared"
            found.append((iterator, told_by, [number, done]))
    return found


def _length(loader: Any) -> float:
    with contextlib.suppress(TypeError, NotImplementedError):
        return float(len(loader))
    return float("inf")  # a stream
