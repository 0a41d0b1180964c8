"""Small training runs that contain everything a resume can get wrong, for the tests of exact resume."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import random
import re
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torchmetrics
from lightning.pytorch.callbacks import BaseFinetuning, Checkpoint
from lightning.pytorch.loggers import Logger
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_ckpt._exact.state import KEY
from lightning_ckpt.resumable import ResumableCheckpoint
from tests.lightning_ckpt.exact_data import BATCH, make_loader
from tests.support.data_sets import Samples
from tests.support.seen import seen_by

for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
    logging.getLogger(name).setLevel(logging.ERROR)


#: Lightning's version, as numbers.
RELEASE = tuple(int(part) for part in re.findall(r"\d+", pl.__version__)[:3])


class PlannedError(RuntimeError):
    """Raised by a run that is told to fail."""


def first_batches(batch: Any) -> list[Any]:
    """Return the (indices, data) pairs of a batch, however the loaders are combined."""
    if isinstance(batch, dict):
        return [part for part in batch.values() if part is not None]
    if isinstance(batch, list) and batch and isinstance(batch[0], (list, tuple)):
        return [part for part in batch if part is not None]
    return [batch]


_kept: weakref.WeakKeyDictionary[Model, Any] = weakref.WeakKeyDictionary()  # loaders to return again at every reload


class Model(pl.LightningModule):
    """A model with dropout, noise from every generator, and metrics over the epoch; remembers what it saw."""

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.options = options or {}
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
        self.other = torch.nn.Linear(1, 1)
        if self.options.get("wide"):
            # more than one gradient bucket under DDP
            layers = [torch.nn.Linear(512, 512) for _ in range(8)]
            self.net = torch.nn.Sequential(torch.nn.Linear(4, 512), *layers, torch.nn.Linear(512, 1))
        if self.options.get("statistics"):
            self.register_buffer("level", torch.zeros(()))
        self.average = torchmetrics.MeanMetric()
        self.unlogged = torchmetrics.MeanMetric()
        self.automatic_optimization = not self.options.get("manual")
        self.raise_at: int | None = self.options.get("raise_at")
        self.reseed = 0

    @property
    def seen(self) -> list[Any]:
        return seen_by(self)

    def train_dataloader(self) -> Any:
        rank, world = self.trainer.global_rank, self.trainer.world_size
        if self in _kept:
            return _kept[self]
        loader = make_loader(self.options.get("loader", "plain"), self.options.get("workers", 0), rank, world)
        if self.options.get("keeps_loader"):
            _kept[self] = loader
        if self.options.get("reads_before"):
            next(iter(loader))
        return loader

    def val_dataloader(self) -> Any:
        if not self.options.get("val"):
            return []
        return DataLoader(Samples(12), batch_size=BATCH, num_workers=self.options.get("val_workers", 0))

    def loss(self, batch: Any) -> torch.Tensor:
        total = torch.zeros(())
        for _, x in first_batches(batch):
            y = self.net(x + 0.01 * float(np.random.randn()) + 0.01 * random.random())
            if self.options.get("statistics"):
                y = y - self.level
                self.level.lerp_(y.detach().mean(), 0.5)
            total = total + ((self.other(y) - x.sum(1, keepdim=True)) ** 2).mean()
        return total

    def note(self, batch: Any, batch_idx: int) -> None:
        indices = [[int(i) for i in part[0]] for part in first_batches(batch)]
        self.seen.append([self.trainer.current_epoch, batch_idx, self.trainer.global_step, indices])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.average.update(loss.detach())
        self.log("average", self.average, on_step=False, on_epoch=True)
        self.unlogged.update(loss.detach() + 1)
        if self.raise_at is not None and len(self.seen) == self.raise_at:
            raise PlannedError
        self.note(batch, batch_idx)
        if self.automatic_optimization:
            return loss
        self.manual_step(batch, loss, batch_idx)
        return None

    def manual_step(self, batch: Any, loss: torch.Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.manual_backward(loss)
        if (batch_idx + 1) % 3 == 0:
            first.step()
            first.zero_grad()
        second.zero_grad()
        self.manual_backward(self.loss(batch))
        second.step()

    def on_train_epoch_end(self) -> None:
        self.log("unlogged", self.unlogged.compute())
        self.unlogged.reset()

    def on_validation_model_eval(self) -> None:
        super().on_validation_model_eval()
        for callback in self.trainer.callbacks:
            if isinstance(callback, SaveAt):
                callback.validation = (len(self.seen), len(self.trainer.logger.rows))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        value = self.loss(batch) + float(torch.randn(()))
        self.log("val_loss", value)
        self.seen.append(["val", self.trainer.global_step, batch_idx, [[int(i) for i in batch[0]]]])

    def configure_optimizers(self) -> Any:
        if self.options.get("manual"):
            return [
                torch.optim.AdamW(self.net.parameters(), lr=0.02),
                torch.optim.AdamW(self.other.parameters(), lr=0.02),
            ]
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        if self.options.get("plateau"):
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=10.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, **self.options["plateau"]}}
        period = self.trainer.estimated_stepping_batches if self.options.get("estimated") else 5
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, max(1, int(min(period, 5))), 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Thaws(BaseFinetuning):
    """Trains ``other`` from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.other)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.other, optimizer)


class MemoryLogger(Logger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []

    name = "memory"
    version = 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append([step, dict(sorted(metrics.items()))])

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class SaveAt(Checkpoint):
    """Saves once, at the n-th call of a hook, and remembers how far the run was."""

    def __init__(self, hook: str, count: int, path: Path, after_save: Callable[[], None] | None = None) -> None:
        self.count, self.path, self.calls = count, path, 0
        self.after_save = after_save
        self.seen = self.rows = 0
        self.validation = (0, 0)

        def call(trainer: Any, module: Any, *args: Any) -> None:
            if trainer.sanity_checking:
                return
            self.calls += 1
            if self.calls == self.count:
                trainer.save_checkpoint(self.path)
                # a resume repeats an unfinished validation from its start
                again = hook.startswith("on_validation") and hook != "on_validation_end"
                self.seen, self.rows = self.validation if again else (len(module.seen), len(trainer.logger.rows))
                if self.after_save is not None:
                    self.after_save()

        setattr(self, hook, call)

    def on_sanity_check_end(self, trainer: Any, module: Any) -> None:
        module.seen.clear()


@dataclasses.dataclass
class Outcome:
    """The results of a run: its final state, the batches that it saw, and what it logged."""

    weights: str
    optimizer: str
    seen: list[Any]
    rows: list[Any]
    step: int
    callback_metrics: dict[str, float]
    #: digests of the state in the last checkpoint, from which a resume continues
    saved: dict[str, str] = dataclasses.field(default_factory=dict)

    def after(self, seen: int, rows: int) -> Outcome:
        return dataclasses.replace(self, seen=self.seen[seen:], rows=self.rows[rows:])


def digest(value: Any) -> str:
    """Return the SHA-256 of nested data that may hold tensors."""
    found = hashlib.sha256()

    def add(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            item = item.to_local() if isinstance(item, DTensor) else item
            found.update(item.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(item, dict):
            for key in item:
                found.update(repr(key).encode())
                add(item[key])
        elif isinstance(item, (list, tuple)):
            for part in item:
                add(part)
        else:
            found.update(repr(item).encode())

    add(value)
    return found.hexdigest()


def outcome(trainer: Any, model: Model) -> Outcome:
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    optimizers = [optimizer.state_dict() for optimizer in trainer.optimizers]
    return Outcome(
        digest(model.state_dict()), digest(optimizers), model.seen, trainer.logger.rows, trainer.global_step, metrics
    )


def end_workers(trainer: Any) -> None:
    """End the persistent workers of the loaders, which nothing else ends in time.

    When Python's garbage collector ends them, their queues are already gone, and it waits five seconds for each worker.
    """
    loops = (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop)
    for combined in (loop._combined_loader for loop in loops):
        for loader in [] if combined is None else combined.flattened:
            if hasattr(iterator := getattr(loader, "_iterator", None), "_shutdown_workers"):
                iterator._shutdown_workers()


def saved_at_the_end(trainer: Any, path: Path) -> dict[str, str]:
    """Save a checkpoint; return a digest of each leaf of its exact state, without what it notes about its own run."""
    trainer.save_checkpoint(path)
    state = torch.load(path, weights_only=False)
    found = {}

    def add(value: Any, name: str) -> None:
        if isinstance(value, (dict, list)) and value:
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            for key, part in pairs:
                if key not in ("changed", "recorder", "variables") and "SaveAt" not in str(key):
                    add(part, f"{name}.{key}")
        else:
            found[name] = digest(value) if not isinstance(value, int) else repr(value)

    add({name: state[name] for name in ("loops", KEY)}, "")
    return found


DEFAULTS: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 3,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 2,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def make_trainer(directory: Path, callbacks: list[Any], **kwargs: Any) -> Any:
    exact = ResumableCheckpoint(dirpath=directory / "unused", save_top_k=0, every_n_epochs=1000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = {**DEFAULTS, "default_root_dir": directory, **kwargs}
        return pl.Trainer(**settings, callbacks=[*callbacks, exact], logger=MemoryLogger())
