"""What the source of a script says about its variables: which ones stay, are reset, or decide anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpt_core.state import variable_use
from ckpt_core.state.variable_use import Source, mark

SCRIPT = """
import math

TOTAL = 0
SEEN = []

class Meter:
    best: float = math.inf

    def __init__(self):
        self.sum, self.count, self.shown, self.last, self.phase = 0.0, 0, 0, 0.0, "warm"
        self.history = []
        self.reset_all()

    def reset(self):
        self.sum = 0.0

    def reset_all(self):
        self.count = 0

    def update(self, value):
        self.sum += value
        self.count = self.count + 1
        self.shown += 1
        self.last = value
        self.history.append(value)
        if value < self.best:
            self.best = value
        mean = self.sum / self.count
        print(f"{self.shown}: {mean}", self.history)
        writer.add_scalar("mean", self.sum, self.shown)

    def cool(self):
        self.phase = "cold"

def train(optimizer, batches, limit, meter):
    global TOTAL
    done, steps, bad, stage, noted = 0, 0, 0, 0, {}
    while done < limit:
        meter.reset()
        for batch in batches:
            done += 1
            steps += 1
            TOTAL += 1
            bad = 0 if meter.last < meter.best else bad + 1
            SEEN.append(batch)
            noted["loss"] = meter.last
            noted["sum"] = noted.get("sum", 0) + 1
            if steps == 7:
                stage = 1
            if steps % 10 == 0:
                print(steps, TOTAL)
                save(f"step_{steps}")
            if bad > 3:
                break
        for group in optimizer.param_groups:
            group["lr"] = 0.1 ** stage
        if meter.phase == "cold" and noted["sum"]:
            optimizer.step()
    return SEEN

class Heat:
    @property
    def temperature(self):
        return self._temperature

    @temperature.setter
    def temperature(self, value):
        self._temperature = max(0.1, value)

    def set_level(self, level):
        limited = min(level, 9)
        self._level = limited

    def note(self, loss):
        self._noted = loss

    def cool(self, loss):
        self.temperature = self.temperature * 0.9
        self.set_level(self._level / 2)
        self.note(loss)
"""
TRAIN = 36  # the line of train


@pytest.fixture
def source(tmp_path: Path) -> Source:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    assert SCRIPT.splitlines()[TRAIN - 1].startswith("def train")
    return Source([str(path)], [(str(path), "train", TRAIN)])


def of_train(name: str) -> str:
    return f"train:{TRAIN}:{name}"


@pytest.mark.parametrize(
    ("name", "value", "decides"),
    [
        (of_train("done"), 3, False),  # only says when to end
        (of_train("bad"), 3, True),  # says when to end, too, but is reset
        (of_train("steps"), 3, True),  # decides stage
        (of_train("stage"), 1, True),
        (of_train("noted[loss]"), 0.5, False),
        (of_train("noted[sum]"), 2, True),
        (":TOTAL", 3, False),
        (":SEEN", [1], False),  # only returned, to be looked at
        (".sum", 0.5, False),  # only its mean is printed
        (".shown", 3, False),
        (".last", 0.5, True),  # decides bad
        (".phase", "cold", True),
        (".history", [0.5], False),
        (".unknown", 3, True),
    ],
)
def test_what_decides(source: Source, name: str, value: Any, decides: bool) -> None:
    assert source.decides(name, counts=type(value) is int, holds=isinstance(value, list)) == decides


@pytest.mark.parametrize(
    ("name", "value", "keeps"),
    [
        (".sum", 0.5, True),
        (".count", 3, True),
        (".last", 0.5, False),
        (".best", 0.5, True),
        (".phase", "cold", True),
        (of_train("noted[loss]"), 0.5, False),
        (of_train("noted[sum]"), 2, True),
        (of_train("noted"), {}, True),  # not created by a step: its items, which are set in other places, stay
        ("._temperature", 0.5, True),  # through its property
        ("._level", 0.5, True),  # through a method that it is passed to
        ("._noted", 0.5, False),
        (".unknown", 3, True),
    ],
)
def test_what_keeps_something_of_what_was_there(source: Source, name: str, value: Any, keeps: bool) -> None:
    assert source.keeps(name, value) == keeps


def test_what_is_set_back(source: Source) -> None:
    assert source.begins_anew(".sum", mark(0.0))
    assert not source.begins_anew(".sum", mark(1.0))
    assert not source.begins_anew(".count", mark(0))  # reset only when the object is made
    assert not source.begins_anew(".best", mark(0.5))  # set only if the value is better


RECORDERS = """
class Recorder:
    def __init__(self):
        self.losses: list[float] = []
        self.total, self.factor, self.scale, self.unread = 0.0, 1.0, 1.0, 0

    def add(self, step, loss):
        while len(self.losses) <= step:
            self.losses.append(0.0)
        self.total += loss - self.losses[step]
        self.losses[step] = loss

    @property
    def average(self):
        count = len(self.losses)
        if count == 0:
            return 0.0
        return self.total / count

    @property
    def rate(self):
        return self.factor * self.scale

    @property
    def num_samples(self):
        return self.unread + 1

class Window:
    def __init__(self):
        self.values, self.queue, self.limit = [], [], 3

    def add(self, value):
        self.values.append(value)
        if len(self.values) > 100:
            self.values.pop(0)
        while len(self.queue) < self.limit:
            self.queue.append(next(self.batches))
        print(self.values)

def train(recorder, optimizer, loss):
    recorder.factor += 1
    recorder.unread += 1
    average = recorder.average
    logs = {"average": average}
    accelerator.log(logs)
    optimizer.lr = recorder.rate
"""


@pytest.mark.parametrize(
    ("name", "value", "decides", "is_logged"),
    [
        (".losses", [0.5], False, True),
        (".total", 0.5, False, True),  # through a property
        (".factor", 2.0, True, False),  # through a property that decides
        (".unread", 1.0, True, False),  # through a property that no code is seen to read
        (".values", [0.5], False, False),
        (".limit", 2.0, True, False),  # how many batches are read
    ],
)
def test_what_properties_and_lengths_of_containers_decide(
    tmp_path: Path, name: str, value: Any, decides: bool, is_logged: bool
) -> None:
    (tmp_path / "recorders.py").write_text(RECORDERS)
    source = Source([str(tmp_path / "recorders.py")])
    assert source.decides(name, holds=isinstance(value, list)) == decides
    assert source.is_logged(name) == is_logged


MADE = """
SEED = None

class Grid:
    def __init__(self):
        self.points = self.first = self.mean = self.best = self.size = None

    def of(self, x):
        global SEED
        if self.points is None:
            self.points = make(x)
        if not hasattr(self, "weights"):
            self.weights = [1.0, 2.0]
        if SEED is None:
            SEED = 3
        if self.mean is None:
            self.mean = x
        else:
            self.mean = 0.9 * self.mean + 0.1 * x
        if self.first is None:
            self.first = x
        self.first += 1
        if self.best is None or x > self.best:
            self.best = x
        if x is None:
            self.size = 2
        return self.points

    def forget(self):
        self.points = None
"""


def test_what_is_made_where_there_is_nothing_yet(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text(MADE)
    source = Source([str(tmp_path / "made.py")])
    made_once = {".points", ".weights", ":SEED"}
    names = [*made_once, ".mean", ".first", ".best", ".size", ".unknown"]
    assert {name for name in names if source.is_made_once(name)} == made_once


def test_where_no_source_is_everything_matters(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def (")
    source = Source([str(tmp_path / "broken.py"), str(tmp_path / "none.py")])
    assert source.decides(".sum")
    assert source.keeps(".sum", 0.5)
    assert source.names_of("meter.sum", None)[-1] == ".sum"


def test_a_file_is_read_again_only_where_something_else_of_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves query the source from several places, and reading it takes as long as a step."""
    script, helpers = tmp_path / "script.py", tmp_path / "helpers.py"
    script.write_text("def train():\n    global total\n    total += 1\n\ndef check():\n    pass\n")
    helpers.write_text("class Meter:\n    def reset(self):\n        self.sum = 0\n")
    files, reads, read = [str(helpers), str(script)], [], variable_use._Reader.read

    def count(self: Any, tree: Any, running: Any) -> None:
        reads.append([node.name for node in tree.body])
        read(self, tree, running)

    monkeypatch.setattr(variable_use._Reader, "read", count)
    for running in [("train", 1)], [("check", 5)], [("train", 1)]:
        source = Source(files, [(str(script), *one) for one in running])
        assert source.set_back_by(".sum", 1, mark(0)) == {"reset"}
        assert source.keeps(":total", 1)
    assert reads == [["Meter"], ["train", "check"], ["train", "check"]]


def test_a_value_is_set_by_all_whose_steps_call_what_sets_it(tmp_path: Path) -> None:
    (tmp_path / "helped.py").write_text(
        """
class Model:
    def on_train_batch_end(self):
        if self.trainer.global_step % 5 == 0:
            self.anneal()
        if self.is_late():
            self.slow_down()
        other.shrink()
        self.lamp.shine(self.trainer.step)
        if self.trainer.global_step < 100:
            self.reset()
        else:
            self.warm()

    def reset(self):
        self.__init__()

    def warm(self):
        self.warmth = self.trainer.step / 10

    def anneal(self):
        self.cool()

    def cool(self):
        self.heat = self.trainer.step / 10
        self.anneal()

    def slow_down(self):
        self.speed = self.trainer.step / 10

    def shrink(self):
        self.size = self.trainer.step / 10

class Lamp:
    def shine(self, step):
        self.light = step / 10

class Other:
    def __init__(self):
        self.received = 0
"""
    )
    source = Source([str(tmp_path / "helped.py")])
    assert source.set_in(".heat") == {"on_train_batch_end", "anneal", "cool"}
    assert source.set_in(".speed") == {"slow_down"}
    assert source.set_in(".size") == {"shrink"}
    assert source.set_in(".light") == {"on_train_batch_end", "shine"}
    assert source.set_in(".warmth") == {"on_train_batch_end", "warm"}
    assert source.set_in(".received") == {"__init__"}


def test_what_is_put_aside_is_read_after_it_was_set(tmp_path: Path) -> None:
    (tmp_path / "averages.py").write_text(
        """
class Average:
    def __init__(self):
        self.aside, self.tried, self.used, self.part, self.early = [], None, [], [], None

    def store(self, parameters):
        self.aside = [p.clone() for p in parameters]
        if self.is_on:
            self.part = list(parameters)

    def restore(self, parameters):
        for own, p in zip(self.aside, parameters):
            p.copy_(own)
        self.check(self.part)

    def use(self, parameters):
        self.used = list(parameters)

    def read(self):
        return self.used

class Model:
    def scope(self):
        if self.on:
            self.average.store(self.parameters())
        try:
            yield
        finally:
            if self.on:
                self.average.restore(self.parameters())

    def step(self):
        self.average.use(self.parameters())

    def other_step(self):
        return self.average.read()

class Swaps:
    def on_validation_start(self):
        if self.average is None:
            return
        self.tried, self.early = self.average.copy(), self.average.early
        self.ahead = 1

    def on_validation_end(self):
        self.last = self.ahead
        if self.average is None:
            return
        self.load(self.tried)

    def on_train_epoch_start(self):
        self.load(self.early)
        self.show(self.kept)

    def on_train_epoch_end(self):
        self.kept = self.average.copy()

def train(model, state):
    state.best = model.average.copy()
    for batch in model.batches:
        model.load(state.best)
"""
    )
    path = str(tmp_path / "averages.py")
    source = Source([path])
    found = {
        name: source.is_put_aside(f".{name}")
        for name in ("aside", "tried", "used", "part", "early", "ahead", "kept", "best", "nowhere")
    }
    assert found == dict.fromkeys(found, False) | {"aside": True, "tried": True, "best": False}
    assert not Source([path], [(path, "train", 58)]).is_put_aside(".best")


def test_what_may_not_have_been_set_is_not_put_aside(tmp_path: Path) -> None:
    (tmp_path / "perhaps.py").write_text(
        """
class Model(Base):
    def training_step(self, batch):
        try:
            self.tried = solve(batch)
        except ValueError:
            pass
        with contextlib.suppress(ValueError):
            self.suppressed = solve(batch)
        match batch:
            case [_]:
                self.matched = solve(batch)
        batch.late and self.fit(batch)
        self.fit_one() if batch.one else None
        self.handed = solve(batch)
        self.surely = solve(batch)
        return self.use(batch) + self.warm(0)

    def fit(self, batch):
        self.fitted = solve(batch)

    def fit_one(self):
        self.chosen = 1

    def use(self, batch):
        return self.tried, self.suppressed, self.matched, self.fitted, self.chosen, self.surely

    def configure_optimizers(self):
        return LambdaLR(self.optimizer, self.warm)

    def warm(self, step):
        return self.handed

    def early(self, batch):
        if batch:
            pass
        else:
            self.returned = solve(batch)
            return None
        return self.used_late()

    def used_late(self):
        return self.returned

    def forward(self, batch):
        self.of_base = self.of_base + batch
        return self.of_base

class Below(Model):
    def forward(self, batch):
        self.of_base = 1
        return super().forward(batch)
"""
    )
    source = Source([str(tmp_path / "perhaps.py")])
    names = ("tried", "suppressed", "matched", "fitted", "chosen", "handed", "returned", "of_base", "surely")
    assert [name for name in names if source.is_put_aside(f".{name}")] == ["surely"]


def test_what_is_taken_from_elsewhere_does_not_come_of_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "taken.py").write_text(
        """
class Model:
    def on_train_start(self):
        self.last, self.count = 0, 0

    def on_train_batch_end(self):
        if self.trainer.global_step > self.last:
            self.update()
        self.last = self.trainer.global_step
        self.count = self.count + self.trainer.world_size
        self.mean = 0.9 * self.mean + loss
        if self.is_late:
            self.late = self.trainer.global_step
        self.twice = self.trainer.global_step

    def update(self):
        self.twice = self.twice + self.trainer.world_size
"""
    )
    source = Source([str(tmp_path / "taken.py")])
    assert source.taken_in(".last") == {"on_train_batch_end"}
    assert not any(source.taken_in(f".{name}") for name in ("count", "mean", "late", "twice"))


def test_what_is_given_to_a_change_in_place_decides(tmp_path: Path) -> None:
    (tmp_path / "clips.py").write_text(
        """
class Model:
    def __init__(self):
        self.clip, self.norms, self.shown = 1.0, [], 0.0

    def configure_gradient_clipping(self, optimizer):
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), self.clip)
        self.norms.append(float(norm))
        self.clip = sum(self.norms[-5:]) / 5
        self.shown = norm + self.shown
        print(self.shown)
"""
    )
    source = Source([str(tmp_path / "clips.py")])
    assert source.decides(".clip")
    assert source.decides(".norms", holds=True)
    assert not source.decides(".shown")
