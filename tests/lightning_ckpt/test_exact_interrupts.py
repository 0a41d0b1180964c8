"""Exact resume after interrupted batches and signals, causes of inexactness, and several callbacks."""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from ckpt_core.errors import CheckpointFormatError, StateMismatchError
from lightning_ckpt.resumable import ResumableCheckpoint
from tests.lightning_ckpt.exact_cases import Model, Outcome, PlannedError, SaveAt, make_trainer, outcome
from tests.lightning_ckpt.features import needs_save_on_exception
from tests.lightning_ckpt.signal_ranks import Job

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torchdata"),
]

BATCHES = 8


def fit(directory: Path, options: dict[str, Any], callbacks: list[Any], seed: int = 1, **kwargs: Any) -> Any:
    """Train; return the model, the Trainer, and the warnings about exactness."""
    path = kwargs.pop("ckpt_path", None)
    pl.seed_everything(seed, verbose=False)
    model = kwargs.pop("kind", Model)(options)
    trainer = make_trainer(directory, callbacks, **kwargs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with contextlib.suppress(PlannedError):
            trainer.fit(model, ckpt_path=path)
    return model, trainer, [str(w.message) for w in caught if "exact" in str(w.message)]


def tail(expected: Outcome, found: Outcome) -> bool:
    """Return whether the run ``found`` equals the end of the run ``expected``."""
    return (
        found.seen == expected.seen[-len(found.seen) :]
        and found.rows == expected.rows[-len(found.rows) :]
        and found.weights == expected.weights
        and found.optimizer == expected.optimizer
        and found.callback_metrics == expected.callback_metrics
    )


def saver(kind: str, directory: Path) -> Any:
    if kind in ("stock", "ours"):
        needs_save_on_exception()
    if kind == "stock":
        return ModelCheckpoint(directory, filename="saved", save_on_exception=True, save_top_k=0)
    if kind == "ours":
        return ResumableCheckpoint(directory, filename="saved", save_on_exception=True, save_top_k=0)
    return OnExceptionCheckpoint(directory, filename="saved")


INTERRUPTED = [
    *((kind, options) for kind in ("stock", "ours", "on_exception") for options in ({}, {"loader": "stateful_stream"})),
    *(("ours", {"loader": kind, "workers": 2}) for kind in ("plain", "stateful_stream")),
    *(("ours", {"loader": kind}) for kind in ("stateful", "stateful_dataset")),
]


@pytest.mark.sampled(2)
@pytest.mark.extended_cells(
    "stock-{'loader': 'stateful_stream'}",
    "on_exception-{'loader': 'stateful_stream'}",
    "ours-{'loader': 'plain', 'workers': 2}",
    "ours-{'loader': 'stateful'}",
)
@pytest.mark.parametrize(("kind", "options"), INTERRUPTED, ids=str)
def test_interrupted_batch_is_trained_again(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    model, trainer, _ = fit(tmp_path, options, [])
    expected = outcome(trainer, model)
    failed, _, _ = fit(tmp_path, {**options, "raise_at": BATCHES + 3}, [saver(kind, tmp_path)])
    assert len(failed.seen) == BATCHES + 3
    model, trainer, warned = fit(tmp_path, options, [], 77, ckpt_path=tmp_path / "saved.ckpt")
    assert warned == []
    assert failed.seen + model.seen == expected.seen
    assert tail(expected, outcome(trainer, model))


def test_interrupted_batch_inside_an_open_window(tmp_path: Path) -> None:
    # raised in the forward pass: the window's gradients are still those of the previous batches
    model, trainer, _ = fit(tmp_path, {}, [], accumulate_grad_batches=3)
    expected = outcome(trainer, model)
    fit(tmp_path, {"raise_at": BATCHES + 2}, [saver("ours", tmp_path)], accumulate_grad_batches=3)
    model, trainer, warned = fit(tmp_path, {}, [], 77, ckpt_path=tmp_path / "saved.ckpt", accumulate_grad_batches=3)
    assert warned == []
    assert tail(expected, outcome(trainer, model))


class CollectsAtOnce(Model):
    """Appends to a list in each batch, before the batch is interrupted."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.losses: list[torch.Tensor] = []

    def loss(self, batch: Any) -> torch.Tensor:
        loss = super().loss(batch)
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.log("mean", torch.stack(self.losses).mean())
        self.losses.clear()


def test_a_list_that_the_interrupted_batch_filled(tmp_path: Path) -> None:
    model, trainer, _ = fit(tmp_path, {}, [], kind=CollectsAtOnce)
    expected = outcome(trainer, model)
    fit(tmp_path, {"raise_at": BATCHES + 3}, [saver("ours", tmp_path)], kind=CollectsAtOnce)
    model, trainer, warned = fit(tmp_path, {}, [], 77, ckpt_path=tmp_path / "saved.ckpt", kind=CollectsAtOnce)
    assert warned == []
    assert tail(expected, outcome(trainer, model))


class RaiseIn(pl.Callback):
    """Raises in a hook, at the n-th call."""

    def __init__(self, hook: str, count: int) -> None:
        self.left = count

        def call(*args: Any) -> None:
            self.left -= 1
            if self.left == 0:
                raise PlannedError

        setattr(self, hook, call)


@pytest.mark.sampled(2)
@pytest.mark.extended_cells(
    "on_validation_end-2-1-in the hooks on_validation_end",
    "on_before_zero_grad-10-1-None",
    "on_train_batch_start-10-3-None",
)
@pytest.mark.parametrize(
    ("hook", "count", "accumulate", "cause"),
    [
        ("on_after_backward", BATCHES + 2, 3, "after its backward pass began, inside an open accumulation window"),
        ("on_after_backward", BATCHES + 1, 3, None),
        ("on_before_zero_grad", BATCHES + 2, 1, None),
        ("on_train_batch_start", BATCHES + 2, 3, None),
        ("on_train_batch_end", BATCHES + 2, 3, "in the hooks on_train_batch_end"),
        ("on_validation_end", 2, 1, "in the hooks on_validation_end"),
        ("on_train_epoch_end", 1, 1, "in the hooks on_train_epoch_end"),  # the model resets a metric in its own hook
        ("on_validation_batch_start", 5, 1, None),
    ],
)
def test_interrupted_in_a_hook(hook: str, count: int, accumulate: int, cause: str | None, tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {"accumulate_grad_batches": accumulate}
    options = {"val": "validation" in hook}
    model, trainer, _ = fit(tmp_path, options, [], **kwargs)
    expected = outcome(trainer, model)
    fit(tmp_path, options, [RaiseIn(hook, count), saver("ours", tmp_path)], **kwargs)
    model, trainer, warned = fit(tmp_path, options, [], 77, ckpt_path=tmp_path / "saved.ckpt", **kwargs)
    if cause is None:
        assert warned == []
        assert tail(expected, outcome(trainer, model))
    else:
        assert len(warned) == 1 and cause in warned[0]


@pytest.mark.extended_cells("on_train_end")
@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_train_end", "on_fit_end"])
def test_a_run_that_was_over_has_its_metrics_again(hook: str, tmp_path: Path) -> None:
    model, trainer, _ = fit(tmp_path, {"val": True}, [])
    expected = outcome(trainer, model)
    epochs = trainer.max_epochs if hook == "on_train_epoch_end" else 1
    fit(tmp_path, {"val": True}, [RaiseIn(hook, epochs), saver("ours", tmp_path)])
    model, trainer, warned = fit(tmp_path, {"val": True}, [], 77, ckpt_path=tmp_path / "saved.ckpt")
    found = outcome(trainer, model)
    assert (found.seen, found.weights) == ([], expected.weights)
    if hook == "on_train_epoch_end":  # the model's own hook had not computed one of them yet
        assert len(warned) == 1 and "training stopped in the hooks on_train_epoch_end" in warned[0]
        expected.callback_metrics.pop("unlogged")
        found.callback_metrics.pop("unlogged")
    else:
        assert warned == []
    assert found.callback_metrics == expected.callback_metrics


class WithoutAverage(Model):
    """The model without one of its metrics, as after a change of the user's code."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        del self.average

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.unlogged.update(loss.detach() + 1)
        self.note(batch, batch_idx)
        return loss


@pytest.mark.parametrize("count", [3, 3 * BATCHES])
def test_a_metric_that_the_model_no_longer_has_is_left_out(count: int, tmp_path: Path) -> None:
    fit(tmp_path, {}, [SaveAt("on_train_batch_end", count, tmp_path / "saved.ckpt")])
    model = WithoutAverage({})
    trainer = make_trainer(tmp_path, [])
    trainer.fit(model, ckpt_path=tmp_path / "saved.ckpt")
    assert trainer.global_step == 3 * BATCHES
    assert "loss_epoch" in trainer.callback_metrics


@pytest.mark.parametrize(("hook", "count"), [("on_after_backward", 4), ("on_before_optimizer_step", 2)])
def test_manual_optimization_interrupted_after_a_backward_pass(hook: str, count: int, tmp_path: Path) -> None:
    # one optimizer steps every third batch: nothing tells whether its gradients already include this batch's
    fit(tmp_path, {"manual": True}, [RaiseIn(hook, count), saver("ours", tmp_path)])
    _, _, warned = fit(tmp_path, {"manual": True}, [], 77, ckpt_path=tmp_path / "saved.ckpt")
    assert len(warned) == 1 and "after its backward pass began" in warned[0]


class RaiseInStep(Model):
    """Manual optimization that raises between its two optimizer steps."""

    def manual_step(self, batch: Any, loss: torch.Tensor, batch_idx: int) -> None:
        super().manual_step(batch, loss, batch_idx)
        if len(self.seen) == 5:
            raise PlannedError


def test_interrupted_after_an_optimizer_step(tmp_path: Path) -> None:
    model = RaiseInStep({"manual": True})
    trainer = make_trainer(tmp_path, [saver("ours", tmp_path)])
    with pytest.raises(PlannedError):
        trainer.fit(model)
    _, _, warned = fit(tmp_path, {"manual": True}, [], 77, ckpt_path=tmp_path / "saved.ckpt")
    assert len(warned) == 1 and "after it had changed weights or buffers" in warned[0]


@pytest.mark.extended
def test_interrupted_after_an_optimizer_step_behind_a_sanity_check_of_shards(job: Job, tmp_path: Path) -> None:
    # the sanity check leaves whole parameters in the model, while optimizers step on others
    needs_save_on_exception()
    spec = {"shards": 2, "io": "ShardedCheckpointIO", "options": {"manual": True, "val": True}}
    spec |= {"settings": {"save_on_exception": True, "filename": "saved"}, "trainer": {"num_sanity_val_steps": 1}}
    job.run(tmp_path, "first", **spec, signals=[[rank, "raise", "on_after_backward", 6] for rank in range(2)])
    resumed = job.run(tmp_path, "resumed", **spec, resume=str(tmp_path / "saved" / "saved.ckpt"))
    assert "after it had changed weights or buffers" in resumed[0]["warnings"][0]


class Terminate(pl.Callback):
    """Sends this process SIGTERM at a batch."""

    def __init__(self, count: int) -> None:
        self.left = count

    def on_train_batch_start(self, *args: Any) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("count", [3, BATCHES, BATCHES + 2])
def test_sigterm_saves_between_batches(count: int, tmp_path: Path) -> None:
    model, trainer, _ = fit(tmp_path, {}, [])
    expected = outcome(trainer, model)
    with pytest.raises(SystemExit):
        fit(tmp_path, {}, [Terminate(count), saver("ours", tmp_path)])
    model, trainer, warned = fit(tmp_path, {}, [], 77, ckpt_path=tmp_path / "saved.ckpt")
    assert warned == []
    assert len(model.seen) == 3 * BATCHES - count
    assert tail(expected, outcome(trainer, model))


@pytest.mark.extended
def test_resumed_run_can_be_resumed(tmp_path: Path) -> None:
    options = {"workers": 2}
    model, trainer, _ = fit(tmp_path, options, [])
    expected = outcome(trainer, model)
    path = tmp_path / "first.ckpt"
    fit(tmp_path, options, [SaveAt("on_train_batch_end", 3, path)])
    for number, seed in ((2, 77), (1, 78), (1, 79)):
        following = tmp_path / f"{seed}.ckpt"
        fit(tmp_path, options, [SaveAt("on_train_batch_end", number, following)], seed, ckpt_path=path)
        path = following
    model, trainer, _ = fit(tmp_path, options, [], 80, ckpt_path=path)
    assert len(model.seen) == 3 * BATCHES - 7
    assert tail(expected, outcome(trainer, model))


def test_replay_gives_the_same(tmp_path: Path) -> None:
    options = {"workers": 2}
    save = SaveAt("on_train_batch_end", BATCHES + 3, tmp_path / "saved.ckpt")
    model, trainer, _ = fit(tmp_path, options, [save])
    expected = outcome(trainer, model)
    pl.seed_everything(77, verbose=False)
    again = Model(options)
    trainer = make_trainer(tmp_path, [])
    trainer.callbacks[-1].data_resume = "replay"
    trainer.fit(again, ckpt_path=save.path)
    assert tail(expected, outcome(trainer, again))


def test_each_save_carries_one_state(tmp_path: Path) -> None:
    second = ResumableCheckpoint(tmp_path, filename="second", every_n_train_steps=11, save_top_k=-1)
    stock = ModelCheckpoint(tmp_path, filename="stock", every_n_train_steps=11, save_top_k=-1)
    model, trainer, _ = fit(tmp_path, {}, [second, stock])
    expected = outcome(trainer, model)
    for name in ("second", "stock"):
        saved = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
        assert saved["lightning_ckpt"]["version"] == 1 and len(saved["lightning_ckpt"]["per-rank"]) == 1
        model, trainer, warned = fit(tmp_path, {}, [], 77, ckpt_path=tmp_path / f"{name}.ckpt")
        assert warned == [] and tail(expected, outcome(trainer, model))


def test_adding_the_callback_changes_no_result(tmp_path: Path) -> None:
    for options in ({"workers": 2}, {"loader": "stateful_stream"}, {"loader": "dict"}):
        model, trainer, _ = fit(tmp_path, options, [])
        pl.seed_everything(1, verbose=False)
        plain = Model(options)
        other = make_trainer(tmp_path, [])
        other.callbacks[-1].exact = False
        other.fit(plain)
        assert outcome(other, plain) == outcome(trainer, model)


def test_loaders_are_given_back(tmp_path: Path) -> None:
    model, _, _ = fit(tmp_path, {"loader": "plain", "workers": 2}, [])
    loader = model.trainer.train_dataloader
    assert type(loader.batch_sampler).__module__.startswith("torch.")
    assert type(loader.collate_fn).__name__ == "function" and loader.worker_init_fn is None


def test_checkpoint_of_stock_lightning_loads(tmp_path: Path) -> None:
    path = tmp_path / "stock.ckpt"
    plain = Model()
    trainer = make_trainer(tmp_path, [SaveAt("on_train_epoch_end", 1, path)])
    trainer.callbacks[-1].exact = False
    trainer.fit(plain)
    assert "lightning_ckpt" not in torch.load(path, weights_only=True)
    _model, trainer, warned = fit(tmp_path, {}, [], ckpt_path=path)
    assert len(warned) == 1 and "saved by ResumableCheckpoint(exact=False)" in warned[0]
    assert trainer.global_step == 3 * BATCHES


def edited(path: Path, **changes: Any) -> Path:
    saved = torch.load(path, weights_only=True)
    saved["lightning_ckpt"].update(changes)
    torch.save(saved, path)
    return path


def test_other_versions_and_ranks(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    fit(tmp_path, {}, [SaveAt("on_train_epoch_end", 1, path)])
    shared = torch.load(path, weights_only=True)["lightning_ckpt"]["replicated"]
    _model, trainer, warned = fit(tmp_path, {}, [], ckpt_path=edited(path, replicated={**shared, "world_size": 2}))
    assert len(warned) == 1 and "saved by 2 ranks and is resumed by 1" in warned[0]
    assert trainer.global_step == 3 * BATCHES
    edited(path, replicated=shared, **{"per-rank": [None]})
    with pytest.raises(StateMismatchError, match="no state of rank 0"):
        make_trainer(tmp_path, []).fit(Model(), ckpt_path=path)
    edited(path, version=99)
    with pytest.raises(CheckpointFormatError, match="version 99"):
        make_trainer(tmp_path, []).fit(Model(), ckpt_path=path)


def test_another_number_of_workers_is_named(tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    fit(tmp_path, {"workers": 2}, [SaveAt("on_train_batch_end", 3, path)])
    _, trainer, warned = fit(tmp_path, {"workers": 0}, [], ckpt_path=path)
    assert len(warned) == 1 and "num_workers of a training data loader was 2 and is 0" in warned[0]
    assert trainer.global_step == 3 * BATCHES


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("hook", "count", "said"),
    [("on_train_batch_end", 3, 0), ("on_train_epoch_end", 1, 1), ("on_train_batch_end", BATCHES + 3, 1)],
)
def test_persistent_workers_of_a_stream_are_named_after_a_pass(
    hook: str, count: int, said: int, tmp_path: Path
) -> None:
    path = tmp_path / "saved.ckpt"
    options = {"loader": "persistent_stream", "workers": 2}
    fit(tmp_path, options, [SaveAt(hook, count, path)])
    _, _, warned = fit(tmp_path, options, [], ckpt_path=path)
    assert ["persistent workers" in warning for warning in warned] == [True] * said


@pytest.mark.sampled(1)
@pytest.mark.parametrize("reads_before", [False, True])
def test_workers_that_were_there_before_the_fit_are_named(reads_before: bool, tmp_path: Path) -> None:
    path, options = tmp_path / "saved.ckpt", {"loader": "persistent", "workers": 2}
    fit(tmp_path, {**options, "reads_before": reads_before}, [SaveAt("on_train_batch_end", 3, path)])
    _, _, warned = fit(tmp_path, options, [], ckpt_path=path)
    assert ["started before this fit" in warning for warning in warned] == [True] * reads_before


def test_save_after_the_fit_goes_on(tmp_path: Path) -> None:
    model, trainer, _ = fit(tmp_path, {}, [], max_epochs=3)
    expected = outcome(trainer, model)
    _, trainer, _ = fit(tmp_path, {}, [], max_epochs=2)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    model, trainer, warned = fit(tmp_path, {}, [], 77, ckpt_path=tmp_path / "after.ckpt", max_epochs=3)
    assert warned == []
    assert model.seen == expected.seen[2 * BATCHES :]
    assert (outcome(trainer, model).weights, trainer.global_step) == (expected.weights, expected.step)


def test_weights_only_saves_carry_nothing(tmp_path: Path) -> None:
    _, trainer, _ = fit(tmp_path, {}, [])
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert "lightning_ckpt" not in torch.load(tmp_path / "weights.ckpt", weights_only=True)


def test_time_interval_survives(tmp_path: Path) -> None:
    callback = ResumableCheckpoint(tmp_path, train_time_interval=timedelta(hours=1), save_top_k=0)
    callback._last_time_checked = None
    fit(tmp_path, {}, [callback])
    state = callback.state_dict()
    assert 0 < state["seconds_since_check"] < 600
    resumed = ResumableCheckpoint(tmp_path, train_time_interval=timedelta(hours=1), save_top_k=0)
    resumed.load_state_dict({**state, "seconds_since_check": 1000.0})
    fit(tmp_path, {}, [resumed])
    assert 1000 <= resumed.state_dict()["seconds_since_check"] < 1600
