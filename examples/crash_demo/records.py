"""Reads back what a training run did from its log files: its jobs, their steps and their saves."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any


@dataclasses.dataclass
class Step:
    """One batch as rank 0 saw it; ``lost`` when a kill threw its result away, so that a later job repeated it."""

    key: tuple[int, int]
    number: int
    start: float
    end: float
    lost: bool = False


@dataclasses.dataclass
class Save:
    """One save: ``freed`` is when the training thread continued; None where a kill came first."""

    path: str
    started: float
    freed: float | None = None
    committed: float | None = None
    bytes: int = 0

    @property
    def background_seconds(self) -> float:
        """Time from the end of the stall to the commit; 0 where there was none."""
        return self.committed - self.freed if self.committed and self.freed else 0.0


@dataclasses.dataclass
class Stall:
    """The time from the end of a step to the start of the next one that belongs to saves.

    It is all that the training waits for: collecting the state, agreeing with the other ranks, and the plugin's part.
    """

    start: float
    end: float
    saves: list[Save]

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def durable(self) -> float:
        """When the last of its saves was committed; the end of the stall where one never was."""
        return max(self.end, *(save.committed or 0.0 for save in self.saves))


@dataclasses.dataclass
class Job:
    """One start of the training script, up to its end or its kill."""

    launched: float
    ended: float
    killed: bool
    aim: str
    during_save: list[str]
    steps: list[Step] = dataclasses.field(default_factory=list)
    saves: list[Save] = dataclasses.field(default_factory=list)

    @property
    def lost(self) -> list[Step]:
        """The steps that had to be repeated."""
        return [step for step in self.steps if step.lost]

    @property
    def stalls(self) -> list[Stall]:
        """Where training waited for saves; nothing waits after the end of the training."""
        pauses = [(step.end, following.start) for step, following in itertools.pairwise(self.steps)]
        if self.killed and self.steps:
            cut_off = [save for save in self.saves if save.started >= self.steps[-1].end]
            pauses += [(self.steps[-1].end, max(save.freed or self.ended for save in cut_off))] if cut_off else []
        stalls = [Stall(*pause, [s for s in self.saves if pause[0] <= s.started < pause[1]]) for pause in pauses]
        return [stall for stall in stalls if stall.saves]


@dataclasses.dataclass
class Run:
    """All jobs of one training, in order."""

    directory: Path
    jobs: list[Job]

    @property
    def start(self) -> float:
        return self.jobs[0].launched

    @property
    def seconds(self) -> float:
        return self.jobs[-1].ended - self.start

    @property
    def kills(self) -> list[Job]:
        return [job for job in self.jobs if job.killed]

    @property
    def saves(self) -> list[Save]:
        return [save for job in self.jobs for save in job.saves]

    @property
    def stalls(self) -> list[Stall]:
        return [stall for job in self.jobs for stall in job.stalls]

    @property
    def stall_seconds(self) -> float:
        return sum(stall.seconds for stall in self.stalls)


def typical_stall(run: Run) -> Stall:
    """Return the stall with the median duration, without the first, which allocates memory that later ones reuse."""
    stalls = sorted(run.stalls[1:] or run.stalls, key=lambda stall: stall.seconds)
    return stalls[len(stalls) // 2]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a JSON Lines file, without a line still being written; none if there is no file yet."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


class LogTail:
    """Follow a JSON Lines file that another process writes: each call of :meth:`new` returns what was added since."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self.path = path
        self._offset = path.stat().st_size if from_end and path.exists() else 0

    def new(self) -> list[dict[str, Any]]:
        if not self.path.exists() or self.path.stat().st_size == self._offset:
            return []
        with self.path.open("rb") as log:
            log.seek(self._offset)
            whole = log.read().rpartition(b"\n")[0]
        if not whole:
            return []
        self._offset += len(whole) + 1
        return [json.loads(line) for line in whole.splitlines()]


def pair_events(events: list[dict[str, Any]]) -> list[Save]:
    """Combine the events of an event log into saves, in the order in which these started."""
    saves: list[Save] = []
    for event in events:
        if event["event"] == "SaveStarted":
            saves.append(Save(path=event["path"], started=event["time"]))
            continue
        same_path = [save for save in saves if save.path == event["path"]]
        if event["event"] == "SnapshotTaken":
            save = next(save for save in same_path if save.freed is None)
            save.freed, save.bytes = event["time"], event["bytes"]
        elif event["event"] == "SaveCommitted":
            next(save for save in same_path if save.committed is None).committed = event["time"]
    return saves


def read_run(directory: Path) -> Run:
    """Read ``jobs.jsonl``, ``events.jsonl`` and the steps of rank 0."""
    jobs = [Job(**record) for record in read_lines(directory / "jobs.jsonl")]
    events = read_lines(directory / "events.jsonl")
    last_job_with: dict[tuple[int, int], Job] = {}
    for record in read_lines(directory / "steps-rank0.jsonl"):
        key = (record["epoch"], record["batch"])
        job = running_at(record["start"], jobs)
        job.steps.append(Step(key, record["step"], record["start"], record["end"]))
        last_job_with[key] = job
    for job in jobs:
        job.saves = pair_events([event for event in events if running_at(event["time"], jobs) is job])
        for step in job.steps:
            step.lost = last_job_with[step.key] is not job
    return Run(directory, jobs)


def running_at(moment: float, jobs: list[Job]) -> Job:
    """Return the job that ran at a moment: the last one launched before it."""
    return max((job for job in jobs if job.launched <= moment), key=lambda job: job.launched)
