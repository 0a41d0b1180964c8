"""Scripts that fit several times: what resumes when an earlier fit has nothing left to train."""

from __future__ import annotations

import contextlib
import random
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_ckpt import ResumableCheckpoint
from tests.lightning_ckpt.exact_cases import Model, Outcome, PlannedError, make_trainer, outcome
from tests.support.data_sets import Samples

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")

BATCHES = 8


def test_what_follows_a_finished_fit_has_its_generators(tmp_path: Path) -> None:
    def draws(seed: int, path: Any = None) -> list[float]:
        pl.seed_everything(seed, verbose=False)
        make_trainer(tmp_path, [ResumableCheckpoint(tmp_path / "saved")], max_epochs=1).fit(Model(), ckpt_path=path)
        return [float(torch.rand(())), float(np.random.rand()), random.random()]

    assert draws(1) == draws(77, "last")


def two_fits(
    directory: Path, seed: int, *, raise_at: int | None = None, second: Any = None, **options: Any
) -> tuple[Outcome, list[str]]:
    """Fit an epoch, and a second one with the same Trainer; return the outcome and the warnings about exactness."""
    pl.seed_everything(seed, verbose=False)
    model, path = Model({"raise_at": raise_at}), options.pop("ckpt_path", None)
    callback = ResumableCheckpoint(directory, "{step}", save_top_k=-1, every_n_train_steps=1, **options)
    trainer = make_trainer(directory, [callback], max_epochs=1)
    with warnings.catch_warnings(record=True) as caught, contextlib.suppress(PlannedError):
        warnings.simplefilter("always")
        trainer.fit(model, ckpt_path=path)
        trainer.fit_loop.max_epochs = 2
        second = second(model, trainer) if second is not None else model
        trainer.fit(second)
    return outcome(trainer, model), [str(w.message) for w in caught if "exact" in str(w.message)]


def test_a_later_fit_resumes_from_its_own_checkpoint(tmp_path: Path) -> None:
    expected, _ = two_fits(tmp_path / "whole", 1, resume="auto")
    failed, _ = two_fits(tmp_path / "failed", 1, resume="auto", raise_at=BATCHES + 3)
    found, warned = two_fits(tmp_path / "failed", 77, resume="auto")
    assert warned == []
    assert failed.seen + found.seen == expected.seen
    assert (found.weights, found.optimizer) == (expected.weights, expected.optimizer)


def test_a_later_fit_without_its_checkpoint_is_said(tmp_path: Path) -> None:
    two_fits(tmp_path, 1, raise_at=BATCHES + 3)
    _, warned = two_fits(tmp_path, 77, ckpt_path="last")
    assert len(warned) == 1
    assert "an earlier fit of this Trainer had nothing left to train" in warned[0]


def test_an_evaluation_between_two_fits_is_said(tmp_path: Path) -> None:
    def evaluate(model: Model, trainer: pl.Trainer) -> Model:
        trainer.validate(model, DataLoader(Samples(8), batch_size=4), verbose=False)
        return model

    expected, warned = two_fits(tmp_path / "whole", 1, resume="auto", second=evaluate)
    assert warned == []
    failed, _ = two_fits(tmp_path / "failed", 1, resume="auto", second=evaluate, raise_at=BATCHES + 3)
    found, warned = two_fits(tmp_path / "failed", 77, resume="auto", second=evaluate)
    assert len(warned) == 1
    assert "this trainer.validate has the weights of a checkpoint that a later fit had saved" in warned[0]
    trained = [[seen for seen in fits.seen if seen[0] != "val"] for fits in (failed, found, expected)]
    assert trained[0] + trained[1] == trained[2]
    assert (found.weights, found.optimizer) == (expected.weights, expected.optimizer)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("raise_at", [3, None])
def test_another_model_in_the_later_fit_is_said(raise_at: int | None, tmp_path: Path) -> None:
    def another(model: Model, _: pl.Trainer) -> Model:
        second = Model({"raise_at": raise_at if model.seen else None})
        second.load_state_dict(model.state_dict())
        return second

    _, warned = two_fits(tmp_path, 1, resume="auto", second=another)
    assert warned == []
    _, warned = two_fits(tmp_path, 77, resume="auto", second=another)
    assert len(warned) == 1
    assert "the fit before this one, of another model, resumed from a checkpoint that this fit had saved" in warned[0]


def test_a_later_fit_after_the_end_of_the_first_is_exact(tmp_path: Path) -> None:
    expected, _ = two_fits(tmp_path / "whole", 1)
    two_fits(tmp_path / "failed", 1, raise_at=BATCHES)
    found, warned = two_fits(tmp_path / "failed", 77, ckpt_path="last")
    assert warned == []
    assert found.seen == expected.seen[-BATCHES:]
    assert (found.weights, found.optimizer) == (expected.weights, expected.optimizer)
