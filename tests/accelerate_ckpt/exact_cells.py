"""Data sets, loaders and styles of training scripts for the tests of exact resume under Accelerate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from tests.support.data_sets import (
    GeneratorSamples,
    OwnSampler,
    Samples,
    StatefulSamples,
    StatefulStream,
    Stream,
    augment,
)

SAMPLES = 31
BATCH = 4


class Batches(Samples):
    """A data set whose index is a whole batch of indices."""

    def __getitem__(self, index: Any) -> Any:
        return torch.tensor(index), torch.stack([augment(i) for i in index])


class ShuffledStream(IterableDataset):
    """An iterable data set whose order depends on the epoch."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        order = np.random.default_rng(self.epoch).permutation(self.size)
        for index in order[first::step]:
            yield int(index), augment(int(index))


class GeneratorStream(IterableDataset):
    """An iterable data set with a generator that Accelerate seeds with the epoch."""

    def __init__(self, size: int) -> None:
        self.size, self.generator = size, torch.Generator()

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        for index in torch.randperm(self.size, generator=self.generator).tolist():
            yield index, augment(index)


class Buckets(BatchSampler):
    """A user's batch sampler with a fixed batch size."""

    def __init__(self, size: int = SAMPLES) -> None:
        super().__init__(SequentialSampler(range(size)), BATCH, False)
        self.rng = np.random.default_rng(5)

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(super().__iter__())
        for number in self.rng.permutation(len(batches) - 1).tolist():
            yield batches[number]
        yield batches[-1]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One way to load data and to write a training script.

    Attributes:
        loader: Makes the loaders; the first is trained on.
        config: How Accelerate prepares them.
        style: How the script continues: ``iterate`` (unchanged), ``skip`` (``skip_first_batches`` and
            ``set_epoch``).
        accumulate: Micro-batches in one optimizer step.
        evaluate: Iterate over the second loader after each epoch.
        together: Iterate over both loaders together.
        local: Train without DDP, because ranks have different numbers of batches.
        hidden: Width of the model.
    """

    loader: Callable[[int], list[Any]]
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    style: str = "iterate"
    accumulate: int = 1
    evaluate: bool = False
    together: bool = False
    local: bool = False
    hidden: int = 8


def plain(dataset: Callable[[int], Any] = Samples, workers: int = 0, **kwargs: Any) -> Callable[[int], list[Any]]:
    def make(seed: int) -> list[Any]:
        options = {key: value(seed) if callable(value) else value for key, value in kwargs.items()}
        if workers:
            options["num_workers"] = workers
        if "batch_sampler" not in options:
            options.setdefault("batch_size", BATCH)
        return [DataLoader(dataset(SAMPLES), **options)]

    return make


def two(dataset: Callable[[int], Any] = Samples, workers: int = 0) -> Callable[[int], list[Any]]:
    def make(seed: int) -> list[Any]:
        train = DataLoader(dataset(SAMPLES), batch_size=BATCH, shuffle=True, num_workers=workers)
        return [train, DataLoader(Samples(18), batch_size=BATCH, shuffle=True)]

    return make


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


SHUFFLED = plain(shuffle=True)
SEEDABLE = {"use_seedable_sampler": True}
STATEFUL = {"use_stateful_dataloader": True}
DISPATCHED = {"dispatch_batches": True}
SHARDED = {"dispatch_batches": False}

CELLS: dict[str, Cell] = {
    "default": Cell(SHUFFLED),
    "default_skip": Cell(SHUFFLED, style="skip"),
    "default_workers": Cell(plain(shuffle=True, workers=2)),
    "default_workers_skip": Cell(plain(shuffle=True, workers=2), style="skip"),
    "default_persistent": Cell(plain(shuffle=True, workers=2, persistent_workers=True)),
    "default_accumulate": Cell(SHUFFLED, accumulate=4),
    "generator": Cell(plain(shuffle=True, generator=_generator)),
    "drop_last": Cell(plain(shuffle=True, drop_last=True)),
    "sequential": Cell(plain()),
    "weighted": Cell(plain(sampler=lambda seed: WeightedRandomSampler([1.0] * SAMPLES, SAMPLES))),
    "own_sampler": Cell(plain(sampler=lambda seed: OwnSampler(SAMPLES))),
    "own_batch_sampler": Cell(plain(batch_sampler=lambda seed: Buckets())),
    "sampler_is_batch_sampler": Cell(plain(Batches, sampler=lambda seed: Buckets(), batch_size=None)),
    "own_rng": Cell(plain(GeneratorSamples, shuffle=True)),
    "split_batches": Cell(SHUFFLED, config={"split_batches": True}),
    "uneven": Cell(plain(lambda _: Samples(27), shuffle=True), config={"even_batches": False}, local=True),
    "uneven_seedable": Cell(
        plain(lambda _: Samples(27), shuffle=True), config={"even_batches": False, **SEEDABLE}, local=True
    ),
    "seedable": Cell(SHUFFLED, config=SEEDABLE),
    "seedable_skip": Cell(SHUFFLED, config=SEEDABLE, style="skip"),
    "seedable_workers": Cell(plain(shuffle=True, workers=2), config=SEEDABLE),
    "stateful": Cell(SHUFFLED, config=STATEFUL),
    "stateful_workers": Cell(plain(shuffle=True, workers=2), config=STATEFUL),
    "stateful_persistent": Cell(plain(shuffle=True, workers=2, persistent_workers=True), config=STATEFUL),
    "stateful_seedable": Cell(SHUFFLED, config={**STATEFUL, **SEEDABLE}),
    "stateful_samples": Cell(plain(StatefulSamples, shuffle=True), config=STATEFUL),
    "stateful_samples_workers": Cell(plain(StatefulSamples, shuffle=True, workers=2), config=STATEFUL),
    "dispatched": Cell(SHUFFLED, config=DISPATCHED),
    "dispatched_skip": Cell(SHUFFLED, config=DISPATCHED, style="skip"),
    "dispatched_split": Cell(SHUFFLED, config={**DISPATCHED, "split_batches": True}),
    "dispatched_workers": Cell(plain(shuffle=True, workers=2), config=DISPATCHED),
    "dispatched_stateful": Cell(SHUFFLED, config={**DISPATCHED, **STATEFUL}),
    "dispatched_stream": Cell(plain(Stream), config=DISPATCHED),
    "dispatched_stream_workers": Cell(plain(Stream, workers=2), config=DISPATCHED),
    "stream": Cell(plain(Stream), config=SHARDED),
    "stream_workers": Cell(plain(Stream, workers=2), config=SHARDED),
    "stream_split": Cell(plain(Stream), config={**SHARDED, "split_batches": True}),
    "shuffled_stream": Cell(plain(ShuffledStream), config=SHARDED),
    "generator_stream": Cell(plain(GeneratorStream), config=SHARDED),
    "stateful_stream": Cell(plain(StatefulStream), config={**SHARDED, **STATEFUL}),
    "stateful_stream_workers": Cell(plain(StatefulStream, workers=2), config={**SHARDED, **STATEFUL}),
    "evaluate": Cell(two(), evaluate=True),
    "together": Cell(two(), together=True),
    "buckets": Cell(SHUFFLED, hidden=700),
}


def configuration(cell: Cell) -> DataLoaderConfiguration:
    return DataLoaderConfiguration(**cell.config)
