"""The kill campaign: kills trainings at chosen and random instants, judges their checkpoints, resumes and compares."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import random
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.chaos.cells import LAUNCH, LIGHTNING, LOCAL, STORES, Setting
from tests.chaos.jobs import ROOT, Job, Launched, Nursery
from tests.chaos.judge import Judge
from tests.chaos.kills import AIMS, PHASES, Pace, kill_at, measure, phase_hit, read_lines
from tests.chaos.places import LocalPlace, Place, StorePlace
from tests.chaos.training import KEPT

ACCELERATE_SCRIPT = ROOT / "tests" / "chaos" / "train_accelerate.py"
COMMIT_TIMEOUT_SECONDS = 20  # after which the other ranks give up when one was killed


@dataclasses.dataclass
class Report:
    """What a campaign did and found; reports of its parts can be added."""

    seed: int
    aimed: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    hit: collections.Counter[tuple[str, str, str]] = dataclasses.field(default_factory=collections.Counter)
    runs: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    verified: int = 0
    unfinished: int = 0
    left_over: int = 0
    unfinished_at_end: int = 0
    never_pruned: int = 0
    violations: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    @property
    def kills(self) -> int:
        return sum(self.hit.values())

    def add(self, other: Report) -> None:
        """Add what another part of the campaign found, except its time."""
        for field in dataclasses.fields(self):
            if field.name not in ("seed", "seconds"):
                mine, more = getattr(self, field.name), getattr(other, field.name)
                setattr(self, field.name, mine + more)

    def table(self) -> str:
        """Return the report as text."""
        cells = sorted({cell for cell, _, _ in self.hit})
        lines = [f"{'kills':<43}{'aimed at':>9}" + "".join(f"{f'hit, {store}':>12}" for store in STORES)]
        for phase in PHASES:
            hits = [self._count(phase=phase, store=store) for store in STORES]
            lines.append(f"  {phase:<41}{self.aimed[phase]:>9}" + "".join(f"{count:>12}" for count in hits))
        every = "".join(f"{self._count(store=store):>12}" for store in STORES)
        lines += [f"  {'all':<41}{sum(self.aimed.values()):>9}{every}", ""]
        lines += [
            f"{'':<31}" + "".join(f"{word:>11}" for word in (*(_short(phase) for phase in PHASES), "kills", "runs"))
        ]
        for cell in cells:
            counts = [self._count(cell=cell, phase=phase) for phase in PHASES]
            counts += [self._count(cell=cell), self.runs[cell]]
            lines.append(f"  {cell:<29}" + "".join(f"{count:>11}" for count in counts))
        lines += [
            "",
            f"{'runs resumed to their end and compared':<52}{self.runs.total():>6}",
            f"{'checkpoints verified':<52}{self.verified:>6}",
            f"{'unfinished files and objects found after a kill':<52}{self.unfinished:>6}",
            f"{'unfinished objects left in a store at the end':<52}{self.unfinished_at_end:>6}",
            f"{'... and after pruning':<52}{self.never_pruned:>6}",
            f"{'checkpoints left over at the end':<52}{self.left_over:>6}",
            f"{'violations':<52}{len(self.violations):>6}",
            f"seed {self.seed}, {self.kills} kills in {self.seconds:.0f} s",
        ]
        return "\n".join(lines)

    def _count(self, *, cell: str = "", store: str = "", phase: str = "") -> int:
        return sum(
            count
            for (of_cell, of_store, of_phase), count in self.hit.items()
            if cell in ("", of_cell) and store in ("", of_store) and phase in ("", of_phase)
        )


def _short(phase: str) -> str:
    words = {"in a save, nothing of it in sight": "staging", "writing or uploading": "writing"}
    words |= {"committed, not yet announced": "committed", "between commit and removal": "retention"}
    return words.get(phase, phase.removesuffix(" saves"))


def outcome(run: Path) -> dict[str, Any]:
    """Return what a finished run must share, bit for bit, with a run that was never killed."""
    result = json.loads((run / "result.json").read_text())
    for log in sorted(run.glob("steps-rank*.jsonl")):
        # A batch that was repeated after a kill is in the log several times: the last one counts.
        losses = {(step["epoch"], step["batch"]): (step["step"], step["loss"]) for step in read_lines(log)}
        result[log.stem] = hashlib.sha256(repr(sorted(losses.items())).encode()).hexdigest()
    return dict(result)


class Campaign:
    """Kills trainings of one setting after the other, with a nursery of its own.

    Args:
        directory: Where the runs live; runs with a violation stay there.
        seed: Seed of the random choices. The moment of a kill also depends on the machine, so a seed repeats only the
            plan.
        say: Called with each line of progress.
        store: URL of a bucket and ``storage_options``, for settings on S3.
        kills_per_run: Fewest and most kills of a run.
    """

    def __init__(
        self,
        directory: Path,
        seed: int,
        say: Callable[[str], None],
        *,
        store: tuple[str, Mapping[str, Any]] | None = None,
        kills_per_run: tuple[int, int] = (6, 14),
    ) -> None:
        self._directory = directory
        self._seed = seed
        self.say = say
        self._store = store
        self._kills_per_run = kills_per_run
        self._nursery: Nursery | None = None

    def close(self) -> None:
        """End the nursery."""
        if self._nursery is not None:
            self._nursery.close()

    def __enter__(self) -> Campaign:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, setting: Setting, kills: int) -> Report:
        """Kill trainings of a setting ``kills`` times, and bring each of them to its end."""
        report = Report(self._seed)
        dice = random.Random(f"{self._seed} {setting}")
        began = time.monotonic()
        pace, expected = self._train_alone(setting)
        fruitless = 0
        while report.kills < kills and fruitless < 3:
            most = 2 if setting.framework == LAUNCH else dice.randint(*self._kills_per_run)
            before = report.kills
            run = _Run(self, setting, dice, report, self._new_place(setting, report.runs.total()))
            run.carry_out(min(most, kills - report.kills), pace, expected)
            fruitless = 0 if report.kills > before else fruitless + 1
        report.seconds = time.monotonic() - began
        self.say(
            f"{setting}: {report.kills} kills, {len(report.violations)} violations, {report.seconds:.0f} s "
            f"(start {pace.start:.2f} s, whole {pace.whole:.1f} s, save {pace.write:.3f} s)"
        )
        return report

    def start(self, setting: Setting, run: Path, place: Place, keep: str, *, resume: bool) -> Job:
        """Start a training."""
        arguments = ["--output", str(run), "--root", place.root, *setting.arguments, *(["--resume"] if resume else [])]
        if setting.framework == LIGHTNING:
            arguments += ["--keep", keep, "--storage-options", json.dumps(place.options)]
        else:
            ours = ["--strategy", setting.strategy, "--event_log", str(run / "events.jsonl")]
            ours += ["--commit_timeout", str(COMMIT_TIMEOUT_SECONDS)]
            ours += ["--storage_options", json.dumps(place.options)] if place.options is not None else []
            arguments = [*ours, str(ACCELERATE_SCRIPT), *arguments]
        if setting.framework == LAUNCH:
            return Launched.start(run, setting.ranks, arguments)
        if self._nursery is None:
            self._nursery = Nursery()
        return self._nursery.start(run, setting.framework, setting.ranks, arguments)

    def _train_alone(self, setting: Setting) -> tuple[Pace, dict[str, Any]]:
        run, place = self._new_place(setting, "alone")
        job = self.start(setting, run, place, "newest", resume=False)
        job.finish()
        found = measure(run, job.launched, time.time()), outcome(run)
        forget(run, place)
        return found

    def _new_place(self, setting: Setting, number: object) -> tuple[Path, Place]:
        name = f"{setting}-{number}".replace(", ", "-").replace(" ", "-")
        run = self._directory / name
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir(parents=True)
        if setting.store == LOCAL:
            return run, LocalPlace(run)
        if self._store is None:
            raise ValueError(f"{setting} needs a store")
        bucket, options = self._store
        return run, StorePlace(f"{bucket}/{name}", options)


class _Run:
    """One training, from its start through its kills to its end."""

    def __init__(
        self,
        campaign: Campaign,
        setting: Setting,
        dice: random.Random,
        report: Report,
        place: tuple[Path, Place],
    ) -> None:
        self._campaign = campaign
        self._setting = setting
        self._dice = dice
        self._report = report
        self._run, self._place = place
        self._judge = Judge(self._run, self._place, KEPT * (not setting.same_name), setting.never_missing)
        self._keep = dice.choice(["newest", "best"])
        self._sound = True

    def carry_out(self, kills: int, pace: Pace, expected: dict[str, Any]) -> None:
        try:
            job = self._start(resume=False)
            job = self._kill(job, kills, pace)
            job.finish()
        except (RuntimeError, TimeoutError) as error:
            self._note([str(error)], "a training that nobody killed")
        else:
            self._note([*self._look(job), *self._differences(expected, job)], "finished")
            self._prune()
        report, judge = self._report, self._judge
        report.runs[self._setting.cell] += 1
        report.verified += judge.verified
        report.left_over += max(0, judge.ranked - KEPT)
        if self._sound:
            forget(self._run, self._place)

    def _kill(self, job: Job, kills: int, pace: Pace) -> Job:
        """Kill and resume; return the job that is to run to its end."""
        setting, report = self._setting, self._report
        for number in range(kills):
            aim = self._dice.choices(list(AIMS), list(AIMS.values()))[0]
            if not kill_at(job, aim, pace, self._place, setting.ranks, self._dice):
                return job
            time.sleep(self._place.settle_seconds)
            problems = self._look(job)
            hit = phase_hit(job, self._judge, self._run, resumed=number > 0)
            report.aimed[aim] += 1
            report.hit[setting.cell, setting.store, hit] += 1
            report.unfinished += len(self._judge.unfinished)
            self._note(problems, f"killed {hit} (aim: {aim})")
            job = self._start(resume=True)
        return job

    def _start(self, *, resume: bool) -> Job:
        return self._campaign.start(self._setting, self._run, self._place, self._keep, resume=resume)

    def _look(self, job: Job) -> list[str]:
        return self._judge.look(job.events, job.launched, saves_may_fail=job.lost_a_rank)

    def _differences(self, expected: dict[str, Any], job: Job) -> list[str]:
        found = outcome(self._run)
        problems = [f"not bit-exact: {key}" for key in expected if found.get(key) != expected[key]]
        # The next save removes what a kill has left; if the kill came after the last commit, there is no next save.
        has_saved = any(event["event"] == "SaveStarted" for event in job.events)
        if self._judge.unfinished and self._place.options is None and has_saved:
            problems.append(f"the finished run has unfinished files: {sorted(self._judge.unfinished)}")
        return problems

    def _prune(self) -> None:
        """Prune a store, where what a kill has left stays until it is old, and check that nothing else is removed."""
        self._report.unfinished_at_end += len(self._judge.unfinished)
        if self._place.options is None:
            return
        self._place.prune()
        problems = self._judge.look([])
        # Objects of a directory that was never committed, or is half removed, cannot be told from work in progress.
        objects = [path for path, name in self._judge.unfinished.items() if path.startswith(f"{name}/") and name]
        self._report.never_pruned += len(objects)
        rest = sorted(self._judge.unfinished.keys() - set(objects))
        self._note([*problems, *([f"pruned, there still is {rest}"] if rest else [])], "pruned")

    def _note(self, problems: list[str], phase: str) -> None:
        for problem in problems:
            self._sound = False
            violation = f"{self._run.name}, {phase}: {problem}"
            self._report.violations.append(violation)
            self._campaign.say(f"VIOLATION: {violation}")


def forget(run: Path, place: Place) -> None:
    """Delete a run and its checkpoints."""
    shutil.rmtree(run)
    if isinstance(place, StorePlace):
        place.clear()
