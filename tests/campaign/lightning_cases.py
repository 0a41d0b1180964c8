"""The cases that the campaign trains with Lightning: each is a few lines, as users write them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelPruning,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.utilities import CombinedLoader
from torch.nn.utils import parametrizations, prune
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader, Subset, random_split
from torchmetrics import (
    AUROC,
    CatMetric,
    MeanMetric,
    MetricCollection,
    MetricTracker,
    MinMaxMetric,
    RunningMean,
    SumMetric,
)

from ckpt_core.state.rng import RngState
from ckpt_core.state.samplers import RecordingSampler
from lightning_ckpt import ResumableCheckpoint
from lightning_ckpt._exact.loaders import TrainingData
from lightning_ckpt._exact.modes import Modes
from lightning_ckpt._exact.state import ExactState
from tests.campaign.data import (
    Items,
    OwnNoise,
    Stream,
)
from tests.campaign.kept_lightning import KEPT
from tests.campaign.lightning_runs import Case, Net, Validates
from tests.campaign.loaders import LOADERS, NEEDS, hugging_face, mapped, streamed

F = torch.nn.functional


COMBINED: dict[str, Callable[[], Any]] = {
    "combined, max_size": lambda: CombinedLoader([mapped()(), mapped(batch_size=16)()], "max_size"),
    "combined, max_size_cycle": lambda: CombinedLoader([mapped()(), mapped(batch_size=16)()], "max_size_cycle"),
    "combined, workers": lambda: CombinedLoader([mapped(num_workers=1)(), mapped(batch_size=16, num_workers=2)()]),
}


# ---- models ----------------------------------------------------------------------------------------------------------


class Hooked(Net):
    """Does something at the start of each epoch."""

    def __init__(self, loader: Any, do: Callable[[Any], None]) -> None:
        super().__init__(loader)
        self.do = do

    def on_train_epoch_start(self) -> None:
        self.do(self)


def _hooked(do: Callable[[Any], Any]) -> Callable[[Any], Net]:
    return lambda loader: Hooked(loader, do)


class Anneals(Net):
    """Weights the loss by the number of the epoch."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self.by_epoch = 1.0

    def on_train_epoch_start(self) -> None:
        self.by_epoch = 1 / (1 + self.current_epoch)

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) * self.by_epoch


class AnnealsByItself(Net):
    """Weights the loss by a factor that each epoch computes from that of the epoch before."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self.by_itself = 1.0

    def on_train_epoch_start(self) -> None:
        self.by_itself *= 0.9

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) * self.by_itself


class AnnealsByChance(Net):
    """Weights the loss by a number that it draws for the epoch."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self.by_chance = 1.0

    def on_train_epoch_start(self) -> None:
        self.by_chance = 1 + float(torch.rand(()))

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) * self.by_chance


class SwitchesLate(Net):
    """Switches a part to eval, and freezes it, at some step of an epoch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 7:
            self.backbone.eval()
            self.backbone[0].requires_grad_(False)


class Attribute(Net):
    """Scales its loss by an attribute that each step changes.

    ``kind``: ``float``, ``int`` (a count), ``list``, ``tensor``, ``buffer`` (not saved), ``saved``, ``object``,
    ``global``.
    """

    def __init__(self, loader: Any, kind: str) -> None:
        super().__init__(loader)
        self.kind = kind
        self.value: Any = {"float": 1.0, "int": 0, "list": [], "tensor": torch.ones(()), "object": _Holder()}.get(kind)
        if kind == "buffer":
            self.register_buffer("scale", torch.ones(()), persistent=False)
        if kind == "saved":
            self.register_buffer("scale", torch.ones(()))

    def _scale(self) -> Any:
        if self.kind == "float":
            self.value *= 0.9
            return self.value
        if self.kind == "int":
            self.value += 1
            return 1 + 0.1 * (self.value % 7)
        if self.kind == "list":
            self.value.append(len(self.value) * 0.5)
            return 1 + sum(self.value[-3:])
        if self.kind == "tensor":
            self.value = self.value * 0.9
            return self.value
        if self.kind == "object":
            self.value.x += 0.1
            return self.value.x
        if self.kind == "global":
            _HELD["x"] += 0.1
            return _HELD["x"]
        self.scale *= 0.9
        return self.scale

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) * self._scale()


class _Holder:
    x = 1.0


_HELD = {"x": 1.0}


class OwnGenerator(Net):
    """Draws from a generator of its own, of some library."""

    def __init__(self, loader: Any, kind: str) -> None:
        super().__init__(loader)
        self.noise = OwnNoise(kind)

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss((batch[0] + self.noise(), batch[1]))


class Carries(Net):
    """Carries a hidden state from step to step; each epoch begins without it, as the training does."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self.hidden: torch.Tensor | None = None

    def on_train_epoch_start(self) -> None:
        self.hidden = None

    def loss(self, batch: Any) -> torch.Tensor:
        loss = super().loss(batch)
        mean = loss.detach() if self.hidden is None else 0.5 * (loss.detach() + self.hidden)
        self.hidden = mean
        return loss * (1 + mean)


class Collects(Net):
    """Collects the outputs of each epoch in a list that is made in a hook."""

    def on_train_epoch_start(self) -> None:
        self.outs: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.outs.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean of all", torch.stack(self.outs).mean())


class Momentum(Net):
    """Has a teacher that follows the model, in the hook that is given."""

    def __init__(self, loader: Any, hook: str) -> None:
        super().__init__(loader)
        self.teacher = torch.nn.Linear(16, 3).requires_grad_(False)
        self.hook = hook

    def loss(self, batch: Any) -> torch.Tensor:
        features = self.backbone(batch[0])
        return super().loss(batch) + F.mse_loss(self.head(features), self.teacher(features.detach()))

    def _follow(self) -> None:
        with torch.no_grad():
            for mine, theirs in zip(self.teacher.parameters(), self.head[1].parameters(), strict=True):
                mine.lerp_(theirs, 0.1)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.hook == "batch end":
            self._follow()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.hook == "before zero grad":
            self._follow()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.hook == "optimizer step":
            self._follow()

    def on_train_epoch_end(self) -> None:
        if self.hook == "epoch end":
            self._follow()

    def on_validation_end(self) -> None:
        if self.hook == "validation end":
            self._follow()


class MomentumValidates(Momentum, Validates):
    """``Momentum`` with a validation."""


class Manual(Net):
    """Manual optimization, with some optimizers, over some batches each."""

    def __init__(self, loader: Any, parts: int = 1, window: int = 1, schedule: bool = False) -> None:
        super().__init__(loader)
        self.automatic_optimization = False
        self.parts, self.window, self.schedule = parts, window, schedule

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = self.optimizers()
        for optimizer in found if isinstance(found, list) else [found]:
            loss = self.loss(batch) / self.window
            self.manual_backward(loss)
            if (batch_idx + 1) % self.window == 0:
                optimizer.step()
                optimizer.zero_grad()
            self.log("loss", loss)
        if self.schedule and batch_idx % 2:
            self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        parts = [self.backbone, self.head] if self.parts == 2 else [self]
        optimizers = [torch.optim.Adam(part.parameters(), lr=1e-2) for part in parts]
        return optimizers, [schedules.StepLR(optimizers[0], 2, 0.7)] if self.schedule else []


class Gan(Manual):
    """Toggles its optimizers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.log("loss", loss)


class Optimized(Net):
    """Has the optimizer or schedule that ``make`` returns."""

    def __init__(self, loader: Any, make: Callable[[Any], Any]) -> None:
        super().__init__(loader)
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self)


class OptimizedValidates(Optimized, Validates):
    """``Optimized`` with a validation."""


def _adam(model: Any, **settings: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, **settings})


def _scheduled(
    make: Callable[[Any], Any], interval: str = "epoch", cls: Any = Optimized, **settings: Any
) -> Callable[[Any], Net]:
    def both(model: Any) -> Any:
        optimizer = _adam(model)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": make(optimizer), "interval": interval, **settings},
        }

    return lambda loader: cls(loader, both)


def _sequential(optimizer: Any) -> Any:
    warm = schedules.LinearLR(optimizer, 0.1, total_iters=5)
    return schedules.SequentialLR(optimizer, [warm, schedules.CosineAnnealingLR(optimizer, 20)], [5])


class Metrics(Net):
    """Torchmetrics of some kind, in training."""

    def __init__(self, loader: Any, kind: str) -> None:
        super().__init__(loader)
        self.kind = kind
        made = {
            "mean": MeanMetric,
            "running": lambda: RunningMean(4),
            "extremes": lambda: MinMaxMetric(MeanMetric()),
            "cat": CatMetric,
            "tracker": lambda: MetricTracker(MeanMetric(), maximize=False),
            "collection": lambda: MetricCollection({"a": MeanMetric(), "b": SumMetric()}),
        }
        self.metric: Any = made[kind]() if kind in made else None
        self.held = [MeanMetric(), SumMetric()]
        self.area = AUROC("multiclass", num_classes=3)

    def on_train_epoch_start(self) -> None:
        if self.kind == "tracker":
            self.metric.increment()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.kind == "held":
            self.held[0].update(loss.detach())
            self.held[1].update(loss.detach())
        elif self.kind == "area":
            self.area(self(batch[0]).softmax(-1), batch[1])
            self.log("area", self.area, on_epoch=True, on_step=False)
        elif self.kind == "extremes":
            self.log_dict({f"extreme_{name}": value for name, value in self.metric(loss.detach()).items()})
        elif self.kind in ("cat", "tracker"):
            self.metric.update(loss.detach())
        elif self.kind == "collection":
            self.metric(loss.detach())
            self.log_dict(self.metric, on_step=True, on_epoch=True)
        else:
            self.metric(loss.detach())
            self.log("metric", self.metric, on_step=True, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        if self.kind == "held":
            self.log("held", self.held[0].compute() + self.held[1].compute())
            self.held[0].reset()
        elif self.kind == "cat":
            self.log("cat", self.metric.compute().std())
            self.metric.reset()
        elif self.kind == "tracker":
            self.log("best", self.metric.best_metric())


class Various(Net):
    """Reductions, sums and steps that are left out."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("summed", loss, on_step=False, on_epoch=True, reduce_fx=torch.sum)
        self.log("weighted", loss, on_epoch=True, batch_size=batch_idx + 1, prog_bar=True)
        return None if batch_idx == 2 else {"loss": loss, "extra": 1}


class Pruned(Net):
    """Prunes by hand."""

    def __init__(self, loader: Any, when: str) -> None:
        super().__init__(loader)
        self.when = when
        if when == "built":
            prune.l1_unstructured(self.backbone[0], "weight", amount=0.3)

    def on_train_epoch_start(self) -> None:
        if self.when == "epoch" and self.current_epoch:
            prune.random_unstructured(self.backbone[0], "weight", amount=0.2)


class Registers(Net):
    """Normalised weights, forward hooks, dropout that is annealed."""

    def __init__(self, loader: Any, kind: str) -> None:
        super().__init__(loader)
        self.kind = kind
        if kind == "spectral":
            parametrizations.spectral_norm(self.backbone[0])
        elif kind == "weight norm":
            parametrizations.weight_norm(self.backbone[0])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.kind == "dropout":
            self.head[0].p = min(0.6, 0.02 * self.global_step)
        elif self.kind == "dropout by itself":
            self.head[0].p = min(0.6, self.head[0].p * 1.1)
        elif self.kind == "momentum":
            self.backbone[1].momentum = max(0.01, self.backbone[1].momentum * 0.9)
        elif self.kind == "learning rate":
            for group in self.optimizers().param_groups:
                group["lr"] *= 0.95


class Datamodule(pl.LightningDataModule):
    """Makes the loader of a model."""

    def train_dataloader(self) -> Any:
        return DataLoader(Items(), 8, shuffle=True)


class DataOfEpoch(pl.LightningDataModule):
    """With another loader in each epoch, by its number."""

    def train_dataloader(self) -> Any:
        return DataLoader(Subset(Items(64), range(self.trainer.current_epoch, 48 + self.trainer.current_epoch)), 8)


class DataByCount(pl.LightningDataModule):
    """With another loader in each epoch, by a count of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def train_dataloader(self) -> Any:
        self.made += 1
        return DataLoader(Subset(Items(64), range(self.made, 48 + self.made)), 8)


class DataByChance(pl.LightningDataModule):
    """With another loader in each epoch, by a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(11)

    def train_dataloader(self) -> Any:
        return DataLoader(Subset(Items(64), torch.randperm(48, generator=self.generator).tolist()), 8)


class DataDrawnInSetup(pl.LightningDataModule):
    """Draws its samples again at each start, before anything is restored."""

    def setup(self, stage: str) -> None:
        self.samples = random_split(Items(64), [48, 16])[0]

    def train_dataloader(self) -> Any:
        return DataLoader(self.samples, 8)


# ---- callbacks -------------------------------------------------------------------------------------------------------


class Ema(Callback):
    """Averages weights in a plain attribute (or, ``saved``, with a state), and pulls the head there."""

    def __init__(self, saved: bool) -> None:
        self.average: dict[str, torch.Tensor] = {}
        self.saved = saved

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        with torch.no_grad():
            for name, weight in module.head.named_parameters():
                self.average[name] = average = (self.average.get(name, weight) * 0.9 + weight * 0.1).clone()
                weight.lerp_(average, 0.1)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.average) if self.saved else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = dict(state)


class EmaWithoutMethods(Callback):
    """``Ema`` without a ``state_dict`` at all."""

    def __init__(self) -> None:
        self.average: dict[str, torch.Tensor] = {}

    on_train_batch_end = Ema.on_train_batch_end


class Patience(Callback):
    """Lowers the learning rate when the loss has not fallen for some steps: a count and a best value."""

    def __init__(self) -> None:
        self.best, self.waited = float("inf"), 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        loss = float(outputs["loss"])
        self.waited = 0 if loss < self.best else self.waited + 1
        self.best = min(self.best, loss)
        if self.waited == 3:
            self.waited = 0
            for group in trainer.optimizers[0].param_groups:
                group["lr"] *= 0.5


class CountsOnly(Callback):
    """Counts, and does nothing with it."""

    def __init__(self) -> None:
        self.batches, self.losses = 0, list[float]()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.batches += 1
        self.losses.append(float(outputs["loss"]))


class EveryFew(Callback):
    """Perturbs the weights at every fifth batch that it has counted."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.batches += 1
        if self.batches % 5 == 0:
            with torch.no_grad():
                module.head[1].weight.mul_(0.9)


class Unfreeze(BaseFinetuning):
    """Freezes the backbone for an epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer)


class SearchesInEpochs(LearningRateFinder):
    """The example in the docstring of Lightning: searches again in some epochs."""

    def on_fit_start(self, *_: Any) -> None:
        return

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch in (0, 1):
            self.lr_find(trainer, pl_module)


class SizesInEpochs(BatchSizeFinder):
    """The example in the docstring of Lightning: scales the batch again in some epochs."""

    def on_fit_start(self, *_: Any) -> None:
        return

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            self.scale_batch_size(trainer, pl_module)


class Sized(Net):
    """Has the attributes that searches set."""

    def __init__(self, loader: Any = None) -> None:
        super().__init__(loader)
        self.lr, self.batch_size = 1e-2, 8

    def train_dataloader(self) -> Any:
        return DataLoader(Items(), batch_size=self.batch_size, shuffle=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Grows(Net):
    """Adds a layer at the beginning of each epoch, and on loading as many as the checkpoint has."""

    def __init__(self, loader: Any = None) -> None:
        super().__init__(loader)
        self.more = torch.nn.ModuleList()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.backbone(x)
        for layer in self.more:
            x = x + layer(x)
        return self.head(x)

    def _grow(self) -> torch.nn.Module:
        self.more.append(torch.nn.Linear(16, 16))
        return self.more[-1]

    def on_train_epoch_start(self) -> None:
        if len(self.more) < self.current_epoch:
            self.optimizers().add_param_group({"params": self._grow().parameters()})  # type: ignore[union-attr]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        while f"more.{len(self.more)}.bias" in checkpoint["state_dict"]:
            self._grow()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([*self.backbone.parameters(), *self.head.parameters()], lr=1e-2)
        for layer in self.more:
            optimizer.add_param_group({"params": layer.parameters()})
        return optimizer


def _evaluates(model: Any, draws: bool) -> None:
    model.eval()
    with torch.no_grad():
        for x, _ in DataLoader(Items(16), batch_size=8, shuffle=draws):
            model(x)
    model.train()


class EvaluatesByHand(Net):
    """Evaluates itself in a hook, with random numbers."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            _evaluates(self, draws=True)


CALLBACKS: dict[str, tuple[Callable[[], list[Any]], dict[str, Any]]] = {
    "average with a state": (lambda: [Ema(saved=True)], {}),
    "average without a state": (lambda: [Ema(saved=False)], {}),
    "average without methods": (lambda: [EmaWithoutMethods()], {}),
    "patience": (lambda: [Patience()], {}),
    "counts only": (lambda: [CountsOnly()], {}),
    "every fifth batch": (lambda: [EveryFew()], {}),
    "early stopping": (lambda: [EarlyStopping("loss_epoch", patience=100)], {}),
    "early stopping that stops": (lambda: [EarlyStopping("val", patience=1, mode="max")], {"model": Validates}),
    "learning rates and timer": (lambda: [LearningRateMonitor(), Timer()], {}),
    "two checkpoints": (lambda: [ResumableCheckpoint(every_n_epochs=1, save_top_k=0)], {}),
    "fine-tuning": (
        lambda: [Unfreeze()],
        {
            "model": lambda loader: Optimized(
                loader, lambda m: torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=1e-2)
            )
        },
    ),
    "SWA": (lambda: [StochasticWeightAveraging(1e-2, swa_epoch_start=1)], {}),
    **(
        {"weight averaging": (lambda: [pl.callbacks.WeightAveraging()], {"model": Validates})}
        if hasattr(pl.callbacks, "WeightAveraging")  # since Lightning 2.6
        else {}
    ),
    "accumulation schedule": (lambda: [GradientAccumulationScheduler({0: 1, 1: 3})], {}),
    "pruning, each epoch": (
        lambda: [
            ModelPruning("l1_unstructured", parameters_to_prune=None, amount=0.2, use_lottery_ticket_hypothesis=False)
        ],
        {},
    ),
    "pruning, lottery": (lambda: [ModelPruning("random_unstructured", amount=0.2)], {}),
    "pruning, not permanent": (lambda: [ModelPruning("l1_unstructured", amount=0.2, make_pruning_permanent=False)], {}),
    "pruning, not on epoch end": (
        lambda: [ModelPruning("l1_unstructured", amount=0.2, prune_on_train_epoch_end=False)],
        {"model": Validates},
    ),
    "learning rate finder": (
        lambda: [LearningRateFinder(num_training_steps=5)],
        {"model": Sized},
    ),
    "learning rate finder in epochs": (lambda: [SearchesInEpochs(num_training_steps=5)], {"model": Sized}),
    "batch size finder": (lambda: [BatchSizeFinder(max_trials=1, steps_per_trial=2)], {"model": Sized}),
    "batch size finder in epochs": (
        lambda: [SizesInEpochs(max_trials=1, steps_per_trial=2)],
        {"model": Sized, "trainer": {"reload_dataloaders_every_n_epochs": 1}},
    ),
    "lambda that draws": (
        lambda: [LambdaCallback(on_train_epoch_start=lambda trainer, module: torch.randn(3))],
        {},
    ),
    "lambda that doubles the batch": (
        lambda: [
            LambdaCallback(
                on_train_epoch_start=lambda trainer, module: setattr(
                    trainer.train_dataloader.batch_sampler, "batch_size", 8 if trainer.current_epoch < 2 else 16
                )
            )
        ],
        {},
    ),
    "lambda that evaluates after an epoch": (
        lambda: [LambdaCallback(on_train_epoch_end=lambda trainer, module: _evaluates(module, draws=True))],
        {},
    ),
}

MODELS: dict[str, dict[str, Any]] = {
    "annealing": {"model": Anneals},
    "annealing by itself": {"model": AnnealsByItself},
    "random factor": {"model": AnnealsByChance},
    "eval in the hook": {"model": _hooked(lambda m: m.current_epoch and m.backbone.eval())},
    "freezes in the hook": {"model": _hooked(lambda m: m.current_epoch and m.backbone.requires_grad_(False))},
    "set_epoch in the hook": {
        "model": _hooked(lambda m: m.trainer.train_dataloader.dataset.set_epoch(m.current_epoch)),
        "loader": mapped(),
    },
    "set_epoch in the hook, two workers": {
        "model": _hooked(lambda m: m.trainer.train_dataloader.dataset.set_epoch(m.current_epoch)),
        "loader": mapped(num_workers=2),
    },
    "set_epoch in the hook, stream": {
        "model": _hooked(lambda m: m.trainer.train_dataloader.dataset.set_epoch(m.current_epoch)),
        "loader": streamed("epoch"),
    },
    "set_epoch in the hook, stream, workers": {
        "model": _hooked(lambda m: m.trainer.train_dataloader.dataset.set_epoch(m.current_epoch)),
        "loader": streamed("epoch", num_workers=2),
    },
    "set_epoch in the hook, hf": {
        "model": _hooked(lambda m: m.trainer.train_dataloader.dataset.set_epoch(m.current_epoch)),
        "loader": hugging_face("iterable, shuffled"),
        "needs": ("datasets", "pyarrow"),
    },
    "adds a parameter group": {
        "model": _hooked(
            lambda m: (
                m.current_epoch == 1 and m.optimizers().add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
            )
        )
    },
    "switches late": {"model": SwitchesLate},
    **{
        f"attribute: {kind}": {"model": lambda loader, kind=kind: Attribute(loader, kind)}
        for kind in ("float", "int", "list", "tensor", "buffer", "saved", "object", "global")
    },
    **{
        f"generator: {kind}": {"model": lambda loader, kind=kind: OwnGenerator(loader, kind)}
        for kind in ("torch", "numpy", "python", "legacy")
    },
    "carries a hidden state": {"model": Carries},
    "collects outputs": {"model": Collects},
    **{
        f"teacher follows at {hook}": {"model": lambda loader, hook=hook: Momentum(loader, hook)}
        for hook in ("batch end", "before zero grad", "optimizer step", "epoch end")
    },
    "teacher follows at validation end": {
        "model": lambda loader: MomentumValidates(loader, "validation end"),
        "trainer": {"val_check_interval": 0.5},
    },
    "manual": {"model": Manual},
    "manual, window": {"model": lambda loader: Manual(loader, window=4)},
    "manual, two optimizers": {"model": lambda loader: Manual(loader, parts=2, schedule=True)},
    "gan": {"model": lambda loader: Gan(loader, parts=2)},
    "lbfgs": {"model": lambda loader: Optimized(loader, lambda m: torch.optim.LBFGS(m.parameters(), 0.1, 3))},
    "sgd": {"model": lambda loader: Optimized(loader, lambda m: torch.optim.SGD(m.parameters(), 1e-2, 0.9))},
    "amsgrad": {"model": lambda loader: Optimized(loader, lambda m: _adam(m, amsgrad=True))},
    "adafactor": {"model": lambda loader: Optimized(loader, lambda m: torch.optim.Adafactor(m.parameters()))},
    "tensor lr": {"model": lambda loader: Optimized(loader, lambda m: _adam(m, lr=torch.tensor(1e-2)))},
    "one cycle": {"model": _scheduled(lambda o: schedules.OneCycleLR(o, 1e-1, total_steps=100), "step")},
    "cosine restarts": {"model": _scheduled(lambda o: schedules.CosineAnnealingWarmRestarts(o, 4), "step")},
    "sequential schedule": {"model": _scheduled(_sequential, "step")},
    "schedule every second epoch": {"model": _scheduled(lambda o: schedules.ExponentialLR(o, 0.5), frequency=2)},
    "schedule every third step": {"model": _scheduled(lambda o: schedules.StepLR(o, 1, 0.9), "step", frequency=3)},
    "lambda schedule": {"model": _scheduled(lambda o: schedules.LambdaLR(o, lambda n: 0.9**n), "step")},
    "plateau": {
        "model": _scheduled(
            lambda o: schedules.ReduceLROnPlateau(o, patience=0, threshold=1.0), cls=OptimizedValidates, monitor="val"
        )
    },
    "plateau on training loss": {
        "model": _scheduled(lambda o: schedules.ReduceLROnPlateau(o, patience=0, threshold=1.0), monitor="loss_epoch")
    },
    **{
        f"metrics: {kind}": {"model": lambda loader, kind=kind: Metrics(loader, kind)}
        for kind in ("mean", "running", "extremes", "cat", "tracker", "collection", "held", "area")
    },
    "various logs": {"model": Various},
    "pruned when built": {"model": lambda loader: Pruned(loader, "built")},
    "pruned in an epoch": {"model": lambda loader: Pruned(loader, "epoch")},
    **{
        f"parts: {kind}": {"model": lambda loader, kind=kind: Registers(loader, kind)}
        for kind in ("spectral", "weight norm", "dropout", "dropout by itself", "momentum", "learning rate")
    },
    "evaluates by hand": {"model": EvaluatesByHand},
    "grows": {"model": Grows},
    "datamodule": {"datamodule": Datamodule, "loader": None, "model": lambda _: _NoLoader()},
    "datamodule, drawn in setup": {"datamodule": DataDrawnInSetup, "loader": None, "model": lambda _: _NoLoader()},
    **{
        f"datamodule, {kind}, reloads": {
            "datamodule": made,
            "model": lambda _: _NoLoader(),
            "trainer": {"reload_dataloaders_every_n_epochs": 1},
        }
        for kind, made in (("epoch", DataOfEpoch), ("count", DataByCount), ("generator", DataByChance))
    },
}


class _NoLoader(Net):
    train_dataloader = pl.LightningModule.train_dataloader


TRAINERS: dict[str, dict[str, Any]] = {
    "accumulates": {"trainer": {"accumulate_grad_batches": 3}},
    "accumulates, two workers": {"trainer": {"accumulate_grad_batches": 4}, "loader": mapped(num_workers=2)},
    "clips": {"trainer": {"gradient_clip_val": 0.1}},
    "validates": {"model": Validates},
    "validates in mid-epoch": {"model": Validates, "trainer": {"val_check_interval": 2}},
    "validates every second epoch": {"model": Validates, "trainer": {"check_val_every_n_epoch": 2}},
    "validates across epochs": {
        "model": Validates,
        "trainer": {"check_val_every_n_epoch": None, "val_check_interval": 4},
    },
    "sanity check": {"model": Validates, "trainer": {"num_sanity_val_steps": 2}},
    "limits batches": {"trainer": {"limit_train_batches": 6}, "loader": mapped(functools.partial(Items, 80))},
    "limits a stream": {"trainer": {"limit_train_batches": 6}, "loader": streamed("cursor")},
    "limits a stream that counts": {
        "trainer": {"limit_train_batches": 6},
        "loader": lambda: DataLoader(Stream("counts", 80), batch_size=8),
    },
    "overfits": {"trainer": {"overfit_batches": 6}},
    "reloads": {"trainer": {"reload_dataloaders_every_n_epochs": 1}},
    "reloads, workers": {
        "trainer": {"reload_dataloaders_every_n_epochs": 2},
        "loader": mapped(num_workers=2, persistent_workers=True),
    },
    "max_steps": {"trainer": {"max_steps": 15, "max_epochs": -1}},
    "bf16": {"trainer": {"precision": "bf16-mixed"}},
    "barebones logging": {"trainer": {"log_every_n_steps": 5}},
    "replays": {"options": {"data_resume": "replay"}, "loader": mapped()},
}


def _cases() -> dict[str, Case]:
    found = {f"loader: {name}": Case(loader=make) for name, make in {**LOADERS, **COMBINED}.items()}
    for name, (make, package) in NEEDS.items():
        needs = (package, "pyarrow") if package == "datasets" else (package,)
        found[f"loader: {name}"] = Case(loader=make, needs=needs)
    for name, (callbacks, settings) in CALLBACKS.items():
        found[f"callback: {name}"] = Case(callbacks=callbacks, **settings)
    found |= {f"model: {name}": Case(**settings) for name, settings in MODELS.items()}
    found |= {f"trainer: {name}": Case(**settings) for name, settings in TRAINERS.items()}
    found |= {f"kept: {name}": case for name, case in KEPT.items()}
    return found


CASES = _cases()


# ---- an engine that forgets ------------------------------------------------------------------------------------------


def _forget_generators(trainer: pl.Trainer) -> None:
    RngState.restore = lambda self: None  # type: ignore[method-assign]


def _skip_batch(trainer: pl.Trainer) -> None:
    fetch = TrainingData._fetch
    done: list[bool] = []

    def skip(self: TrainingData, original: Callable[[], Any]) -> Any:
        if not done and not self.idle:
            done.append(True)
            original()
        return fetch(self, original)

    TrainingData._fetch = skip  # type: ignore[method-assign]


def _forget_moment(trainer: pl.Trainer) -> None:
    load = type(trainer.strategy).load_optimizer_state_dict

    def load_without(self: Any, checkpoint: Any) -> None:
        for state in checkpoint["optimizer_states"]:
            for of_parameter in state["state"].values():
                of_parameter["exp_avg"].zero_()
        load(self, checkpoint)

    type(trainer.strategy).load_optimizer_state_dict = load_without  # type: ignore[method-assign]


def _forget_buffer(trainer: pl.Trainer) -> None:
    load = type(trainer.strategy).load_model_state_dict

    def load_without(self: Any, checkpoint: Any, strict: bool = True) -> None:
        checkpoint["state_dict"]["backbone.1.running_mean"].zero_()
        load(self, checkpoint, strict=strict)

    type(trainer.strategy).load_model_state_dict = load_without  # type: ignore[method-assign]


def _forget_schedule(trainer: pl.Trainer) -> None:
    connector = trainer._checkpoint_connector
    connector.restore_lr_schedulers = lambda: None  # type: ignore[method-assign]


def _forget_gradients(trainer: pl.Trainer) -> None:
    ExactState._restore_gradients = lambda self, module, gradients: None  # type: ignore[method-assign]


def _forget_order(trainer: pl.Trainer) -> None:
    RecordingSampler.restore_generators = lambda self, generators: None  # type: ignore[method-assign]


def _forget_modes(trainer: pl.Trainer) -> None:
    Modes.restore = lambda self, flags: None  # type: ignore[method-assign]


BROKEN: dict[str, Case] = {
    "forgets the generators": Case(break_engine=_forget_generators),
    "forgets a batch": Case(break_engine=_skip_batch),
    "forgets a batch, no recorder": Case(break_engine=_skip_batch, options={"recorder": False}),
    "forgets a moment": Case(break_engine=_forget_moment),
    "forgets a buffer": Case(break_engine=_forget_buffer),
    "forgets a schedule": dataclasses.replace(Case(**MODELS["one cycle"]), break_engine=_forget_schedule),
    "forgets the gradients": Case(trainer={"accumulate_grad_batches": 3}, break_engine=_forget_gradients),
    "forgets the order": Case(
        loader=lambda: DataLoader(Items(), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(3)),
        break_engine=_forget_order,
    ),
    "forgets the modes": Case(model=SwitchesLate, break_engine=_forget_modes),
}
