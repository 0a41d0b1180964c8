"""Data sets and a sampler whose state (generators, counters, positions), which a resume must restore, is known."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

SAMPLES = 32


def augment(index: int) -> torch.Tensor:
    """Return a sample with noise from all three global generators (torch, NumPy, ``random``)."""
    base = torch.sin(torch.arange(4.0) + index)
    return base + 0.1 * torch.randn(4) + 0.1 * float(np.random.randn()) + 0.1 * random.gauss(0, 1)


class Samples(Dataset):
    def __init__(self, size: int = SAMPLES) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, augment(index)


class GeneratorSamples(Samples):
    """A map-style data set that adds noise from a NumPy generator of its own."""

    def __init__(self, size: int = SAMPLES) -> None:
        super().__init__(size)
        self.rng = np.random.default_rng(3)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, augment(index) + float(self.rng.normal())


class StatefulSamples(Samples):
    """A map-style data set with a state."""

    def __init__(self, size: int = SAMPLES) -> None:
        super().__init__(size)
        self.taken = 0

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        self.taken += 1
        return index, augment(index) + 0.01 * self.taken

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]


class Stream(IterableDataset):
    """An iterable data set without a state, which divides its samples among the loader's workers."""

    def __init__(self, size: int = SAMPLES) -> None:
        self.size = size

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for index in range(first, self.size, step):
            yield index, augment(index)


class StatefulStream(IterableDataset):
    """An iterable data set with a state."""

    def __init__(self, size: int = SAMPLES) -> None:
        self.size = size
        self.position: int | None = None
        self.resumed = False

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        if not self.resumed:
            self.position = first
        self.resumed = False
        while self.position < self.size:
            index = self.position
            self.position += step
            yield index, augment(index)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self.resumed = self.position is not None


class OwnSampler(Sampler[int]):
    """A user's sampler with a NumPy generator of its own and a counter of passes."""

    def __init__(self, size: int = SAMPLES) -> None:
        self.size = size
        self.rng = np.random.default_rng(11)
        self.passes = 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        yield from (int(i) for i in np.roll(self.rng.permutation(self.size), self.passes))
