"""Warnings about a script's own variables that a resume has lost, also where no repeated step shows a difference."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import itertools
import json
import math
import random
import re
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from accelerate_ckpt import attach
from accelerate_ckpt._attach import uninstall
from ckpt_core.state.value_marks import variables_of
from ckpt_core.state.variable_use import is_live


class Average:
    """An average of the weights."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.shadow = [parameter.detach().clone() for parameter in model.parameters()]

    def update(self, model: torch.nn.Module) -> None:
        for mine, parameter in zip(self.shadow, model.parameters(), strict=True):
            mine.lerp_(parameter.detach(), 0.1)


class AverageBesideTheModel(torch.nn.Module):
    """An average of the weights that also holds the model, like that of ema-pytorch."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.online, self.average = model, copy.deepcopy(model)

    def update(self) -> None:
        with torch.no_grad():
            for mine, parameter in zip(self.average.parameters(), self.online.parameters(), strict=True):
                mine.lerp_(parameter, 0.1)


class Patience:
    """A script's early stopping, whose best value is in an attribute."""

    def __init__(self) -> None:
        self.best = math.inf

    def update(self, value: float) -> None:
        self.best = min(self.best, value)

    def state_dict(self) -> dict[str, float]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.best = state["best"]


class Training:
    """A prepared training with a model of one layer."""

    def __init__(self, directory: Path, source: str | None, seed: int = 0) -> None:
        self.directory, self.source = directory, source
        self.accelerator: Any = Accelerator(cpu=True)
        attach(self.accelerator, "sync")
        torch.manual_seed(seed)
        loader = DataLoader(torch.linspace(0, 1, 24).view(6, 4), batch_size=2)
        self.model: Any = torch.nn.Linear(4, 4)
        self.other: Any = torch.optim.Adam(self.model.parameters(), 1e-3)
        optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(self.model, optimizer, loader)
        self.has_resumed = source is not None

    def resume(self) -> None:
        if self.source is not None:
            self.accelerator.load_state(str(self.directory / self.source))

    def step(self, batch: Any) -> float:
        loss = self.model(batch).pow(2).mean()
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)

    def set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def save(self, name: str) -> None:
        if not (self.directory / name).exists():
            self.accelerator.save_state(str(self.directory / name))


def keeps_a_best(of: Training) -> None:
    best, bad = math.inf, 0
    of.resume()
    for _ in range(2):
        total = 0.0
        for batch in of.loader:
            total += of.step(batch)
            of.save("middle")
        best, bad = min(best, total), bad + (total > best)
        of.save("end")
        of.set_rate(0.1 / (1 + bad))


def keeps_a_factor(of: Training) -> None:
    factor = 1.0
    of.resume()
    for _ in range(2):
        for batch in of.loader:
            of.step(batch)
            of.save("first")
            factor *= 0.9
            for group in of.optimizer.param_groups:
                group["lr"] = factor
            of.save("middle")


def keeps_an_average(of: Training) -> None:
    average = Average(of.model)
    of.resume()
    for _ in range(2):
        for batch in of.loader:
            of.step(batch)
            average.update(of.model)
            of.save("middle")


def keeps_an_average_beside_the_model(of: Training) -> None:
    average = AverageBesideTheModel(of.model)
    of.resume()
    for _ in range(2):
        for batch in of.loader:
            of.step(batch)
            average.update()
            of.save("middle")


def has_modules_around_the_model(of: Training) -> None:
    around, teacher = torch.nn.ModuleList([of.model]), AverageBesideTheModel(of.model)
    of.resume()
    for batch in of.loader:
        of.step(batch)
        of.save("middle")
    around.eval()
    teacher.update()


def keeps_an_average_that_the_resume_makes_of_other_weights(of: Training) -> None:
    if of.has_resumed:
        torch.nn.init.normal_(of.model.weight)
    average = Average(of.model)
    of.resume()
    for _ in range(2):
        for batch in of.loader:
            of.step(batch)
            average.update(of.model)
            of.save("middle")


def has_an_optimizer_of_its_own(of: Training) -> None:
    holder = {"other": of.other}
    of.resume()
    for _ in range(2):
        for batch in of.loader:
            of.step(batch)
            for parameter in of.model.parameters():
                parameter.grad = torch.ones_like(parameter)
            holder["other"].step()
            of.optimizer.zero_grad()
            of.save("middle")


def sets_what_it_registers_back_on_a_condition(of: Training) -> None:
    patience, count = Patience(), 0
    of.accelerator.register_for_checkpointing(patience)
    of.resume()
    for _ in range(3):
        if count % 3 == 0:
            patience.best = math.inf
        for batch in of.loader:
            patience.update(of.step(batch))
            of.save("middle")
        of.set_rate(patience.best)
        of.save("end")


def has_an_object_that_is_updated_at_ends(of: Training) -> None:
    patience = Patience()
    of.resume()
    for _ in range(3):
        for batch in of.loader:
            loss = of.step(batch)
        patience.update(loss)
        of.set_rate(patience.best)
        of.save("end")


class Meter:
    """The usual meter of a mean."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.sum, self.count, self.mean = 0.0, 0, 0.0

    def update(self, value: float) -> None:
        self.sum += value
        self.count += 1
        self.mean = self.sum / self.count


def has_a_meter(of: Training) -> None:
    meter = Meter()
    of.resume()
    for _ in range(3):
        meter.reset()
        for batch in of.loader:
            meter.update(of.step(batch))
            of.save("middle")
        of.set_rate(meter.mean)
        of.save("end")


class Total:
    """A sum that is never reset."""

    def __init__(self) -> None:
        self.all, self.number = 0.0, 0

    def update(self, value: float) -> None:
        self.all, self.number = self.all + value, self.number + 1


def has_a_total_of_all_epochs(of: Training) -> None:
    totals = {"loss": Total()}
    of.resume()
    for _ in range(3):
        for batch in of.loader:
            totals["loss"].update(of.step(batch))
            of.save("middle")
        of.set_rate(totals["loss"].all / totals["loss"].number)
        of.save("end")


def keeps_metrics_in_a_dictionary(of: Training) -> None:
    metrics = {"loss": 0.0, "best": math.inf, "last": 0.0, "seen": 0}
    of.resume()
    for _ in range(3):
        for batch in of.loader:
            loss = of.step(batch)
            metrics["loss"] += loss
            metrics["best"] = min(metrics["best"], loss)
            metrics["last"] = loss
            metrics["seen"] += 1
            of.save("middle")
        of.set_rate(metrics["loss"] / metrics["seen"] + metrics["best"] + metrics["last"])
        of.save("end")


def counts_steps_for_its_rate(of: Training) -> None:
    count = 0
    of.resume()
    for _ in range(3):
        for batch in of.loader:
            of.step(batch)
            count += 1
            of.save("middle")
        of.set_rate(0.1 * 0.9 ** (count // 3))
        of.save("end")


class Fit:
    """Trains with all of its variables in attributes."""

    done = 0

    def __init__(self, of: Training) -> None:
        self.of, self.steps, self.frozen, self.shown, self.last = of, 0, False, 0, 0.0
        self.history: list[float] = []
        self.phase = "warm"

    def run(self) -> None:
        for _ in range(3):
            self.epoch()
            self.of.save("end")

    def epoch(self) -> None:
        for batch in self.of.loader:
            self.step(batch)
            self.of.save("middle")
        if self.phase == "cold" or self.frozen or Fit.done > 100:
            self.of.set_rate(0.01)
        print(f"{self.shown} steps, the last loss was {self.last}")
        self.of.set_rate(self.last)

    def step(self, batch: Any) -> None:
        self.last = self.of.step(batch)
        self.history.append(self.last)
        self.steps += 1
        self.shown += 1
        Fit.done += 1
        if self.steps == 2:
            self.phase = "cold"
            self.freeze()

    def freeze(self) -> None:
        self.frozen = True


def is_a_class_of_its_own(of: Training) -> None:
    Fit.done = 0
    fit = Fit(of)
    of.resume()
    fit.run()


GLOBAL = [0]


def counts_globally(of: Training) -> None:
    GLOBAL[0] = 0
    of.resume()
    for _ in range(2):
        for batch in of.loader:
            of.step(batch)
            GLOBAL[0] += 1
            of.save("middle")
        of.set_rate(1 / GLOBAL[0])


def counts_in_a_closure(of: Training) -> None:
    count = 0

    def next_rate() -> float:
        nonlocal count
        count += 1
        return 1 / count

    of.resume()
    for _ in range(2):
        for batch in of.loader:
            of.step(batch)
            rate = next_rate()
            of.save("middle")
        of.set_rate(rate)


def rates() -> Iterator[float]:
    rate = 0.1
    while True:
        yield rate
        rate *= 0.9


def has_iterators(of: Training) -> None:
    torch.manual_seed(5)
    second = iter(DataLoader(torch.arange(40.0).view(10, 4)))
    planned, counted, by_hand = rates(), itertools.count(), random.Random(3)
    stages = itertools.cycle([0.1, 0.2, 0.3])
    next(planned)
    of.resume()
    for _ in range(2):
        for batch in of.loader:
            of.step(batch + next(second) + next(counted) + by_hand.random())
            next(planned)
            next(stages)
            of.save("middle")
        of.set_rate(next(planned) + next(stages))


def has_iterators_at_the_end_of_the_first_epoch(of: Training) -> None:
    kept, before = itertools.count(), itertools.count()
    of.resume()
    for _ in range(2):
        anew = itertools.count()
        for number, batch in enumerate(of.loader):
            of.step(batch + next(kept) + next(anew) + next(before))
            if number == 2:
                of.save("last")
        before = anew
        trains_with_an_iterator_of_its_own(of)
        of.save("end")


def trains_with_an_iterator_of_its_own(of: Training) -> None:
    own = itertools.count()
    for number, batch in enumerate(of.loader):
        of.step(batch + next(own))
        if number == 2:
            of.save("function")


def has_the_last_ones(of: Training) -> None:
    memory = collections.deque[Any](maxlen=2)
    of.resume()
    for _ in range(2):
        for batch in of.loader:
            of.step(batch)
            memory.append(batch.clone())
            of.save("middle")
        of.set_rate(float(memory[0].mean()))


@dataclasses.dataclass(slots=True)
class Slots:
    best: float = math.inf


def has_slots(of: Training) -> None:
    slots = Slots()
    of.resume()
    for _ in range(2):
        for batch in of.loader:
            slots.best = min(slots.best, of.step(batch))
            of.save("middle")
        of.set_rate(slots.best)


def averages_what_was_loaded(of: Training) -> None:
    of.resume()
    average = Average(of.model)
    for _ in range(2):
        for batch in of.loader:
            of.step(batch)
            average.update(of.model)
            of.save("middle")


def only_tells(of: Training) -> None:
    count, best, losses = 0, math.inf, list[float]()
    start = time.time()
    of.resume()
    for epoch in range(3):
        for batch in of.loader:
            losses.append(loss := of.step(batch))
            best = min(best, loss)
            count += 1
            if count % 2 == 0:
                print(f"{count} steps, best {best}, {time.time() - start} s")
            of.save("middle")
        print("epoch", epoch, "best", best)
        of.save("end")
    json.dumps(losses)


def skips_by_itself(of: Training) -> None:
    seen, first = 0, 0
    of.resume()
    if of.has_resumed:
        first = int(of.accelerator.step)
    for epoch in range(2):
        for step, batch in enumerate(of.loader):
            seen += 1
            if seen < first and epoch + step < 0:
                continue
            of.step(batch)
            if epoch == 0:
                of.save("middle")
        of.set_rate(0.1)


def batches_of(loader: Any) -> Iterator[Any]:
    yield from loader


def has_loaders_that_are_not_prepared(of: Training) -> None:
    shuffled = DataLoader(torch.linspace(0, 1, 24).view(6, 4), batch_size=2, shuffle=True)
    of.resume()
    for _ in range(2):
        for number, (batch, more) in enumerate(zip(of.loader, batches_of(shuffled), strict=False)):
            of.step(batch + more)
            of.save("first" if number == 0 else "middle" if number == 1 else "last")


def leaves_out_what_it_had_itself(of: Training) -> None:
    ordered = DataLoader(torch.linspace(0, 1, 32).view(8, 4), batch_size=2)
    of.resume()
    for number, (batch, more) in enumerate(zip(batches_of(ordered), ordered, strict=True)):
        if number >= 2 or not of.has_resumed:
            of.step(batch + more)
        if number == 1:
            of.save("middle")


def begins_epochs_anew(of: Training) -> None:
    outputs, holder = list[float](), {"sum": 0.0}
    meter = Meter()
    of.resume()
    for _ in range(3):
        meter.reset()
        holder["sum"] = 0.0
        outputs.clear()
        for batch in of.loader:
            loss = of.step(batch)
            outputs.append(loss)
            holder["sum"] += loss
            meter.update(loss)
        of.set_rate(holder["sum"] + meter.mean + sum(outputs))
        of.save("end")


def has_generators_of_each_epoch(of: Training) -> None:
    of.resume()
    for epoch in range(of.accelerator.resumed.epoch if of.has_resumed else 0, 3):
        noise, order = torch.Generator().manual_seed(epoch), random.Random(epoch)
        picked = order.sample(range(4), 4)
        for batch in of.loader:
            of.step(batch[:, picked] + torch.rand(batch.shape, generator=noise))
            if epoch == 1:
                of.save("middle")
        if epoch == 1:
            of.save("end")


def trains_for_some_steps(of: Training) -> None:
    done, steps = 0, 2 if of.has_resumed else 4
    of.resume()
    while done < steps:
        for batch in of.loader:
            of.step(batch)
            done += 1
            of.save("middle")
            if done == steps:
                break


class Waits(Patience):
    """Counts updates that were no better, which its state leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.bad = 0

    def update(self, value: float) -> None:
        self.bad += value >= self.best
        super().update(value)


def registers_what_holds_a_part_of_its_state(of: Training) -> None:
    waits = Waits()
    of.accelerator.register_for_checkpointing(waits)
    of.resume()
    for _ in range(2):
        for batch in of.loader:
            of.step(batch)
            waits.update(1.0)
            of.set_rate(0.1 / (1 + waits.bad))
        of.save("end")


def restores_its_own(of: Training) -> None:
    best, patience = math.inf, Patience()
    of.accelerator.register_for_checkpointing(patience)
    of.resume()
    if of.has_resumed:
        best = 0.25
    for _ in range(2):
        for batch in of.loader:
            best = min(best, of.step(batch))
            patience.update(best)
            of.save("middle")
        of.save("end")


def sets_all_anew(of: Training) -> None:
    loss, largest, names, noted = 0.0, 0.0, list[float](), {"loss": 0.0, "mean": 0.0}
    of.resume()
    for _ in range(2):
        total = torch.zeros(())
        for step, batch in enumerate(of.loader):
            loss = of.step(batch)
            largest = max(loss, 0.5)
            names = [largest, step]
            noted["loss"] = loss
            total += loss
            if step == 1:
                of.accelerator.log({"loss": loss})
        noted["mean"] = float(total)
        of.save("end")
    of.accelerator.log({"loss": loss, "names": len(names), **noted})


class Begun:
    """Has cached properties, which do not change while the process lives."""

    def __init__(self, of: Training) -> None:
        self.of = of

    @functools.cached_property
    def norm(self) -> float:
        return float(self.of.model.weight.detach().norm())

    @functools.cached_property
    def root(self) -> float:
        return math.sqrt(2)


def has_caches(of: Training) -> None:
    begun, norm_cache = Begun(of), dict[int, float]()

    @functools.cache
    def norm(epoch: int) -> float:
        return float(of.model.weight.detach().norm())

    @functools.lru_cache(maxsize=4)
    def bias(epoch: int, scale: float = 1.0) -> float:
        return scale * float(of.model.bias.detach().norm())

    @functools.cache
    def root(epoch: int) -> float:
        return math.sqrt(epoch)

    @functools.cache
    def now() -> float:
        return float(of.model.weight.detach().norm())

    of.resume()
    for epoch in range(2):
        for batch in of.loader:
            of.step(batch)
            now.cache_clear()
            if epoch not in norm_cache:
                norm_cache[epoch] = norm(epoch)
            of.set_rate(0.1 / (begun.norm * begun.root + norm(epoch) + bias(epoch, scale=2.0) + root(epoch) + now()))
            of.save("middle")
        of.set_rate(0.1 / norm_cache[epoch])
    of.accelerator.end_training()


@pytest.fixture(autouse=True)
def _ours_alone() -> Iterator[None]:
    yield
    uninstall()


def lost(train: Callable[[Training], None], directory: Path, source: str) -> list[str]:
    """Return the variables that a resume from ``source`` has lost, according to its warning."""
    train(Training(directory, None))
    uninstall()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(Training(directory, source))
    found = [str(w.message) for w in caught if "begins without variables of the script" in str(w.message)]
    assert len(found) <= 1
    named = r"`([\w. ]+)` (?:of (?:[^`]*test_lost_variables.py|Waits|Patience)|over a DataLoader)"
    return re.findall(named, found[0]) if found else []


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("train", "source", "names"),
    [
        (keeps_a_best, "middle", ["total"]),
        (keeps_a_best, "end", ["best"]),
        (keeps_a_factor, "middle", ["factor"]),
        (keeps_an_average, "middle", ["average.shadow"]),
        (keeps_an_average_beside_the_model, "middle", ["average"]),
        (keeps_an_average_that_the_resume_makes_of_other_weights, "middle", ["average.shadow"]),
        (has_an_optimizer_of_its_own, "middle", ["of.other"]),
        (has_an_object_that_is_updated_at_ends, "end", ["patience.best"]),
        (sets_what_it_registers_back_on_a_condition, "middle", ["best"]),
        (has_a_meter, "middle", ["meter.sum", "meter.count"]),
        (has_a_total_of_all_epochs, "end", ["totals.loss.all", "totals.loss.number"]),
        (keeps_metrics_in_a_dictionary, "middle", ["metrics.loss", "metrics.best", "metrics.seen"]),
        (counts_steps_for_its_rate, "middle", ["count"]),
        (counts_steps_for_its_rate, "end", ["count"]),
        (is_a_class_of_its_own, "end", ["self.steps", "self.phase", "self.frozen", "done"]),
        (counts_globally, "middle", ["GLOBAL"]),
        (counts_in_a_closure, "middle", ["count"]),
        (has_iterators, "middle", ["second", "planned", "counted", "by_hand", "stages"]),
        (has_iterators_at_the_end_of_the_first_epoch, "last", ["kept", "before"]),
        (has_iterators_at_the_end_of_the_first_epoch, "function", ["kept", "before"]),
        (has_iterators_at_the_end_of_the_first_epoch, "end", ["kept", "before"]),
        (has_the_last_ones, "middle", ["memory"]),
        (has_slots, "middle", ["slots.best"]),
        (averages_what_was_loaded, "middle", ["average.shadow"]),
        (has_caches, "middle", ["begun.norm", "norm_cache", "norm", "bias"]),
        (registers_what_holds_a_part_of_its_state, "end", ["bad"]),
        (has_generators_of_each_epoch, "middle", ["noise"]),
        (has_loaders_that_are_not_prepared, "middle", ["iteration 1"]),
    ],
)
def test_lost_variables_are_named_at_the_resume(
    train: Callable[[Training], None], source: str, names: list[str], tmp_path: Path
) -> None:
    assert sorted(lost(train, tmp_path, source)) == sorted(names)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("train", "source"),
    [
        (keeps_a_factor, "first"),
        (has_modules_around_the_model, "middle"),
        (restores_its_own, "middle"),
        (restores_its_own, "end"),
        (sets_all_anew, "end"),
        (has_a_meter, "end"),
        (only_tells, "middle"),
        (only_tells, "end"),
        (skips_by_itself, "middle"),
        (has_loaders_that_are_not_prepared, "last"),
        (leaves_out_what_it_had_itself, "middle"),
        (begins_epochs_anew, "end"),
        (has_generators_of_each_epoch, "end"),
        (trains_for_some_steps, "middle"),
        (sets_what_it_registers_back_on_a_condition, "end"),
    ],
)
def test_what_the_script_restores_or_sets_anew_is_not_named(
    train: Callable[[Training], None], source: str, tmp_path: Path
) -> None:
    assert lost(train, tmp_path, source) == []


def test_a_run_that_was_resumed_without_a_word_still_knows_what_a_new_one_begins_with(tmp_path: Path) -> None:
    def train(of: Training, *, restores: bool, name: str) -> None:
        best = math.inf
        of.resume()
        if restores:
            best = 0.01
        for batch in of.loader:
            best = min(best, of.step(batch))
            of.save(name)
        of.set_rate(best)

    train(Training(tmp_path, None), restores=False, name="a")
    uninstall()
    train(Training(tmp_path, "a"), restores=True, name="b")
    assert lost(lambda of: train(of, restores=False, name="c"), tmp_path, "b") == ["best"]


class Unwilling:
    """Raises at every access to an attribute."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


def test_no_variable_ends_a_training_by_being_looked_at(tmp_path: Path) -> None:
    def train(of: Training) -> None:
        unwilling, held = Unwilling(), {"unwilling": Unwilling()}
        of.resume()
        of.accelerator.prepare(lazy := torch.nn.LazyLinear(2))
        for batch in of.loader:
            lazy(batch)
            of.step(batch)
            of.save("middle")
        del unwilling, held

    train(Training(tmp_path, None))
    assert (tmp_path / "middle").is_dir()


def live(*names: str) -> set[str]:
    frame = sys._getframe(1)
    return {name for name in names if is_live(name, frame)}


def test_live_is_what_is_read_before_it_is_written_again() -> None:
    names = "best", "total", "unused", "loss", "number", "found", "never"
    best, total, unused, never = math.inf, 0.0, 0, 0
    found = []
    for number in range(2):
        loss = float(number) + unused
        found.append(live(*names))
        best = min(best, loss)
        if number:
            total += best
        unused = 0
    assert found[0] == {"best", "total", "loss", "number", "found"}
    assert total < best + 1
    never = 1  # noqa: F841


def test_where_a_loop_waits_for_its_next_item_what_comes_after_it_is_not_next() -> None:
    def items(names: tuple[str, ...]) -> Iterator[set[str]]:
        yield live_outside(*names)

    def live_outside(*names: str) -> set[str]:
        frame = sys._getframe(2)
        return {name for name in names if is_live(name, frame)}

    last, kept = 0, 0
    for found in items(("last", "kept")):
        last = len(found) + kept
    assert found == {"kept"}
    assert last == 1


def test_a_look_keeps_nothing_alive_and_takes_nothing_away() -> None:
    class Large:
        pass

    # No assertions in these functions: pytest rewrites them to call locals().
    def script() -> tuple[bool, bool]:
        large = Large()
        is_seen = ("large", large) in variables_of(sys._getframe())
        gone = weakref.ref(large)
        del large
        return is_seen, gone() is None

    assert script() == (True, True)

    def script_that_notes_its_settings(rate: float, epochs: int) -> dict[str, Any]:
        settings = locals()
        model = Large()
        variables_of(sys._getframe())
        del model
        return settings

    found = script_that_notes_its_settings(0.1, 3)
    assert (found["rate"], found["epochs"], "model" in found) == (0.1, 3, False)
