"""Data sets, samplers, transforms and streams of the campaign, as users write them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info


class Items(Dataset[Any]):
    """Samples with noise from the global generators, or from ``draw``."""

    def __init__(self, length: int = 48, draw: Callable[[], torch.Tensor] | None = None) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(length, 8, generator=generator)
        self.y = torch.randint(0, 3, (length,), generator=generator)
        self.draw = draw
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.x)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        noise = torch.randn(8) if self.draw is None else self.draw()
        return self.x[index] * (1 + self.epoch) + 0.1 * noise, self.y[index]


def collates_and_counts() -> Any:
    """Return a loader whose ``collate_fn`` counts its calls."""
    calls = 0

    def collate(items: Any) -> Any:
        nonlocal calls
        calls += 1
        x, y = torch.utils.data.default_collate(items)
        return x * (1 + 0.1 * (calls % 5)), y

    return DataLoader(Items(), batch_size=8, shuffle=True, collate_fn=collate)


class Jitter:
    """A transform with a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(11)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * float(self.rng.normal())


class Transformed(Dataset[Any]):
    """Items with a transform."""

    def __init__(self, transform: Any) -> None:
        self.items, self.transform = Items(draw=lambda: torch.zeros(8)), transform

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        x, y = self.items[index]
        return self.transform(x), y


class CountsEpochs(Items):
    """Counts its epochs by the reads of its first sample."""

    passes = -1

    def __getitem__(self, index: int) -> Any:
        if index == 0:
            self.passes += 1
        x, y = super().__getitem__(index)
        return x * (1 + max(0, self.passes)), y


class OwnNoise:
    """Draws noise, as transforms with a generator or a counter of their own do."""

    kinds = ("torch", "numpy", "legacy", "counts", "seeds itself", "global numpy", "python")

    def __init__(self, kind: str = "torch") -> None:
        self.torch, self.numpy = torch.Generator().manual_seed(5), np.random.default_rng(5)
        self.python, self.kind, self.legacy = random.Random(5), kind, np.random.RandomState(5)
        self.calls, self.flipped = 0, False

    def __call__(self) -> torch.Tensor:
        if self.kind == "flips":
            self.flipped = not self.flipped
            return torch.full((8,), float(self.flipped))
        self.calls += 1
        if self.kind == "torch":
            return torch.randn(8, generator=self.torch)
        if self.kind == "numpy":
            return torch.from_numpy(self.numpy.standard_normal(8).astype("f4"))
        if self.kind == "legacy":
            return torch.from_numpy(self.legacy.standard_normal(8).astype("f4"))
        if self.kind == "counts":
            return torch.full((8,), float(self.calls % 7))
        if self.kind == "seeds itself":
            return torch.randn(8, generator=torch.Generator().manual_seed(self.calls))
        if self.kind == "global numpy":
            return torch.from_numpy(np.random.standard_normal(8).astype("f4"))
        return torch.tensor([self.python.random() for _ in range(8)])


class Stream(IterableDataset[Any]):
    """A stream of samples.

    Args:
        kind: ``plain``; ``counts``, in an order that depends on how often it was read; ``epoch``, on ``set_epoch``;
            ``global``, drawn from torch's global generator at the beginning of a pass; ``clock``, from the system's
            randomness, never twice the same; ``own``, from a generator of its own; ``noise``, with noise of torch's
            global generator; ``cursor``, continues where the last pass ended.
        length: Number of samples in a pass.
    """

    def __init__(self, kind: str = "plain", length: int = 48) -> None:
        self.items, self.kind, self.length = Items(length, lambda: torch.zeros(8)), kind, length
        self.passes = self.epoch = self.at = 0
        self.own = random.Random(9)
        self.kept: Any = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = list(range(self.length))
        self.passes += 1
        if self.kind == "counts":
            random.Random(self.passes).shuffle(order)
        elif self.kind == "epoch":
            random.Random(self.epoch).shuffle(order)
        elif self.kind == "global":
            order = torch.randperm(self.length).tolist()
        elif self.kind == "clock":
            random.SystemRandom().shuffle(order)
        elif self.kind == "own":
            self.own.shuffle(order)
        worker = get_worker_info()
        if worker is not None:
            order = order[worker.id :: worker.num_workers]
        for i in order:
            x, y = self.items[i]
            if self.kind == "noise":
                x = x + 0.1 * torch.randn(8)
            if self.kind == "cursor":
                x, y = self.items[self.at % self.length]
                self.at += 5
            yield x, y


class StatefulStream(Stream):
    """A stream with a state."""

    position = 0

    def __iter__(self) -> Iterator[Any]:
        for number, item in enumerate(list(super().__iter__())):
            if number >= self.position:
                self.position = number + 1
                yield item
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.passes = state["position"], state["passes"] - 1


class Stuck(Stream):
    """A stream that begins each pass at the position of the state that was loaded."""

    position = begins_at = 0

    def __iter__(self) -> Iterator[Any]:
        items = list(super().__iter__())
        for number in range(self.begins_at, len(items)):
            self.position = number + 1
            yield items[number]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begins_at = state["position"]


class InPlaceSampler(Sampler[Any]):
    """Shuffles its own list in place; yields samples, or batches."""

    def __init__(self, length: int = 48, batch: int | None = None, kind: str = "list") -> None:
        self.order: Any = np.arange(length) if kind == "array" else list(range(length))
        if kind == "tensor":
            self.order = torch.arange(length)
        self.batch, self.length = batch, length

    def __len__(self) -> int:
        return self.length if self.batch is None else self.length // self.batch

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.order, np.ndarray):
            np.random.shuffle(self.order)
        elif torch.is_tensor(self.order):
            self.order = self.order[torch.randperm(self.length)]
        else:
            random.shuffle(self.order)
        order = [int(i) for i in self.order]
        if self.batch is None:
            yield from order
        else:
            yield from [order[i : i + self.batch] for i in range(0, len(order), self.batch)]


class BucketBatches(Sampler[Any]):
    """Makes batches of neighbours and yields them in an order of its own.

    Args:
        kind: Source of the order: ``epoch``, its own count; ``generator``, one of NumPy; ``shared``, one of the class;
            ``queue``, torch's global generator, with batches left over for the next pass.
    """

    shared = random.Random(3)

    def __init__(self, kind: str, length: int = 48, size: int = 8) -> None:
        self.kind, self.length, self.size, self.epoch = kind, length, size, 0
        self.generator = np.random.default_rng(4)
        self.pending: list[list[int]] = []

    def __len__(self) -> int:
        return self.length // self.size

    def __iter__(self) -> Iterator[Any]:
        batches = [list(range(i, i + self.size)) for i in range(0, self.length, self.size)]
        if self.kind == "epoch":
            random.Random(self.epoch).shuffle(batches)
        elif self.kind == "generator":
            batches = [batches[i] for i in self.generator.permutation(len(batches))]
        elif self.kind == "shared":
            BucketBatches.shared.shuffle(batches)
        elif self.kind == "queue":  # what is left over from the last pass comes first
            self.pending += [batches[i] for i in torch.randperm(len(batches)).tolist()]
            self.pending += [batches[0]]
            batches, self.pending = self.pending[: len(self)], self.pending[len(self) :]
        self.epoch += 1
        yield from batches


class Mining(Sampler[Any]):
    """Draws by weights that it changes with each draw."""

    def __init__(self, length: int = 48) -> None:
        self.weights = torch.ones(length)

    def __len__(self) -> int:
        return len(self.weights)

    def __iter__(self) -> Iterator[int]:
        for _ in range(len(self.weights)):
            index = int(torch.multinomial(self.weights, 1))
            self.weights[index] *= 0.5
            yield index


class Growing(Dataset[Any]):
    """A data set that reading changes.

    Args:
        kind: ``order`` rotates its index list at each epoch's first read; ``reads`` counts reads; ``drawn`` keeps what
            it has drawn once.
    """

    def __init__(self, kind: str) -> None:
        self.items, self.kind, self.reads = Items(draw=lambda: torch.zeros(8)), kind, 0
        self.order, self.drawn = list(range(48)), dict[int, torch.Tensor]()

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        if self.kind == "order" and self.reads % 48 == 1:
            self.order.append(self.order.pop(0))
        x, y = self.items[self.order[index]]
        if self.kind == "reads":
            x = x * (1 + (self.reads % 5))
        if self.kind == "drawn":
            x = x + self.drawn.setdefault(index, torch.randn(8))
        return x, y


def collate_with(generator: Any) -> Callable[[Any], Any]:
    """Return a ``collate_fn`` that draws from a generator, or from the global one."""

    def collate(samples: Any) -> Any:
        x, y = torch.utils.data.default_collate(samples)
        return x + 0.1 * torch.randn(x.shape, generator=generator), y

    return collate
