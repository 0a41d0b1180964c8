"""What hooks set at an epoch's start is there after a resume in its middle, and captured state is as it was."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, Callback, StochasticWeightAveraging
from torch.optim.swa_utils import SWALR
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricTracker, MinMaxMetric, RunningMean, SumMetric

from lightning_ckpt._exact.modes import Modes
from lightning_ckpt._exact.parameter_groups import restore_groups
from tests.lightning_ckpt.captured import BATCHES, END, Training, train_and_resume
from tests.lightning_ckpt.exact_cases import Model, Thaws
from tests.support.data_sets import Samples

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Normed(Model):
    """A model with batch normalisation, which trains differently in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))


class InEval(Normed):
    def on_train_epoch_start(self) -> None:
        self.net[1].eval()


class EvalLater(Normed):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 9:
            self.net[1].eval()


class SetsItsModules(Normed):
    """Derives settings of its modules from their previous values: a hook that runs again cannot restore them."""

    def __init__(self) -> None:
        super().__init__()
        self.net.append(torch.nn.Dropout(0.1))
        self.criterion = torch.nn.SmoothL1Loss(beta=1.0)

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) + self.criterion(self.net(batch[1]), batch[1].sum(1, keepdim=True))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[1].momentum *= 0.9
        self.net[3].p *= 1.1
        self.criterion.beta *= 0.8


class Annealed(Model):
    def on_train_epoch_start(self) -> None:
        self.weight = 1.0 / (1 + self.trainer.global_step) + float(torch.rand(()))

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) * self.weight


class AnnealedByCount(Annealed):
    """Keeps a count next to an object that exists in this process only."""

    def on_train_epoch_start(self) -> None:
        self.steps = 0

    def loss(self, batch: Any) -> torch.Tensor:
        self.steps += 1
        self.last, self.weight = object(), 1.0 / self.steps
        return super().loss(batch)


class AnnealedByMetric(Annealed):
    def on_train_epoch_start(self) -> None:
        self.weight = 1.0 + float(self.trainer.callback_metrics.get("loss_epoch", 0.0))


class FreezesAndThaws(Model):
    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch != 1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 9:
            self.other.requires_grad_(False)


class SetsItsOptimizer(Model):
    """Sets learning rates at an epoch's start, which later steps change, and starts the epoch with other weights."""

    def on_train_epoch_start(self) -> None:
        for group in self.optimizers().param_groups:
            group["lr"] = 0.1
        with torch.no_grad():
            self.other.weight.mul_(0.5)
        self.logger.log_metrics({"own": 1.0}, step=self.trainer.global_step)
        self.log("logged", 1.0)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for group in self.optimizers().param_groups:
            group["lr"] *= 0.9


class Tracks(Model):
    def __init__(self) -> None:
        super().__init__()
        self.tracked = MetricTracker(MeanMetric(), maximize=False)

    def on_train_epoch_start(self) -> None:
        self.tracked.increment()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.tracked.update(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.log("tracked", self.tracked.compute())
        self.log("best", self.tracked.best_metric())


class Runs(Model):
    """Has a running window, extremes, and metrics in a plain list, none of which is reset between epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.running, self.extremes = RunningMean(window=4), MinMaxMetric(MeanMetric())
        self.held = [MeanMetric(), SumMetric()]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.running(loss.detach())
        self.log("running", self.running, on_step=True, on_epoch=True)
        self.log_dict({f"extreme_{name}": v for name, v in self.extremes(loss.detach()).items()})
        self.held[0].update(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.log("held", self.held[0].compute())


class Weighted(Samples):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        number, x = super().__getitem__(index)
        return number, x * (1 + self.epoch)


class TellsItsData(Model):
    def train_dataloader(self) -> Any:
        return DataLoader(Weighted(32), batch_size=4, shuffle=True, num_workers=self.options.get("workers", 0))

    def on_train_epoch_start(self) -> None:
        self.trainer.train_dataloader.dataset.set_epoch(self.current_epoch)


class ScalesTheLoss(Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.scale = 1.0 + trainer.current_epoch


class CountsInAnArray(Callback):
    """Has an array in an attribute, and a number under the same name in its state."""

    def __init__(self) -> None:
        self.seen = np.zeros(3)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += 1

    def state_dict(self) -> dict[str, Any]:
        return {"seen": float(self.seen.sum())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = np.full(3, state_dict["seen"] / 3)


class Scaled(Model):
    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) * self.scale


class ScalesWhileItTrains(Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.scale = 1 + trainer.global_step / 100


class AddsACallback(Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if not any(isinstance(callback, ScalesWhileItTrains) for callback in trainer.callbacks):
            trainer.callbacks.append(ScalesWhileItTrains())


class FineTuned(Model):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.01)


class HasBackbone(FineTuned):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.other


class AddsGroups(Model):
    """Adds a parameter group in the second epoch, which the new optimizer of a resumed run does not have."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters(), lr=0.01)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.optimizers().add_param_group({"params": self.other.parameters(), "lr": 0.1})
        for group in self.optimizers().param_groups:
            group["lr"] *= 0.9


def warms_up() -> list[Any]:
    return [BackboneFinetuning(0, lambda_func=lambda epoch: 1.5, backbone_initial_lr=1e-4, should_align=False)]


def averages() -> list[Any]:
    return [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=2)]


TRAININGS = {
    "eval mode": Training(InEval),
    "eval mode in the middle": Training(EvalLater),
    "annealing by step and chance": Training(Annealed),
    "annealing by count": Training(AnnealedByCount),
    "annealing by metric": Training(AnnealedByMetric),
    "requires_grad": Training(FreezesAndThaws),
    "settings of modules": Training(SetsItsModules),
    "optimizer, weights and rows": Training(SetsItsOptimizer),
    "metric for each epoch": Training(Tracks),
    "running window": Training(Runs),
    "set_epoch": Training(TellsItsData),
    "callback": Training(Scaled, lambda: [ScalesTheLoss()]),
    "callback that adds one": Training(Scaled, lambda: [AddsACallback()]),
    "callback with an array": Training(Model, lambda: [CountsInAnArray()]),
    "groups of parameters": Training(AddsGroups),
    "fine-tuning": Training(FineTuned, lambda: [Thaws()]),
    "learning rate of a backbone": Training(HasBackbone, warms_up, {"max_epochs": 4}),
    "weight averaging": Training(Model, averages, {"max_epochs": 4}, is_plain="state_dict" in vars(SWALR)),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", TRAININGS)
def test_hooks_of_the_epochs_start_have_run(name: str, tmp_path: Path) -> None:
    expected, found, said = train_and_resume(TRAININGS[name], tmp_path)
    assert not said
    assert found == expected


AFTER_AN_EPOCH = "eval mode in the middle, requires_grad, settings of modules, fine-tuning, running window"


@pytest.mark.sampled(1)
@pytest.mark.extended_cells("requires_grad", "fine-tuning", "running window")
@pytest.mark.parametrize("name", [*AFTER_AN_EPOCH.split(", "), "groups of parameters"])
def test_modes_are_as_they_were_after_an_epoch(name: str, tmp_path: Path) -> None:
    expected, found, said = train_and_resume(TRAININGS[name], tmp_path, END)
    assert not said
    assert found == expected


def test_an_optimizer_that_follows_its_groups_is_told_of_those_that_a_resume_adds() -> None:
    class Follows(torch.optim.SGD):
        def add_param_group(self, group: Any) -> None:
            self.rates = [*getattr(self, "rates", []), group["lr"] if "lr" in group else self.defaults["lr"]]
            super().add_param_group(group)

    module = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 1, bias=False))
    optimizer = Follows(module[0].parameters(), lr=0.1)
    trainer = SimpleNamespace(
        optimizers=[optimizer],
        lightning_module=module,
        strategy=SimpleNamespace(restore_checkpoint_after_setup=False),
    )
    states = [{"param_groups": [{"lr": 0.1}, {"lr": 0.5}]}]
    restore_groups(trainer, [[["0.weight"], ["1.weight"]]], states)
    assert [group["params"] for group in optimizer.param_groups] == [[module[0].weight], [module[1].weight]]
    assert optimizer.rates == [0.1, 0.5]


@pytest.mark.extended_cells("1")
@pytest.mark.parametrize("batch", [1, 5, BATCHES])
def test_the_epoch_that_averages_batch_normalisation(batch: int, tmp_path: Path) -> None:
    # Lightning appends this epoch; its start copies the averaged weights and resets the statistics
    momentum: list[float | None] = []

    class Told(Normed):
        def on_fit_end(self) -> None:
            momentum.append(self.net[1].momentum)

    training = Training(Told, averages, {"max_epochs": 3}, is_plain="state_dict" in vars(SWALR))
    expected, found, said = train_and_resume(training, tmp_path, ("on_train_batch_end", 3 * BATCHES + batch))
    assert not said
    assert found == expected
    assert momentum == [0.1, 0.1]


class Validated(EvalLater):
    def val_dataloader(self) -> Any:
        return DataLoader(Samples(12), batch_size=4)


@pytest.mark.parametrize("hook", ["on_validation_start", "on_validation_end"])
def test_modes_are_those_outside_of_the_validation_that_saved(hook: str, tmp_path: Path) -> None:
    expected, found, said = train_and_resume(Training(Validated), tmp_path, (hook, 2))
    assert not said
    assert found == expected


def test_what_a_user_freezes_in_another_way_stays_so(tmp_path: Path) -> None:
    frozen: list[bool] = []

    class Frozen(Model):
        def __init__(self) -> None:
            super().__init__()
            self.other.requires_grad_(not frozen)
            frozen.append(True)

        def on_train_end(self) -> None:
            frozen.append(self.other.weight.requires_grad)

    train_and_resume(Training(Frozen), tmp_path)
    assert frozen == [True, True, True, False]


def test_settings_of_modules_come_back_as_far_as_the_run_had_changed_them() -> None:
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Dropout(0.1), torch.nn.BatchNorm1d(4), torch.nn.CrossEntropyLoss())
    modes = Modes(net)
    net[0].p, net[1].momentum, net[2].label_smoothing = 0.5, None, 0.2
    saved = modes.capture()
    assert saved["settings"] == {"0.p": 0.5, "1.momentum": None, "2.label_smoothing": 0.2}

    resumed = torch.nn.Sequential(
        torch.nn.Dropout(0.3), torch.nn.BatchNorm1d(4, eps=1e-2), torch.nn.CrossEntropyLoss(ignore_index=3)
    )
    modes = Modes(resumed)
    modes.restore({kind: flags for kind, flags in saved.items() if kind != "settings"})
    assert (resumed[0].p, resumed[1].momentum, resumed[2].label_smoothing) == (0.3, 0.1, 0.0)
    modes.restore(saved)
    assert (resumed[0].p, resumed[1].momentum, resumed[2].label_smoothing) == (0.5, None, 0.2)
    assert (resumed[1].eps, resumed[2].ignore_index) == (1e-2, 3)


def test_what_a_users_module_keeps_is_no_setting_of_torchs() -> None:
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = self.data = 1

    own = Own()
    modes = Modes(own)
    own.p = own.data = 2
    assert modes.capture()["settings"] == {}
