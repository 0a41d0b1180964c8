"""Scripts for Accelerate that keep state of kinds that a list of captured state is likely to forget."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import enum
import functools
import itertools
import math
import queue
import random
import threading
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset

from tests.campaign.accelerate_runs import Case
from tests.campaign.data import CountsEpochs, Jitter, Transformed, collates_and_counts


def _scale(env: Any, factor: float) -> None:
    with torch.no_grad():
        env.accelerator.unwrap_model(env.model)[0].weight.mul_(factor)


class Phase(enum.Enum):
    WARM = 1
    MAIN = 2


@dataclasses.dataclass
class Progress:
    total: float = 0.0
    best: float = math.inf
    phase: Phase = Phase.WARM


@dataclasses.dataclass(frozen=True)
class Frozen:
    total: float = 0.0


class Meter:
    def __init__(self) -> None:
        self.summed = 0.0


class Tuple(NamedTuple):
    total: float
    count: int


PROGRESS = Progress()
DIFFICULTY: contextvars.ContextVar[float] = contextvars.ContextVar("difficulty of a script", default=1.0)


def dataclass_in_a_global(env: Any, do: Any) -> None:
    for _ in do.epochs():
        for batch in do.batches():
            loss = do.step(batch)
            PROGRESS.total += loss
            PROGRESS.best = min(PROGRESS.best, loss)
            do.saves()
        _scale(env, 1 / (1 + PROGRESS.total + PROGRESS.best))
        do.epoch_saves()


def frozen_dataclass(env: Any, do: Any) -> None:
    state = Frozen()
    for _ in do.epochs():
        for batch in do.batches():
            state = dataclasses.replace(state, total=state.total + do.step(batch))
            do.saves()
        _scale(env, 1 / (1 + state.total))
        do.epoch_saves()


def named_tuple(env: Any, do: Any) -> None:
    state = Tuple(0.0, 0)
    for _ in do.epochs():
        for batch in do.batches():
            state = Tuple(state.total + do.step(batch), state.count + 1)
            do.saves()
        _scale(env, 1 / (1 + state.total / state.count))
        do.epoch_saves()


def phase_of_an_enum(env: Any, do: Any) -> None:
    phase, total = Phase.WARM, 0.0
    for _ in do.epochs():
        for batch in do.batches():
            total += do.step(batch)
            if total > 5:
                phase = Phase.MAIN
            do.saves()
        _scale(env, 0.5 if phase is Phase.MAIN else 0.9)
        do.epoch_saves()


def deque_drives_the_rate(env: Any, do: Any) -> None:
    recent: collections.deque[float] = collections.deque(maxlen=8)
    for _ in do.epochs():
        for batch in do.batches():
            recent.append(do.step(batch))
            do.saves()
        for group in env.optimizers[0].param_groups:
            group["lr"] = 1e-2 / (1 + sum(recent))
        do.epoch_saves()


def average_in_a_closure(env: Any, do: Any) -> None:
    shadow: dict[str, torch.Tensor] = {}
    model = env.accelerator.unwrap_model(env.model)

    def update() -> None:
        for name, p in model.named_parameters():
            shadow.setdefault(name, p.detach().clone()).lerp_(p.detach(), 0.1)

    for epoch in do.epochs():
        for batch in do.batches():
            do.step(batch)
            update()
            do.saves()
        if epoch == 2:
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(shadow[name])
        do.epoch_saves()


def early_stopping(env: Any, do: Any) -> None:
    best, bad = math.inf, 0
    for _ in do.epochs():
        total = 0.0
        for batch in do.batches():
            total += do.step(batch)
            do.saves()
        best, bad = (total, 0) if total < best - 100 else (min(best, total), bad + 1)
        do.epoch_saves()
        if bad >= 3:
            _scale(env, 0.1)
            break
    _scale(env, 1 / (1 + best))
    env.progress.epoch = 3


def counts_and_generators(env: Any, do: Any) -> None:
    numbers = itertools.count(1)

    def rates() -> Iterator[float]:
        n = 0
        while True:
            n += 1
            yield 1 / (1 + n / 10)

    rate, value = rates(), 1.0
    for _ in do.epochs():
        for batch in do.batches():
            do.step(batch)
            next(numbers)
            value = next(rate)
            do.saves()
        _scale(env, value / next(numbers))
        do.epoch_saves()


def weak_references(env: Any, do: Any) -> None:
    moments: Any = weakref.WeakKeyDictionary()
    model = env.accelerator.unwrap_model(env.model)
    for _ in do.epochs():
        for batch in do.batches():
            loss = do.step(batch)
            for layer in model:
                moments[layer] = 0.9 * moments.get(layer, 0.0) + loss
            do.saves()
        for layer in model:
            with torch.no_grad():
                for p in layer.parameters():
                    p.mul_(1 / (1 + moments[layer]))
        do.epoch_saves()


def parameters_in_a_dictionary(env: Any, do: Any) -> None:
    extra = {"temperature": torch.nn.Parameter(torch.ones(()))}
    own = torch.optim.SGD(extra.values(), lr=0.05, momentum=0.9)
    for _ in do.epochs():
        for batch in do.batches():
            loss = do.step(batch)
            (extra["temperature"] * loss).backward()
            own.step()
            own.zero_grad()
            do.saves()
        _scale(env, float(extra["temperature"].detach()))
        do.epoch_saves()


def scaler_of_its_own(env: Any, do: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=4)
    dummy = torch.nn.Parameter(torch.ones(()))
    own = torch.optim.SGD([dummy], lr=0.0)
    for _ in do.epochs():
        for batch in do.batches():
            do.step(batch)
            scaler.scale(dummy * 2).backward()
            scaler.step(own)
            scaler.update()
            do.saves()
        _scale(env, 1 / scaler.get_scale())
        do.epoch_saves()


def thread_of_its_own(env: Any, do: Any) -> None:
    asked: queue.Queue[float] = queue.Queue()
    told: queue.Queue[float] = queue.Queue()

    def work() -> None:
        total = 1.0
        while True:
            total += asked.get()
            told.put(total)

    threading.Thread(target=work, daemon=True).start()
    for _ in do.epochs():
        for batch in do.batches():
            asked.put(do.step(batch))
            factor = told.get(timeout=200)
            do.saves()
        _scale(env, 1 / factor)
        do.epoch_saves()


def context_variable(env: Any, do: Any) -> None:
    for _ in do.epochs():
        for batch in do.batches():
            do.step(batch)
            DIFFICULTY.set(DIFFICULTY.get() * 0.95)
            do.saves()
        _scale(env, DIFFICULTY.get())
        do.epoch_saves()


def complex_and_bytes(env: Any, do: Any) -> None:
    angle, text = 1 + 0j, b""
    for _ in do.epochs():
        for batch in do.batches():
            angle *= complex(0.9, 0.1 * do.step(batch))
            text += b"x"
            do.saves()
        _scale(env, 1 / (1 + abs(angle) + len(text)))
        do.epoch_saves()


def sets_and_counters(env: Any, do: Any) -> None:
    seen: set[int] = set()
    tally: collections.Counter[str] = collections.Counter()
    for _ in do.epochs():
        for batch in do.batches():
            loss = do.step(batch)
            seen.add(int(loss * 100))
            tally["high" if loss > 1.1 else "low"] += 1
            do.saves()
        _scale(env, 1 / (len(seen) + tally["low"]))
        do.epoch_saves()


def caches_that_draw(env: Any, do: Any) -> None:
    @functools.cache
    def drawn(epoch: int) -> float:
        return float(np.random.default_rng(len(losses)).normal())

    losses: list[float] = []
    for epoch in do.epochs():
        for batch in do.batches():
            losses.append(do.step(batch))
            drawn(epoch)
            do.saves()
        _scale(env, 1 + 0.1 * drawn(epoch))
        do.epoch_saves()


class Dice:
    dice: ClassVar[random.Random] = random.Random(3)


def generator_of_a_class(env: Any, do: Any) -> None:
    factor = 1.0
    for _ in do.epochs():
        for batch in do.batches():
            do.step(batch)
            factor = 0.5 + Dice.dice.random()
            do.saves()
        _scale(env, factor)
        do.epoch_saves()


class Trainer:
    """A class around the loop, as scripts write it."""

    def __init__(self, env: Any, do: Any) -> None:
        self.env, self.do = env, do
        self.best, self.history = math.inf, list[float]()

    def one_epoch(self) -> None:
        for batch in self.do.batches():
            self.history.append(self.do.step(batch))
            self.do.saves()
        self.best = min(self.best, *self.history)

    def fit(self) -> None:
        for _ in self.do.epochs():
            self.one_epoch()
            _scale(self.env, 1 / (1 + self.best + len(self.history)))
            self.do.epoch_saves()


def trainer_with_history(env: Any, do: Any) -> None:
    Trainer(env, do).fit()


def tells_with_globals(env: Any, do: Any) -> None:
    history: list[float] = []
    for epoch in do.epochs():
        for batch in do.batches():
            history.append(do.step(batch))
            do.saves()
        print(f"epoch {epoch}: {sum(history) / len(history)}")
        do.epoch_saves()


def meter_of_each_epoch(env: Any, do: Any) -> None:
    for epoch in do.epochs():
        meter = Meter()
        for batch in do.batches():
            meter.summed += do.step(batch)
            do.saves()
        print(f"epoch {epoch}: {meter.summed}")
        do.epoch_saves()


def caches(env: Any, do: Any) -> None:
    memo: dict[int, float] = {}
    for epoch in do.epochs():
        for batch in do.batches():
            if epoch not in memo:
                memo[epoch] = 1 / (1 + epoch)
            do.step(batch)
            do.saves()
        if epoch not in memo:
            memo[epoch] = 1 / (1 + epoch)
        _scale(env, memo[epoch])
        do.epoch_saves()


class AnUnsavedBuffer(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
        self.register_buffer("centre", torch.zeros(16), persistent=False)

    def forward(self, x: Any) -> Any:
        features = self[1](self[0](x))
        if self.training:
            self.centre.mul_(0.9).add_(0.1 * features.detach().mean(0))
        return self[2](features)


KEPT: dict[str, Case] = {
    **{
        f"kept: {script.__name__.replace('_', ' ')}": Case(script=script)
        for script in (
            dataclass_in_a_global,
            frozen_dataclass,
            named_tuple,
            phase_of_an_enum,
            deque_drives_the_rate,
            average_in_a_closure,
            early_stopping,
            counts_and_generators,
            weak_references,
            parameters_in_a_dictionary,
            scaler_of_its_own,
            thread_of_its_own,
            context_variable,
            complex_and_bytes,
            sets_and_counters,
            caches_that_draw,
            generator_of_a_class,
            trainer_with_history,
            tells_with_globals,
            meter_of_each_epoch,
            caches,
        )
    },
    "kept: collate_fn counts": Case(loader=collates_and_counts),
    "kept: a transform in a subset": Case(
        loader=lambda: DataLoader(Subset(Transformed(Jitter()), range(4, 48)), batch_size=8, shuffle=True)
    ),
    "kept: a data set counts epochs": Case(loader=lambda: DataLoader(CountsEpochs(), batch_size=8, shuffle=True)),
    "kept: a buffer that is not saved": Case(
        model=AnUnsavedBuffer,
        end=lambda env: _scale(env, 1 / (1 + float(env.accelerator.unwrap_model(env.model).centre.abs().mean()))),
    ),
}
