"""Attributes of modules and callbacks: generators are restored; other changes that no state holds are named."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import shutil
import time
import types
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateFinder,
    LearningRateMonitor,
    RichProgressBar,
    StochasticWeightAveraging,
    Timer,
    TQDMProgressBar,
)
from torch.utils.data import DataLoader

from ckpt_core.state.changed_values import looks_without_waiting
from lightning_ckpt import ResumableCheckpoint
from lightning_ckpt._exact.user_attributes import UserAttributes
from tests.lightning_ckpt.captured import BATCHES, END, MIDDLE, Training, train_and_resume
from tests.lightning_ckpt.exact_cases import RELEASE, MemoryLogger, Model, Outcome, Thaws, make_trainer, outcome
from tests.lightning_ckpt.exact_data import Shifts
from tests.support.accelerators import SIMULATED, SimulatedAccelerator
from tests.support.data_sets import Samples

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Noisy(Model):
    def __init__(self) -> None:
        super().__init__()
        self.generators = [torch.Generator().manual_seed(3), np.random.default_rng(1), random.Random(1)]

    def loss(self, batch: Any) -> torch.Tensor:
        first, second, third = self.generators
        noise = float(torch.rand((), generator=first)) + float(second.random()) + third.random()
        return super().loss(batch) * noise


class Perturbs(Callback):
    def __init__(self) -> None:
        self.generator = random.Random(2)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            pl_module.other.weight.add_(0.01 * self.generator.random())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("at", [MIDDLE, END], ids=["middle", "end"])
def test_generators_of_module_and_callbacks(at: tuple[str, int], tmp_path: Path) -> None:
    expected, found, said = train_and_resume(Training(Noisy, lambda: [Perturbs()]), tmp_path, at)
    assert not said
    assert found == expected


class Counts(Model):
    """Anneals the loss by its own counter, which no state holds."""

    steps = 0.0

    def loss(self, batch: Any) -> torch.Tensor:
        self.steps += 1.0
        return super().loss(batch) / self.steps


class HoldsCount(Counts):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["steps"] = self.steps

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.steps = checkpoint["steps"]


class HoldsAndResets(HoldsCount):
    """Has a hook that would change the value that the checkpoint has restored."""

    def on_train_epoch_start(self) -> None:
        self.steps += 10


class Collects(Model):
    def on_train_epoch_start(self) -> None:
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.log("mean", torch.stack(self.losses).mean())


class CollectsForAnEpoch(Collects):
    """Collects losses over an epoch, as Lightning's documentation shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.losses = []

    def on_train_epoch_start(self) -> None:
        pass

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.losses.clear()


class CollectsRows(Collects):
    """Collects tensors of more than one number, which have a graph."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.losses[-1] = torch.stack([loss, 2 * loss])
        return loss


class CollectsForever(Model):
    """Collects tensors, which may be views of weights, and never resets the list."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.rows = [*getattr(self, "rows", []), torch.ones(2) * loss.item()]
        return loss * len(self.rows)


class Named(dict[str, float]):
    """A dictionary that cannot be made without arguments."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class CollectsByName(Model):
    def __init__(self) -> None:
        super().__init__()
        self.sums = Named("sums")

    def loss(self, batch: Any) -> torch.Tensor:
        self.sums["steps"] = self.sums.get("steps", 0.0) + 1.0
        return super().loss(batch) / self.sums["steps"]


class Swaps(Model):
    """Changes a buffer that is not persistent, so no checkpoint holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def loss(self, batch: Any) -> torch.Tensor:
        self.scale *= 0.9
        return super().loss(batch) * self.scale


class Draws(Model):
    """Draws tensors when it is made: they differ at each start, and training does not change them."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn_once, self.not_used = torch.randn(4), torch.randn(4)

    def loss(self, batch: Any) -> torch.Tensor:
        batch[1].add_(self.drawn_once)
        return super().loss(batch)


class CountsEpochs(Model):
    """Has a hook at an epoch's start that changes a number depending on its previous value."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs = 0

    def on_train_epoch_start(self) -> None:
        self.epochs += 1

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) * self.epochs


class Shuffles(Model):
    """Has a hook at an epoch's start that changes a list depending on its previous order."""

    def __init__(self) -> None:
        super().__init__()
        self.order = [0, 1, 2, 3]

    def on_train_epoch_start(self) -> None:
        self.order.append(self.order.pop(0))

    def loss(self, batch: Any) -> torch.Tensor:
        batch[1][:] = batch[1][:, self.order]
        return super().loss(batch) * (1 + self.order[0])


class TellsOfEpochs(Model):
    """Has a hook at an epoch's start that sets everything again, except a count that is only printed."""

    def __init__(self) -> None:
        super().__init__()
        self.told_epochs, self.drawn = 0, [0, 1, 2, 3]

    def on_train_epoch_start(self) -> None:
        self.told_epochs += 1
        self.began = time.time()
        self.share, self.drawn = 1 / (1 + self.trainer.current_epoch), torch.randperm(4).tolist()
        self.losses: list[float] = []

    def loss(self, batch: Any) -> torch.Tensor:
        loss = super().loss(batch) * self.share * (1 + self.drawn[0])
        self.losses.append(float(loss))
        return loss

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.log("mean", sum(self.losses) / len(self.losses))
        print(f"epoch {self.told_epochs} took {time.time() - self.began} s")


class CountsEpochsBeside(Callback):
    """Does in a callback what :class:`CountsEpochs` does."""

    def __init__(self) -> None:
        self.epochs = 0

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.epochs += 1

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        batch[1].mul_(self.epochs)


class Teaches(Model):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.other.weight.mul_(0.99)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("model", "at", "named"),
    [
        (Counts, MIDDLE, "training had changed Counts.steps"),
        (Counts, END, "training had changed Counts.steps"),
        (CollectsForever, MIDDLE, "training had changed CollectsForever.rows"),
        (CollectsByName, MIDDLE, "training had changed CollectsByName.sums"),
        (Swaps, MIDDLE, "training had changed Swaps.scale"),
        (Draws, MIDDLE, ": Draws.drawn_once is not that of the run that saved"),
        (CountsEpochs, MIDDLE, "training had changed CountsEpochs.epochs"),
        (CountsEpochs, END, "training had changed CountsEpochs.epochs"),
        (Shuffles, MIDDLE, "training had changed Shuffles.order"),
        (Teaches, MIDDLE, "Teaches.on_train_batch_end changes weights or buffers"),
    ],
)
def test_what_is_lost_is_named_at_the_resume(model: type, at: Any, named: str, tmp_path: Path) -> None:
    expected, found, said = train_and_resume(Training(model), tmp_path, at)
    assert len(said) == 1
    assert named in said[0]
    assert found != expected


@pytest.mark.sampled(1)
@pytest.mark.parametrize("at", [MIDDLE, END], ids=["middle", "end"])
def test_what_a_callback_has_made_of_what_was_there_is_named(at: tuple[str, int], tmp_path: Path) -> None:
    expected, found, said = train_and_resume(Training(Model, lambda: [CountsEpochsBeside()]), tmp_path, at)
    assert len(said) == 1
    assert "training had changed CountsEpochsBeside.epochs" in said[0]
    assert found != expected


class Tells(Model):
    """Sets an attribute in each step, which does not exist before."""

    def loss(self, batch: Any) -> torch.Tensor:
        loss = super().loss(batch)
        self.told = float(loss)
        return loss

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        print(self.told)


class Average(torch.nn.Module):
    """Keeps an average of weights in buffers, and a copy of the weights while the average replaces them."""

    def __init__(self, of: torch.nn.Module) -> None:
        super().__init__()
        for name, parameter in of.named_parameters():
            self.register_buffer(name, parameter.detach().clone())
        self.collected: list[torch.Tensor] = []

    def update(self, of: torch.nn.Module) -> None:
        for name, parameter in of.named_parameters():
            self.get_buffer(name).lerp_(parameter.detach(), 0.5)

    def copy_to(self, parameters: dict[str, torch.nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            parameter.data.copy_(self.get_buffer(name))

    def store(self, parameters: Iterator[torch.nn.Parameter]) -> None:
        self.collected = [parameter.clone() for parameter in parameters]

    def restore(self, parameters: Iterator[torch.nn.Parameter]) -> None:
        for own, parameter in zip(self.collected, parameters, strict=True):
            parameter.data.copy_(own.data)


class PutsItsWeightsAside(Model):
    """Validates with an average of its weights, as latent diffusion does."""

    def __init__(self) -> None:
        super().__init__({"val": True})
        self.average_of_other = Average(self.other)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.average_of_other.store(self.other.parameters())
        self.average_of_other.copy_to(dict(self.other.named_parameters()))
        super().validation_step(batch, batch_idx)
        self.average_of_other.restore(self.other.parameters())

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.average_of_other.update(self.other)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("model", "at"),
    [
        (HoldsCount, MIDDLE),
        (HoldsAndResets, MIDDLE),
        (TellsOfEpochs, MIDDLE),
        (TellsOfEpochs, END),
        (PutsItsWeightsAside, MIDDLE),
        (PutsItsWeightsAside, END),
    ],
)
def test_what_hooks_bring_back_is_not_named(model: type, at: tuple[str, int], tmp_path: Path) -> None:
    expected, found, said = train_and_resume(Training(model), tmp_path, at)
    assert not said
    assert found == expected


class SwapsInItsOwnHooks(Model):
    """Replaces its weights during a validation, and still has the others when callbacks save at its end."""

    def __init__(self) -> None:
        super().__init__({"val": True})

    def on_validation_start(self) -> None:
        self.aside = [parameter.detach().clone() for parameter in self.other.parameters()]
        torch.nn.init.ones_(self.other.weight)

    def on_validation_end(self) -> None:
        for own, parameter in zip(self.aside, self.other.parameters(), strict=True):
            parameter.data.copy_(own)


def test_what_is_put_aside_is_named_if_it_was_not_put_back(tmp_path: Path) -> None:
    expected, found, said = train_and_resume(Training(SwapsInItsOwnHooks), tmp_path, ("on_validation_end", 2))
    assert "training had changed SwapsInItsOwnHooks.aside" in said[0]
    assert found != expected
    expected, found, said = train_and_resume(Training(SwapsInItsOwnHooks), tmp_path, ("on_validation_batch_end", 3))
    assert "training had changed SwapsInItsOwnHooks.aside" in said[0]
    assert found != expected
    expected, found, said = train_and_resume(Training(SwapsInItsOwnHooks), tmp_path, MIDDLE)
    assert not said
    assert found == expected


class Prints(Callback):
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Do nothing: the callback only has to have this hook."""


def test_what_was_put_back_before_a_save_at_the_validations_end_is_not_named(tmp_path: Path) -> None:
    # ResumableCheckpoint saves after the module's own hook
    directory = tmp_path / "saved"

    def train(epochs: int, **options: Any) -> Outcome:
        pl.seed_everything(1, verbose=False)
        model = SwapsInItsOwnHooks()
        saves = ResumableCheckpoint(dirpath=directory, save_top_k=-1, save_on_train_epoch_end=False)
        trainer = make_trainer(tmp_path, [saves, Prints()], max_epochs=epochs)
        trainer.fit(model, **options)
        return outcome(trainer, model)

    whole = train(3)
    resumed = min(directory.glob("epoch=0*.ckpt"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = train(3, ckpt_path=resumed)
    assert not [str(one.message) for one in caught if "exact" in str(one.message)]
    assert found.weights == whole.weights


class MakesOnce(Model):
    """Makes an attribute when it is first needed: from the batch, or from what is the same in each run."""

    def __init__(self, of_batch: bool = False) -> None:
        super().__init__()
        self.of_batch, self.made = of_batch, None

    def loss(self, batch: Any) -> torch.Tensor:
        if self.made is None:
            self.made = batch[1].mean(0).tanh() + 1 if self.of_batch else torch.arange(4.0)
        return super().loss((batch[0], batch[1] * self.made))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("at", [MIDDLE, END], ids=["middle", "end"])
@pytest.mark.parametrize("of_batch", [False, True])
def test_what_is_made_where_there_is_none_is_named_if_it_is_another_one(
    of_batch: bool, at: tuple[str, int], tmp_path: Path
) -> None:
    expected, found, said = train_and_resume(Training(lambda: MakesOnce(of_batch)), tmp_path, at)
    assert (found == expected) != of_batch
    lost = "begins without variables of the script that training had changed: `made` of MakesOnce"
    assert bool(said) == any(lost in text for text in said) == of_batch


class TellsOfSteps(Callback):
    """Has an attribute that steps set, and that hooks at the end and the start of an epoch read."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch:
            print(self.last)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.last = outputs["loss"].detach()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        with torch.no_grad():
            pl_module.other.weight.mul_(self.last)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("at", [MIDDLE, ("on_train_batch_end", 2 * BATCHES), END], ids=["middle", "last", "end"])
@pytest.mark.parametrize("model", [Collects, CollectsForAnEpoch, CollectsRows, Tells])
def test_numbers_that_steps_make_are_put_back(model: type, at: tuple[str, int], tmp_path: Path) -> None:
    expected, found, said = train_and_resume(Training(model, lambda: [TellsOfSteps()]), tmp_path, at)
    assert not said
    assert found == expected


class Meter:
    """A running average, as many scripts have it."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.sum, self.count = 0.0, 0

    def add(self, value: float) -> None:
        self.sum += value
        self.count += 1


class SetsBackAtTheEnd(Model):
    """Accumulates numbers over an epoch in every way, without which the hook at its end would fail."""

    of_class = 0

    def __init__(self) -> None:
        super().__init__()
        self.total, self.steps = 0.0, 0
        self.on_device = torch.zeros(1)
        self.in_place = torch.tensor(0.0)
        self.meters = {"loss": Meter()}
        self.sums = {"loss": 0.0, "steps": 0}
        self.by_name: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
        self.of_three = 0.0
        self.hidden: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.total += loss.item()
        self.steps += 1
        self.on_device = self.on_device + loss.detach()
        self.in_place += loss.detach()
        self.meters["loss"].add(loss.item())
        self.sums["loss"] += loss.item()
        self.sums["steps"] += 1
        self.by_name["loss"].append(loss)
        self.of_class += 1
        self.hidden = (loss.detach().reshape(1) + (0 if self.hidden is None else 0.5 * self.hidden[0]),)
        self.of_three += loss.item()
        if batch_idx % 3 == 2:
            self.log("of three", self.of_three)
            self.of_three = 0
        return loss

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        meter, stacked = self.meters["loss"], torch.stack(self.by_name["loss"])
        means = [self.total / self.steps, meter.sum / meter.count, self.sums["loss"] / self.sums["steps"]]
        means += [self.on_device.item() / self.steps, self.in_place.item() / self.of_class, stacked.mean().item()]
        means += [self.hidden[0].item()]
        for number, mean in enumerate(means):
            self.log(f"mean{number}", mean)
        self.set_back()

    def set_back(self) -> None:
        self.total = 0.0
        self.steps = 0
        self.on_device = torch.zeros(1, device=self.device)
        self.in_place.zero_()
        self.meters["loss"].reset()
        self.sums = {"loss": 0.0, "steps": 0}
        self.by_name.clear()
        self.of_class = 0
        self.hidden = None


@dataclasses.dataclass
class Sums:
    loss: float = 0.0
    steps: int = 0


class SetsBackWhatObjectsHave(Model):
    """Resets fields of other objects and arrays at the end of an epoch, and replaces some objects."""

    def __init__(self) -> None:
        super().__init__()
        self.sums, self.meter = Sums(), Meter()
        self.names = types.SimpleNamespace(steps=0)
        self.bins, self.last = np.zeros(2), np.float32(0)
        self.matrix = torch.zeros(2, 2)
        self.labels: Counter[int] = Counter()

    def on_train_epoch_start(self) -> None:
        self.made_by_hook = Meter()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.sums.loss += loss.item()
        self.sums.steps += 1
        self.names.steps += 2
        self.meter.add(loss.item())
        self.made_by_hook.add(loss.item())
        self.bins[batch_idx % 2] += loss.item()
        self.last = self.last + np.float32(loss.item())
        self.matrix[batch_idx % 2] += loss.item()
        self.labels.update([batch_idx % 3])
        return loss

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        means = [one.sum / one.count for one in (self.meter, self.made_by_hook)]
        means += [self.sums.loss / self.sums.steps, self.names.steps, self.bins[1], self.last, self.labels[1]]
        for number, mean in enumerate((*means, self.matrix[1].sum())):
            self.log(f"mean{number}", float(mean))
        self.sums.loss, self.sums.steps = 0.0, 0
        self.names = types.SimpleNamespace(steps=0)
        self.meter = Meter()
        self.bins[:] = 0
        self.last = np.float32(0)
        self.matrix.zero_()
        self.labels.clear()


class SetsBackAtTheStart(SetsBackAtTheEnd):
    def __init__(self) -> None:
        super().__init__()
        self.total = self.steps = None  # type: ignore[assignment]

    def on_train_epoch_start(self) -> None:
        super().set_back()

    def set_back(self) -> None:
        pass


class Notes:
    """Has a file that each process opens itself."""

    def __init__(self, path: Path) -> None:
        self.path, self.is_open, self.file = path, False, None

    def add(self, text: str) -> None:
        if not self.is_open:
            self.file = self.path.open("a")
        assert self.file is not None
        self.file.write(text)

    def __del__(self) -> None:
        if self.file is not None:
            self.file.close()


class Updater:
    def __init__(self) -> None:
        self.late_tau = 1.0

    def update(self, step: int) -> None:
        self.late_tau = 1 - step / 200


class SetsForTheNextStep(Model):
    """Sets in late hooks what the next step uses, as published code does; each process opens its own file."""

    def __init__(self, directory: Path) -> None:
        super().__init__({"val": True})
        self.notes, self.updater, self.shifts = Notes(directory / "notes"), Updater(), Shifts()
        self.late_factor, self.late_level, self.late_scale, self.late_began = 1.0, 0, torch.ones(1), 0.0
        self.late_weight = self.late_share = 1.0

    def on_train_start(self) -> None:
        self.late_part = 1.0
        self.late_step = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.notes.add(f"{batch_idx} ")
        self.took = time.perf_counter() - self.late_began
        batch = batch[0], self.shifts.center(batch[1])
        parts = self.late_factor * (1 + self.late_level) * float(self.late_scale) * self.late_weight * self.late_share
        return super().training_step(batch, batch_idx) * parts * self.late_part * self.updater.late_tau

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.late_scale = torch.full((1,), 1 + self.trainer.current_epoch / 10)
        if self.trainer.global_step > self.late_step:
            self.late_scale += self.trainer.global_step - self.late_step
            self.updater.update(self.trainer.global_step)
        self.late_step = self.trainer.global_step
        self.anneal()

    def anneal(self) -> None:
        self.late_part = 1 + self.global_step / 100
        self.share(self.global_step)

    def share(self, step: int) -> None:
        self.late_share = 1 - step / 100

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.late_factor = 0.5**self.trainer.current_epoch

    def on_validation_epoch_end(self) -> None:
        self.late_weight = 0.5 / (1 + self.trainer.global_step)  # 0.5 in a sanity check, which a resume skips


class SetsTheLevel(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.late_level = trainer.global_step // 2
        pl_module.notes.is_open = True
        pl_module.late_began = time.perf_counter()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("at", [MIDDLE, END], ids=["middle", "end"])
def test_what_a_step_sets_for_the_next_one_is_put_back(at: tuple[str, int], tmp_path: Path) -> None:
    checks = {"num_sanity_val_steps": 2 if at is MIDDLE else 0}
    training = Training(lambda: SetsForTheNextStep(tmp_path), lambda: [SetsTheLevel()], checks)
    expected, found, said = train_and_resume(training, tmp_path, at)
    assert not said
    assert found == expected


def test_what_a_module_in_the_module_keeps_of_a_step_is_put_back(tmp_path: Path) -> None:
    def users_of(model: Model) -> UserAttributes:
        trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False)
        trainer.strategy.connect(model)
        return UserAttributes(trainer)

    first, second = SetsForTheNextStep(tmp_path), SetsForTheNextStep(tmp_path)
    users = users_of(first)
    users.training_starts()
    first.shifts.center(torch.ones(2, 4))
    _, made = users.capture()
    users_of(second).make_again(made)
    assert torch.equal(second.shifts.shift, torch.ones(4))


def test_the_time_of_another_process_is_not_put_back(tmp_path: Path) -> None:
    model, trainer = SetsForTheNextStep(tmp_path), pl.Trainer(accelerator="cpu", devices=1, logger=False)
    trainer.strategy.connect(model)
    users = UserAttributes(trainer)
    users.training_starts()
    model.late_began, model.late_factor = time.perf_counter(), 0.5
    _, made = users.capture()
    assert made["module"].keys() == {"late_factor"}


class Stops(Callback):
    """Sets attributes that can end a training: by a signal handler, a time budget, and a full disk."""

    def __init__(self) -> None:
        self.asked_to_stop = self.used_up = False
        self.has_begun, self.used = time.monotonic(), 0.0
        self.free_bytes = self.process = 0

    def handle(self, number: int, frame: Any) -> None:
        self.asked_to_stop = True

    def on_train_batch_end(self, *_: Any) -> None:
        self.used = time.monotonic() - self.has_begun
        self.used_up = self.used > 1
        self.look()

    def look(self) -> None:
        self.free_bytes = shutil.disk_usage("/").free
        self.process = os.getpid()

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = self.asked_to_stop or self.used_up or self.free_bytes + self.process == 1


def test_what_ends_a_training_is_not_put_back(tmp_path: Path) -> None:
    stops = Stops()
    model, trainer = Model(), pl.Trainer(accelerator="cpu", devices=1, logger=False, callbacks=[stops])
    trainer.strategy.connect(model)
    users = UserAttributes(trainer)
    users.training_starts()
    stops.asked_to_stop, stops.used_up, stops.used = True, True, 2.0
    stops.look()
    with pytest.warns(UserWarning, match="`asked_to_stop`"):
        _, made = users.capture()
    assert not any(made.values())


class HoldsItsDatamodule(Samples):
    def __init__(self, of: pl.LightningDataModule) -> None:
        super().__init__()
        self.of = of


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(HoldsItsDatamodule(self), batch_size=4, shuffle=True)


def test_what_lightning_makes_at_a_save_in_what_data_holds_is_no_change(tmp_path: Path) -> None:
    expected, found, said = train_and_resume(Training(datamodule=Data), tmp_path)
    assert not said
    assert found == expected


def test_a_number_of_an_earlier_release_that_is_a_buffer_now_is_left_alone(tmp_path: Path) -> None:
    model, trainer = Model(), pl.Trainer(accelerator="cpu", devices=1, logger=False, default_root_dir=tmp_path)
    model.register_buffer("scale", torch.ones(()))
    trainer.strategy.connect(model)
    users = UserAttributes(trainer)
    users.make_again({"module": {"scale": {"value": 2.0, "in_place": False}}})
    users.before_hooks({})
    users.after_hooks()
    assert "scale" not in vars(model)
    assert float(model.scale) == 1


@pytest.mark.extended
@pytest.mark.parametrize("accelerator", [SIMULATED], indirect=True)
def test_what_a_look_could_not_wait_for_is_not_said_to_differ(
    tmp_path: Path, accelerator: SimulatedAccelerator
) -> None:
    model, trainer = Model(), pl.Trainer(accelerator="cpu", devices=1, logger=False, default_root_dir=tmp_path)
    model.hidden, model.number = torch.zeros(2, device=accelerator.type), 1
    trainer.strategy.connect(model)
    users = UserAttributes(trainer)
    users.training_starts()
    model.hidden += 1
    model.number = 2.5
    with looks_without_waiting():
        changed, _ = users.capture(looks=False, names=False)
    assert users.differences(changed) is None
    model.number = 3.5
    assert "training had changed Model.number, " in (users.differences(changed) or "")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("at", [MIDDLE, ("on_train_batch_end", 2 * BATCHES), END], ids=["middle", "last", "end"])
@pytest.mark.parametrize("model", [SetsBackAtTheEnd, SetsBackAtTheStart, SetsBackWhatObjectsHave])
def test_what_an_epoch_sets_back_is_put_back(model: type, at: tuple[str, int], tmp_path: Path) -> None:
    expected, found, said = train_and_resume(Training(model), tmp_path, at)
    assert not said
    assert found == expected


def test_a_batch_that_is_trained_again_begins_with_the_numbers_that_it_had(tmp_path: Path) -> None:
    expected, found, said = train_and_resume(Training(Interrupted), tmp_path, ("on_before_backward", MIDDLE[1]))
    assert not said
    assert (found.weights, found.rows) == (expected.weights, expected.rows)


class Interrupted(SetsBackAtTheEnd):
    """Uses no dictionaries: what they held before the interrupted batch is not known."""

    def __init__(self) -> None:
        super().__init__()
        self.in_step = 0
        self.carried: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = Model.training_step(self, batch, batch_idx)
        self.in_step += 1
        self.total += loss.item()
        self.steps += 1
        self.on_device = self.on_device + loss.detach()
        self.meters["loss"].add(loss.item())
        self.last = getattr(self, "last", np.float32(0)) + np.float32(1)
        self.carried = torch.stack([loss.detach(), loss.detach()]) + (0 if self.carried is None else self.carried)
        return loss * self.in_step * float(self.last) * self.carried.sum()

    def on_train_epoch_end(self) -> None:
        Model.on_train_epoch_end(self)
        meter = self.meters["loss"]
        self.log("mean", self.total / self.steps + self.on_device.item() + meter.sum / meter.count)
        self.set_back()

    def set_back(self) -> None:
        super().set_back()
        self.in_step = 0
        self.carried = None


class CollectsByLabel(Callback):
    """Has a dictionary and a window that begin empty, and that change the weights."""

    def __init__(self) -> None:
        self.parts: dict[int, list[float]] = {}
        self.window: deque[float] = deque(maxlen=5)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.window.clear()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.parts.setdefault(batch_idx % 2, []).append(float(outputs["loss"]))
        self.window.append(float(outputs["loss"]))
        with torch.no_grad():
            pl_module.other.weight.mul_(1 / (1 + sum(self.window)))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        with torch.no_grad():
            for part in self.parts.values():
                pl_module.other.weight.add_(1 / (1 + sum(part)) / len(part))
        self.parts = {}


class Records(Callback):
    """Keeps a list of this process's steps, to be read after the training."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen.append(trainer.global_step)


def test_a_record_is_not_put_back(tmp_path: Path) -> None:
    made: list[Records] = []

    def records() -> list[Any]:
        made.append(Records())
        return made[-1:]

    train_and_resume(Training(callbacks=records), tmp_path)
    assert made[1].seen == made[0].seen[-len(made[1].seen) :]
    assert len(made[1].seen) == 3 * BATCHES - MIDDLE[1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("at", [MIDDLE, ("on_train_batch_end", 2 * BATCHES), END], ids=["middle", "last", "end"])
def test_containers_that_steps_fill_are_put_back(at: tuple[str, int], tmp_path: Path) -> None:
    expected, found, said = train_and_resume(Training(callbacks=lambda: [CollectsByLabel()]), tmp_path, at)
    assert not said
    assert found == expected


class CollectsInValidation(CollectsForAnEpoch):
    def __init__(self) -> None:
        super().__init__()
        self.options["val"] = True
        self.of_validation: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.of_validation.append(float(batch[1].sum()))

    def on_validation_epoch_end(self) -> None:
        self.log("sums", sum(self.of_validation) / len(self.of_validation))
        self.of_validation.clear()


@pytest.mark.parametrize("every", [3, 1.0], ids=["inside", "end"])
def test_a_validation_that_begins_anew_begins_with_what_it_had(every: float, tmp_path: Path) -> None:
    training = Training(CollectsInValidation, trainer={"val_check_interval": every})
    expected, found, said = train_and_resume(training, tmp_path, ("on_validation_batch_end", 5))
    assert not said
    assert found == expected


class HoldsAPart(Callback):
    """Has a state_dict without the number of steps, and without a number that is only printed."""

    def __init__(self) -> None:
        self.mean, self.count, self.told = 0.0, 0, 0.0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.count += 1
        self.told += 1.0
        self.mean += (float(outputs["loss"]) - self.mean) / self.count

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        print(f"{self.told} steps")
        with torch.no_grad():
            pl_module.other.weight.mul_(self.mean)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]


class HoldsAPartByHooks(HoldsAPart):
    state_dict, load_state_dict = Callback.state_dict, Callback.load_state_dict

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["mean"] = self.mean

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.mean = checkpoint["mean"]


class CountsInWhole(Model):
    """Has a count that changes weights at an epoch's end, and that ``on_save_checkpoint`` leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def loss(self, batch: Any) -> torch.Tensor:
        self.steps += 1
        return super().loss(batch)

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        with torch.no_grad():
            self.other.weight.mul_(1 / self.steps)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["nothing"] = 0


class Lookahead(torch.optim.SGD):
    """An optimizer that keeps a count outside of its state."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.taken = 0

    def step(self, closure: Any = None) -> Any:
        self.taken += 1
        for group in self.param_groups if self.taken % 7 == 0 else ():
            group["lr"] *= 0.5
        return super().step(closure)


class LooksAhead(Model):
    def configure_optimizers(self) -> Any:
        return Lookahead(self.parameters(), lr=0.1)


def rates() -> Iterator[float]:
    rate = 1.0
    while True:
        yield rate
        rate *= 0.9


class InAFunctionOfItsSchedule(Model):
    def configure_optimizers(self) -> Any:
        optimizer, counts = torch.optim.SGD(self.parameters(), lr=0.05), itertools.count()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.9 ** next(counts))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class SchedulesLate(Model):
    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        if not hasattr(self, "later"):
            optimizer: Any = self.optimizers()
            self.later = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda n: 0.5**n)
        self.later.step()


class InItsClass(Model):
    rates: Iterator[float]

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) * next(self.rates)


@pytest.mark.sampled(2)
@pytest.mark.extended_cells(
    "Model-HoldsAPartByHooks-`count` of HoldsAPartByHooks ", "SchedulesLate-None-`later` of SchedulesLate "
)
@pytest.mark.parametrize(
    ("model", "callback", "named"),
    [
        (Model, HoldsAPart, "`count` of HoldsAPart "),
        (Model, HoldsAPartByHooks, "`count` of HoldsAPartByHooks "),
        (CountsInWhole, None, "`steps` of CountsInWhole "),
        (LooksAhead, None, "`taken` of Lookahead "),
        (InAFunctionOfItsSchedule, None, "`counts` of <lambda> "),
        (SchedulesLate, None, "`later` of SchedulesLate "),
        (InItsClass, None, "`rates` of InItsClass in test_user_attributes.py "),
    ],
)
def test_what_a_state_leaves_out_is_named_at_the_resume(
    model: type[Model], callback: Any, named: str, tmp_path: Path
) -> None:
    def begin() -> Model:
        InItsClass.rates = rates()  # as in a new process
        return model()

    training = Training(begin, lambda: [callback()] if callback else [])
    expected, found, said = train_and_resume(training, tmp_path)
    assert len(said) == 1
    assert f"begins without variables of the script that training had changed: {named}" in said[0]
    assert found != expected


class OneOfTwo(HoldsAPart):
    """One of two callbacks of this class, of which the second does nothing."""

    def __init__(self, which: int) -> None:
        super().__init__()
        self.which = which

    @property
    def state_key(self) -> str:
        return f"OneOfTwo {self.which}"

    def on_train_batch_end(self, *arguments: Any) -> None:
        if self.which == 1:
            super().on_train_batch_end(*arguments)

    def on_train_epoch_end(self, *arguments: Any) -> None:
        if self.which == 1:
            super().on_train_epoch_end(*arguments)


def test_two_callbacks_of_one_class_are_told_apart(tmp_path: Path) -> None:
    _, _, said = train_and_resume(Training(Model, lambda: [OneOfTwo(1), OneOfTwo(2)]), tmp_path)
    assert len(said) == 1
    assert "`count` of OneOfTwo (" in said[0]


# ---- at saves --------------------------------------------------------------------------------------------------------


class Remembers(Callback):
    best = told = 0.0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.best += 1.0
        self.told += 1.0
        self.last = float(outputs["loss"])

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        print(f"{self.told} steps, {self.last}")
        if self.best > 1000:
            trainer.strategy.barrier()


class Holds(Remembers):
    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}


class SetsEachEpoch(Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.weight = min(1.0, trainer.current_epoch / 2)


class MyBar(TQDMProgressBar):
    """A progress bar of the user's own."""


class MyTimer(Timer):
    """A timer of the user's own."""


def fit(model: Model, callbacks: list[Any], directory: Path, **options: Any) -> list[str]:
    saves = ResumableCheckpoint(dirpath=directory, every_n_train_steps=2, save_top_k=-1)
    quiet = not any(isinstance(cb, (TQDMProgressBar, RichProgressBar)) for cb in callbacks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = pl.Trainer(
            accelerator="cpu",
            max_epochs=4,
            logger=MemoryLogger(),
            enable_model_summary=False,
            log_every_n_steps=1,
            callbacks=[*callbacks, saves],
            **({"enable_progress_bar": False} if quiet else {}),
            **options,
        )
        trainer.fit(model)
    return [str(w.message) for w in caught if "since the start" in str(w.message)]


def test_what_training_changes_is_named_once_at_saves(tmp_path: Path) -> None:
    said = fit(Counts(), [Remembers()], tmp_path)
    assert len(said) == 2
    assert any(text.startswith("module `Counts` changed `steps` since the start") for text in said)
    assert any(
        text.startswith("callback `Remembers` changed `best` since the start, and has no state_dict: a resume will")
        for text in said
    )


STOCK: dict[str, Callable[[], list[Any]]] = {
    "bars and monitors": lambda: [
        TQDMProgressBar(),
        LearningRateMonitor(),
        DeviceStatsMonitor(cpu_stats=False),
        Timer(duration="00:12:00:00"),
        EarlyStopping("loss", patience=100, check_on_train_epoch_end=True),
    ],
    "rich": lambda: [RichProgressBar()],
    "averaging": lambda: [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)],
    "of the user's own": lambda: [Holds(), SetsEachEpoch(), Thaws(), MyBar(), MyTimer()],
}


class Plain(Model):
    """Changes only what a state holds."""

    def note(self, batch: Any, batch_idx: int) -> None:
        pass


@pytest.mark.sampled(2)
@pytest.mark.extended_cells("bars and monitors")
@pytest.mark.parametrize("name", STOCK)
def test_nothing_else_is_named(name: str, tmp_path: Path) -> None:
    if name == "rich":
        pytest.importorskip("rich")
        if RELEASE < (2, 5, 6):
            pytest.skip("the bar of older releases fails with this release of rich, also without us")
    assert fit(Plain(), STOCK[name](), tmp_path) == []


class Holding(torch.nn.Module):
    """Keeps a total, and puts it into the ``state_dict`` of the model that it is a part of."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.kept = 0.0, types.SimpleNamespace(total=0.0)

    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        self.total += float(loss)
        self.kept.total = self.total
        return loss * (1 + self.kept.total)

    def get_extra_state(self) -> Any:
        return {"total": self.total}

    def set_extra_state(self, state: Any) -> None:
        self.total = self.kept.total = state["total"]


class HasOne(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.held = torch.nn.ModuleList([Holding()])

    def loss(self, batch: Any) -> torch.Tensor:
        return self.held[0](super().loss(batch))


def test_what_a_submodule_puts_into_the_state_dict_is_not_named(tmp_path: Path) -> None:
    assert fit(HasOne(), [], tmp_path) == []


class HoldsOne(Callback):
    """Has such a module, which is in no ``state_dict`` here."""

    def __init__(self) -> None:
        self.held = Holding()

    def on_train_batch_end(self, *args: Any) -> None:
        self.held(torch.ones(()))


def test_a_module_that_is_in_no_state_dict_is_named(tmp_path: Path) -> None:
    assert any("HoldsOne" in said and "held.total" in said for said in fit(Plain(), [HoldsOne()], tmp_path))


class Searched(Plain):
    """Has the attributes that searches set before the training."""

    def __init__(self) -> None:
        super().__init__()
        self.lr, self.batch_size = 1e-2, 2

    def train_dataloader(self) -> Any:
        return DataLoader(Samples(), self.batch_size)


class Swaps(Plain):
    """Uses other weights during a validation."""

    def __init__(self) -> None:
        super().__init__({"val": True})

    def on_validation_start(self) -> None:
        self.trained = {name: p.detach().clone() for name, p in self.other.named_parameters()}
        torch.nn.init.zeros_(self.other.weight)

    def on_validation_end(self) -> None:
        self.other.load_state_dict(self.trained)


class SetsUp(Plain):
    """Makes what it needs at the start of each training."""

    def on_train_start(self) -> None:
        self.notes_of_run = types.SimpleNamespace(batches=len(self.trainer.train_dataloader), seen=())


def searches() -> list[Any]:
    return [
        BatchSizeFinder(max_trials=3, steps_per_trial=2),
        LearningRateFinder(num_training_steps=4, early_stop_threshold=None),
    ]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("model", "make"), [(Searched, searches), (Swaps, list), (SetsUp, list)], ids=["searches", "swaps", "sets up"]
)
def test_what_is_set_before_it_is_read_is_not_named(model: Any, make: Callable[[], list[Any]], tmp_path: Path) -> None:
    assert fit(model(), make(), tmp_path, default_root_dir=tmp_path, num_sanity_val_steps=0) == []


class Features(Model):
    """Keeps the features of the batch from a frozen part in inference mode, where tensors have no version."""

    def loss(self, batch: Any) -> torch.Tensor:
        with torch.inference_mode():
            self.features = batch[0].detach() * 2
        return super().loss(batch)


def test_a_tensor_of_the_inference_mode_ends_no_training(tmp_path: Path) -> None:
    expected, found, _ = train_and_resume(Training(Features), tmp_path, MIDDLE)
    assert found == expected
