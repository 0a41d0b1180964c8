"""Chooses when to kill a training, and finds out what a kill has hit."""

from __future__ import annotations

import dataclasses
import glob
import os
import random
import statistics
from pathlib import Path
from typing import Any

from records import read_lines  # on the path since tests.chaos.judge

from tests.chaos.jobs import Job
from tests.chaos.judge import Judge, saves_of
from tests.chaos.places import Place
from tests.chaos.training import KEPT

STARTING = "starting"
RESUMING = "resuming"
STAGING = "in a save, nothing of it in sight"
WRITING = "writing or uploading"
COMMIT = "committed, not yet announced"
RETENTION = "between commit and removal"
BETWEEN = "between saves"
PHASES = (STARTING, RESUMING, STAGING, WRITING, COMMIT, RETENTION, BETWEEN)
# The aims and their weights; what a kill really hit is found out afterwards.
AIMS = {RESUMING: 2, STAGING: 3, WRITING: 6, COMMIT: 4, RETENTION: 3, BETWEEN: 1}


@dataclasses.dataclass(frozen=True)
class Pace:
    """How long things take in a training without kills, in seconds; the kills are timed by it."""

    start: float
    whole: float
    stall: float
    write: float


def measure(run: Path, launched: float, ended: float) -> Pace:
    """Return the pace of a run that was never killed, from its logs."""
    events = read_lines(run / "events.jsonl")
    saves = [save for save in saves_of(events) if save.bytes and save.freed and save.committed]
    return Pace(
        start=read_lines(run / "steps-rank0.jsonl")[0]["start"] - launched,
        whole=ended - launched,
        stall=statistics.median((save.freed or 0.0) - save.started for save in saves),
        write=statistics.median((save.committed or 0.0) - save.started for save in saves),
    )


def kill_at(job: Job, aim: str, pace: Pace, place: Place, ranks: int, dice: random.Random) -> bool:
    """Kill the job in, or near, a phase of its work; return False if it ended before."""
    if aim == RESUMING:
        delay = dice.uniform(0.0, 1.2 * pace.start)
    elif aim == BETWEEN:
        delay = dice.uniform(pace.start, pace.whole)
    else:
        # Some saves later, so that the run makes progress. Copies and small files are over at once: rarer aims.
        passed_over = dice.randint(0, 3)
        event = wait_for_event(job, "SaveCommitted" if aim == RETENTION else "SaveStarted", passed_over, dice)
        if event is None:
            return False
        if place.options is None:
            delay = _after_event_on_disk(job, aim, event, pace, dice)
        else:
            # On a store, phases pass too quickly to be watched from outside.
            delay = {
                STAGING: dice.uniform(0.0, min(pace.stall, 0.01)),
                WRITING: dice.uniform(0.0, pace.write),
                COMMIT: dice.uniform(0.7, 1.1) * pace.write,
                RETENTION: dice.uniform(0.0, 0.03),
            }[aim]
    if job.is_over(within=delay):
        return False
    first = dice.randrange(ranks) if ranks > 1 and dice.random() < 0.3 else None
    return job.kill(first=first, seconds_later=dice.uniform(0.0, 2.0))


def _after_event_on_disk(job: Job, aim: str, event: dict[str, Any], pace: Pace, dice: random.Random) -> float:
    path, begun = event["path"], event["time"]
    orphans = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.*")
    if aim == WRITING:
        job.wait_until(lambda: bool(glob.glob(orphans)) or published_since(path, begun), 0.0)
    elif aim == COMMIT:
        job.wait_until(lambda: published_since(path, begun), 0.0)
    return {
        STAGING: dice.uniform(0.0, min(pace.stall, 0.01)),
        WRITING: dice.uniform(0.0, 0.7 * pace.write),
        COMMIT: 0.0,
        RETENTION: dice.uniform(0.0, 0.001),
    }[aim]


def wait_for_event(job: Job, name: str, passed_over: int, dice: random.Random) -> dict[str, Any] | None:
    """Wait for an event of a save, mostly not of a copy, after ``passed_over`` others; return None if the job ended."""
    any_save = dice.random() < 0.2
    found: list[dict[str, Any]] = []

    def happened() -> bool:
        new = (event for event in job.new_events() if event["event"] == name)
        found.extend(event for event in new if any_save or not os.path.basename(event["path"]).startswith("last"))
        return len(found) > passed_over

    return found[passed_over] if job.wait_until(happened) else None


def published_since(path: str, moment: float) -> bool:
    """Return whether a file or directory got this name after the moment."""
    try:
        return os.stat(path).st_ctime >= moment
    except FileNotFoundError:
        return False


def phase_hit(job: Job, judge: Judge, run: Path, *, resumed: bool) -> str:
    """Return what the job was doing when it was killed, judged by what it left behind."""
    under_way = [save for save in saves_of(job.events) if save.committed is None]
    if under_way:
        save = under_way[0]  # they are carried out in order
        name = os.path.basename(save.path)
        if judge.files.get(name) != judge.before.get(name):
            return COMMIT
        # On a store, what a single request uploads is invisible until it is complete.
        return WRITING if save.freed or name in judge.unfinished.values() else STAGING
    if not any(step["start"] >= job.launched for step in read_lines(run / "steps-rank0.jsonl")):
        return RESUMING if resumed else STARTING
    half_removed = [name for name in judge.unfinished.values() if name in judge.before and name not in judge.files]
    # Checkpoints left over by earlier kills stay, and do not mean that this kill came before a removal.
    return RETENTION if half_removed or judge.ranked > max(KEPT, judge.ranked_before) else BETWEEN
