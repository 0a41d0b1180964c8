"""Simulates training jobs that fail, and prints which share of their time is useful (goodput) and what work is lost.

Failures are random (exponential, independent on each rank; one stops the job). A save stops training for its stall and
is durable after its commit. A failure sends the job back to the last durable checkpoint, after a restart, during which
failures happen, too. ``auto`` is the interval that ``interval="auto"`` chooses (``ckpt_core.policies.SaveInterval``). A
memory tier holds a snapshot that survives a share of the failures. Just-in-time checkpoints save the state of the ranks
that survive, at a share of the failures, so that at most a step is lost. Both are modelled here, not measured.

    python tools/goodput.py --ranks 1,1024,16384 --stall 0.5 --commit 30
    python tools/goodput.py --plot docs/images/goodput.svg
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ckpt_core.policies import SaveInterval

RANKS = (1, 8, 64, 256, 1024, 4096, 16_384)
MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A job, its saves and its failures; all times in seconds.

    Attributes:
        mtbf: Mean time between failures of the whole job.
        interval: Work between two saves to disk.
        stall: How long a save stops the training.
        commit: Time from the end of the stall until the checkpoint is durable.
        restart: Time from a failure until training continues, loading included.
        step: Duration of a training step.
        just_in_time: Share of the failures after which the other ranks save their state.
        just_in_time_save: How long that save delays the restart.
        memory_every: Work between two snapshots in memory; None: there are none.
        memory_stall: How long a snapshot stops the training.
        memory_survives: Share of the failures that a snapshot survives.
        memory_restart: ``restart`` if it is from a snapshot in memory.
    """

    mtbf: float
    interval: float
    stall: float = 0.5
    commit: float = 30.0
    restart: float = 300.0
    step: float = 1.0
    just_in_time: float = 0.0
    just_in_time_save: float = 30.0
    memory_every: float | None = None
    memory_stall: float = 0.1
    memory_survives: float = 0.9
    memory_restart: float = 120.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a job.

    Attributes:
        goodput: Share of the time that was spent on work that was not lost.
        lost: Work that was repeated, in seconds per day.
        stalls: Time for which saves stopped the training, in seconds per day.
        failures: Failures per day.
    """

    goodput: float
    lost: float
    stalls: float
    failures: float


def simulate(job: Job, work: float, seed: int = 1) -> Outcome:
    """Return the outcome of a job that runs until it has done so many seconds of work."""
    chance = random.Random(seed)

    def fails_after() -> float:
        return chance.expovariate(1 / job.mtbf)

    wall = position = durable = in_memory = lost = stalls = 0.0
    failures = 0
    under_way: tuple[float, float] | None = None  # when it is durable, and its position
    next_save, next_memory = job.interval, job.memory_every or math.inf
    failure = fails_after()
    in_cycle = 0 if job.memory_every is None else math.ceil(job.interval / job.memory_every) - 1
    stalls_of_cycle = job.stall + in_cycle * job.memory_stall
    cycle = job.interval + stalls_of_cycle
    while position < work:
        run = min(next_save, next_memory, work) - position
        saves = next_save <= min(next_memory, work)
        remembers = not saves and next_memory <= work
        stall = job.stall * saves + job.memory_stall * remembers
        end = wall + run + stall
        if under_way is not None and under_way[0] <= min(end, failure):
            durable, under_way = under_way[1], None
        if failure >= end:
            wall, position, stalls = end, min(next_save, next_memory, work), stalls + stall
            if saves:  # skips cycles without a failure, which are all alike
                alike = max(0, min(int((failure - wall) / cycle), int((work - position) / job.interval)) - 1)
                wall, position, stalls = (
                    wall + alike * cycle, position + alike * job.interval, stalls + alike * stalls_of_cycle
                )  # fmt: skip
                durable = position - job.interval if alike else durable
                under_way, next_save = (wall + job.commit, position), position + job.interval
            if saves or remembers:
                in_memory, next_memory = position, position + (job.memory_every or math.inf)
            continue
        failures += 1
        reached, kept, restart = position + min(run, failure - wall), durable, job.restart
        if job.memory_every is not None and chance.random() < job.memory_survives:
            kept, restart = max(kept, in_memory), job.memory_restart
        if chance.random() < job.just_in_time:
            kept, restart = max(kept, reached - job.step * chance.random()), restart + job.just_in_time_save
            durable = kept
        lost += reached - kept
        wall = failure
        while (again := fails_after()) < restart:
            wall, failures = wall + again, failures + 1
        wall += restart
        failure, position, in_memory, under_way = wall + again - restart, kept, kept, None
        next_save, next_memory = kept + job.interval, kept + (job.memory_every or math.inf)
    return Outcome(work / wall, lost / wall * DAY, stalls / wall * DAY, failures / wall * DAY)


def closed_form(job: Job) -> float:
    """Return the goodput of a job without tiers whose saves are durable at once (Daly 2006, equation 13)."""
    cycle = job.mtbf * math.exp(job.restart / job.mtbf) * math.expm1((job.interval + job.stall) / job.mtbf)
    return job.interval / cycle


def policies(ranks: int, options: argparse.Namespace) -> dict[str, Job]:
    """Return the jobs to compare, by name."""
    mtbf = options.rank_mtbf_hours * HOUR / ranks
    common: dict[str, Any] = {"stall": options.stall, "commit": options.commit, "restart": options.restart}

    def auto(covered: float = 0.0) -> float:
        return SaveInterval(mtbf=mtbf / (1 - covered)).choose(options.stall, options.commit, mtbf)[0]

    def stopped(interval: float) -> dict[str, Any]:
        # a save that is not in the background stops training until the checkpoint is durable
        return {**common, "stall": options.stall + options.commit, "commit": 0.0, "interval": interval, "mtbf": mtbf}

    survives = 0.9
    return {
        "hourly, stopped": Job(**stopped(HOUR)),
        "hourly": Job(mtbf=mtbf, interval=HOUR, **common),
        "auto": Job(mtbf=mtbf, interval=auto(), **common),
        "auto + memory": Job(mtbf=mtbf, interval=auto(survives), memory_every=60.0, **common),
        "auto + just in time": Job(mtbf=mtbf, interval=auto(survives), just_in_time=survives, **common),
    }


def table(options: argparse.Namespace) -> dict[int, dict[str, Outcome]]:
    """Return the outcome of each job for each number of ranks."""
    found: dict[int, dict[str, Outcome]] = {}
    for ranks in options.ranks:
        jobs = policies(ranks, options)
        # long enough to see failures where they are rare
        work = max(options.days * DAY, 500 * next(iter(jobs.values())).mtbf)
        found[ranks] = {name: simulate(job, work, options.seed) for name, job in jobs.items()}
    return found


def _plot(found: dict[int, dict[str, Outcome]], path: str) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "goodput", "svg.fonttype": "none"})
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for name in next(iter(found.values())):
        outcomes = [by_name[name] for by_name in found.values()]
        left.plot(list(found), [100 * outcome.goodput for outcome in outcomes], marker=".", label=name)
        right.plot(list(found), [outcome.lost / MINUTE for outcome in outcomes], marker=".", label=name)
    left.set(xscale="log", xlabel="ranks", ylabel="goodput, % of the time")
    right.set(xscale="log", yscale="log", xlabel="ranks", ylabel="work lost, minutes per day")
    left.legend(fontsize="small")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None})


def _numbers_of_ranks(text: str) -> list[int]:
    numbers = text.split(",")
    if not all(number.strip().isdecimal() for number in numbers):
        raise argparse.ArgumentTypeError(f"must be whole numbers, such as 64,1024: {text}")
    ranks = [int(number) for number in numbers]
    if min(ranks) < 1:
        raise argparse.ArgumentTypeError(f"a run has at least 1 rank, not {min(ranks)}")
    return ranks


def _not_below_0(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number: {text}") from None
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"must not be below 0 or infinite: {text}")
    return number


def _above_0(text: str) -> float:
    if _not_below_0(text) == 0:
        raise argparse.ArgumentTypeError(f"must be above 0: {text}")
    return float(text)


def main() -> None:
    """Print a table of goodput; with ``--plot``, also draw it."""
    parser = argparse.ArgumentParser(description="Simulate the goodput of jobs that fail.")
    parser.add_argument("--ranks", type=_numbers_of_ranks, default=list(RANKS), help="numbers of them: 64,1024")
    parser.add_argument("--stall", type=_above_0, default=0.5, help="seconds for which a save stops the training")
    parser.add_argument("--commit", type=_not_below_0, default=30.0, help="seconds from then until it is durable")
    parser.add_argument(
        "--restart", type=_not_below_0, default=300.0, help="seconds from a failure until training continues"
    )
    parser.add_argument(
        "--rank-mtbf-hours", type=_above_0, default=50_000.0, help="hours between failures of a rank (Llama 3)"
    )
    parser.add_argument("--days", type=_above_0, default=30.0, help="days of work, at least 500 failures")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", help="an SVG file")
    options = parser.parse_args()
    found = table(options)
    print("| ranks | a failure every | interval of auto | policy | goodput | lost, min/day | stalls, min/day |")
    print("|---|---|---|---|---|---|---|")
    for ranks, by_name in found.items():
        jobs = policies(ranks, options)
        for name, outcome in by_name.items():
            job = jobs[name]
            print(
                f"| {ranks} | {job.mtbf / HOUR:.1f} h | {job.interval / MINUTE:.1f} min | {name} "
                f"| {outcome.goodput:.2%} | {outcome.lost / MINUTE:.2f} | {outcome.stalls / MINUTE:.2f} |"
            )
    if options.plot:
        _plot(found, options.plot)


if __name__ == "__main__":
    main()
