"""Scripts for Lightning that keep state where no checkpoint looks: in globals, classes, closures, iterators."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import enum
import functools
import itertools
import json
import math
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback
from torch.utils.data import DataLoader, Sampler, Subset

from tests.campaign.data import CountsEpochs, Items, Jitter, Transformed, collates_and_counts
from tests.campaign.lightning_runs import Case, Net


def _scale(module: Any, factor: float) -> None:
    with torch.no_grad():
        module.head[1].weight.mul_(factor)


class Kept(Net):
    """The base of these cases: keeps something in each step, and uses it at the end of an epoch."""

    def keep(self, loss: float) -> None:
        pass

    def use(self) -> None:
        pass

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.keep(float(loss.detach()))
        return loss

    def on_train_epoch_end(self) -> None:
        self.use()


# ---- globals of the module -------------------------------------------------------------------------------------------


class Phase(enum.Enum):
    WARM = 1
    MAIN = 2


@dataclasses.dataclass
class Progress:
    total: float = 0.0
    best: float = math.inf
    phase: Phase = Phase.WARM


PROGRESS = Progress()


class InADataclass(Kept):
    def keep(self, loss: float) -> None:
        PROGRESS.total += loss
        PROGRESS.best = min(PROGRESS.best, loss)

    def use(self) -> None:
        _scale(self, 1 / (1 + PROGRESS.total + PROGRESS.best))


phase = Phase.WARM
seen_losses = 0.0


class APhase(Kept):
    def keep(self, loss: float) -> None:
        global phase, seen_losses  # noqa: PLW0603 - it is what is tried
        seen_losses += loss
        if seen_losses > 10:
            phase = Phase.MAIN

    def use(self) -> None:
        _scale(self, 0.5 if phase is Phase.MAIN else 0.9)


def _rates() -> Iterator[float]:
    n = 0
    while True:
        n += 1
        yield 1 / (1 + n / 10)


RATES = _rates()
NUMBERS = itertools.count()


class AGenerator(Kept):
    def keep(self, loss: float) -> None:
        self.rate = next(RATES)

    def use(self) -> None:
        _scale(self, self.rate)


class ACount(Kept):
    def keep(self, loss: float) -> None:
        next(NUMBERS)

    def use(self) -> None:
        _scale(self, 1 / (1 + next(NUMBERS) / 10))


MOMENTS: Any = weakref.WeakKeyDictionary()


class Weak(Kept):
    def keep(self, loss: float) -> None:
        for layer in self.head:
            MOMENTS[layer] = 0.9 * MOMENTS.get(layer, 0.0) + loss

    def use(self) -> None:
        for layer in self.head:
            with torch.no_grad():
                for p in layer.parameters():
                    p.mul_(1 / (1 + MOMENTS[layer]))


DIFFICULTY: contextvars.ContextVar[float] = contextvars.ContextVar("difficulty", default=1.0)


class InAContext(Kept):
    def keep(self, loss: float) -> None:
        DIFFICULTY.set(DIFFICULTY.get() * 0.95)

    def use(self) -> None:
        _scale(self, DIFFICULTY.get())


def _annealed(loss: float, seen: list[float] = []) -> float:  # noqa: B006 - it is what is tried
    seen.append(loss)
    return sum(seen)


class ADefault(Kept):
    def keep(self, loss: float) -> None:
        self.sum = _annealed(loss)

    def use(self) -> None:
        _scale(self, 1 / (1 + self.sum))


def _counted() -> int:
    _counted.calls += 1  # type: ignore[attr-defined]
    return _counted.calls  # type: ignore[attr-defined,no-any-return]


_counted.calls = 0  # type: ignore[attr-defined]


class AnAttributeOfAFunction(Kept):
    def keep(self, loss: float) -> None:
        _counted()

    def use(self) -> None:
        _scale(self, 1 / (1 + _counted() / 10))


@functools.cache
def _drawn(epoch: int) -> float:
    return float(torch.rand(()))


class ACache(Kept):
    def keep(self, loss: float) -> None:
        _drawn(self.current_epoch)

    def use(self) -> None:
        _scale(self, 0.5 + _drawn(self.current_epoch))


def _norm(module: Any) -> float:
    return float(module.head[1].weight.detach().norm())


@functools.lru_cache(maxsize=8)
def _norm_then(module: Any, epoch: int) -> float:
    return _norm(module)


class ABoundedCache(Kept):
    def keep(self, loss: float) -> None:
        _norm_then(self, self.current_epoch)

    def use(self) -> None:
        _scale(self, 1 / _norm_then(self, self.current_epoch))


class Curve:
    @functools.cache  # noqa: B019 - it is what is tried
    def at(self, epoch: int, of: Any = None) -> float:
        return _norm(of)


CURVE = Curve()


class ACachedMethod(Kept):
    def keep(self, loss: float) -> None:
        CURVE.at(self.current_epoch, of=self)

    def use(self) -> None:
        _scale(self, 1 / CURVE.at(self.current_epoch, of=self))


class Begun:
    """Caches the first value of its property."""

    def __init__(self) -> None:
        self.module: Any = None

    @functools.cached_property
    def norm(self) -> float:
        return _norm(self.module())


BEGUN = Begun()


class ACachedProperty(Kept):
    def on_fit_start(self) -> None:
        BEGUN.module = weakref.ref(self)

    def keep(self, loss: float) -> None:
        assert BEGUN.norm > 0

    def use(self) -> None:
        _scale(self, 1 / BEGUN.norm)


class ACachedPropertyOfItsOwn(Kept):
    @functools.cached_property
    def norm(self) -> float:
        return _norm(self)

    def keep(self, loss: float) -> None:
        assert self.norm > 0

    def use(self) -> None:
        _scale(self, 1 / self.norm)


_norm_cache: dict[int, float] = {}


class ACacheByName(Kept):
    def keep(self, loss: float) -> None:
        if self.current_epoch not in _norm_cache:
            _norm_cache[self.current_epoch] = _norm(self)

    def use(self) -> None:
        self.keep(0.0)
        _scale(self, 1 / _norm_cache[self.current_epoch])


_remembered: dict[int, float] = {}


class AMemo(Kept):
    def keep(self, loss: float) -> None:
        _remembered.setdefault(self.current_epoch, _norm(self))

    def use(self) -> None:
        self.keep(0.0)
        _scale(self, 1 / sum(_remembered.values()))


def _memoized() -> Any:
    known: dict[int, float] = {}

    def remember(module: Any) -> float:
        if module.current_epoch not in known:
            known[module.current_epoch] = _norm(module)
        return sum(known.values())

    return [
        LambdaCallback(
            on_train_batch_start=lambda trainer, module, *_: remember(module),
            on_train_epoch_end=lambda trainer, module: _scale(module, 1 / remember(module)),
        )
    ]


@functools.cache
def _cleared() -> float:
    return time.monotonic()


class LazilyMade:
    @functools.cached_property
    def factor(self) -> float:
        return math.sqrt(2)


LAZILY = LazilyMade()
_memo_of_losses: dict[int, float] = {}


class MakesLazily(Kept):
    """Uses a property that is computed when it is first read, and a dictionary that only looks like a cache."""

    def keep(self, loss: float) -> None:
        _memo_of_losses[self.current_epoch] = loss
        self.log("kept", _memo_of_losses[self.current_epoch])

    def use(self) -> None:
        _scale(self, 1 / LAZILY.factor)


class AClearedCache(Kept):
    """Has a cache that each step clears and fills again."""

    def keep(self, loss: float) -> None:
        _cleared.cache_clear()
        _cleared()


def _weighted(weights: dict[str, float], loss: float) -> None:
    weights["w"] = 0.9 * weights["w"] + 0.1 * loss


WEIGHTED = functools.partial(_weighted, {"w": 1.0})


class APartial(Kept):
    def keep(self, loss: float) -> None:
        WEIGHTED(loss)

    def use(self) -> None:
        _scale(self, 1 / (1 + WEIGHTED.args[0]["w"]))


HISTORY: collections.deque[float] = collections.deque(maxlen=8)


class ADeque(Kept):
    """Computes the learning rate from the last losses."""

    def keep(self, loss: float) -> None:
        HISTORY.append(loss)

    def use(self) -> None:
        for group in self.optimizers().param_groups:  # type: ignore[union-attr]
            group["lr"] = 1e-2 / (1 + sum(HISTORY))


CRITIC = torch.nn.Linear(8, 1)
CRITICS = torch.optim.SGD(CRITIC.parameters(), 1e-2, momentum=0.9)


class ACritic(Kept):
    """Trains another model, which is not a part of the module."""

    def loss(self, batch: Any) -> torch.Tensor:
        CRITICS.zero_grad()
        with torch.enable_grad():
            CRITIC(batch[0]).square().mean().backward()
        CRITICS.step()
        return super().loss(batch)

    def use(self) -> None:
        _scale(self, 1 / (1 + float(CRITIC.weight.detach().norm())))


LIKELY = np.ones(4)
AVERAGE = torch.zeros(3)
TALLY: collections.Counter[str] = collections.Counter()


class InArrays(Kept):
    def keep(self, loss: float) -> None:
        LIKELY[1] += loss
        AVERAGE.mul_(0.9).add_(loss)

    def use(self) -> None:
        _scale(self, 1 / (1 + float(LIKELY[1]) + float(AVERAGE[0])))


class Tallies(Kept):
    def keep(self, loss: float) -> None:
        TALLY["high" if loss > 1.1 else "low"] += 1

    def use(self) -> None:
        _scale(self, 1 / (1 + TALLY["high"] + TALLY["low"] / 10))


# ---- attributes of classes -------------------------------------------------------------------------------------------


class OfTheClass(Kept):
    losses: ClassVar[list[float]] = []
    best: ClassVar[float] = math.inf

    def keep(self, loss: float) -> None:
        self.losses.append(loss)
        OfTheClass.best = min(OfTheClass.best, loss)

    def use(self) -> None:
        _scale(self, 1 / (1 + sum(self.losses) + self.best))


class RandomOfTheClass(Kept):
    dice: ClassVar[random.Random] = random.Random(3)

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) * (1 + self.dice.random())


class Registry:
    """A singleton, as scripts write it."""

    _instance: ClassVar[Any] = None

    def __init__(self) -> None:
        self.value = 1.0

    @classmethod
    def get(cls) -> Any:
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance


class ASingleton(Kept):
    def keep(self, loss: float) -> None:
        Registry.get().value *= 0.95

    def use(self) -> None:
        _scale(self, Registry.get().value)


# ---- closures --------------------------------------------------------------------------------------------------------


def _average(decay: float = 0.9) -> tuple[Callable[[Any], None], Callable[[Any], None]]:
    shadow: dict[str, torch.Tensor] = {}

    def update(module: Any) -> None:
        for name, p in module.named_parameters():
            shadow.setdefault(name, p.detach().clone()).lerp_(p.detach(), 1 - decay)

    def copy_to(module: Any) -> None:
        with torch.no_grad():
            for name, p in module.named_parameters():
                p.copy_(shadow[name])

    return update, copy_to


class AnAverageInAClosure(Kept):
    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self.update, self.copy_to = _average()

    def keep(self, loss: float) -> None:
        self.update(self)

    def on_train_end(self) -> None:
        self.copy_to(self)


def _average_in_callbacks() -> list[Any]:
    update, copy_to = _average()
    return [
        LambdaCallback(
            on_train_batch_end=lambda trainer, module, *_: update(module),
            on_train_end=lambda trainer, module: copy_to(module),
        )
    ]


def _stops_by_hand() -> list[Any]:
    best, bad = math.inf, 0

    def look(trainer: Any, module: Any) -> None:
        nonlocal best, bad
        loss = float(trainer.callback_metrics["loss_epoch"])
        best, bad = (loss, 0) if loss < best - 1 else (min(best, loss), bad + 1)
        if bad == 2:
            trainer.should_stop = True

    return [LambdaCallback(on_train_epoch_end=look)]


class AHook(Kept):
    """Keeps the statistics of activations in the closure of a forward hook."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        sums = torch.zeros(16)

        def note(module: Any, args: Any, output: torch.Tensor) -> None:
            sums.add_(output.detach().abs().mean(0))

        self.backbone.register_forward_hook(note)
        self.now = lambda: sums

    def use(self) -> None:
        _scale(self, 1 / (1 + float(self.now().mean())))


class AGradientHook(Kept):
    """Scales gradients by a count in the closure of a hook of a parameter."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        calls = 0

        def scale(gradient: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return gradient / (1 + calls // 9)

        self.head[1].weight.register_hook(scale)


# ---- attributes of the module ----------------------------------------------------------------------------------------


class ParametersInADict(Kept):
    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self.extra = {"temperature": torch.nn.Parameter(torch.ones(()))}

    def keep(self, loss: float) -> None:
        with torch.no_grad():
            self.extra["temperature"].sub_(0.05 * loss)

    def use(self) -> None:
        _scale(self, float(self.extra["temperature"].detach()))


class AnUnsavedBuffer(Kept):
    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self.register_buffer("centre", torch.zeros(16), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.backbone(x)
        if self.training:
            self.centre.mul_(0.9).add_(0.1 * features.detach().mean(0))
        return self.head(features)

    def use(self) -> None:
        _scale(self, 1 / (1 + float(self.centre.abs().mean())))


class Scales(Net):
    """Scales its loss by hand, with a scaler that is not the precision plugin's."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self.automatic_optimization = False
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers().optimizer  # type: ignore[union-attr]
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05 * self.scaler.get_scale())
        self.scaler.step(optimizer)
        self.scaler.update()
        self.log("loss", loss, on_step=True, on_epoch=True)


class AThread(Kept):
    """Gets its factor from a thread of its own."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self.asked: queue.Queue[float] = queue.Queue()
        self.told: queue.Queue[float] = queue.Queue()

        def work() -> None:
            total = 1.0
            while True:
                total += self.asked.get()
                self.told.put(total)

        threading.Thread(target=work, daemon=True).start()

    def loss(self, batch: Any) -> torch.Tensor:
        self.asked.put(0.1)
        return super().loss(batch) * self.told.get(timeout=200)


class AScheduleOfItsOwn(Kept):
    """Steps a schedule that `configure_optimizers` does not return."""

    def on_train_start(self) -> None:
        self.own = torch.optim.lr_scheduler.StepLR(self.optimizers().optimizer, 2, 0.1)  # type: ignore[union-attr]

    def use(self) -> None:
        self.own.step()


class ACallbackWithAnObject(Callback):
    def __init__(self) -> None:
        self.window = collections.deque(maxlen=10)  # type: ignore[var-annotated]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.window.append(float(outputs["loss"]))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        _scale(pl_module, 1 / (1 + sum(self.window)))


# ---- data ------------------------------------------------------------------------------------------------------------


class Curriculum(Sampler[int]):
    """Shows more of the data, the better it goes."""

    def __init__(self) -> None:
        self.share = 0.5

    def __len__(self) -> int:
        return 48

    def __iter__(self) -> Iterator[int]:
        for _ in range(48):
            yield int(torch.randint(int(48 * self.share), ()))


class Teaches(Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        sampler = trainer.train_dataloader.sampler
        sampler.share = min(1.0, sampler.share * (1 + 0.2 * float(trainer.callback_metrics["loss_epoch"])))


AUGMENT = {"strength": 0.1}


class Augmented(Items):
    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x * (1 + AUGMENT["strength"]), y


class Strengthens(Kept):
    def use(self) -> None:
        AUGMENT["strength"] *= 2


class Hardest(Sampler[int]):
    """Begins with the hard samples, which the model collects in a global."""

    def __init__(self, hard: set[int]) -> None:
        self.hard = hard

    def __len__(self) -> int:
        return 48

    def __iter__(self) -> Iterator[int]:
        easy = [i for i in torch.randperm(48).tolist() if i not in self.hard]
        yield from [*sorted(self.hard), *easy]


HARD: set[int] = set()


class Mines(Kept):
    def keep(self, loss: float) -> None:
        HARD.add(int(loss * 1000) % 48)


# ---- what is of no matter --------------------------------------------------------------------------------------------


@functools.cache
def _root(n: int) -> float:
    return math.sqrt(n)


_memo: dict[int, float] = {}
_losses: list[float] = []
_began = time.monotonic()
_steps = 0
_factor = 1.0


class Remembers(Kept):
    """Has caches whose content does not depend on when they are filled."""

    def loss(self, batch: Any) -> torch.Tensor:
        n = self.global_step
        if n not in _memo:
            _memo[n] = 1 + n / 100
        return super().loss(batch) * _root(n + 1) * _memo[n]


class Tells(Kept):
    """Tells how it goes, and writes it down."""

    def keep(self, loss: float) -> None:
        global _steps  # noqa: PLW0603 - it is what is tried
        _steps += 1
        _losses.append(loss)
        if _steps % 5 == 0:
            print(f"step {_steps}: {sum(_losses) / len(_losses):.4f}, {time.monotonic() - _began:.1f} s")

    def on_train_end(self) -> None:
        Path(self.trainer.default_root_dir, "losses.json").write_text(json.dumps(_losses))


class MadeAnew(Kept):
    """Sets a global at the beginning of each epoch."""

    def on_train_epoch_start(self) -> None:
        global _factor  # noqa: PLW0603 - it is what is tried
        _factor = 1 / (1 + self.current_epoch)

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) * _factor


BEST = {"loss": math.inf, "steps": 0.0}


class Restores(Kept):
    """Saves its global itself."""

    def keep(self, loss: float) -> None:
        BEST["loss"] = min(BEST["loss"], loss)
        BEST["steps"] += 1.5

    def use(self) -> None:
        _scale(self, 1 / (1 + BEST["loss"] + BEST["steps"] / 10))

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        checkpoint["best"] = dict(BEST)

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        BEST.update(checkpoint["best"])


class RestoresItsCallback(Callback):
    best = math.inf
    seen: ClassVar[list[float]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.best = min(self.best, float(outputs["loss"]))
        self.seen.append(self.best)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        _scale(pl_module, 1 / (1 + sum(self.seen)))

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "seen": list(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.seen[:] = state["best"], state["seen"]


class Collected(Kept):
    """Keeps values that each step replaces."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self.last = 0.0

    def keep(self, loss: float) -> None:
        self.last = _last["loss"] = loss

    def use(self) -> None:
        self.log("last", self.last)
        self.log("last of all", _last["loss"])


_last: dict[str, float] = {}


# ---- what a state leaves out -----------------------------------------------------------------------------------------


class HoldsAPart(Callback):
    """A callback whose ``state_dict`` leaves out a count, and a value that is only printed."""

    def __init__(self) -> None:
        self.mean, self.count, self.best = 0.0, 0, math.inf

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = float(outputs["loss"])
        self.count, self.best = self.count + 1, min(self.best, loss)
        self.mean += (loss - self.mean) / self.count

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        print(f"best {self.best}")
        _scale(pl_module, 1 / (1 + self.mean))

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]


class LooksAhead(torch.optim.SGD):
    """Keeps slow weights, and a count, outside of its state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05)
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.taken = 0

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.taken += 1
        every = [p for group in self.param_groups for p in group["params"]]
        for slow, p in zip(self.slow, every, strict=True) if self.taken % 5 == 0 else ():
            slow.lerp_(p.detach(), 0.5)
            p.data.copy_(slow)
        return loss


class WithLookahead(Net):
    def configure_optimizers(self) -> Any:
        return LooksAhead(self.parameters())


class DrawsLate(Items):
    """Makes its generator when it first draws."""

    def __init__(self) -> None:
        super().__init__()
        self.generator: Any = None

    def __getitem__(self, index: int) -> Any:
        if self.generator is None:
            self.generator = np.random.default_rng(5)
        x, *rest = super().__getitem__(index)
        return (x + float(self.generator.random()), *rest)


KEPT: dict[str, Case] = {
    "a dataclass in a global": Case(model=InADataclass),
    "a phase in a global": Case(model=APhase),
    "a generator function in a global": Case(model=AGenerator),
    "a count in a global": Case(model=ACount),
    "a weak dictionary": Case(model=Weak),
    "a context variable": Case(model=InAContext),
    "a default argument": Case(model=ADefault),
    "an attribute of a function": Case(model=AnAttributeOfAFunction),
    "a cache that draws": Case(model=ACache),
    "a bounded cache": Case(model=ABoundedCache),
    "a cached method": Case(model=ACachedMethod),
    "a cached property in a global": Case(model=ACachedProperty),
    "a cached property of the module": Case(model=ACachedPropertyOfItsOwn),
    "a cache by its name": Case(model=ACacheByName),
    "a memo": Case(model=AMemo),
    "a memo in a closure": Case(callbacks=_memoized),
    "exact: makes lazily": Case(model=MakesLazily),
    "exact: a cache that is cleared": Case(model=AClearedCache),
    "a partial": Case(model=APartial),
    "a deque that drives the learning rate": Case(model=ADeque),
    "a critic in a global": Case(model=ACritic),
    "arrays in globals": Case(model=InArrays),
    "a counter in a global": Case(model=Tallies),
    "attributes of the class": Case(model=OfTheClass),
    "a generator of the class": Case(model=RandomOfTheClass),
    "a singleton": Case(model=ASingleton),
    "an average in a closure": Case(model=AnAverageInAClosure),
    "an average in closures of callbacks": Case(callbacks=_average_in_callbacks),
    "early stopping in a closure": Case(callbacks=_stops_by_hand, trainer={"max_epochs": 5}),
    "a forward hook": Case(model=AHook),
    "a hook of a gradient": Case(model=AGradientHook),
    "parameters in a dictionary": Case(model=ParametersInADict),
    "a buffer that is not saved": Case(model=AnUnsavedBuffer),
    "a scaler of its own": Case(model=Scales),
    "a thread": Case(model=AThread),
    "a schedule of its own": Case(model=AScheduleOfItsOwn),
    "a window in a callback": Case(callbacks=lambda: [ACallbackWithAnObject()]),
    "collate_fn counts": Case(loader=collates_and_counts),
    "a transform in a subset": Case(
        loader=lambda: DataLoader(Subset(Transformed(Jitter()), range(4, 48)), batch_size=8, shuffle=True)
    ),
    "a curriculum": Case(
        loader=lambda: DataLoader(Items(), batch_size=8, sampler=Curriculum()), callbacks=lambda: [Teaches()]
    ),
    "a data set counts epochs": Case(loader=lambda: DataLoader(CountsEpochs(), batch_size=8, shuffle=True)),
    "the data's strength in a global": Case(
        model=Strengthens, loader=lambda: DataLoader(Augmented(), batch_size=8, shuffle=True)
    ),
    "hard samples in a global": Case(
        model=Mines, loader=lambda: DataLoader(Items(), batch_size=8, sampler=Hardest(HARD))
    ),
    "a state_dict leaves out a count": Case(callbacks=lambda: [HoldsAPart()]),
    "an optimizer with a state of its own": Case(model=WithLookahead),
    "exact: draws late": Case(loader=lambda: DataLoader(DrawsLate(), batch_size=8, shuffle=True)),
    "exact: draws late, workers": Case(loader=lambda: DataLoader(DrawsLate(), 8, shuffle=True, num_workers=2)),
    "exact: caches": Case(model=Remembers),
    "exact: tells": Case(model=Tells),
    "exact: made anew": Case(model=MadeAnew),
    "exact: restores a global": Case(model=Restores),
    "exact: restores what its class has": Case(callbacks=lambda: [RestoresItsCallback()]),
    "exact: the last loss in a global": Case(model=Collected),
}
