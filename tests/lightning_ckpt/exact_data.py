"""Data sets, samplers and loaders of every kind, for the tests of exact resume."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from tests.support.data_sets import (
    SAMPLES,
    GeneratorSamples,
    OwnSampler,
    Samples,
    StatefulSamples,
    StatefulStream,
    Stream,
    augment,
)

BATCH = 4


class GeneratorLoader(DataLoader[Any]):
    """A ``DataLoader`` whose iterator is a generator, not one of torch's own."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


class QuietStream(Stream):
    """An iterable data set that has no state and draws no random numbers."""

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        for index in range(self.size):
            yield index, torch.sin(torch.arange(4.0) + index)


class OwnLoader:
    """A user's loader that is not a ``DataLoader``."""

    def __len__(self) -> int:
        return SAMPLES // BATCH

    def __iter__(self) -> Iterator[Any]:
        for first in range(0, SAMPLES, BATCH):
            indices = torch.arange(first, first + BATCH)
            yield indices, torch.sin(indices[:, None] + torch.arange(4.0))


class OwnStatefulLoader:
    """A user's loader that has a state but no length."""

    def __init__(self) -> None:
        self.done = 0

    def __iter__(self) -> Iterator[Any]:
        while self.done < SAMPLES // BATCH:
            indices = torch.arange(self.done * BATCH, (self.done + 1) * BATCH)
            self.done += 1
            yield indices, torch.stack([augment(int(i)) for i in indices])
        self.done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


class Shifts(torch.nn.Module):
    """Sets an attribute in each step that only the same step uses."""

    def center(self, inputs: torch.Tensor) -> torch.Tensor:
        self.shift = inputs.mean(0)
        return inputs - self.shift


def make_loader(kind: str, workers: int = 0, rank: int = 0, world: int = 1) -> Any:
    kw: dict[str, Any] = {"batch_size": BATCH, "num_workers": workers}
    own = {"num_replicas": world, "rank": rank, "seed": 3}
    samples = Samples()
    makers: dict[str, Callable[[], Any]] = {
        "plain": lambda: DataLoader(samples, shuffle=True, **kw),
        "generator": lambda: DataLoader(samples, shuffle=True, generator=torch.Generator().manual_seed(5), **kw),
        "sampler": lambda: DataLoader(samples, sampler=OwnSampler(), **kw),
        "weighted": lambda: DataLoader(samples, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES), **kw),
        "replacement": lambda: DataLoader(samples, sampler=RandomSampler(samples, replacement=True), **kw),
        "batch_sampler": lambda: DataLoader(
            samples, batch_sampler=BatchSampler(RandomSampler(samples), BATCH, False), num_workers=workers
        ),
        "persistent": lambda: DataLoader(samples, shuffle=True, persistent_workers=True, **kw),
        "distributed": lambda: DataLoader(samples, sampler=DistributedSampler(samples, **own), **kw),
        "own_rng": lambda: DataLoader(GeneratorSamples(), shuffle=True, **kw),
        "stateful": lambda: StatefulDataLoader(samples, shuffle=True, **kw),
        "stateful_persistent": lambda: StatefulDataLoader(samples, shuffle=True, persistent_workers=True, **kw),
        "stateful_dataset": lambda: StatefulDataLoader(StatefulSamples(), shuffle=True, **kw),
        "stateful_distributed": lambda: StatefulDataLoader(
            samples, sampler=StatefulDistributedSampler(samples, **own), **kw
        ),
        "stateful_stream": lambda: StatefulDataLoader(StatefulStream(), **kw),
        "stateful_stateless_stream": lambda: StatefulDataLoader(Stream(), **kw),
        "stream": lambda: DataLoader(Stream(), **kw),
        "persistent_stream": lambda: DataLoader(Stream(), persistent_workers=True, **kw),
        "quiet_stream": lambda: DataLoader(QuietStream(), **kw),
        "beside_stream": lambda: [DataLoader(samples, shuffle=True, **kw), DataLoader(QuietStream(), **kw)],
        "own_loader": OwnLoader,
        "own_stateful_loader": OwnStatefulLoader,
        "dict": lambda: {
            "a": DataLoader(samples, shuffle=True, **kw),
            "b": DataLoader(Samples(12), shuffle=True, **kw),
        },
        "persistent_dict": lambda: {
            "a": DataLoader(samples, shuffle=True, persistent_workers=True, **kw),
            "b": DataLoader(Samples(12), shuffle=True, persistent_workers=True, **kw),
        },
        "persistent_beside_stream": lambda: [
            DataLoader(Samples(12), shuffle=True, persistent_workers=True, **kw),
            DataLoader(QuietStream(), batch_size=BATCH),
        ],
        "persistent_one_beside_stream": lambda: [
            DataLoader(Samples(BATCH), shuffle=True, persistent_workers=True, **kw),
            DataLoader(QuietStream(), batch_size=BATCH),
        ],
        "persistent_generator": lambda: GeneratorLoader(samples, shuffle=True, persistent_workers=True, **kw),
        "persistent_generator_of_stream": lambda: GeneratorLoader(Stream(), persistent_workers=True, **kw),
        "min_size": lambda: CombinedLoader(
            [DataLoader(samples, shuffle=True, **kw), DataLoader(Samples(20), shuffle=True, **kw)], "min_size"
        ),
        "persistent_max_size": lambda: CombinedLoader(
            [
                DataLoader(samples, shuffle=True, persistent_workers=True, **kw),
                DataLoader(Samples(12), shuffle=True, persistent_workers=True, **kw),
            ],
            "max_size",
        ),
        "max_size": lambda: CombinedLoader(
            [DataLoader(samples, shuffle=True, **kw), DataLoader(Samples(12), shuffle=True, **kw)], "max_size"
        ),
    }
    return makers[kind]()
