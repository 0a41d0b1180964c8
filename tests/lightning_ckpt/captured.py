"""Run a training to its end, and resume it from an earlier checkpoint in new objects, under another seed."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from tests.lightning_ckpt.exact_cases import Model, Outcome, SaveAt, make_trainer, outcome

BATCHES = 8
MIDDLE = ("on_train_batch_end", BATCHES + 3)
END = ("on_train_epoch_end", 2)


def _none() -> None:
    """Return None: the training has no datamodule."""


@dataclasses.dataclass(frozen=True)
class Training:
    """A training to run twice.

    Attributes:
        model: Makes the model.
        callbacks: Makes the callbacks.
        trainer: Arguments of the Trainer.
        is_plain: Whether its checkpoint can be loaded with ``weights_only=True``.
        datamodule: Makes the datamodule, if there is one.
    """

    model: Callable[[], Model] = Model
    callbacks: Callable[[], list[Any]] = list
    trainer: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_plain: bool = True
    datamodule: Callable[[], Any] = _none


def train_and_resume(
    training: Training, directory: Path, at: tuple[str, int] = MIDDLE
) -> tuple[Outcome, Outcome, list[str]]:
    """Return what the whole run did after its save, what the resumed run did, and its warnings about exactness."""
    pl.seed_everything(1, verbose=False)
    model, save = training.model(), SaveAt(*at, directory / "saved.ckpt")
    trainer = make_trainer(directory, [*training.callbacks(), save], **training.trainer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, datamodule=training.datamodule())
    assert save.calls >= at[1]
    torch.load(save.path, weights_only=training.is_plain)
    expected = outcome(trainer, model).after(save.seen, save.rows)

    pl.seed_everything(77, verbose=False)
    torch.randn(3)
    model = training.model()
    trainer = make_trainer(directory, training.callbacks(), **training.trainer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, datamodule=training.datamodule(), ckpt_path=save.path)
    said = [str(w.message) for w in caught if "exact" in str(w.message)]
    return expected, outcome(trainer, model), said
