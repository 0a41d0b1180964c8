"""Small training runs whose states are just large enough to be saved in the background."""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from ckpt_core.small_states import SMALL_STATE_BYTES
from ckpt_core.storage import FileWriter, LocalStorage
from lightning_ckpt.io import AsyncCheckpointIO
from tests.support.filling import fill

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:
    from pytorch_lightning import Callback

SECONDS = 200.0
NUMBERS = SMALL_STATE_BYTES // 4 + 1000  # float32 parameters: a state just over the limit
BATCHES = 6  # per epoch

for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero", "pytorch_lightning"):
    logging.getLogger(name).setLevel(logging.ERROR)


def model_of(
    package: str = "lightning.pytorch", *, raise_at: int | None = None, metrics: tuple[float, ...] = ()
) -> Any:
    """Return a model of ``NUMBERS`` parameters, each of which counts the optimizer steps.

    Args:
        package: Package of the ``LightningModule`` to derive from.
        raise_at: Number of the batch whose ``training_step`` raises.
        metrics: Values of ``loss`` to log, one per batch, from the start again when they are used up.
    """
    pl = importlib.import_module(package)

    class Counts(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(NUMBERS))
            self.batches = 0

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            self.batches += 1
            if self.batches == raise_at:
                raise ValueError("the model is on fire")
            if metrics:
                self.log("loss", metrics[(self.batches - 1) % len(metrics)])
            return -self.weight.sum()

        def validation_step(self, batch: torch.Tensor, index: int) -> None:
            self.log("val_loss", self.weight.mean())

        def test_step(self, batch: torch.Tensor, index: int) -> None:
            self.log("test_loss", self.weight.mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1.0)

        def train_dataloader(self) -> Any:
            return DataLoader(torch.zeros(BATCHES * self.trainer.world_size, 1))

        def val_dataloader(self) -> Any:
            return DataLoader(torch.zeros(1, 1))

        def test_dataloader(self) -> Any:
            return DataLoader(torch.zeros(1, 1))

    return Counts()


def trainer_of(folder: Path, callbacks: list[Any], *, package: str = "lightning.pytorch", **options: Any) -> Any:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    return importlib.import_module(package).Trainer(callbacks=callbacks, **{**settings, **options})


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.002)


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


class GatedStorage(LocalStorage):
    """Holds every write back while its gate is closed."""

    opened = threading.Event()

    def create(self, path: str, expected_size: int) -> FileWriter:
        assert self.opened.wait(SECONDS)
        return super().create(path, expected_size)


class FillsDisk(Callback):
    """Fills the disk before the save of one step, and frees it before the save of another.

    Keeps the gate of :class:`GatedStorage` closed from a save to the next batch, so that saves fail between batches.

    Args:
        directory: A directory of the small filesystem.
        full_at: The optimizer step before whose save the disk is filled.
        free_at: The optimizer step before whose save the disk has space again.
    """

    def __init__(self, directory: Path, full_at: int, free_at: int | None = None) -> None:
        self.directory, self.full_at, self.free_at = directory, full_at, free_at
        self.filler: Path | None = None

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        GatedStorage.opened.clear()
        if not trainer.is_global_zero:
            return
        if trainer.global_step == self.full_at and self.filler is None:
            self.filler = fill(self.directory)
        if trainer.global_step == self.free_at and self.filler is not None and self.filler.exists():
            self.filler.unlink()

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        GatedStorage.opened.set()
        plugin = trainer.strategy.checkpoint_io
        if isinstance(plugin, AsyncCheckpointIO):
            wait_until(lambda: not plugin.checkpointer.pending)

    def on_train_epoch_end(self, *_: Any) -> None:
        GatedStorage.opened.set()
