"""``ResumableCallback``: what it saves, keeps, resumes from and refuses."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import os
import random
import re
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckpt_core.errors import (
    CheckpointCorruptedError,
    CheckpointError,
    CheckpointNotFoundError,
    StateMismatchError,
    StorageError,
)

transformers = pytest.importorskip("transformers", reason="the optional extra is not installed")

from tokenizers import Tokenizer  # noqa: E402
from tokenizers.models import WordLevel  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments  # noqa: E402
from transformers.trainer_callback import ExportableState  # noqa: E402

from accelerate_ckpt._state.just_in_time import JustInTime  # noqa: E402
from accelerate_ckpt._state.session import close_sessions, session_of  # noqa: E402
from accelerate_ckpt.config import OptionError  # noqa: E402
from accelerate_ckpt.integrations.transformers import (  # noqa: E402
    ResumableCallback,
    _counts_are_known,
    missing_internals,
)
from ckpt_core import small_states  # noqa: E402
from tests.support.damage import flip_bit  # noqa: E402

STEPS_PER_EPOCH = 8
ENDED_BEFORE = "the one before it resumed from that one, and had nothing left to train"


class StopError(Exception):
    """Ends a training where the test wants it."""


class StopAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise StopError


class Noisy(torch.utils.data.Dataset):
    """Draws from all generators while it is read, so that each of them matters."""

    def __len__(self) -> int:
        return 62  # the last batch of an epoch is smaller, and so is its last window

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        noise = random.random() + float(np.random.rand()) + torch.rand(4)
        return {"inputs": index / 62 + 0.1 * noise, "labels": torch.tensor(float(index % 3))}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        output = self.layers(inputs).squeeze(-1)
        return {"output": output} if labels is None else {"loss": (output - labels).pow(2).mean(), "output": output}


def trainer_for(
    folder: Path,
    *,
    callback: bool = True,
    strategy: str = "async",
    callbacks: Any = None,
    kind: type[Trainer] = Trainer,
    **arguments: Any,
) -> Trainer:
    torch.manual_seed(3)
    defaults = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 31,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.05,
        "save_steps": 3,
        "logging_steps": 4,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 1,
        "dataloader_pin_memory": False,
        "remove_unused_columns": False,
    }
    args = TrainingArguments(str(folder), **{**defaults, **arguments})
    trainer = kind(Network(), args, train_dataset=Noisy(), eval_dataset=Noisy(), callbacks=callbacks)
    if callback and callbacks is None:
        ResumableCallback(trainer, strategy=strategy)
    return trainer


@pytest.fixture(autouse=True)
def _fresh(fresh_accelerate: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    # Saves wait for small states; here, all are saved in the background like large ones.
    monkeypatch.setattr(small_states, "SMALL_STATE_BYTES", 0)
    yield
    close_sessions()


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def logged(trainer: Trainer) -> list[tuple[int, float, float]]:
    return [
        (entry["step"], entry["loss"], entry["learning_rate"]) for entry in trainer.state.log_history if "loss" in entry
    ]


def saved(folder: Path) -> list[str]:
    return sorted((path.name for path in folder.iterdir()), key=lambda name: int(name.split("-")[1]))


@pytest.mark.parametrize("spelled", [ResumableCallback, ResumableCallback(strategy="sync")], ids=["class", "made"])
def test_it_may_be_among_the_callbacks_that_the_trainer_is_made_with(tmp_path: Path, spelled: Any) -> None:
    order: list[str] = []

    class Other(TrainerCallback):
        def on_init_end(self, *_: Any, **__: Any) -> None:
            order.append("init")

        def on_save(self, *_: Any, **__: Any) -> None:
            order.append("save")

    trainer = trainer_for(tmp_path, callbacks=[spelled, Other()], max_steps=3)
    (ours,) = [each for each in trainer.callback_handler.callbacks if isinstance(each, ResumableCallback)]
    trainer.train()
    assert order == ["init", "save"]
    assert session_of(trainer.accelerator).config.strategy == ("async" if spelled is ResumableCallback else "sync")
    assert (tmp_path / "checkpoint-3" / "manifest.json").is_file()
    assert ours is trainer.callback_handler.callbacks[-1]


def test_a_callback_that_was_added_too_late_says_so(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, callback=False, max_steps=1)
    trainer.add_callback(ResumableCallback())
    with pytest.raises(CheckpointError, match="does not know its Trainer"):
        trainer.train()


class Generates(Trainer):
    """Trains for five batches on what it has drawn, as TRL's trainers do on what the model has generated.

    It also counts tokens, as those trainers do for their logs.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._step, self._buffered_inputs, self._total_train_tokens = 0, None, 0

    def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
        if self._step % 5 == 0 or self._buffered_inputs is None:
            drawn = [inputs["inputs"] + torch.rand(()) for _ in range(5)]
            self._buffered_inputs = [{**inputs, "inputs": one} for one in drawn]
        inputs = self._buffered_inputs[self._step % 5]
        self._step += 1
        self._total_train_tokens += inputs["inputs"].numel()
        return super().training_step(model, inputs, *args)


class TrainsBesides(Trainer):
    """Has parameters in the optimizer that are not the model's, as with losses of sentence-transformers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.unused, self.scale = nn.Parameter(torch.ones(1000)), nn.Parameter(torch.ones(()))

    def create_optimizer(self, *args: Any) -> Any:
        super().create_optimizer(*args).add_param_group({"params": [self.unused, self.scale]})
        return self.optimizer

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) * self.scale


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("error:this resume begins")
@pytest.mark.extended_cells("middle")
@pytest.mark.parametrize(
    ("stop", "arguments"),
    [
        (7, {}),  # in the middle of an epoch
        (9, {"save_strategy": "epoch"}),  # between two epochs
        (8, {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 4}),  # evaluations, which read the noisy data too
        (7, {"eval_strategy": "steps", "eval_steps": 3, "dataloader_num_workers": 2}),
        (7, {"kind": Generates}),
        (7, {"kind": TrainsBesides}),
    ],
    ids=["middle", "epoch", "evaluation", "workers", "generated", "besides"],
)
def test_a_resumed_run_ends_and_logs_as_one_that_was_never_interrupted(
    tmp_path: Path, stop: int, arguments: dict[str, Any]
) -> None:
    whole = trainer_for(tmp_path / "whole", **arguments)
    whole.train()
    first = trainer_for(tmp_path / "parts", **arguments)
    first.add_callback(StopAfter(stop))
    with pytest.raises(StopError):
        first.train()
    torch.manual_seed(99)
    resumed = trainer_for(tmp_path / "parts", **arguments)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 2 * STEPS_PER_EPOCH
    assert_same(weights(resumed), weights(whole))
    assert logged(resumed) == logged(whole) and len(logged(whole)) == 4
    assert vars(resumed).get("_total_train_tokens") == vars(whole).get("_total_train_tokens")


def test_what_was_generated_is_saved_but_not_noted_after_each_step(tmp_path: Path) -> None:
    callbacks = [ResumableCallback(just_in_time=True)]
    trainer = trainer_for(tmp_path, callbacks=callbacks, kind=Generates, max_steps=1)
    trainer.train()
    session = session_of(trainer.accelerator)
    assert session is not None and session.not_noted()
    (noted,) = JustInTime._state(SimpleNamespace(_session=session))["custom"]  # type: ignore[arg-type]
    (saved,) = (each.state_dict() for each in trainer.accelerator._custom_objects)
    assert saved.pop("generated")["_step"] == 2
    assert noted == saved
    trainer._buffered_inputs = torch.zeros(2)  # a script's own Trainer may keep something else there
    (saved,) = (each.state_dict() for each in trainer.accelerator._custom_objects)
    assert saved["generated"]["_buffered_inputs"].tolist() == [0.0, 0.0]


class GeneratesOtherwise(Generates):
    """Keeps generated batches under another name, as a later release of TRL may."""

    def training_step(self, *args: Any) -> Any:
        loss = super().training_step(*args)
        self.kept = self.__dict__.pop("_buffered_inputs", None) or self.kept
        return loss

    def __getattr__(self, name: str) -> Any:
        if name == "_buffered_inputs":
            return self.kept
        return super().__getattribute__(name)


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:this resume begins")
@pytest.mark.parametrize(
    ("steps", "kind", "is_said"), [(5, GeneratesOtherwise, True), (2, GeneratesOtherwise, False), (5, Generates, False)]
)
def test_it_is_said_where_what_was_generated_is_kept_otherwise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, steps: int, kind: type[Trainer], is_said: bool
) -> None:
    for stop in (3, 4):
        trainer = trainer_for(tmp_path, kind=kind, max_steps=stop, lr_scheduler_type="constant")
        trainer.args.steps_per_generation = steps
        trainer.train(resume_from_checkpoint=stop == 4)
    assert ("what the model had generated for the next steps is not in the checkpoint" in caplog.text) == is_said


class Anneals(TrainerCallback):
    """Keeps a factor in an attribute, and has no state."""

    def __init__(self) -> None:
        self.factor = 1.0

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.factor *= 0.9
        with torch.no_grad():
            model.layers[0].weight.mul_(self.factor)


class AnnealsWithState(Anneals, ExportableState):
    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"factor": self.factor}}


class OfItsOwn(Trainer):
    """Keeps a sum in an attribute."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.total = 0.0

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        self.total += float(loss)
        return loss * (1 + self.total)


class GrowingLoss:
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Any, labels: Any, **_: Any) -> Any:
        self.calls += 1
        return (outputs["output"] - labels).square().mean() * (1 + 0.1 * self.calls)


def growing_loss() -> Any:
    factor = 1.0

    def loss(outputs: Any, labels: Any, **_: Any) -> Any:
        nonlocal factor
        factor *= 1.1
        return (outputs["output"] - labels).square().mean() * factor

    return loss


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("callback", "kind", "loss", "named"),
    [
        (Anneals, Trainer, None, ["`factor` of Anneals"]),
        (AnnealsWithState, Trainer, None, []),
        (TrainerCallback, OfItsOwn, None, ["`total` of OfItsOwn"]),
        (TrainerCallback, Trainer, GrowingLoss, ["`calls` of GrowingLoss"]),
        (TrainerCallback, Trainer, growing_loss, ["`factor` of loss"]),
    ],
)
def test_attributes_of_callbacks_and_subclasses_that_a_resume_has_lost_are_named(
    tmp_path: Path, callback: Any, kind: type[Trainer], loss: Any, named: list[str]
) -> None:
    def trainer() -> Trainer:
        parts = [callback(), ResumableCallback()]
        made = trainer_for(tmp_path, callbacks=parts, kind=kind, restore_callback_states_from_checkpoint=True)
        made.compute_loss_func = loss and loss()
        return made

    first = trainer()
    first.add_callback(StopAfter(7))
    with pytest.raises(StopError):
        first.train()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer().train(resume_from_checkpoint=True)
    found = [str(one.message) for one in caught if "begins without variables of the script" in str(one.message)]
    assert [re.findall(r"`\w+` of \w+", text) for text in found] == [named] * bool(named)


def test_early_stopping_counts_on_in_a_resumed_run(tmp_path: Path) -> None:
    def trainer(folder: str, patience: int) -> Trainer:
        return trainer_for(
            tmp_path / folder,
            callbacks=[transformers.EarlyStoppingCallback(patience), ResumableCallback()],
            eval_strategy="steps",
            eval_steps=1,
            metric_for_best_model="eval_loss",
            greater_is_better=False,
        )

    whole, killed = trainer("whole", 5), trainer("killed", 5)
    for one in (whole, killed):  # each evaluation after the first is worse
        losses = itertools.count(1)
        one.evaluate = functools.partial(_evaluates_worse, one, losses)  # type: ignore[method-assign]
    whole.train()
    killed.add_callback(StopAfter(5))
    with pytest.raises(StopError):
        killed.train()
    resumed = trainer("killed", 5)
    resumed.evaluate = functools.partial(_evaluates_worse, resumed, itertools.count(9))  # type: ignore[method-assign]
    resumed.train(resume_from_checkpoint=True)
    assert whole.state.global_step == resumed.state.global_step == 6


def _evaluates_worse(trainer: Trainer, losses: Iterator[int], *_: Any, **__: Any) -> dict[str, float]:
    metrics = {"eval_loss": float(next(losses))}
    trainer.control = trainer.callback_handler.on_evaluate(trainer.args, trainer.state, trainer.control, metrics)
    return metrics


@pytest.mark.extended_cells("0")
@pytest.mark.parametrize("workers", [0, 1])
def test_masks_that_a_collator_of_transformers_draws_from_its_own_seed_continue(tmp_path: Path, workers: int) -> None:
    words = {str(number): number for number in range(16)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="0")), pad_token="0", mask_token="1", unk_token="0"
    )

    def trainer(folder: str) -> Trainer:
        torch.manual_seed(3)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2))
        arguments = TrainingArguments(
            str(tmp_path / folder),
            max_steps=8,
            save_steps=3,
            logging_steps=1,
            per_device_train_batch_size=2,
            dataloader_num_workers=workers,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        return Trainer(
            model,
            arguments,
            data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.4, seed=7),
            train_dataset=[{"input_ids": [2 + (number + at) % 14 for at in range(8)]} for number in range(20)],
            callbacks=[ResumableCallback()],
        )

    whole = trainer("whole")
    whole.train()
    first = trainer("parts")
    first.add_callback(StopAfter(4))
    with pytest.raises(StopError):
        first.train()
    resumed = trainer("parts")
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed) == logged(whole) and len(logged(whole)) == 8
    assert_same(weights(resumed), weights(whole))


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for index in range(len(Noisy())):
            yield {"inputs": torch.full((4,), index / 62), "labels": torch.tensor(float(index % 3))}


def test_a_stream_resumes_in_a_later_epoch_without_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def trainer(folder: str) -> Trainer:
        one = trainer_for(tmp_path / folder, max_steps=30, save_steps=20, gradient_accumulation_steps=1)
        one.train_dataset = Stream()
        return one

    whole = trainer("whole")
    whole.train()
    first = trainer("parts")
    first.add_callback(StopAfter(21))
    with pytest.raises(StopError):
        first.train()
    resumed = trainer("parts")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 30
    assert_same(weights(resumed), weights(whole))
    assert [one.message for one in caplog.records if "skip" in one.message] == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize("step", [4, STEPS_PER_EPOCH], ids=["middle", "between epochs"])
def test_an_evaluation_before_the_first_step_does_not_change_the_resumed_run(tmp_path: Path, step: int) -> None:
    whole = trainer_for(tmp_path, save_steps=4)
    whole.train()
    resumed = trainer_for(tmp_path, save_steps=4, eval_on_start=True)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert_same(weights(resumed), weights(whole))


def test_a_checkpoint_of_the_trainer_alone_can_be_resumed(tmp_path: Path) -> None:
    stock = trainer_for(tmp_path, callback=False)
    stock.train()
    resumed = trainer_for(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert resumed.state.global_step == 2 * STEPS_PER_EPOCH
    assert (tmp_path / "checkpoint-9/manifest.json").exists()


def test_the_trainer_looks_for_generators_in_checkpoints_of_its_own_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_in: list[str] = []
    monkeypatch.setattr(Trainer, "_load_rng_state", lambda self, checkpoint: looked_in.append(checkpoint))
    for callback in (True, False):
        trainer_for(tmp_path / str(callback), callback=callback, max_steps=3).train()
        looked_in.clear()
        trainer_for(tmp_path / str(callback), max_steps=4).train(resume_from_checkpoint=True)
        assert bool([path for path in looked_in if path]) == (not callback)


def test_old_checkpoints_go_when_the_new_one_is_durable_and_the_best_one_stays(tmp_path: Path) -> None:
    best = []

    class Watch(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            best.append(state.best_model_checkpoint)

    trainer = trainer_for(
        tmp_path,
        save_steps=2,
        save_total_limit=2,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # the loss falls, so the best checkpoint is an early one
    )
    trainer.add_callback(Watch())
    trainer.train()
    chosen = Path(trainer.state.best_model_checkpoint)
    assert best[-1] == str(chosen) and chosen.name != "checkpoint-16"
    assert saved(tmp_path) == [chosen.name, "checkpoint-16"]
    from safetensors.torch import load_file

    assert_same(weights(trainer), load_file(chosen / "model.safetensors"))


def test_what_cannot_be_read_takes_no_place_of_the_total_limit(tmp_path: Path) -> None:
    trainer_for(tmp_path, max_steps=4, save_steps=2).train()
    (tmp_path / "checkpoint-4").rename(tmp_path / "checkpoint-100")
    flip_bit(tmp_path / "checkpoint-100/manifest.json", 5)
    trainer_for(tmp_path, max_steps=8, save_steps=2, save_total_limit=2).train()
    assert saved(tmp_path) == ["checkpoint-6", "checkpoint-8", "checkpoint-100"]


def test_what_runs_between_two_trainings_and_sees_the_weights_of_the_later_one_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(stop: int, evaluates: bool) -> None:
        trainer = trainer_for(tmp_path, max_steps=3, strategy="sync", callback=False)
        ResumableCallback(trainer, strategy="sync", resume="auto")
        trainer.add_callback(StopAfter(stop))
        for steps in (3, 9):
            trainer.args.max_steps = steps
            trainer.train()
            if evaluates:
                trainer.evaluate()

    caplog.set_level(logging.INFO, "accelerate_ckpt")
    with pytest.raises(StopError):
        run(7, evaluates=True)
    assert "later train()" not in caplog.text
    with pytest.raises(StopError):
        run(8, evaluates=False)
    (line,) = [one for one in caplog.messages if "later train()" in one]  # perhaps nothing depends on it: no warning
    assert line.endswith("this one ends after step 3, and what the script does after it sees the weights of step 6")
    caplog.clear()
    run(100, evaluates=True)
    said = [one.message for one in caplog.records if "later train()" in one.message and one.levelname == "WARNING"]
    assert said == [
        f"this trainer.evaluate has the weights of a checkpoint that a later train() had saved: {ENDED_BEFORE}"
    ]


def test_resuming_takes_the_newest_checkpoint_that_verifies(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = trainer_for(tmp_path)
    whole.train()
    expected = weights(whole)
    flip_bit(tmp_path / "checkpoint-15/model.safetensors", -5)
    flip_bit(tmp_path / "checkpoint-12/trainer_state.json", -5)
    (tmp_path / "checkpoint-16/manifest.json").unlink()
    (tmp_path / "checkpoint-16/trainer_state.json").unlink()
    resumed = trainer_for(tmp_path)
    with caplog.at_level(logging.WARNING, "accelerate_ckpt"):
        resumed.train(resume_from_checkpoint=True)
    passed = [message for message in caplog.messages if "passed over" in message]
    assert [name for name in ("checkpoint-16", "checkpoint-15", "checkpoint-12") for m in passed if name in m] == [
        "checkpoint-16",
        "checkpoint-15",
        "checkpoint-12",
    ]
    assert all("checkpoint-9 instead" in message for message in passed)
    assert_same(weights(resumed), expected)


@pytest.mark.parametrize("named", [True, False])
def test_ours_without_its_manifest_is_not_taken_for_the_trainers_own(tmp_path: Path, named: bool) -> None:
    trainer_for(tmp_path, max_steps=3).train()
    (tmp_path / "checkpoint-3" / "manifest.json").unlink()
    trainer = trainer_for(tmp_path, max_steps=5)
    with pytest.raises(CheckpointCorruptedError, match=r"manifest\.json is missing"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3") if named else True)
    assert trainer.state.global_step == 0


def test_nothing_to_resume_from_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No valid checkpoint found") as caught:
        trainer_for(tmp_path).train(resume_from_checkpoint=True)
    assert isinstance(caught.value, CheckpointNotFoundError)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    trainer_for(tmp_path, max_steps=3).train()
    other = trainer_for(tmp_path, max_steps=6)
    other.model.layers[0] = nn.Linear(4, 9)
    with pytest.raises(StateMismatchError):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_a_folder_that_is_a_file_is_told_before_training_if_the_trainer_saves(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("")
    for save, steps in (("steps", 0), ("no", 2)):
        trainer = trainer_for(tmp_path, max_steps=2, save_strategy=save)
        trainer.args.output_dir = str(tmp_path / "folder")
        with pytest.raises(StorageError, match="Not a directory") if save == "steps" else contextlib.nullcontext():
            trainer.train()
        assert trainer.state.global_step == steps


def test_a_save_that_fails_in_the_background_ends_the_training(tmp_path: Path) -> None:
    # A file where the folder of the checkpoints should be: nothing can be saved, not even by root.
    class MakeFile(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            (tmp_path / "folder").write_text("")

    trainer = trainer_for(tmp_path)
    trainer.args.output_dir = str(tmp_path / "folder")
    trainer.add_callback(MakeFile())
    with pytest.raises(CheckpointError) as caught:
        trainer.train()
    assert "checkpoint-3" in str(caught.value) and trainer.state.global_step < 2 * STEPS_PER_EPOCH


def test_the_last_save_is_durable_when_training_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, fsync = [], os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(0.3)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)

    class Watch(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen.append(saved(tmp_path))

    trainer = trainer_for(tmp_path, save_steps=8)
    trainer.add_callback(Watch())
    trainer.train()
    assert seen == [["checkpoint-8", "checkpoint-16"]]
    session = session_of(trainer.accelerator)
    assert session is not None and session.checkpointer.pending == ()


@pytest.mark.extended_cells("True", "False")
@pytest.mark.parametrize("several", [False, True])
def test_an_evaluation_whose_workers_stay_draws_no_second_seed_in_a_resumed_run(tmp_path: Path, several: bool) -> None:
    def trainer(folder: str) -> Trainer:
        made = trainer_for(
            tmp_path / folder,
            num_train_epochs=3,
            save_strategy="epoch",
            eval_strategy="epoch",
            dataloader_num_workers=1,
            dataloader_persistent_workers=True,
        )
        made.eval_dataset = {"one": Noisy(), "two": Noisy()} if several else Noisy()
        return made

    whole = trainer("whole")
    whole.train()
    first = trainer("killed")
    first.add_callback(StopAfter(9))
    with pytest.raises(StopError):
        first.train()
    resumed = trainer("killed")
    resumed.train(resume_from_checkpoint=True)
    assert_same(whole.model.state_dict(), resumed.model.state_dict())
    assert logged(whole) == logged(resumed)


def test_evaluations_leave_nothing_in_the_checkpoint(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, eval_strategy="steps", eval_steps=1)
    trainer.train()
    assert len(trainer.accelerator._dataloaders) == 1


@pytest.mark.parametrize("strategy", ["sync", "sharded"])
def test_the_model_is_read_by_transformers(tmp_path: Path, strategy: str) -> None:
    sizes = {"vocab_size": 17, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))  # with tied weights
    text = [{"input_ids": torch.arange(8) % 5, "labels": torch.arange(8) % 5}] * 8
    args = TrainingArguments(
        str(tmp_path),
        max_steps=2,
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model, args, train_dataset=text)
    ResumableCallback(trainer, strategy=strategy)
    trainer.train()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    assert type(loaded) is GPT2LMHeadModel and loaded.config.architectures == ["GPT2LMHeadModel"]
    assert_same(loaded.state_dict(), model.state_dict())
    assert not list(tmp_path.rglob("*.bin")) and not list(tmp_path.rglob("*.pt*"))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [({"save_only_model": True}, "save_only_model"), ({"output_dir": "memory://runs"}, "URL")],
)
def test_what_is_not_supported_is_refused(tmp_path: Path, arguments: dict[str, Any], named: str) -> None:
    trainer = trainer_for(tmp_path, callback=False)
    for name, value in arguments.items():
        setattr(trainer.args, name, value)
    with pytest.raises(OptionError, match=named):
        ResumableCallback(trainer)
    assert not any(isinstance(item, ResumableCallback) for item in trainer.callback_handler.callbacks)


def test_an_unknown_option_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="strateg"):
        trainer_for(tmp_path, strategy="later")


def test_resuming_without_the_data_position_is_refused(tmp_path: Path) -> None:
    trainer_for(tmp_path, max_steps=3).train()
    with pytest.raises(OptionError, match="ignore_data_skip"):
        trainer_for(tmp_path, ignore_data_skip=True).train(resume_from_checkpoint=True)


def test_this_release_has_what_is_replaced_and_another_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert missing_internals() == []
    assert _counts_are_known()
    trainer = trainer_for(tmp_path, callback=False)

    def changed(self: Any, model: Any) -> None:
        """Save as a later release might."""

    monkeypatch.setattr(Trainer, "_save_checkpoint", changed)
    assert missing_internals() == ["_save_checkpoint"]
    with pytest.raises(CheckpointError, match="_save_checkpoint"):
        ResumableCallback(trainer)


def test_another_trainer_is_left_alone(tmp_path: Path) -> None:
    trainer_for(tmp_path / "ours", max_steps=3).train()
    trainer_for(tmp_path / "stock", max_steps=3, callback=False).train()
    assert os.path.exists(tmp_path / "ours/checkpoint-3/manifest.json")
    assert os.path.exists(tmp_path / "stock/checkpoint-3/optimizer.pt")
    assert not os.path.exists(tmp_path / "stock/checkpoint-3/manifest.json")


class Overriding(Trainer):
    """Overrides methods that the callback replaces, as trainers of other libraries do."""

    best = 0

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        (folder / "README.md").write_text("card")

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        Path(output_dir or "", "extra.json").write_text("{}")

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        Path(output_dir or "", "value_head.json").write_text("{}")

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self.best += 1


class WritesWeights(Trainer):
    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        Path(output_dir or "", "model.safetensors").write_bytes(b"mine")
        Path(output_dir or "", "mine.txt").write_text("mine")


class OwnLoader(Trainer):
    """Has its own loader, which it does not prepare."""

    shuffles = True

    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=4, shuffle=self.shuffles)


class OwnOrder(OwnLoader):
    shuffles = False


def test_what_subclasses_override_is_called(tmp_path: Path) -> None:
    best = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True}
    trainer = trainer_for(tmp_path / "ours", kind=Overriding, max_steps=6, **best)
    assert isinstance(trainer, Overriding) and type(trainer).__name__ == "Overriding"
    trainer.train()
    stock = trainer_for(tmp_path / "stock", kind=Overriding, callback=False, max_steps=6, **best)
    stock.train()
    assert trainer.best == stock.best == 1
    for step in (3, 6):
        folder = tmp_path / f"ours/checkpoint-{step}"
        assert (folder / "README.md").read_text() == "card"
        assert (folder / "manifest.json").exists()
        its_own = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"}
        there = {path.name for path in (tmp_path / f"stock/checkpoint-{step}").iterdir()}
        assert there - its_own - {path.name for path in folder.iterdir()} == set()
    trainer.save_model(str(tmp_path / "whole"))
    names = {path.name for path in (tmp_path / "whole").iterdir()}
    assert names == {"model.safetensors", "training_args.bin", "extra.json", "value_head.json"}


class KeepsMore(Trainer):
    """Scales the loss by its own mean, which it saves next to the optimizer, as TRL's BCOTrainer does."""

    mean = 1.0

    def train(self, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
        return super().train(resume_from_checkpoint, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.mean = 0.5 * self.mean + 0.5 * float(loss.detach())
        return loss / self.mean

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        Path(output_dir, "running.json").write_text(json.dumps(self.mean))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint:
            self.mean = json.loads(Path(checkpoint, "running.json").read_text())


@pytest.mark.filterwarnings("error:this resume begins")
def test_what_a_subclass_keeps_beside_the_optimizer_is_restored(tmp_path: Path) -> None:
    whole = trainer_for(tmp_path / "whole", kind=KeepsMore, max_steps=6)
    whole.train()
    stopped = trainer_for(tmp_path / "parts", kind=KeepsMore, max_steps=6)
    stopped.add_callback(StopAfter(3))
    with pytest.raises(StopError):
        stopped.train()
    resumed = trainer_for(tmp_path / "parts", kind=KeepsMore, max_steps=6)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.mean == whole.mean != 1.0
    files = {path.name for path in (tmp_path / "parts/checkpoint-6").iterdir()}
    assert "running.json" in files and not files & {"optimizer.pt", "scheduler.pt"}


@pytest.mark.parametrize(("kind", "is_said"), [(KeepsMore, True), (TrainsBesides, True), (Trainer, False)])
def test_what_no_note_of_a_step_holds_is_said_where_a_rank_is_lost(
    kind: type[Trainer], is_said: bool, tmp_path: Path
) -> None:
    trainer = trainer_for(tmp_path, callbacks=[ResumableCallback(just_in_time=True)], kind=kind, max_steps=1)
    trainer.train()
    session = session_of(trainer.accelerator)
    assert session is not None
    assert ["saves beside the optimizer" in text for text in session.not_noted()] == [True] * is_said


class LooksAtItsState(TrainerCallback):
    """Takes the state that a save would hold, changes it, and loads it back."""

    def __init__(self, change: Callable[[dict[str, Any]], None]) -> None:
        self.change, self.trainer = change, None
        self.held: list[str] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        state_of = next(one for one in self.trainer.accelerator._custom_objects if hasattr(one, "noted"))
        state = state_of.state_dict()
        self.held = list(state["besides"])
        self.change(state)
        state_of.load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: None, ""),
        (lambda state: state.pop("besides"), "parameters that the optimizer trains outside of the model are not in"),
        (lambda state: state["besides"].update({"1": [torch.ones(2), None]}), "a parameter of shape [2] outside"),
        (lambda state: state["besides"].update({"2": [torch.ones(()), None]}), "a parameter of shape [] outside"),
    ],
    ids=["as saved", "of an older version", "of another shape", "of more"],
)
def test_what_is_trained_outside_of_the_model_is_there_or_it_is_said(
    change: Callable[[dict[str, Any]], None], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_for(tmp_path, kind=TrainsBesides, max_steps=1)
    looks = LooksAtItsState(change)
    looks.trainer = trainer
    trainer.add_callback(looks)
    if "shape" in said:
        with pytest.raises(StateMismatchError, match=re.escape(said)) as caught:
            trainer.train()
        assert "of the optimizer that is not the model's" in str(caught.value)
        assert "same loss" in str(caught.value)
    else:
        trainer.train()
        assert said in caplog.text
        assert ("outside of the model" in caplog.text) == bool(said)
    assert looks.held == ["1"]  # parameters that are never trained are not in it


class TakesAny(Trainer):
    def train(self, *args: Any) -> Any:  # type: ignore[override]
        return super().train(*args)


class ResumesByDefault(Trainer):
    def train(self, resume_from_checkpoint: Any = True, **kwargs: Any) -> Any:
        return super().train(resume_from_checkpoint, **kwargs)


@pytest.mark.parametrize("kind", [TakesAny, ResumesByDefault])
def test_train_of_a_subclass_is_given_what_it_takes(kind: type[Trainer], tmp_path: Path) -> None:
    trainer_for(tmp_path, kind=kind, max_steps=2).train(False)
    resumed = trainer_for(tmp_path, kind=kind, max_steps=3)
    resumed.train(True)
    assert resumed.state.global_step == 3
    assert (tmp_path / "checkpoint-3").is_dir()


class TrainsAlone(Trainer):
    def train(self) -> Any:
        raise AssertionError


def test_a_trainer_that_cannot_resume_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"TrainsAlone, whose train\(\) takes no resume_from_checkpoint"):
        trainer_for(tmp_path, kind=TrainsAlone)


class ReadsItsOwn(Trainer):
    """Makes a model from a checkpoint's own files, as sentence-transformers does; without them, its weights are new."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str) -> None:
        self.model.load_state_dict(Network().state_dict())

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(resume_from_checkpoint=self.state.best_model_checkpoint)


def test_the_best_model_is_that_of_the_checkpoint_where_a_subclass_reads_files_of_another_kind(tmp_path: Path) -> None:
    best = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True, "max_steps": 6}
    ends = []
    for kind in (Trainer, ReadsItsOwn):
        trainer = trainer_for(tmp_path / kind.__name__, kind=kind, **best)
        trainer.train()
        ends.append(weights(trainer))
    assert_same(*ends)


def test_weights_that_a_subclass_writes_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_for(tmp_path, kind=WritesWeights, max_steps=3)
    trainer.train()
    assert (tmp_path / "checkpoint-3/mine.txt").exists()
    assert (tmp_path / "checkpoint-3/model.safetensors").read_bytes() != b"mine"
    assert "WritesWeights writes its own model.safetensors" in caplog.text
    assert (tmp_path / "checkpoint-3/trainer_state.json").exists()


@pytest.mark.parametrize("kind", [OwnLoader, OwnOrder])
def test_a_loader_that_is_not_prepared_is_said(
    tmp_path: Path, kind: type[Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    trainer_for(tmp_path, kind=kind, max_steps=5).train()
    trainer_for(tmp_path, kind=kind, max_steps=6).train(resume_from_checkpoint=True)
    assert ("get_train_dataloader returns a loader that is not prepared" in caplog.text) == (kind is OwnLoader)
