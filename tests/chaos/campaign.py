"""The kill campaign: trainings killed at chosen and at random instants, judged after every kill, resumed, and compared."""

from __future__ import annotations

import collections
import dataclasses
import glob
import hashlib
import itertools
import json
import os
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "crash_demo"))

from records import pair_events, read_lines

from tests.chaos.jobs import Job, Nursery
from tests.chaos.judge import Judge

KEPT = 2  # as in train.py

STARTING = "starting or resuming"
STAGING = "in a save, before its file"
WRITING = "writing"
COMMIT = "committed, not yet announced"
RETENTION = "between commit and removal"
BETWEEN = "between saves"
PHASES = (STARTING, STAGING, WRITING, COMMIT, RETENTION, BETWEEN)
# Aims, and how often each is taken; what a kill really hit is found out afterwards.
AIMS = {STARTING: 2, STAGING: 3, WRITING: 6, COMMIT: 4, RETENTION: 2, BETWEEN: 2}


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a training runs."""

    io: str
    accumulate: int
    devices: int

    @property
    def arguments(self) -> list[str]:
        return ["--io", self.io, "--accumulate", str(self.accumulate), "--devices", str(self.devices)]

    def __str__(self) -> str:
        ranks = f", {self.devices} ranks" if self.devices > 1 else ""
        return f"{self.io}{f', accumulating {self.accumulate}' if self.accumulate > 1 else ''}{ranks}"


SETTINGS = tuple(Setting(io, accumulate, 1) for io in ("async", "sync") for accumulate in (1, 3))
PARALLEL_SETTINGS = tuple(Setting(io, accumulate, 2) for io, accumulate in (("async", 1), ("sync", 3)))


@dataclasses.dataclass(frozen=True)
class Pace:
    """How long things take in a training that nobody kills: what the kills are timed by, in seconds."""

    start: float
    whole: float
    stall: float
    write: float


@dataclasses.dataclass
class Report:
    """What a campaign did and found."""

    seed: int
    aimed: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    hit: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    by_setting: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    runs: int = 0
    verified: int = 0
    orphans: int = 0
    left_over: int = 0
    violations: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    @property
    def kills(self) -> int:
        return sum(self.hit.values())

    def table(self) -> str:
        """The report as text."""
        lines = [f"{'kills':<34}{'aimed at':>9}{'hit':>6}"]
        lines += [f"  {phase:<32}{self.aimed[phase]:>9}{self.hit[phase]:>6}" for phase in PHASES]
        lines += [f"  {'all':<32}{sum(self.aimed.values()):>9}{self.kills:>6}"]
        lines += [f"  {setting:<41}{count:>6}" for setting, count in sorted(self.by_setting.items())]
        lines += [
            f"{'runs resumed to their end and compared':<43}{self.runs:>6}",
            f"{'checkpoints verified':<43}{self.verified:>6}",
            f"{'unfinished files found after a kill':<43}{self.orphans:>6}",
            f"{'checkpoints left over at the end':<43}{self.left_over:>6}",
            f"{'violations':<43}{len(self.violations):>6}",
            f"seed {self.seed}, {self.seconds:.0f} s",
        ]
        return "\n".join(lines)


def outcome(run: Path) -> dict[str, Any]:
    """What a finished run must have in common with one that was never killed: every bit of it."""
    result = json.loads((run / "result.json").read_text())
    for log in sorted(run.glob("steps-rank*.jsonl")):
        # A batch that was repeated after a kill is in the log several times: the last one counts.
        losses = {(step["epoch"], step["batch"]): (step["step"], step["loss"]) for step in read_lines(log)}
        result[log.stem] = hashlib.sha256(repr(sorted(losses.items())).encode()).hexdigest()
    return dict(result)


def measure(run: Path, launched: float, ended: float) -> Pace:
    """Read the pace off the logs of a run that was never killed."""
    saves = [save for save in pair_events(read_lines(run / "events.jsonl")) if save.bytes and save.freed]
    return Pace(
        start=read_lines(run / "steps-rank0.jsonl")[0]["start"] - launched,
        whole=ended - launched,
        stall=statistics.median(save.freed - save.started for save in saves),
        write=statistics.median((save.committed or 0.0) - save.started for save in saves),
    )


def kill_at(job: Job, aim: str, pace: Pace, dice: random.Random) -> bool:
    """Kill the job in, or near, a phase of its work; False when it ended before."""
    if aim == STARTING:
        delay = dice.uniform(0.0, 1.5 * pace.start)
    elif aim == BETWEEN:
        delay = dice.uniform(pace.start, pace.whole)
    else:
        # Some saves later, so that the run gets on. Copies are over at once, so they are aimed at less often.
        file = "step=" if dice.random() < 0.8 else ""
        event = wait_for_event(job, "SaveCommitted" if aim == RETENTION else "SaveStarted", file, dice.randint(0, 3))
        if event is None:
            return False
        path, begun = event["path"], event["time"]
        orphans = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.*")
        if aim == WRITING and not job.wait_until(lambda: bool(glob.glob(orphans)) or published_since(path, begun), 0.0):
            return False
        if aim == COMMIT and not job.wait_until(lambda: published_since(path, begun), 0.0):
            return False
        delay = {
            STAGING: dice.uniform(0.0, min(pace.stall, 0.01)),
            WRITING: dice.uniform(0.0, 0.7 * pace.write),
            COMMIT: 0.0,
            RETENTION: dice.uniform(0.0, 0.001),
        }[aim]
    time.sleep(delay)
    return job.kill()


def wait_for_event(job: Job, name: str, file: str, passed_over: int) -> dict[str, Any] | None:
    """Wait for an event about a file whose name begins so, after ``passed_over`` others; None when the job ended."""
    found: list[dict[str, Any]] = []

    def happened() -> bool:
        new = (event for event in job.new_events() if os.path.basename(event["path"]).startswith(file))
        found.extend(event for event in new if event["event"] == name)
        return len(found) > passed_over

    return found[passed_over] if job.wait_until(happened) else None


def published_since(path: str, moment: float) -> bool:
    """Whether a file got this name after the moment."""
    try:
        return os.stat(path).st_ctime >= moment
    except FileNotFoundError:
        return False


def phase_hit(job: Job, judge: Judge, run: Path) -> str:
    """What the job was doing when it was killed, by what it left behind."""
    steps = [step for step in read_lines(run / "steps-rank0.jsonl") if step["start"] >= job.launched]
    unfinished = [save for save in pair_events(job.events) if save.committed is None]
    if unfinished:
        save = unfinished[0]  # they are carried out in order
        name = os.path.basename(save.path)
        if any(orphan.startswith(f".{name}.") for orphan in judge.orphans):
            return WRITING
        return COMMIT if published_since(save.path, save.started) else STAGING
    if not steps:
        return STARTING
    # What earlier kills left over stays, and is no removal that this one came before.
    return RETENTION if judge.ranked > max(KEPT, judge.ranked_before) else BETWEEN


class Campaign:
    """Runs trainings until enough of them have been killed.

    Args:
        directory: Where the runs live; runs with a violation stay there.
        seed: Where chance comes from. The moment of a kill also depends on the machine, so a seed repeats the plan only.
        say: Told what happens, line by line.
        settings: How the trainings on one process run, in turn.
        kills_per_run: From how many to how many times a run is killed.
    """

    def __init__(
        self,
        directory: Path,
        seed: int,
        say: Callable[[str], None],
        *,
        settings: Sequence[Setting] = SETTINGS,
        kills_per_run: tuple[int, int] = (6, 14),
    ) -> None:
        self.report = Report(seed)
        self._directory = directory
        self._dice = random.Random(seed)
        self._say = say
        self._settings = itertools.cycle(settings)
        self._parallel_settings = itertools.cycle(PARALLEL_SETTINGS)
        self._kills_per_run = kills_per_run
        self._alone: dict[Setting, tuple[Pace, dict[str, Any]]] = {}

    def run(self, kills: int, *, parallel_share: float = 0.1) -> Report:
        """Kill ``kills`` times or a little more: the last run is brought to its end.

        Args:
            kills: Number of kills.
            parallel_share: Share of the runs that train on two ranks.
        """
        began = time.monotonic()
        with Nursery() as nursery:
            while self.report.kills < kills:
                parallel = self._dice.random() < parallel_share
                setting = next(self._parallel_settings if parallel else self._settings)
                most = self._dice.randint(2, 4) if parallel else self._dice.randint(*self._kills_per_run)
                self._one_run(nursery, setting, min(most, kills - self.report.kills))
        self.report.seconds = time.monotonic() - began
        return self.report

    def _one_run(self, nursery: Nursery, setting: Setting, kills: int) -> None:
        pace, expected = self._train_alone(nursery, setting)
        number, before = self.report.runs, len(self.report.violations)
        run = self._new_directory(f"run-{number}")
        arguments = [*setting.arguments, "--keep", self._dice.choice(["newest", "best"])]
        judge = Judge(run, KEPT)
        job = nursery.start(run, arguments)
        for _ in range(kills):
            aim = self._dice.choices(list(AIMS), list(AIMS.values()))[0]
            if not kill_at(job, aim, pace, self._dice):
                break
            problems = judge.look(job.events)
            hit = phase_hit(job, judge, run)
            self.report.aimed[aim] += 1
            self.report.hit[hit] += 1
            self.report.by_setting[str(setting)] += 1
            self.report.orphans += len(judge.orphans)
            self._note(number, setting, problems, hit)
            job = nursery.start(run, [*arguments, "--resume"])
        job.finish()
        problems = judge.look(job.events)
        if judge.orphans:
            problems.append(f"the finished run has unfinished files: {sorted(judge.orphans)}")
        found = outcome(run)
        problems += [f"not bit-exact: {key}" for key in expected if found.get(key) != expected[key]]
        self._note(number, setting, problems, "finished")
        self.report.runs += 1
        self.report.verified += judge.verified
        self.report.left_over += judge.ranked - KEPT
        self._say(
            f"run {number} ({setting}): {self.report.kills} kills, {len(self.report.violations)} violations so far"
        )
        if len(self.report.violations) == before:
            shutil.rmtree(run)

    def _train_alone(self, nursery: Nursery, setting: Setting) -> tuple[Pace, dict[str, Any]]:
        if setting not in self._alone:
            run = self._new_directory(f"alone-{setting.io}-{setting.accumulate}-{setting.devices}")
            job = nursery.start(run, setting.arguments)
            job.finish()
            self._alone[setting] = measure(run, job.launched, time.time()), outcome(run)
        return self._alone[setting]

    def _new_directory(self, name: str) -> Path:
        directory = self._directory / name
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        return directory

    def _note(self, number: int, setting: Setting, problems: list[str], phase: str) -> None:
        for problem in problems:
            violation = f"run {number} ({setting}), {phase}: {problem}"
            self.report.violations.append(violation)
            self._say(f"VIOLATION: {violation}")
