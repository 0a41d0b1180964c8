"""A small fine-tune (a frozen base of a few MB, a few trained tensors), and counts of what a save writes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from ckpt_core import DirectoryCheckpointer, Kind, Part
from ckpt_core.storage import FaultyStorage, LocalStorage, Storage


@dataclasses.dataclass
class FineTune:
    """A model most of which is frozen.

    Attributes:
        frozen: Tensors that :meth:`step` does not change: large ones, alternating with as many small ones.
        trained: The other tensors.
    """

    frozen: dict[str, torch.Tensor]
    trained: dict[str, torch.Tensor]

    @classmethod
    def new(cls, *, layers: int = 4, width: int = 300) -> FineTune:
        generator = torch.Generator().manual_seed(0)
        frozen, trained = {}, {}
        for layer in range(layers):
            frozen[f"{layer}.weight"] = torch.randn(width, width, generator=generator)
            frozen[f"{layer}.bias"] = torch.randn(width, generator=generator)
            trained[f"{layer}.adapter"] = torch.randn(width, 20, generator=generator)
            trained[f"{layer}.scale"] = torch.randn(7, generator=generator)
        return cls(frozen, trained)

    @property
    def trained_bytes(self) -> int:
        """Bytes of the trained tensors and of their optimizer state."""
        return 2 * sum(tensor.nbytes for tensor in self.trained.values())

    def step(self) -> None:
        """Change the trained tensors."""
        for tensor in self.trained.values():
            tensor.add_(1.0)

    def model(self) -> dict[str, torch.Tensor]:
        """Return the model's state, frozen and trained tensors mixed."""
        return dict(sorted({**self.frozen, **self.trained}.items()))

    def parts(self, kind: Kind = Kind.SHARDED) -> list[Part]:
        """Return the whole state as parts: model, optimizer and generator (RNG)."""
        moments = {name: tensor * 2 for name, tensor in self.trained.items()}
        seed = torch.tensor([float(next(iter(self.trained.values()))[0, 0])])
        return [
            Part("model", self.model(), kind, frozenset(self.frozen)),
            Part("optimizer", {"state": moments, "lr": 0.1}, kind),
            Part("rng", {"seed": seed}, Kind.PER_RANK),
        ]


def load_model(path: Path | str, storage: Storage | None = None, options: Any = None) -> dict[str, torch.Tensor]:
    """Verify every byte of a checkpoint and return its model."""
    with DirectoryCheckpointer(storage=storage, storage_options=options).load(path) as checkpoint:
        checkpoint.verify()
        model = checkpoint.load("model")
        assert float(checkpoint.load("rng")["seed"]) == float(model["0.adapter"][0, 0])
        return dict(model)


def bytes_written(storage: FaultyStorage) -> int:
    """Return how many bytes were written to the storage so far."""
    return sum(operation.size for operation in storage.operations if operation.name == "write_at")


def copies(storage: FaultyStorage) -> int:
    """Return how many files the storage was asked to copy so far."""
    return sum(operation.name == "copy" for operation in storage.operations)


def files_with(path: Path, text: str) -> list[Path]:
    """Return the files of a checkpoint with ``text`` in their names."""
    return sorted(file for file in path.iterdir() if text in file.name)


def counted(inner: Storage | None = None) -> FaultyStorage:
    """Return a storage that records its operations."""
    return FaultyStorage(inner or LocalStorage())
