"""Scripts whose variables act late: at an epoch's end, every so many steps, in an evaluation, at the end.

A resume that does not have them repeats its first steps exactly, so that the flight recorder sees nothing.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import itertools
import math
import operator
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, MeanMetric

from tests.campaign.accelerate_runs import Case, net
from tests.campaign.data import Items


def _scale(env: Any, factor: float) -> None:
    with torch.no_grad():
        env.accelerator.unwrap_model(env.model)[0].weight.mul_(factor)


class Stops:
    """Early stopping by patience, as users write it."""

    def __init__(self, patience: int) -> None:
        self.patience, self.best, self.bad = patience, math.inf, 0

    def step(self, value: float) -> bool:
        self.bad = 0 if value < self.best - 10 else self.bad + 1
        self.best = min(self.best, value)
        return self.bad >= self.patience


class Ema:
    """An average with the usual methods."""

    def __init__(self, model: Any) -> None:
        self.shadow = [p.detach().clone() for p in model.parameters()]

    def update(self, model: Any) -> None:
        for mine, p in zip(self.shadow, model.parameters(), strict=True):
            mine.lerp_(p.detach(), 0.1)

    def copy_to(self, model: Any) -> None:
        with torch.no_grad():
            for mine, p in zip(self.shadow, model.parameters(), strict=True):
                p.copy_(mine)


class EmaWithState(Ema):
    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for mine, saved in zip(self.shadow, state["shadow"], strict=True):
            mine.copy_(saved)


def _average(make: Callable[[Any], Any], **more: Any) -> Case:
    return Case(
        prepared=lambda env: env.local.update(ema=make(env.accelerator.unwrap_model(env.model))),
        batch=lambda env: getattr(env.local["ema"], "update_parameters", getattr(env.local["ema"], "update", None))(
            env.accelerator.unwrap_model(env.model)
        ),
        last=lambda env: (
            env.local["ema"].copy_to(env.accelerator.unwrap_model(env.model))
            if hasattr(env.local["ema"], "copy_to")
            else env.accelerator.unwrap_model(env.model).load_state_dict(env.local["ema"].module.state_dict())
        ),
        **more,
    )


def _value(start: Callable[[], Any], change: Callable[[Any, float], Any], use: Callable[[Any, Any], Any]) -> Case:
    """Return a script with one variable, which each step changes and each epoch's end uses."""

    def script(env: Any, do: Any) -> None:
        value = start()
        for _ in do.epochs():
            for batch in do.batches():
                value = change(value, do.step(batch))
                do.saves()
            use(env, value)
            do.epoch_saves()

    return Case(script=script)


def _patience(**more: Any) -> Case:
    return Case(
        begin=lambda env: env.local.update(value=_Registered(2)),
        end=lambda env: env.local["value"].step(env.last) and _scale(env, 0.5),
        **more,
    )


# ---- with variables of their own -------------------------------------------------------------------------------------


def best_and_patience(env: Any, do: Any) -> None:
    best, bad, losses = math.inf, 0, []
    for _ in do.epochs():
        for batch in do.batches():
            loss = do.step(batch)
            losses.append(loss)
            do.saves()
        mean = sum(losses) / len(losses)
        losses = []
        if mean < best - 10:
            best, bad = mean, 0
        else:
            best, bad = min(best, mean), bad + 1
        if bad == 2:
            _scale(env, 0.5 + best / 100)
        do.epoch_saves()


def running_loss(env: Any, do: Any) -> None:
    running, seen = 0.0, 0
    for _ in do.epochs():
        for batch in do.batches():
            loss = do.step(batch)
            running, seen = running + loss, seen + 1
            do.saves()
            if seen % 8 == 0:
                do.log(running / 8)
                running = 0.0
        do.epoch_saves()


def _with_a_shorter_loader(repeat: Callable[[Any], Iterator[Any]]) -> Callable[[Any, Any], None]:
    def script(env: Any, do: Any) -> None:
        other = env.accelerator.prepare(DataLoader(Items(24), batch_size=8, shuffle=True))
        for _ in do.epochs():
            for batch, (x, _y) in zip(do.batches(), repeat(other), strict=False):
                do.step([batch[0] + x, batch[1]])
                do.saves()
            do.epoch_saves()

    return script


def _begun_again(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def restores_its_own(env: Any, do: Any) -> None:
    best, total = math.inf, 0.0
    if do.saved is not None:
        best, total = do.saved
    for _ in do.epochs():
        for batch in do.batches():
            loss = do.step(batch)
            best, total = min(best, loss), total + loss
            do.keep((best, total))
            do.saves()
        _scale(env, 1 / (1 + total + best))
        do.epoch_saves()


def temporaries(env: Any, do: Any) -> None:
    loss, largest, names = 0.0, 0.0, []
    for epoch in do.epochs():
        for number, batch in enumerate(do.batches()):
            loss = do.step(batch)
            largest = max(loss, 0.5)
            names = [epoch, number]
            do.saves()
        do.log(largest + len(names))
        do.epoch_saves()
    do.log(loss)


def stage_by_count(env: Any, do: Any) -> None:
    stage, turns = 0, 0
    for _ in do.epochs():
        for batch in do.batches():
            do.step(batch)
            turns += 1
            if turns == 9:
                stage = 1
            do.saves()
        if stage == 1:
            env.accelerator.unwrap_model(env.model)[0].requires_grad_(False)
        do.epoch_saves()


def best_weights(env: Any, do: Any) -> None:
    best, kept = math.inf, None
    for _ in do.epochs():
        for batch in do.batches():
            loss = do.step(batch)
            if kept is None or loss < best - 10:
                best, kept = loss, copy.deepcopy(env.accelerator.unwrap_model(env.model).state_dict())
            do.saves()
        do.epoch_saves()
    env.accelerator.unwrap_model(env.model).load_state_dict(kept)


def own_optimizer(env: Any, do: Any) -> None:
    model = env.accelerator.unwrap_model(env.model)
    other = torch.optim.Adam([model[0].bias], lr=1e-3)
    for _ in do.epochs():
        for batch in do.batches():
            do.step(batch, before=other.step)
            do.saves()
        do.epoch_saves()


def replay_buffer(env: Any, do: Any) -> None:
    memory: Any = collections.deque(maxlen=10)
    for _ in do.epochs():
        for batch in do.batches():
            do.step(batch)
            memory.append(batch[0].clone())
            do.saves()
        if len(memory) == 10:
            _scale(env, 1 + float(memory[0].mean()))
        do.epoch_saves()


def own_generator(env: Any, do: Any) -> None:
    generator, other = torch.Generator().manual_seed(3), random.Random(3)
    for _ in do.epochs():
        for batch in do.batches():
            do.step(batch)
            float(torch.rand((), generator=generator)) + other.random()
            do.saves()
        _scale(env, 1 + 0.1 * float(torch.rand((), generator=generator)) + 0.1 * other.random())
        do.epoch_saves()


class Meter:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.sum += value
        self.count += 1


def meter_of_an_epoch(env: Any, do: Any) -> None:
    meter = Meter()
    for _ in do.epochs():
        meter.reset()
        for batch in do.batches():
            meter.update(do.step(batch))
            do.saves()
        _scale(env, 1 / (1 + meter.sum / max(meter.count, 1)))
        do.epoch_saves()


def metrics_in_a_dictionary(env: Any, do: Any) -> None:
    metrics = {"mean": MeanMetric(), "worst": MaxMetric()}
    for _ in do.epochs():
        for batch in do.batches():
            loss = do.step(batch)
            for metric in metrics.values():
                metric.update(loss)
            do.saves()
        _scale(env, 1 / (1 + float(metrics["mean"].compute()) + float(metrics["worst"].compute())))
        do.epoch_saves()


def metrics_begun_anew(env: Any, do: Any) -> None:
    mean, history = MeanMetric(), {"loss": 0.0, "last": 0.0}
    for _ in do.epochs():
        for batch in do.batches():
            mean.update(do.step(batch))
        history["last"] = float(mean.compute())
        _scale(env, 1 / (1 + history["last"]))
        mean.reset()
        do.epoch_saves()


def second_loader(env: Any, do: Any) -> None:
    second = iter(DataLoader(torch.linspace(0, 1, 64), batch_size=2))
    for _ in do.epochs():
        for batch in do.batches():
            do.step(batch)
            value = next(second)
            do.saves()
        _scale(env, 1 + float(value.mean()))
        do.epoch_saves()


def rate_by_count(env: Any, do: Any) -> None:
    count = 0
    for _ in do.epochs():
        for batch in do.batches():
            do.step(batch)
            count += 1
            do.saves()
        for group in env.optimizers[0].param_groups:
            group["lr"] = 1e-2 * 0.9 ** (count // 4)
        do.epoch_saves()


def count_that_is_restored(env: Any, do: Any) -> None:
    count, shown = do.saved or 0, 0
    for _ in do.epochs():
        for batch in do.batches():
            do.step(batch)
            count += 1
            shown += 1
            do.keep(count)
            if shown % 5 == 0:
                print(f"{shown} steps")
            do.saves()
        _scale(env, 1 / count)
        do.epoch_saves()


class _Trainer:
    total = 0

    def __init__(self, env: Any, do: Any) -> None:
        self.env, self.do, self.steps, self.phase, self.last = env, do, 0, "warm", 0.0
        self.history: list[float] = []

    def fit(self) -> None:
        for _ in self.do.epochs():
            self.epoch()
            if self.phase == "cold":
                _scale(self.env, 0.9)
            self.do.epoch_saves()

    def epoch(self) -> None:
        for batch in self.do.batches():
            self.last = self.do.step(batch)
            self.history.append(self.last)
            self.steps += 1
            type(self).total += 1
            if self.steps == 7:
                self.phase = "cold"
            self.do.saves()


def trainer_of_its_own(env: Any, do: Any) -> None:
    _Trainer(env, do).fit()


_GLOBAL = {"turns": 0}


def global_count(env: Any, do: Any) -> None:
    for _ in do.epochs():
        for batch in do.batches():
            do.step(batch)
            _GLOBAL["turns"] += 1
            do.saves()
        _scale(env, 1 / _GLOBAL["turns"])
        do.epoch_saves()


def closure_and_partial(env: Any, do: Any) -> None:
    seen = 0

    def factor(base: float) -> float:
        nonlocal seen
        seen += 1
        return base**seen

    shrink = functools.partial(factor, 0.99)
    for _ in do.epochs():
        for batch in do.batches():
            do.step(batch)
            by = shrink()
            do.saves()
        _scale(env, by)
        do.epoch_saves()


def _planned() -> Iterator[float]:
    value = 1.0
    while True:
        yield value
        value *= 0.9


def iterators(env: Any, do: Any) -> None:
    planned, cycle = _planned(), itertools.cycle([0.9, 0.8, 0.7, 0.6])
    value = next(planned)
    for _ in do.epochs():
        for batch in do.batches():
            do.step(batch)
            value = next(planned) * next(cycle)
            do.saves()
        _scale(env, value)
        do.epoch_saves()


@dataclasses.dataclass(slots=True)
class _Slots:
    best: float = math.inf
    bad: int = 0


def slots(env: Any, do: Any) -> None:
    state = _Slots()
    for _ in do.epochs():
        for batch in do.batches():
            state.best = min(state.best, do.step(batch))
            do.saves()
        state.bad += 1
        _scale(env, 1 / (1 + state.best + state.bad))
        do.epoch_saves()


def average_made_after_the_load(env: Any, do: Any) -> None:
    model = env.accelerator.unwrap_model(env.model)
    ema = Ema(model)
    for _ in do.epochs():
        for batch in do.batches():
            do.step(batch)
            ema.update(model)
            do.saves()
        do.epoch_saves()
    ema.copy_to(model)


def only_tells(env: Any, do: Any) -> None:
    count, best, losses, started = 0, math.inf, [], time.time()
    for epoch in do.epochs():
        for batch in do.batches():
            loss = do.step(batch)
            losses.append(loss)
            count, best = count + 1, min(best, loss)
            if count % 4 == 0:
                print(f"{epoch} {count} {best} {time.time() - started}")
            do.saves()
        print("mean", sum(losses) / len(losses))
        do.epoch_saves()


def epoch_sum(env: Any, do: Any) -> None:
    noted = {"sum": 0.0, "last": 0.0}
    for _ in do.epochs():
        noted["sum"], total = 0.0, 0.0
        for batch in do.batches():
            noted["last"] = do.step(batch)
            noted["sum"] += noted["last"]
            total += noted["last"]
        _scale(env, 1 / (1 + noted["sum"] + total))
        do.epoch_saves()


def _made(name: str) -> Callable[[], Any]:
    def make() -> Any:
        return globals()[name]()  # defined below

    return make


LATE: dict[str, Case] = {
    "sum of losses": _value(float, operator.add, lambda env, value: _scale(env, 1 / (1 + value))),
    "list of losses": _value(list, lambda value, loss: [*value, loss], lambda env, value: _scale(env, len(value) / 6)),
    "array": _value(lambda: np.zeros(2), operator.iadd, lambda env, value: _scale(env, value[0])),
    "tensor": _value(lambda: torch.zeros(2), operator.iadd, lambda env, value: _scale(env, value[0])),
    "phase, a text": _value(
        lambda: "warm", lambda value, loss: value + ".", lambda env, value: _scale(env, len(value) / 8)
    ),
    "patience": _patience(),
    "patience, registered": _patience(objects=lambda env: [env.local["value"]]),
    "average, plain": _average(Ema),
    "average with a state": _average(EmaWithState),
    "average with a state, registered": _average(EmaWithState, objects=lambda env: [env.local["ema"]]),
    "average of torch": _average(AveragedModel),
    "schedule by hand at epochs": Case(
        prepared=lambda env: env.local.update(own=schedules.StepLR(env.optimizers[0].optimizer, 2, 0.1)),
        end=lambda env: env.local["own"].step(),
    ),
    "plateau by hand at epochs": Case(
        prepared=lambda env: env.local.update(
            own=schedules.ReduceLROnPlateau(env.optimizers[0].optimizer, patience=1, threshold=10.0)
        ),
        end=lambda env: env.local["own"].step(env.last),
    ),
    "module's count of passes": Case(model=_made("_Counts"), end=lambda env: env.model.late()),
    "module's count, a buffer": Case(model=lambda: _Counts(buffer=True), end=lambda env: env.model.late()),
    "model's observer": Case(model=_made("_Observes"), last=lambda env: env.model.rounds()),
    "spectral norm": Case(model=lambda: _normed(torch.nn.utils.parametrizations.spectral_norm)),
    "weight norm": Case(model=lambda: _normed(torch.nn.utils.parametrizations.weight_norm)),
    "a shorter loader, by cycle": Case(script=_with_a_shorter_loader(itertools.cycle)),
    "a shorter loader, begun again": Case(script=_with_a_shorter_loader(_begun_again)),
    **{
        f"variables: {script.__name__.replace('_', ' ')}": Case(script=script)
        for script in (
            best_and_patience,
            running_loss,
            restores_its_own,
            temporaries,
            stage_by_count,
            best_weights,
            own_optimizer,
            replay_buffer,
            own_generator,
            meter_of_an_epoch,
            metrics_in_a_dictionary,
            metrics_begun_anew,
            second_loader,
            rate_by_count,
            count_that_is_restored,
            trainer_of_its_own,
            global_count,
            closure_and_partial,
            iterators,
            slots,
            average_made_after_the_load,
            only_tells,
            epoch_sum,
        )
    },
}


class _Registered(Stops):
    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class _Counts(torch.nn.Sequential):
    """Counts its passes, and scales itself by that at an epoch's end."""

    def __init__(self, *, buffer: bool = False) -> None:
        super().__init__(*net())
        if buffer:
            self.register_buffer("passes", torch.zeros(()))
        else:
            self.passes = 0

    def forward(self, x: Any) -> Any:
        self.passes += 1
        return super().forward(x)

    def late(self) -> None:
        with torch.no_grad():
            self[0].weight.mul_(1 / (1 + float(self.passes) / 50))


class _Observes(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*net())
        self.largest = 0.0

    def forward(self, x: Any) -> Any:
        self.largest = max(self.largest, float(x.abs().max()))
        return super().forward(x)

    def rounds(self) -> None:
        with torch.no_grad():
            self[0].weight.mul_(1 / self.largest)


def _normed(norm: Any) -> torch.nn.Module:
    model = net()
    norm(model[0])
    return model
