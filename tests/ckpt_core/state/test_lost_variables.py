"""User variables in places of every kind: a run that resumes without one warns about it, and about no other."""

from __future__ import annotations

import array
import collections
import concurrent.futures
import contextvars
import ctypes
import datetime
import decimal
import functools
import gc
import importlib
import io
import itertools
import multiprocessing
import operator
import queue
import random
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torchmetrics import MeanMetric
from tqdm.auto import tqdm

from ckpt_core.state import lost_variables as variables_module
from ckpt_core.state.lost_variables import Variables, Watched

LEVEL: contextvars.ContextVar[float] = contextvars.ContextVar("level", default=1.0)
CRITIC = torch.nn.Linear(3, 1)
NOTES: dict[str, float] = {}
REPLAYS: queue.Queue[float] = queue.Queue()
LINES = io.StringIO()


class Run:
    """One start of a script: the first run records what changes, the second resumes without it."""

    def __init__(self, saved: Any = None, owners: tuple[object, ...] = ()) -> None:
        self.model: Any = torch.nn.Linear(2, 2)
        self.lost: list[str] = []
        self.saved: Any = None
        self.mean: Any = None
        self.owners = owners
        self.data: tuple[object, ...] = ()
        self.is_second = saved is not None
        self.waits = False
        self.logged: list[str] = []
        self.variables = Variables(
            lambda: Watched([self.model], [self], self.owners, self.data, self.waits),
            self.lost.extend,
            self.logged.extend,
        )
        if saved is not None:
            self.variables.resume(saved)

    def begins(self) -> bool:
        """Train on the first batch; return whether the script then changes its variables (only in the first run)."""
        self.variables.handed_out(begins=True)
        self.variables.trains()
        return not self.is_second

    def saves(self) -> None:
        self.saved = self.variables.capture()

    def uses(self, value: Any) -> None:
        """Stand for any use of a value by a training loop."""


class Pair(NamedTuple):
    total: float
    count: int


def in_a_thread(run: Run) -> None:
    asked: queue.Queue[float] = queue.Queue()
    told: queue.Queue[float] = queue.Queue()

    def work() -> None:
        total = 0.0
        while (value := asked.get()) >= 0:
            total += value
            told.put(total)

    thread = threading.Thread(target=work)
    thread.start()
    asked.put(0.0)
    told.get()
    if run.begins():
        asked.put(1.0)
        told.get()
        run.saves()
    asked.put(-1.0)
    thread.join()


def in_a_weak_dictionary(run: Run) -> None:
    moments: Any = weakref.WeakKeyDictionary()
    if run.begins():
        moments[run.model] = 0.9 * moments.get(run.model, 0.0) + 1.0
        run.saves()
    run.uses(moments.get(run.model))


def in_a_context(run: Run) -> None:
    if run.begins():
        LEVEL.set(LEVEL.get() * 0.5)
        run.saves()
    run.uses(LEVEL.get())


def appended(value: float, seen: list[float] = []) -> float:  # noqa: B006 - it is what is tried
    seen.append(value)
    return sum(seen)


def in_a_default(run: Run) -> None:
    if run.begins():
        appended(1.0)
        run.saves()
    run.uses(appended(1.0))


def counted() -> int:
    counted.calls += 1  # type: ignore[attr-defined]
    return counted.calls  # type: ignore[attr-defined,no-any-return]


counted.calls = 0  # type: ignore[attr-defined]


def at_a_function(run: Run) -> None:
    if run.begins():
        counted()
        run.saves()
    run.uses(counted())


class Paced:
    stride = 1.0

    def slow_down(self) -> None:
        self.stride *= 0.5


def in_place_of_a_value_of_the_class(run: Run) -> None:
    paced = Paced()
    if run.begins():
        paced.slow_down()
        run.saves()
    run.uses(paced.stride)


def in_a_scaler(run: Run) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    if run.begins():
        scaler.update(new_scale=4.0)
        run.saves()
    run.uses(scaler.get_scale())


def in_a_model_of_its_own(run: Run) -> None:
    if run.begins():
        with torch.no_grad():
            CRITIC.weight.mul_(2)
        run.saves()
    run.uses(CRITIC.weight)


class Centers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centers", torch.zeros(3, 2))
        self.register_buffer("weights", torch.ones(3))


def in_buffers_of_a_loss(run: Run) -> None:
    loss, constant = Centers(), Centers()
    if run.begins():
        loss.centers.add_(0.1)  # type: ignore[operator]
        run.saves()
    run.uses((loss, constant))


def in_a_parameter(run: Run) -> None:
    extra = {"temperature": torch.nn.Parameter(torch.ones(()))}
    if run.begins():
        with torch.no_grad():
            extra["temperature"].sub_(0.5)
        run.saves()
    run.uses(extra["temperature"])


def in_a_tuple_with_names(run: Run) -> None:
    pair = Pair(0.0, 0)
    for _ in range(run.begins()):
        pair = Pair(pair.total + 1.0, pair.count + 1)
        run.saves()
    run.uses(pair.total / 2)


def in_a_dictionary_that_begins_empty(run: Run) -> None:
    shadow: dict[str, torch.Tensor] = {}
    if run.begins():
        for name, p in run.model.named_parameters():
            shadow.setdefault(name, p.detach().clone()).lerp_(p.detach() + 1, 0.5)
        run.saves()
    run.uses(shadow["weight"] if shadow else None)


def observed(model: torch.nn.Module) -> Callable[[], torch.Tensor]:
    sums = torch.zeros(2)

    def note(module: Any, args: Any, output: torch.Tensor) -> None:
        sums.add_(output.detach().abs().mean(0))

    model.register_forward_hook(note)
    return sums.mean


def in_a_hook(run: Run) -> None:
    run.mean = observed(run.model)
    if run.begins():
        run.model(torch.ones(3, 2))
        run.saves()
    run.uses(run.mean())


class Calls:
    """A callback whose function keeps a variable in its closure."""

    def __init__(self) -> None:
        best = 0.0

        def look(value: float) -> bool:
            nonlocal best
            best, before = max(best, value), best
            return value > before

        self.look = look


def in_a_callback(run: Run) -> None:
    calls = Calls()
    run.owners = (calls,)
    if run.begins():
        calls.look(1.0)
        run.saves()
    run.uses(calls.look(2.0))


def in_an_object_that_is_set_elsewhere(run: Run) -> None:
    held = types.SimpleNamespace(pace=1.0)
    if run.begins():
        operator.setitem(vars(held), "pace", 0.5)  # no source code shows this change
        run.saves()
    run.uses(held.pace)


def in_a_library(make: Callable[[], Any], change: Callable[[Any], object]) -> Callable[[Run], None]:
    def in_an_object_of_a_library(run: Run) -> None:
        kept = make()
        if run.begins():
            change(kept)
            run.saves()
        run.uses(kept)

    return in_an_object_of_a_library


def shared(value: Any) -> None:
    value.get_obj()[1] = 2


def plus_one(value: Any) -> None:
    value.value += 1


def filled_queue(*items: int) -> queue.Queue[int]:
    filled: queue.Queue[int] = queue.Queue()
    for item in items:
        filled.put(item)
    return filled


def vars_of_a_new_class() -> types.MappingProxyType[str, Any]:
    held: dict[str, Any] = {"seen": 1}
    held["add"] = functools.partial(operator.setitem, held, "seen")
    return types.MappingProxyType(held)


OF_LIBRARIES = {
    "sobol": in_a_library(lambda: torch.quasirandom.SobolEngine(1), lambda one: one.draw(2)),
    "seeds": in_a_library(lambda: np.random.SeedSequence(1), lambda one: one.spawn(1)),
    "shared value": in_a_library(lambda: multiprocessing.Value("i", 1), plus_one),
    "shared array": in_a_library(lambda: multiprocessing.Array("d", 3), shared),
    "C value": in_a_library(lambda: ctypes.c_int(1), plus_one),
    "bytes": in_a_library(lambda: bytearray(2), lambda one: one.append(1)),
    "array": in_a_library(lambda: array.array("d", [1.0]), lambda one: one.append(1.0)),
    "chain": in_a_library(lambda: collections.ChainMap({"a": 1}, {}), lambda one: one.update(a=2)),
    "user's dictionary": in_a_library(lambda: collections.UserDict(a=1), lambda one: one.update(a=2)),
    "accumulated": in_a_library(lambda: itertools.accumulate([1, 2, 3]), next),
    "binary file": in_a_library(io.BytesIO, lambda one: one.write(b"1")),
    "text file": in_a_library(io.StringIO, lambda one: one.write("\ud800")),
    "closed file": in_a_library(io.StringIO, lambda one: one.close()),
    "queue": in_a_library(queue.Queue, lambda one: one.put(1)),
    "last first": in_a_library(queue.LifoQueue, lambda one: one.put(1)),
    "smallest first": in_a_library(queue.PriorityQueue, lambda one: one.put(1)),
    "taken": in_a_library(lambda: filled_queue(1, 2), lambda one: one.get()),
    "read-only view": in_a_library(vars_of_a_new_class, lambda one: one["add"](2)),
    "sparse": in_a_library(lambda: torch.eye(2).to_sparse(), lambda one: one.mul_(2)),
    "generator of torch": in_a_library(
        lambda: torch.Generator().manual_seed(3), lambda one: torch.rand(1, generator=one)
    ),
    "generator of NumPy": in_a_library(lambda: np.random.default_rng(3), lambda one: one.random()),
    "old generator of NumPy": in_a_library(lambda: np.random.RandomState(3), lambda one: one.rand()),
    "generator of Python": in_a_library(lambda: random.Random(3), lambda one: one.random()),
}


def in_a_queue(run: Run) -> None:
    for _ in range(run.begins()):
        REPLAYS.put(2.0)
        run.saves()
    run.uses(REPLAYS.qsize())


def in_a_file_in_memory(run: Run) -> None:
    for _ in range(run.begins()):
        LINES.write("2.0")
        run.saves()
    run.uses(LINES.getvalue())


def in_a_number_of_a_library(run: Run) -> None:
    rate = decimal.Decimal(1)
    for _ in range(run.begins()):
        rate = rate * decimal.Decimal("0.5")
        run.saves()
    run.uses(rate)


def in_what_never_changes_itself(begins_with: Any, is_next: Any) -> Callable[[Run], None]:
    def in_another_one(run: Run) -> None:
        window = begins_with
        for _ in range(run.begins()):
            window = is_next
            run.saves()
        run.uses(window)

    return in_another_one


NEVER_CHANGING = {
    "date": in_what_never_changes_itself(datetime.date(2020, 1, 1), datetime.date(2020, 1, 2)),
    "time": in_what_never_changes_itself(datetime.datetime(2020, 1, 1), datetime.datetime(2020, 1, 2)),
    "span": in_what_never_changes_itself(datetime.timedelta(1), datetime.timedelta(2)),
    "range": in_what_never_changes_itself(range(3), range(3, 6)),
    "slice": in_what_never_changes_itself(slice(3), slice(3, 6)),
    "pattern": in_what_never_changes_itself(re.compile("a"), re.compile("b")),
    "path": in_what_never_changes_itself(Path("a"), Path("b")),
}


def slowing() -> Callable[[torch.Tensor], torch.Tensor]:
    n = 0

    def slow(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal n
        n += 1
        return gradient / n

    return slow


def in_a_hook_beside_a_variable_of_that_name(run: Run) -> None:
    run.model.weight.register_hook(slowing())
    for n in range(run.begins()):
        run.model(torch.full((1, 2), float(n))).sum().backward()
        run.saves()


def weak(value: float) -> float:
    return value


def strong(value: float) -> float:
    return 3 * value


def in_a_function_that_is_replaced(run: Run) -> None:
    scale = weak
    if run.begins():
        scale = strong
        run.saves()
    run.uses(scale(2.0))


class Transformed:
    """A data set with a transform."""

    def __init__(self) -> None:
        self.transform = weak


def in_a_transform(run: Run) -> None:
    data = Transformed()
    run.data = (data,)
    if run.begins():
        data.transform = strong
        run.saves()
    run.uses(data.transform(2.0))


def in_a_layer_without_weights(run: Run) -> None:
    run.model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    if run.begins():
        run.model[1] = torch.nn.GELU()
        run.saves()


def what_is_made_when_it_is_needed(run: Run) -> None:
    run.model = torch.nn.LazyLinear(2)
    scale = None
    if run.begins():
        scale = strong
        run.model(torch.ones(2))
        run.saves()
    run.uses(scale)


def what_each_step_chooses(run: Run) -> None:
    chosen = types.SimpleNamespace(scale_of_step=weak)
    for step in range(run.begins()):
        chosen.scale_of_step = strong if step == 0 else weak
        run.saves()
    run.uses(chosen.scale_of_step(2.0))


def what_counts_for_those_who_wait(run: Run) -> None:
    run.waits = True
    best_step = None
    if run.begins():
        best_step = 3
        run.saves()
    run.uses(best_step)


def what_each_step_makes(run: Run) -> None:
    noted = {"pace": 1.0}
    for _ in range(run.begins()):
        noted = {"pace": 2.0}
        run.saves()
    run.uses(noted["pace"])


def what_each_step_sets(run: Run) -> None:
    for _ in range(run.begins()):
        NOTES["loss"] = 2.0
        run.saves()
    run.uses(NOTES.get("loss"))


def what_is_a_memo(run: Run) -> None:
    memo: dict[int, float] = {}
    if run.begins():
        memo.setdefault(1, 2.0)
        run.saves()
    run.uses(memo)


class Score(concurrent.futures.Future[float]):
    """An object of a library's class, which keeps its own state in names with an underscore."""


def what_a_library_keeps(run: Run) -> None:
    score = Score()
    if run.begins():
        score.set_result(2.0)
        run.saves()
    run.uses(score.result() if score.done() else None)


class Replay:
    """A replay buffer that turns over; what it holds when training begins differs in each process."""

    def __init__(self) -> None:
        self.items: list[float] = []
        self.next = 0

    def push(self, item: float) -> None:
        if len(self.items) < 4:
            self.items.append(item)
        else:
            self.items[self.next] = item
        self.next = (self.next + 1) % 4


def in_a_replay_buffer(run: Run) -> None:
    replay = Replay()
    replay.push(random.random())
    if run.begins():
        replay.push(random.random())
        run.saves()
    run.uses(sum(replay.items))


class Patience:
    def __init__(self) -> None:
        self.best = 1.0


class OtherPatience(Patience):
    pass


def in_two_that_are_alike(run: Run) -> None:
    one, other = Patience(), OtherPatience()
    if run.begins():
        for patience in (one, other):
            patience.best = min(patience.best, 0.5)
        run.saves()
    run.uses(one.best + other.best)


def what_is_shown_as_a_bar(run: Run) -> None:
    bar = tqdm(total=4, disable=False, file=io.StringIO())
    if run.begins():
        bar.update(1)
        run.saves()
    run.uses(bar.total)


class Tracker:
    def log(self, values: dict[str, float]) -> None:
        """Log values, as experiment trackers do."""


def what_is_only_logged(run: Run) -> None:
    tracker, total, parts, mean = Tracker(), 0.0, list[float](), MeanMetric()
    if run.begins():
        total += 1.0
        parts.append(total)
        mean.update(1.0)
        run.saves()
    tracker.log({"loss": total, "mean": mean.compute().item()})
    logs = {"parts": sum(parts)}
    tracker.log(logs)


def what_says_which_is_saved(run: Run) -> None:
    tracker, best, steps = Tracker(), 0.0, 0
    if run.begins():
        steps += 1
        best = max(best, 0.5)
        run.saves()
    if steps % 2:
        torch.save({}, io.BytesIO())
    if best < 0.7:
        best = 0.7
        torch.save({}, io.BytesIO())
    tracker.log({"best": best})


class Settings(dict[str, float]):
    """A dictionary whose keys are attributes, too, and that raises ``KeyError`` for others."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


class Forwards:
    """Has every attribute that is asked for."""

    def __init__(self) -> None:
        self.best = 1.0

    def __getattr__(self, name: str) -> None:
        return None


def in_a_dictionary_with_attributes(run: Run) -> None:
    settings = Settings(best=1.0)
    if run.begins():
        settings["best"] = min(settings["best"], 0.5)
        run.saves()
    run.uses(settings["best"])


def in_an_object_with_every_attribute(run: Run) -> None:
    tracked = Forwards()
    if run.begins():
        tracked.best = min(tracked.best, 0.5)
        run.saves()
    run.uses(tracked.best)


@pytest.fixture(autouse=True)
def _as_in_a_new_process() -> Iterator[None]:
    _begin_anew()
    yield
    _begin_anew()


def _begin_anew() -> None:
    LEVEL.set(1.0)
    appended.__defaults__[0].clear()  # type: ignore[index]
    counted.calls = 0  # type: ignore[attr-defined]
    globals()["NOTES"].clear()  # through globals(), so that no source code shows it
    REPLAYS.queue.clear()
    LINES.seek(LINES.truncate(0))
    with torch.no_grad():
        CRITIC.weight.fill_(1.0)


@pytest.mark.sampled(20)
@pytest.mark.parametrize(
    ("script", "name"),
    [
        (in_a_thread, "`total` of work() in"),
        (in_a_weak_dictionary, "`moments` of in_a_weak_dictionary() in"),
        (in_a_context, "`LEVEL` of"),
        (in_a_default, "`seen` of appended() in"),
        (at_a_function, "`calls` of counted() in"),
        (in_place_of_a_value_of_the_class, "`paced.stride` of in_place_of_a_value_of_the_class() in"),
        (in_a_scaler, "`scaler` of in_a_scaler() in"),
        (in_a_model_of_its_own, "`CRITIC` of"),
        (in_buffers_of_a_loss, "`loss` of in_buffers_of_a_loss() in"),
        (in_a_parameter, "`extra.temperature` of in_a_parameter() in"),
        (in_a_tuple_with_names, "`pair."),
        (in_a_dictionary_that_begins_empty, "`shadow` of in_a_dictionary_that_begins_empty() in"),
        (in_a_hook, "`hook0.sums` of Linear"),
        (in_a_callback, "`look.best` of Calls"),
        *((script, "`kept") for script in OF_LIBRARIES.values()),
        *((script, "`window` of") for script in NEVER_CHANGING.values()),
        (in_a_number_of_a_library, "`rate` of in_a_number_of_a_library() in"),
        (in_a_hook_beside_a_variable_of_that_name, "`hook0.n` of Linear"),
        (in_a_queue, "`REPLAYS` of"),
        (in_a_file_in_memory, "`LINES` of"),
        (in_a_function_that_is_replaced, "`scale` of in_a_function_that_is_replaced() in"),
        (in_a_transform, "`transform` of Transformed"),
        (in_a_layer_without_weights, "`classes of its modules` of Sequential"),
        (in_an_object_that_is_set_elsewhere, "`held.pace` of in_an_object_that_is_set_elsewhere() in"),
        (in_a_dictionary_with_attributes, "`settings.best` of in_a_dictionary_with_attributes() in"),
        (in_an_object_with_every_attribute, "`tracked.best` of in_an_object_with_every_attribute() in"),
        (what_says_which_is_saved, "`best` of what_says_which_is_saved() in"),
        (what_is_shown_as_a_bar, None),
        (what_is_made_when_it_is_needed, None),
        (what_each_step_chooses, None),
        (what_counts_for_those_who_wait, None),
        (what_each_step_makes, None),
        (what_each_step_sets, None),
        (what_is_a_memo, None),
        (what_a_library_keeps, None),
    ],
)
def test_what_a_script_keeps_is_named_by_a_run_that_begins_without_it(
    script: Callable[[Run], None], name: str | None
) -> None:
    first = Run()
    script(first)
    assert first.saved["values"] or name is None
    _begin_anew()
    second = Run(first.saved)
    script(second)
    assert [one for one in second.lost if name is None or not one.startswith(name)] == []
    assert bool(second.lost) == (name is not None)


@pytest.mark.parametrize(
    ("script", "names", "logged"),
    [
        (in_a_replay_buffer, ["replay.items", "replay.next"], []),
        (in_two_that_are_alike, ["one.best", "other.best"], []),
        (what_is_only_logged, [], ["mean", "parts", "total"]),
    ],
)
def test_all_is_named_that_is_lost_and_what_is_only_logged_apart(
    script: Callable[[Run], None], names: list[str], logged: list[str]
) -> None:
    first = Run()
    script(first)
    second = Run(first.saved)
    script(second)
    found = [sorted(one.split("`")[1] for one in some) for some in (second.lost, second.logged)]
    assert found == [names, logged]


PACE = """
scale = 1.0
rate = 1.0

def bump():
    global scale
    scale *= 0.5
"""
WITH_PACE = """
import pace

def main(run):
    if run.begins():
        pace.bump()
        pace.rate *= 0.5
        run.saves()
    run.uses(pace.scale * pace.rate)
"""


def test_globals_that_are_used_through_their_module_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pace.py").write_text(PACE)
    (tmp_path / "with_pace.py").write_text(WITH_PACE)
    monkeypatch.syspath_prepend(tmp_path)
    saved, runs = None, []
    for _ in range(2):
        for name in ("pace", "with_pace"):
            sys.modules.pop(name, None)
        variables_module._modules_from.cache_clear()
        runs.append(Run(saved))
        importlib.import_module("with_pace").main(runs[-1])
        saved = runs[-1].saved
    assert sorted(runs[1].lost) == ["`rate` of pace.py", "`scale` of pace.py"]


class Refuses(float):
    """A number that raises however it is looked at."""

    def __repr__(self) -> str:
        raise ValueError("no unit")

    __str__ = __hash__ = __eq__ = __bool__ = __format__ = __repr__  # type: ignore[assignment]


def beside_what_refuses(run: Run) -> None:
    refuses, several, best = Refuses(1), {"a": Refuses(2)}, 1.0
    if run.begins():
        best = 0.5
        run.saves()
    run.uses(best)
    run.uses((refuses, several))


def test_what_cannot_be_looked_at_is_left_out() -> None:
    first = Run()
    beside_what_refuses(first)
    second = Run(first.saved)
    beside_what_refuses(second)
    assert [one.partition(" of ")[0] for one in second.lost] == ["`best`"]


def test_no_source_is_read_where_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    of = variables_module
    read: list[object] = []
    monkeypatch.setattr(of, "_source_of", lambda *held: read.append(held))
    by_hooks, back = functools.partial(of.are_set_by_hooks, but=()), functools.partial(of.are_set_back, but=())
    assert [ask([]) for ask in (of.are_kept, of.are_made_once, of.setters_of, by_hooks, back)] == [[]] * 5
    assert read == []


def test_no_training_ends_because_of_a_look() -> None:
    def fails() -> Watched:
        raise ZeroDivisionError

    variables = Variables(fails, lambda names: None, lambda names: None)
    variables.handed_out(begins=True)
    variables.trains()
    assert variables.capture() == {}
    variables.resume({"values": {"a": []}})
    variables.handed_out(begins=True)
    variables.trains()
    assert variables.capture() == {}


def test_a_look_at_a_large_program_stays_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType(__name__)
    module.__file__ = __file__
    vars(module).update({f"values_{number}": {str(key): float(key) for key in range(60)} for number in range(500)})
    monkeypatch.setattr(variables_module, "_user_modules", lambda *_: [(module, set(), [])])
    run = Run()
    beside_much(run)
    assert 256 < len(run.variables._first) < 400
    assert "`mine` of beside_much() in test_lost_variables.py" in run.variables._first


def beside_much(run: Run) -> None:
    mine = 1.0
    run.begins()
    run.uses(mine)


def test_where_nothing_is_noted_a_checkpoint_depends_on_no_earlier_start() -> None:
    once, twice = Run(), Run()
    for run, epochs in ((once, 1), (twice, 3)):
        for _ in range(epochs):
            run.begins()
        run.saves()
    assert once.saved == twice.saved == {"values": {}, "between": False, "ends": False}


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


def uses_up(others: list[Any], keeps: str = "") -> list[bool]:
    found, kept = [], {}
    for number in range(2):
        holder = Holder(object())
        value = holder.value
        if keeps == "a dictionary":
            kept[number] = value
        if keeps == "an attribute":
            holder.other = Holder([(value,)])  # type: ignore[attr-defined]
        others.append(value)
        found.append(variables_module.is_done_with(holder, "value", others=1))
    return found


def closes_over(others: list[Any]) -> list[bool]:
    holder = Holder(object())
    value = holder.value
    others += [value, lambda: value]
    return [variables_module.is_done_with(holder, "value", others=1)]


def in_a_generator(others: list[Any], keeps: str = "") -> list[bool]:
    return list(_runs_as_a_generator(others, keeps))


def _runs_as_a_generator(others: list[Any], keeps: str) -> Iterator[bool]:
    kept = {}
    for number in range(2):
        holder = Holder(object())
        value = holder.value
        if keeps == "a dictionary":
            kept[number] = value
        others.append(value)
        yield variables_module.is_done_with(holder, "value", others=1)


def for_a_generator(others: list[Any], keeps: str = "") -> list[bool]:
    found, kept = [], {}
    for number in range(2):
        holder = Holder(object())
        waits = _hands_out(holder.value, others)
        next(waits)
        if keeps == "a dictionary":
            kept[number] = holder.value
        found.append(variables_module.is_done_with(holder, "value", others=1))
        found.append(variables_module.is_done_with(holder, "value", others=1))
    return found


def _hands_out(value: Any, others: list[Any]) -> Iterator[None]:
    others.append(value)
    yield


def reads_again(others: list[Any]) -> list[bool]:
    found: list[bool] = []
    value, holder = None, Holder(object())
    for _ in range(2):
        if value is None:
            value = holder.value
            others.append(value)
        found.append(variables_module.is_done_with(holder, "value", others=1))
    return found


@pytest.mark.parametrize(
    ("use", "is_done"),
    [
        (uses_up, True),
        (functools.partial(uses_up, keeps="a dictionary"), False),
        (functools.partial(uses_up, keeps="an attribute"), False),
        (in_a_generator, True),
        (functools.partial(in_a_generator, keeps="a dictionary"), False),
        (for_a_generator, True),
        (functools.partial(for_a_generator, keeps="a dictionary"), False),
        (closes_over, False),
        (reads_again, False),
    ],
)
def test_a_script_is_done_with_what_only_its_variables_have(
    use: Callable[[list[Any]], list[bool]], is_done: bool
) -> None:
    dead = weakref.proxy(Holder(1))
    assert {*use([])} == {is_done}
    with pytest.raises(ReferenceError):
        str(dead.value)


def test_no_collection_runs_while_frames_of_other_threads_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.enable()
    states, current = [], sys._current_frames
    monkeypatch.setattr(sys, "_current_frames", lambda: states.append(gc.isenabled()) or current())
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        release = threading.Event()
        waits = pool.submit(release.wait)
        variables_module._frames_elsewhere()
        release.set()
        assert waits.result()
    assert states == [False] and gc.isenabled()
