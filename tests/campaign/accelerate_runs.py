"""Trains a case of the campaign with Accelerate: one script, parts of which the case replaces, in one process."""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import signal
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from accelerate_ckpt import attach
from ckpt_core.errors import CheckpointError
from tests.campaign import device
from tests.campaign.data import Items
from tests.campaign.judging import Judgement, Outcome, Point, events_of, judge_points, said_of, sha

F = torch.nn.functional
Env = types.SimpleNamespace

# a batch of -1 means between two epochs, None means after the case's ``half``, in the middle of an epoch
POINTS = (
    Point("middle", (1, 1), (1, 4)),
    Point("last-batch", (1, 5), (2, 2)),
    Point("epoch-end", (1, -1), (2, 2)),
    Point("evaluated", (1, None), (1, 5)),
    Point("early", (0, 3), (0, 5)),
)
KILLED = Point("killed", (1, 2), (1, 5), really=True)


def net() -> torch.nn.Module:
    """Return a small classifier with batch normalisation and dropout."""
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 3)
    )


def adam(model: torch.nn.Module) -> Any:
    """Return the default optimizer of a case."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def cross_entropy(env: Any, batch: Any) -> torch.Tensor:
    """Return the default loss of a case."""
    x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else (batch[0], batch[1])
    return F.cross_entropy(env.model(torch.as_tensor(x).float()), torch.as_tensor(y).long())


def nothing(env: Any) -> None:
    """Do nothing: the default of a case's hooks."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A case: the parts of the script that it replaces.

    Args:
        loader: Makes the training loader.
        accelerator: Arguments of the Accelerator.
        model: Makes the model.
        optimizer: Makes the optimizer, or several.
        schedule: Makes the schedule of an optimizer.
        loss: Computes the loss of a batch.
        begin: Done once, before ``prepare``.
        prepared: Done once, after ``prepare``.
        epoch: Done at each epoch's start.
        batch: Done after each batch.
        half: Done after the fourth batch of each epoch, such as an evaluation.
        end: Done after each epoch.
        last: Done after training.
        script: Loops itself, with variables of its own, given ``env`` and a :class:`_Loop`.
        objects: Objects registered for checkpointing, in addition to the script's counters.
        skips: How a resumed script skips the batches that it had: ``method``, ``continue``, or not at all (empty).
        loops: How it loops: ``for``, ``iterator``, ``progress``.
        steps_schedule: ``step`` or ``epoch``.
        break_engine: Makes the engine do something wrong in a resume.
        needs: Packages that it needs.
        clips: Whether it clips gradients.
        batches: Number of batches in an epoch.
    """

    loader: Callable[[], Any] = lambda: DataLoader(Items(), batch_size=8, shuffle=True)
    accelerator: Callable[[], dict[str, Any]] = dict
    model: Callable[[], torch.nn.Module] = net
    optimizer: Callable[[torch.nn.Module], Any] = adam
    schedule: Callable[[Any], Any] | None = None
    loss: Callable[[Any, Any], torch.Tensor] = cross_entropy
    begin: Callable[[Any], None] = nothing
    prepared: Callable[[Any], None] = nothing
    epoch: Callable[[Any], Any] = nothing
    batch: Callable[[Any], Any] = nothing
    half: Callable[[Any], Any] = nothing
    end: Callable[[Any], Any] = nothing
    last: Callable[[Any], Any] = nothing
    script: Callable[[Any, Any], None] | None = None
    objects: Callable[[Any], list[Any]] = lambda env: []
    skips: str = ""
    loops: str = "for"
    steps_schedule: str = "step"
    break_engine: Callable[[Any], None] | None = None
    needs: tuple[str, ...] = ()
    clips: bool = False
    batches: int = 6


class Progress:
    """The script's own counters."""

    def __init__(self) -> None:
        self.epoch = self.batch = 0

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


@dataclasses.dataclass
class _Run:
    """What this process does."""

    case: Case
    points: Sequence[Point]
    deaths: Sequence[Point]
    directory: Path
    outcome: Outcome = dataclasses.field(default_factory=Outcome)
    caught: Sequence[Any] = ()

    def saves(self, env: Any, epoch: int, batch: int | None) -> None:
        for point in self.points:
            if point.saves == (epoch, batch) and point.name not in self.outcome.marks:
                mark = [len(self.outcome.seen), len(self.outcome.rows), len(self.caught)]
                self.outcome.attributes[point.name] = _of_modules(env)
                env.accelerator.save_state(str(self.directory / "checkpoints" / point.name))
                self.outcome.marks[point.name] = [*mark, len(self.caught)]

    def begins(self, env: Any, batch: Any) -> None:
        for point in self.deaths:
            if point.dies == (env.progress.epoch, env.progress.batch):
                if point.really:
                    os.kill(os.getpid(), signal.SIGKILL)
                self._keep(point)
        if not self.outcome.seen:
            self.outcome.attributes["begun"] = _of_modules(env)
        self.outcome.seen.append([env.progress.epoch, env.progress.batch, sha(batch)])

    def _keep(self, point: Point) -> None:
        saved, copy = self.directory / "checkpoints" / point.name, self.directory.parent / point.name
        if saved.exists() and not copy.exists():
            copy.mkdir()
            shutil.copytree(saved, copy / "checkpoints" / point.name)
            for record in self.directory.glob(".checkpoints.flight*") if point.leaves_records else ():
                shutil.copy(record, copy)


def _of_modules(env: Any) -> dict[str, dict[str, str]]:
    modules = [one for one in env.accelerator.unwrap_model(env.model).modules() if type(one).__module__[:5] == "tests"]
    return {
        "modules": {f"{i} {n}": sha(v) for i, one in enumerate(modules) for n, v in vars(one).items() if n[0] != "_"}
    }


def _batches(env: Any, case: Case, skip: int) -> Iterator[Any]:
    loader = env.loader
    if skip and case.skips == "method":
        loader = env.accelerator.skip_first_batches(loader, skip)
    if case.loops == "for":
        yield from loader
    elif case.loops == "iterator":
        iterator = iter(loader)
        while (batch := next(iterator, None)) is not None:
            yield batch
    elif case.loops == "progress":
        yield from enumerated(loader)


def enumerated(loader: Any) -> Iterator[Any]:
    for _, batch in enumerate(loader):
        yield batch


class _Loop:
    """The loops of a script that has variables of its own."""

    def __init__(self, env: Any, skip: int, saved: Any) -> None:
        self._env, self._skip, self.saved = env, skip, saved

    def epochs(self) -> Iterator[int]:
        while self._env.progress.epoch < 3:
            yield self._env.progress.epoch

    def batches(self) -> Iterator[Any]:
        for batch in self._env.loader:
            _hidden.run.begins(self._env, batch)
            yield batch

    def step(self, batch: Any, before: Callable[[], Any] | None = None) -> float:
        env = self._env
        env.accelerator.backward(loss := cross_entropy(env, batch))
        if before is not None:
            before()
        env.optimizers[0].step()
        env.optimizers[0].zero_grad()
        self.log(float(loss))
        env.progress.batch += 1
        return float(loss)

    def log(self, value: float) -> None:
        _hidden.run.outcome.rows.append([self._env.progress.epoch, self._env.progress.batch, value.hex()])

    def keep(self, values: Any) -> None:
        self._env.progress.kept = values

    def saves(self) -> None:
        epoch, batch = self._env.progress.epoch, self._env.progress.batch - 1
        _note(sys._getframe(1).f_locals, f"{epoch} {batch}")
        _hidden.run.saves(self._env, epoch, batch)

    def epoch_saves(self) -> None:
        _note(sys._getframe(1).f_locals, str(self._env.progress.epoch))
        self._env.progress.epoch, self._env.progress.batch = self._env.progress.epoch + 1, 0
        _hidden.run.saves(self._env, self._env.progress.epoch - 1, -1)


def _note(variables: Mapping[str, Any], place: str) -> None:
    """Note a script's variables after a step or an epoch: a warning is not false if a variable it names differs."""
    noted = _hidden.run.outcome.attributes.setdefault("end", {"variables": {}})["variables"]
    noted.update({f"{name}, {place}": sha(one) for name, one in variables.items() if name not in ("env", "do")})


# in a module of its own, because a resume looks at variables and objects that training changes
_hidden: Any = types.ModuleType("hidden")


def _script(what: str, point: Point | None) -> Any:
    case = _hidden.run.case
    device.begin()
    device.choose_for_accelerate()
    accelerator = Accelerator(cpu=device.IS_HOST, **case.accelerator())
    attach(accelerator, "async" if what == "killed" else "sync", event_log=str(_hidden.run.directory / "events"))
    set_seed(1)
    if what == "resumed":
        torch.randn(5)  # a new process may draw other numbers first
    env = Env(accelerator=accelerator, progress=Progress(), local={}, schedules=[])
    case.begin(env)
    model, loader = case.model(), case.loader()
    if device.DEVICE == "simulated":  # moving a model there gives it new parameters
        model.to(accelerator.device)
    made = case.optimizer(model)
    optimizers = made if isinstance(made, list) else [made]
    schedules = [case.schedule(optimizer) for optimizer in optimizers] if case.schedule is not None else []
    env.model, env.loader, *rest = accelerator.prepare(model, loader, *optimizers, *schedules)
    env.optimizers, env.schedules = rest[: len(optimizers)], rest[len(optimizers) :]
    case.prepared(env)
    for thing in (env.progress, *case.objects(env)):
        accelerator.register_for_checkpointing(thing)
    skip = 0
    if what == "resumed" and point is not None:
        accelerator.load_state(str(_hidden.run.directory / "checkpoints" / point.name))
        if case.break_engine is not None:
            case.break_engine(env)
        skip = env.progress.batch
        if skip == case.batches:  # of a whole epoch: continue with the next, as documented
            env.progress.epoch, env.progress.batch, skip = env.progress.epoch + 1, 0, 0
    progress = env.progress
    if case.script is not None:
        case.script(env, _Loop(env, skip, getattr(progress, "kept", None)))
    while progress.epoch < 3:
        case.epoch(env)
        if case.epoch is nothing:
            env.model.train()
        for number, batch in enumerate(_batches(env, case, skip)):
            if case.skips == "continue" and number < skip:
                continue
            _hidden.run.begins(env, batch)
            with accelerator.accumulate(env.model):
                loss = case.loss(env, batch)
                accelerator.backward(loss)
                if case.clips and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(env.model.parameters(), 0.5)
                for optimizer in env.optimizers:
                    optimizer.step()
                if case.steps_schedule == "step":
                    for schedule in env.schedules:
                        schedule.step()
                for optimizer in env.optimizers:
                    optimizer.zero_grad()
            env.last = float(loss)
            _hidden.run.outcome.rows.append([progress.epoch, progress.batch, env.last.hex()])
            at = progress.epoch, progress.batch
            progress.batch += 1
            case.batch(env)
            if at[1] == 3 and case.half is not nothing:
                case.half(env)
                _hidden.run.saves(env, at[0], None)
            _hidden.run.saves(env, *at)
        skip = 0
        if case.steps_schedule == "epoch":
            for schedule in env.schedules:
                schedule.step()
        progress.epoch, progress.batch = progress.epoch + 1, 0
        case.end(env)
        _hidden.run.saves(env, progress.epoch - 1, -1)
    _hidden.run.outcome.attributes.setdefault("end", {"variables": {"env, end": sha(env.local)}})
    case.last(env)
    _hidden.run.outcome.weights = sha(dict(accelerator.unwrap_model(env.model).state_dict()))
    _hidden.run.outcome.optimizers = sha([optimizer.optimizer.state_dict() for optimizer in env.optimizers])
    _hidden.run.outcome.step = progress.epoch
    accelerator.end_training()


def train(case: Case, points: Sequence[Point], what: str, directory: Path, point: Point | None) -> None:
    """Train, in a process of its own."""
    dies_at = [p for p in points if not p.really] if what == "base" else [point] if what == "killed" and point else []
    _hidden.run = _Run(case, points, dies_at, directory)
    with warnings.catch_warnings(record=True) as _hidden.run.caught:
        warnings.simplefilter("always")
        os.chdir(directory)
        try:
            _script(what, point)
        except CheckpointError as error:
            _hidden.run.outcome.refused = str(error)
        except Exception:
            if what != "resumed":
                raise
            _hidden.run.outcome.crashed = traceback.format_exc()
    outcome = _hidden.run.outcome
    outcome.warned = said_of(_hidden.run.caught)
    outcome.compared = events_of(directory / "events")
    outcome.write(directory / "outcome.json")


def judge(case: Case, directory: Path, points: Sequence[Point] = POINTS) -> dict[str, Judgement]:
    """Return the judgement of the resume from each point that the script passes."""
    return judge_points(functools.partial(train, case, points), points, directory)
