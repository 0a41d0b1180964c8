"""Settings that differ at a resume: the new ones apply, and one line says what has changed."""

from __future__ import annotations

import logging
import pickle
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from torch.utils.data import DataLoader

from tests.lightning_ckpt.exact_cases import Model, SaveAt, make_trainer
from tests.lightning_ckpt.exact_data import BATCH
from tests.support.data_sets import Samples

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

BATCHES = 8


class Loading(Model):
    """Passes its options to its loader."""

    def train_dataloader(self) -> Any:
        return DataLoader(Samples(BATCHES * BATCH), **{"batch_size": BATCH, "shuffle": True, **self.options})


class AccumulatesLater(Callback):
    """Sets the Trainer's attribute once in a hook, as a user's own schedule does."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.accumulate_grad_batches = 4


def fit(
    directory: Path, *, options: dict[str, Any], callbacks: list[Any], **settings: Any
) -> tuple[list[int], list[str]]:
    """Train; return the optimizer steps before each batch and at the end, and the warnings about the resume."""
    path = settings.pop("ckpt_path", None)
    pl.seed_everything(1, verbose=False)
    model = Loading(options)
    trainer = make_trainer(directory, callbacks, **{"max_epochs": 2, **settings})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, ckpt_path=path)
    steps = [seen[2] for seen in model.seen] + [trainer.global_step]
    return steps, [str(w.message) for w in caught if "exact" in str(w.message)]


def steps_after(first: int, at: list[int], batches: int) -> list[int]:
    """Return the steps before each next batch and after the last, if the optimizer steps after the batches ``at``."""
    return [first + sum(done <= batch for done in at) for batch in range(batches + 1)]


ACCUMULATE = "accumulate_grad_batches"


@pytest.mark.sampled(2)
@pytest.mark.extended_cells("epoch", "hook", "schedule")
@pytest.mark.parametrize(
    ("saved_at", "first", "second", "expected", "told"),
    [
        pytest.param(
            ("on_train_epoch_end", 1), {ACCUMULATE: 1}, {ACCUMULATE: 2}, (8, [2, 4, 6, 8], 8), "was 1 and is 2", id="epoch"
        ),
        pytest.param(
            ("on_train_batch_end", 2), {ACCUMULATE: 1}, {ACCUMULATE: 4}, (2, [2, 6, 10, 14], 14), "was 1 and is 4", id="none open"
        ),
        pytest.param(
            ("on_train_batch_end", 4), {ACCUMULATE: 3}, {ACCUMULATE: 2}, (1, [2, 4, 6, 8, 10, 12], 12), "was 3 and is 2", id="open"
        ),
        pytest.param(
            ("on_train_batch_end", 10),
            {"schedule": {1: 4}},
            {"schedule": {1: 4}},
            (8, [2, 6], 6),
            None,
            id="schedule",
        ),
        pytest.param(
            ("on_train_batch_end", 12), {"schedule": {1: 4}}, {}, (9, [1, 2, 3, 4], 4), "was 4 and is 1", id="no schedule"
        ),
        pytest.param(
            ("on_train_batch_end", 12), {"schedule": {1: 4}}, {"schedule": {1: 2}}, (9, [2, 4], 4), "was 4 and is 2", id="other schedule"
        ),
        pytest.param(("on_train_batch_end", 10), {"hook": True}, {"hook": True}, (8, [2, 6], 6), None, id="hook"),
    ],
)  # fmt: skip
def test_accumulation(
    saved_at: tuple[str, int],
    first: dict[str, Any],
    second: dict[str, Any],
    expected: tuple[int, list[int], int],
    told: str | None,
    tmp_path: Path,
) -> None:
    def settings(of: dict[str, Any], *callbacks: Any) -> dict[str, Any]:
        found: dict[str, Any] = {"options": {}, "callbacks": list(callbacks)}
        if "schedule" in of:
            found["callbacks"].append(GradientAccumulationScheduler(dict(of["schedule"])))
        if "hook" in of:
            found["callbacks"].append(AccumulatesLater())
        return {**found, **{name: value for name, value in of.items() if name == ACCUMULATE}}

    save = SaveAt(*saved_at, tmp_path / "saved.ckpt")
    fit(tmp_path, **settings(first, save))
    steps, warned = fit(tmp_path, **settings(second), ckpt_path=save.path)
    assert steps == steps_after(*expected)
    assert len(warned) == (told is not None)
    assert told is None or f"accumulate_grad_batches {told} now" in warned[0]


class Ends(Callback):
    """Changes, after the third batch, when the fit ends."""

    def __init__(self, **limits: Any) -> None:
        self.limits = limits

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.should_stop = not self.limits
            for name, value in self.limits.items():
                setattr(trainer.fit_loop if "epochs" in name else trainer.fit_loop.epoch_loop, name, value)


@pytest.mark.sampled(2)
@pytest.mark.extended_cells(
    "between-more epochs",
    "in-fewer steps",
    "between-another argument",
    "between-waits",
    "in-steps",
    "in-waits no more",
)
@pytest.mark.parametrize(
    ("hook", "first", "second", "steps", "told"),
    [
        pytest.param(Ends(max_epochs=4), {}, {}, 32, "max_epochs=4", id="more epochs"),
        pytest.param(Ends(max_steps=10), {}, {}, 10, "max_steps=10", id="fewer steps"),
        pytest.param(Ends(max_epochs=4), {}, {"max_epochs": 3}, 24, None, id="another argument"),
        pytest.param(Ends(), {"max_epochs": 4, "min_epochs": 2}, {"max_epochs": 4, "min_epochs": 2}, 16, None, id="waits"),
        pytest.param(Ends(), {"max_epochs": 4, "min_steps": 11}, {"max_epochs": 4, "min_steps": 11}, 11, None, id="steps"),
        pytest.param(Ends(), {"min_epochs": 2}, {"max_epochs": 3}, 24, None, id="waits no more"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("at", [("on_train_batch_end", 5), ("on_train_epoch_end", 1)], ids=["in", "between"])
def test_when_the_fit_ends(
    at: tuple[str, int],
    hook: Ends,
    first: dict[str, Any],
    second: dict[str, Any],
    steps: int,
    told: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    save = SaveAt(*at, tmp_path / "saved.ckpt")
    fit(tmp_path, options={}, callbacks=[hook, save], **first)
    caplog.set_level(logging.INFO, "lightning.pytorch.lightning_ckpt")
    taken, warned = fit(tmp_path, options={}, callbacks=[hook], ckpt_path=save.path, **second)
    assert taken[-1] == steps
    assert not warned
    said = [line for line in caplog.messages if "as set by a hook" in line]
    assert len(said) == (told is not None)
    assert told is None or f"continues with {told}, as set by a hook" in said[0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"shuffle": False}, "sampler of a training data loader was BatchSampler of RandomSampler and is BatchSampler of Seq"),
        ({"batch_size": BATCH * 2}, "number of batches"),
        ({}, None),
    ],
)  # fmt: skip
def test_another_loader(changed: dict[str, Any], told: str | None, tmp_path: Path) -> None:
    save = SaveAt("on_train_batch_end", 3, tmp_path / "saved.ckpt")
    fit(tmp_path, options={}, callbacks=[save])
    _, warned = fit(tmp_path, options=changed, callbacks=[], ckpt_path=save.path)
    assert len(warned) == (told is not None)
    assert told is None or told in warned[0]


class Logging(Loading):
    """Logs how many batches of the epoch are done, with the given arguments of ``log``."""

    def __init__(self, **told: Any) -> None:
        super().__init__({})
        self.told = told

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("done", float(batch_idx + 1), batch_size=1, **self.told)
        return super().training_step(batch, batch_idx)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("before", "now", "expected", "is_said"),
    [
        ({}, {}, {"done_epoch": 4.5}, False),
        ({}, {"prog_bar": True}, {"done_epoch": 4.5}, False),
        ({}, {"on_step": False}, {"done": 4.5}, False),
        ({"reduce_fx": "sum"}, {"reduce_fx": "sum", "enable_graph": True}, {"done_epoch": 36}, False),
        ({}, {"reduce_fx": "sum"}, {"done_epoch": 4 + 5 + 6 + 7 + 8}, True),
        ({"on_epoch": False}, {}, {"done_epoch": 6}, True),
    ],
)  # fmt: skip
def test_another_way_of_logging(
    before: dict[str, Any], now: dict[str, Any], expected: dict[str, float], is_said: bool, tmp_path: Path
) -> None:
    at_first: dict[str, Any] = {"on_step": True, "on_epoch": True}
    save = SaveAt("on_train_batch_end", 3, tmp_path / "saved.ckpt")
    make_trainer(tmp_path, [save], max_epochs=1).fit(Logging(**{**at_first, **before}))
    trainer = make_trainer(tmp_path, [], max_epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Logging(**{**at_first, **now}), ckpt_path=save.path)
    assert {name: float(trainer.callback_metrics[name]) for name in expected} == expected
    said = [str(w.message) for w in caught if "exact" in str(w.message)]
    assert len(said) == is_said
    assert not is_said or "self.log('done') has another reduce_fx, on_epoch or metric" in said[0]


class CopiesWhatItLogged(Logging):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.kinds = {
            type(value.meta).__qualname__ for value in pickle.loads(pickle.dumps(self.trainer._results)).values()
        }


def test_restored_values_are_pickled_before_they_are_logged_again(tmp_path: Path) -> None:
    save = SaveAt("on_train_batch_end", 3, tmp_path / "saved.ckpt")
    make_trainer(tmp_path, [save], max_epochs=1, limit_train_batches=4).fit(Logging(on_epoch=True))
    model = CopiesWhatItLogged(on_epoch=True)
    make_trainer(tmp_path, [], max_epochs=1, limit_train_batches=4).fit(model, ckpt_path=save.path)
    assert model.kinds == {"_Metadata"}


@pytest.mark.parametrize(("before", "now", "left"), [(4, 1.0, 6), (1.0, 4, 2)])
def test_a_resumed_epoch_has_the_limit_of_now(before: float, now: float, left: int, tmp_path: Path) -> None:
    save = SaveAt("on_train_batch_end", 2, tmp_path / "saved.ckpt")
    make_trainer(tmp_path, [save], max_epochs=1, limit_train_batches=before).fit(Logging())
    trainer = make_trainer(tmp_path, [], max_epochs=1, limit_train_batches=now)
    trainer.fit(Logging(), ckpt_path=save.path)
    assert trainer.global_step == 2 + left
