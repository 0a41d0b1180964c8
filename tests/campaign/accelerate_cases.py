"""The cases that the campaign trains with Accelerate: each replaces some lines of the script."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin
from torch.nn.utils import prune
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from accelerate_ckpt._data.tracker import ShardSampler
from ckpt_core.state.rng import RngState
from ckpt_core.state.samplers import _RecordingIterator
from tests.campaign.accelerate_runs import Case, cross_entropy
from tests.campaign.data import Items, Mining, OwnNoise, Stream
from tests.campaign.kept_accelerate import KEPT
from tests.campaign.later_accelerate import LATE
from tests.campaign.loaders import LOADERS, NEEDS


def _configured(**settings: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"dataloader_config": DataLoaderConfiguration(**settings)}


def _evaluates(env: Any, draws: bool = True) -> None:
    env.model.eval()
    with torch.no_grad():
        for batch in env.local["evaluation"]:
            env.model(batch[0])
    if draws:
        torch.randn(3)
    env.model.train()


def _evaluation(env: Any, shuffle: bool = False, prepares: bool = True) -> None:
    loader = DataLoader(Items(16), batch_size=8, shuffle=shuffle)
    env.local["evaluation"] = env.accelerator.prepare(loader) if prepares else loader


def _local(name: str, value: Callable[[], Any]) -> Callable[[Any], None]:
    return lambda env: env.local.update({name: value()})


def _noisy(env: Any, batch: Any) -> torch.Tensor:
    return cross_entropy(env, (batch[0] + env.local["noise"](), batch[1]))


def _scaled(env: Any, batch: Any) -> torch.Tensor:
    return cross_entropy(env, batch) * env.local["factor"]


def _change(name: str, change: Callable[[Any], Any]) -> Callable[[Any], None]:
    def do(env: Any) -> None:
        env.local[name] = change(env.local[name])

    return do


class Held:
    """An object of the script with a state."""

    def __init__(self) -> None:
        self.factor = 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.factor = state["factor"]


class Average:
    """An average of the weights, with a state or without."""

    def __init__(self, env: Any) -> None:
        model = env.accelerator.unwrap_model(env.model)
        self.average = {name: p.detach().clone() for name, p in model.named_parameters()}

    def step(self, env: Any) -> None:
        with torch.no_grad():
            for name, p in env.accelerator.unwrap_model(env.model).named_parameters():
                self.average[name].lerp_(p, 0.2)
                p.lerp_(self.average[name], 0.1)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.average)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            self.average[name].copy_(value)


def _held_loss(env: Any, batch: Any) -> torch.Tensor:
    held = env.local["held"]
    held.factor *= 0.95
    return cross_entropy(env, batch) * held.factor


def _freezes(env: Any) -> None:
    if env.progress.epoch >= 1:
        env.accelerator.unwrap_model(env.model)[0].requires_grad_(False)


def _prunes(env: Any) -> None:
    if env.progress.epoch == 1 and not env.local.get("pruned"):
        env.local["pruned"] = True
        prune.random_unstructured(env.accelerator.unwrap_model(env.model)[0], "weight", amount=0.2)


def _plateau(env: Any) -> None:
    for schedule in env.local["plateau"]:
        schedule.step(env.last)


class Frozen(torch.nn.Sequential):
    """Has a dropout layer whose probability follows the model's own count of calls."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 3))
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        self[1].p = min(0.6, 0.02 * self.calls)
        return super().forward(x)


class Unsaved(torch.nn.Sequential):
    """Has a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, x: Any) -> Any:
        self.scale *= 0.95
        return super().forward(x) * self.scale


class Norms(torch.nn.Sequential):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Any) -> Any:
        return super().forward(x + 0.1 * torch.randn(x.shape, generator=self.generator))


def _two(model: torch.nn.Module) -> list[Any]:
    return [torch.optim.Adam(list(model.children())[i].parameters(), lr=1e-2) for i in (0, -1)]


def _second_loader(env: Any, batch: Any) -> torch.Tensor:
    other = next(env.local["other"], None)
    if other is None:
        env.local["other"] = iter(env.local["others"])
        other = next(env.local["other"])
    return cross_entropy(env, batch) + cross_entropy(env, other)


def _others(env: Any) -> None:
    env.local["others"] = env.accelerator.prepare(DataLoader(Items(32), batch_size=8, shuffle=True))
    env.local["other"] = iter(env.local["others"])


def _windows(env: Any, batch: Any) -> torch.Tensor:
    env.local["mean"].update(cross_entropy(env, batch).detach())
    return cross_entropy(env, batch) * (1 + env.local["mean"].compute())


SCRIPTS: dict[str, Case] = {
    "plain": Case(),
    "accumulates": Case(accelerator=lambda: {"gradient_accumulation_steps": 3}),
    "accumulates over epochs": Case(
        accelerator=lambda: {
            "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
        }
    ),
    "clips": Case(clips=True),
    "bf16": Case(accelerator=lambda: {"mixed_precision": "bf16"}),
    "split_batches": Case(accelerator=_configured(split_batches=True)),
    "dispatch_batches": Case(accelerator=_configured(dispatch_batches=True)),
    "dispatch_batches, stream": Case(
        accelerator=_configured(dispatch_batches=True), loader=lambda: DataLoader(Stream("counts"), batch_size=8)
    ),
    "even_batches off": Case(
        accelerator=_configured(even_batches=False), loader=lambda: DataLoader(Items(45), batch_size=8, shuffle=True)
    ),
    "seedable sampler": Case(accelerator=_configured(use_seedable_sampler=True)),
    "stateful loader of Accelerate": Case(accelerator=_configured(use_stateful_dataloader=True)),
    "non-blocking": Case(accelerator=_configured(non_blocking=True)),
    "rng_types": Case(accelerator=lambda: {"rng_types": ["torch", "generator"]}),
    "skips by the function": Case(skips="method"),
    "skips by continue": Case(skips="continue"),
    "own iterator": Case(loops="iterator"),
    "enumerates": Case(loops="progress"),
    "sets the epoch": Case(
        accelerator=_configured(use_seedable_sampler=True), epoch=lambda env: env.loader.set_epoch(env.progress.epoch)
    ),
    "sets the epoch of a stream": Case(
        loader=lambda: DataLoader(Stream("epoch"), batch_size=8),
        epoch=lambda env: env.loader.set_epoch(env.progress.epoch),
    ),
    "one cycle": Case(schedule=lambda o: schedules.OneCycleLR(o, 1e-1, total_steps=100)),
    "cosine": Case(schedule=lambda o: schedules.CosineAnnealingLR(o, 18)),
    "schedule by epoch": Case(schedule=lambda o: schedules.ExponentialLR(o, 0.5), steps_schedule="epoch"),
    "schedule, accumulates": Case(
        schedule=lambda o: schedules.StepLR(o, 2, 0.7), accelerator=lambda: {"gradient_accumulation_steps": 2}
    ),
    "schedule that is not prepared": Case(
        prepared=lambda env: env.local.update(own=schedules.ExponentialLR(env.optimizers[0].optimizer, 0.9)),
        batch=lambda env: env.local["own"].step(),
    ),
    "schedule that is registered": Case(
        prepared=lambda env: env.local.update(own=schedules.ExponentialLR(env.optimizers[0].optimizer, 0.9)),
        batch=lambda env: env.local["own"].step(),
        objects=lambda env: [env.local["own"]],
    ),
    "plateau, registered": Case(
        prepared=lambda env: env.local.update(
            plateau=[schedules.ReduceLROnPlateau(env.optimizers[0].optimizer, patience=0, threshold=1.0)]
        ),
        end=_plateau,
        objects=lambda env: env.local["plateau"],
    ),
    "plateau, not registered": Case(
        prepared=lambda env: env.local.update(
            plateau=[schedules.ReduceLROnPlateau(env.optimizers[0].optimizer, patience=1, threshold=1.0)]
        ),
        batch=_plateau,
    ),
    "two optimizers": Case(optimizer=_two),
    "two optimizers, schedules": Case(optimizer=_two, schedule=lambda o: schedules.ExponentialLR(o, 0.9)),
    "sgd": Case(optimizer=lambda m: torch.optim.SGD(m.parameters(), 1e-2, 0.9)),
    "amsgrad": Case(optimizer=lambda m: torch.optim.AdamW(m.parameters(), 1e-2, amsgrad=True)),
    "evaluates between epochs": Case(prepared=_evaluation, end=_evaluates),
    "evaluates between epochs, shuffled": Case(
        prepared=lambda env: _evaluation(env, shuffle=True), end=lambda env: _evaluates(env, draws=False)
    ),
    "evaluates between epochs, not prepared": Case(
        prepared=lambda env: _evaluation(env, prepares=False), end=lambda env: _evaluates(env, draws=False)
    ),
    "evaluates in mid-epoch": Case(prepared=_evaluation, half=_evaluates),
    "evaluates in mid-epoch, shuffled": Case(prepared=lambda env: _evaluation(env, shuffle=True), half=_evaluates),
    "evaluates before the epoch": Case(prepared=_evaluation, epoch=_evaluates),
    "own generator, torch": Case(begin=_local("noise", lambda: OwnNoise("torch")), loss=_noisy),
    "own generator, numpy": Case(begin=_local("noise", lambda: OwnNoise("numpy")), loss=_noisy),
    "own generator, python": Case(begin=_local("noise", lambda: OwnNoise("python")), loss=_noisy),
    "own counter": Case(begin=_local("noise", lambda: OwnNoise("counts")), loss=_noisy),
    "global noise": Case(
        loss=lambda env, batch: cross_entropy(env, batch) * (1 + random.random() + float(np.random.rand()))
    ),
    "local factor by step": Case(
        begin=_local("factor", lambda: 1.0), loss=_scaled, batch=_change("factor", lambda f: f * 0.9)
    ),
    "local factor by epoch": Case(
        begin=_local("factor", lambda: 1.0),
        loss=_scaled,
        epoch=lambda env: env.local.update(factor=1 / (1 + env.progress.epoch)),
    ),
    "local factor by epoch, by itself": Case(
        begin=_local("factor", lambda: 1.0), loss=_scaled, end=_change("factor", lambda f: f * 0.5)
    ),
    "registered object": Case(begin=_local("held", Held), loss=_held_loss, objects=lambda env: [env.local["held"]]),
    "object that is not registered": Case(begin=_local("held", Held), loss=_held_loss),
    "average, registered": Case(
        prepared=lambda env: env.local.update(average=Average(env)),
        batch=lambda env: env.local["average"].step(env),
        objects=lambda env: [env.local["average"]],
    ),
    "average, not registered": Case(
        prepared=lambda env: env.local.update(average=Average(env)), batch=lambda env: env.local["average"].step(env)
    ),
    "freezes a part": Case(epoch=_freezes),
    "part in eval mode": Case(epoch=lambda env: (env.model.train(), env.model[1].eval())),
    "part in eval mode, late": Case(
        epoch=lambda env: None, batch=lambda env: env.progress.batch == 3 and env.model[1].eval()
    ),
    "thaws late": Case(
        prepared=lambda env: env.model[0].requires_grad_(False),
        batch=lambda env: env.progress.epoch == 1 and env.model[0].requires_grad_(True),
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), 1e-2),
    ),
    "prunes": Case(epoch=_prunes),
    "annealed dropout": Case(model=Frozen),
    "buffer that is not saved": Case(model=Unsaved),
    "model with a generator": Case(model=Norms),
    "metric of the script": Case(begin=_local("mean", MeanMetric), loss=_windows),
    "metric, registered": Case(
        begin=_local("mean", MeanMetric), loss=_windows, objects=lambda env: [_Persistent(env.local["mean"])]
    ),
    "two loaders": Case(prepared=_others, loss=_second_loader),
    "sampler that mines": Case(loader=lambda: DataLoader(Items(), batch_size=8, sampler=Mining())),
    "draws while it waits": Case(batch=lambda env: torch.randn(2)),
    "lr by hand": Case(
        batch=lambda env: [group.update(lr=group["lr"] * 0.95) for group in env.optimizers[0].param_groups]
    ),
    "lr by hand, from a local": Case(
        begin=_local("factor", lambda: 1e-2),
        batch=lambda env: (
            _change("factor", lambda f: f * 0.9)(env),
            [group.update(lr=env.local["factor"]) for group in env.optimizers[0].param_groups],
        ),
    ),
    "prepares anew in each epoch": Case(
        epoch=lambda env: (
            setattr(env, "loader", env.accelerator.prepare(DataLoader(Items(), batch_size=8, shuffle=True)))
            if env.progress.epoch and not env.progress.batch
            else None
        )
    ),
}


class _Persistent:
    """A metric as an object with a state."""

    def __init__(self, metric: Any) -> None:
        metric.persistent(True)
        self.metric = metric

    def state_dict(self) -> dict[str, Any]:
        return {**self.metric.state_dict(), "updates": self.metric._update_count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.metric._update_count = state.pop("updates")
        self.metric.load_state_dict(state)


_NOT_OF_ACCELERATE = ("dictionary", "list of loaders", "an own loader", "nodes", "stateful loader")


def _cases() -> dict[str, Case]:
    found = {f"script: {name}": case for name, case in SCRIPTS.items()}
    found |= {f"late: {name}": case for name, case in LATE.items()}
    found |= KEPT
    for name, make in LOADERS.items():
        if not name.startswith(_NOT_OF_ACCELERATE):
            found[f"loader: {name}"] = Case(loader=make)
    for name, (make, package) in NEEDS.items():
        if "stateful" not in name and "streaming loader" not in name:
            found[f"loader: {name}"] = Case(
                loader=make, needs=(package, *(["pyarrow"] if package == "datasets" else []))
            )
    return found


CASES = _cases()


# ---- an engine that forgets ------------------------------------------------------------------------------------------


def _forget_generators(env: Any) -> None:
    torch.manual_seed(99)
    random.seed(99)
    RngState.restore = lambda self: None  # type: ignore[method-assign]


def _skip_batch(env: Any) -> None:
    fast_forward, done = _RecordingIterator.fast_forward, list[bool]()

    def one_more(self: Any) -> None:
        if self._skip and not done:
            done.append(True)
            self._skip += 1
        fast_forward(self)

    _RecordingIterator.fast_forward = one_more  # type: ignore[method-assign]


def _forget_moment(env: Any) -> None:
    for state in env.optimizers[0].optimizer.state.values():
        state["exp_avg"].zero_()


def _forget_buffer(env: Any) -> None:
    env.accelerator.unwrap_model(env.model)[1].running_mean.zero_()


def _forget_schedule(env: Any) -> None:
    schedule = env.schedules[0].scheduler
    schedule.last_epoch = 0
    for group in env.optimizers[0].param_groups:
        group["lr"] = group["initial_lr"]


def _forget_gradients(env: Any) -> None:
    env.model.zero_grad()


def _forget_order(env: Any) -> None:
    ShardSampler.restore_generators = lambda self, generators: None  # type: ignore[method-assign]


BROKEN: dict[str, Case] = {
    "forgets the generators": Case(break_engine=_forget_generators),
    "forgets a batch": Case(break_engine=_skip_batch),
    "forgets a moment": Case(break_engine=_forget_moment),
    "forgets a buffer": Case(break_engine=_forget_buffer),
    "forgets a schedule": Case(
        schedule=lambda o: schedules.OneCycleLR(o, 1e-1, total_steps=100), break_engine=_forget_schedule
    ),
    "forgets the gradients": Case(
        accelerator=lambda: {"gradient_accumulation_steps": 3}, break_engine=_forget_gradients
    ),
    "forgets the order": Case(
        loader=lambda: DataLoader(Items(), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(3)),
        break_engine=_forget_order,
    ),
}
