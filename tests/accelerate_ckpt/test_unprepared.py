"""Which iterators of unprepared loaders count as in progress."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accelerate_ckpt._data import unprepared


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(10.0))

    def __len__(self) -> int:
        raise RuntimeError("the length is known after one pass")


def begin(loader: DataLoader[Any]) -> Iterator[Any]:
    # not with `__iter__`, which an attached Accelerator of another test has wrapped
    return unprepared.iterate(lambda loader: loader._get_iterator(), loader)


@pytest.mark.parametrize(
    ("make", "length"),
    [
        (lambda: DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2), 4),
        (lambda: DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2, shuffle=True), 4),
        (lambda: DataLoader(Stream(), batch_size=2), None),
    ],
)
def test_an_iterator_counts_until_its_last_batch(make: Any, length: int | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's warning about streams whose length was asked for
        for number, _ in enumerate(begin(make()), start=1):  # nothing else holds it, as in a `for` of a script
            places = [place for _, _, place in unprepared.iterators()]
            assert places == ([] if number == length else [[1, number]])
    assert unprepared.iterators() == []


def test_one_with_persistent_workers_is_left_out() -> None:
    loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2, num_workers=1, persistent_workers=True)
    next(begin(loader))
    assert unprepared.iterators() == []
