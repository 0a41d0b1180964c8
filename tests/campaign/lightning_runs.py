"""Trains a case of the campaign with Lightning, in one process."""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import signal
import traceback
import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from torch.utils.data import DataLoader

from ckpt_core.errors import CheckpointError
from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint, SyncCheckpointIO
from tests.campaign import device
from tests.campaign.data import Items
from tests.campaign.judging import (
    Judgement,
    Outcome,
    Point,
    attributes_of,
    events_of,
    judge_points,
    said_of,
    sha,
)

F = torch.nn.functional

POINTS = (
    Point("middle", (1, 1), (1, 4)),
    Point("last-batch", (1, 5), (2, 2)),
    Point("epoch-end", (1, -1), (2, 1)),
    Point("validation", (1, None), (2, 2)),
    Point("early", (0, 3), (0, 5)),
)
KILLED = Point("killed", (1, 2), (1, 5), really=True)


class Net(pl.LightningModule):
    """A small classifier with batch normalisation and dropout; cases override its parts."""

    def __init__(self, loader: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self._loader = loader
        self.backbone = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU())
        self.head = torch.nn.Sequential(torch.nn.Dropout(0.2), torch.nn.Linear(16, 3))

    def train_dataloader(self) -> Any:
        return DataLoader(Items(), batch_size=8, shuffle=True) if self._loader is None else self._loader()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x))

    def loss(self, batch: Any) -> torch.Tensor:
        while isinstance(batch, dict) and "x" not in batch:
            batch = next(item for item in batch.values() if item is not None)
        while isinstance(batch, (list, tuple)) and not torch.is_tensor(batch[0]):  # of several loaders
            batch = next(item for item in batch if item is not None)
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else (batch[0], batch[1])
        return F.cross_entropy(self(torch.as_tensor(x).float()), torch.as_tensor(y).long())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Validates(Net):
    """With a validation that draws."""

    def val_dataloader(self) -> Any:
        return DataLoader(Items(16), batch_size=8, shuffle=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))


@dataclasses.dataclass(frozen=True)
class Case:
    """A training.

    Args:
        model: Makes the model, given the function that makes its loader.
        loader: Makes the training loader; None is the model's own.
        callbacks: Makes callbacks.
        trainer: Arguments of the Trainer.
        break_engine: Makes the engine do something wrong in a resume.
        needs: Packages that it needs.
        options: Arguments of ``ResumableCheckpoint``.
        datamodule: Makes the datamodule.
    """

    model: Callable[[Any], Any] = Net
    loader: Callable[[], Any] | None = None
    callbacks: Callable[[], list[Any]] = list
    trainer: dict[str, Any] = dataclasses.field(default_factory=dict)
    break_engine: Callable[[pl.Trainer], None] | None = None
    needs: tuple[str, ...] = ()
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    datamodule: Callable[[], Any] | None = None


class Rows(Logger):
    """Keeps what is logged."""

    name, version = "rows", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append([step, {name: float(value).hex() for name, value in sorted(metrics.items())}])

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


@dataclasses.dataclass
class _Run:
    """What this process does; not an attribute of a callback, because a resume looks at what callbacks hold."""

    points: Sequence[Point]
    deaths: Sequence[Point]
    directory: Path
    rows: Rows = dataclasses.field(default_factory=Rows)
    outcome: Outcome = dataclasses.field(default_factory=Outcome)
    caught: Sequence[Any] = ()


# in a module of its own, because a resume looks at variables and objects that training changes
_hidden: Any = types.ModuleType("hidden")


class Spy(Callback):
    """Writes down the batches; dies, or keeps what is on the disk as if it had died."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        run = _hidden.run
        for point in run.deaths:
            if point.dies == (trainer.current_epoch, index):
                if point.really:
                    os.kill(os.getpid(), signal.SIGKILL)
                _keep(run.directory, point)
        if any(name not in run.outcome.attributes for name in (*run.outcome.marks, "begun")):
            datamodule = [] if trainer.datamodule is None else [trainer.datamodule]
            owners = [module, *datamodule, *(cb for cb in trainer.callbacks if not isinstance(cb, (Spy, SavesAt)))]
            found = attributes_of(owners)
            run.outcome.attributes = {
                name: run.outcome.attributes.get(name, found) for name in (*run.outcome.marks, "begun")
            }
        run.outcome.seen.append([trainer.current_epoch, index, trainer.global_step, sha(batch)])


def _keep(directory: Path, point: Point) -> None:
    saved, copy = directory / "checkpoints" / f"{point.name}.ckpt", directory.parent / point.name
    if saved.exists() and not copy.exists():
        (copy / "checkpoints").mkdir(parents=True)
        shutil.copy(saved, copy / "checkpoints")
        for record in directory.glob(".checkpoints.flight*") if point.leaves_records else ():
            shutil.copy(record, copy)


class SavesAt(ResumableCheckpoint):
    """Saves where the campaign wants it."""

    def _saves(self, trainer: Any, batch: int | None) -> None:
        run = _hidden.run
        for point in run.points:
            if point.saves == (trainer.current_epoch, batch) and point.name not in run.outcome.marks:
                mark = [len(run.outcome.seen), len(run.rows.rows), len(run.caught)]
                trainer.save_checkpoint(os.path.join(str(self.dirpath), f"{point.name}.ckpt"))
                run.outcome.marks[point.name] = [*mark, len(run.caught)]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._saves(trainer, batch_idx)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        self._saves(trainer, -1)

    def on_validation_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        if not trainer.sanity_checking:
            self._saves(trainer, None)


def train(case: Case, points: Sequence[Point], what: str, directory: Path, point: Point | None) -> None:
    """Train, in a process of its own."""
    device.begin()
    pl.seed_everything(7, workers=True, verbose=False)
    if what == "resumed":
        torch.randn(5)  # a new process may draw other numbers first
    dies_at = [p for p in points if not p.really] if what == "base" else [point] if what == "killed" and point else []
    _hidden.run = _Run(points, dies_at, directory)
    plugin = AsyncCheckpointIO if what == "killed" else SyncCheckpointIO
    trainer = pl.Trainer(
        **{
            **device.of_trainer(),
            "devices": 1,
            "max_epochs": 3,
            "log_every_n_steps": 1,
            "num_sanity_val_steps": 0,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **case.trainer,
        },
        logger=_hidden.run.rows,
        default_root_dir=directory,
        callbacks=[
            Spy(),
            *case.callbacks(),
            SavesAt(directory / "checkpoints", every_n_epochs=10**6, save_top_k=0, **case.options),
        ],
        plugins=[plugin(event_log=str(directory / "events"))],
    )
    model = case.model(case.loader)
    if case.break_engine is not None and what == "resumed":
        case.break_engine(trainer)
    path = directory / "checkpoints" / f"{point.name}.ckpt" if what == "resumed" and point is not None else None
    data = {} if case.datamodule is None else {"datamodule": case.datamodule()}
    with warnings.catch_warnings(record=True) as _hidden.run.caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(model, ckpt_path=path, **data)
        except CheckpointError as error:
            _hidden.run.outcome.refused = str(error)
        except Exception:
            if what != "resumed":
                raise
            _hidden.run.outcome.crashed = traceback.format_exc()
    outcome = _hidden.run.outcome
    outcome.weights = sha(dict(model.state_dict()))
    outcome.optimizers = sha([optimizer.state_dict() for optimizer in trainer.optimizers])
    outcome.step = trainer.global_step
    outcome.rows = _hidden.run.rows.rows
    outcome.warned = said_of(_hidden.run.caught)
    outcome.compared = events_of(directory / "events")
    outcome.write(directory / "outcome.json")


def judge(case: Case, directory: Path, points: Sequence[Point] = POINTS) -> dict[str, Judgement]:
    """Return the judgement of the resume from each point that the training passes."""
    return judge_points(functools.partial(train, case, points), points, directory)
