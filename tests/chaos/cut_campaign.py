"""The kill campaign of asynchronous training: kills clusters at any instant, judges every checkpoint, and resumes."""

from __future__ import annotations

import collections
import dataclasses
import random
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ckpt_async.consistent_cut import CutOptions, VectorClock
from ckpt_async.parameter_server import CutStore
from tests.chaos.cut_cluster import Cluster
from tests.chaos.cut_training import Job, violations

SHARDS, WORKERS = (1, 2, 3), (1, 2, 3, 5)
LONGEST_RUN = 120.0  # seconds without a kill, to finish or at least to commit
STARTING = 0.15  # share of the kills that are aimed at the start
EAGER = {"every": 0.05}


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A kind of training.

    Attributes:
        name: What is special about it.
        changes: Changes to the job.
        options: Options of the cuts.
        elastic: Whether the numbers of workers and shards are drawn again at each start.
    """

    name: str
    changes: Mapping[str, object] = dataclasses.field(default_factory=dict)
    options: CutOptions = CutOptions()  # noqa: RUF009 - frozen
    elastic: bool = False


ALIGNED = CutOptions(alignment="aligned", aligned_timeout=0.5)
HASTY = CutOptions(alignment="aligned", aligned_timeout=0.01)
RECORDING = CutOptions(channel_state="record")
SCENARIOS = (
    Scenario("unaligned"),
    Scenario("aligned", options=ALIGNED),
    Scenario("unaligned, any order, straggler", {"reorder": True, "straggler": 5.0}),
    Scenario("aligned, any order, straggler, short timeout", {"reorder": True, "straggler": 5.0}, HASTY),
    Scenario("elastic, any order", {"reorder": True}, elastic=True),
    Scenario("back to back, any order", {"reorder": True, **EAGER}),
    Scenario("recorded, elastic, any order", {"reorder": True}, RECORDING, elastic=True),
)


@dataclasses.dataclass
class Report:
    """What a campaign has found.

    Attributes:
        kills: Number of whole clusters killed, by scenario.
        checkpoints: Number of different checkpoints judged, by scenario.
        finished: Number of trainings that ended, by scenario.
        in_snapshot: Number of kills that left a snapshot unfinished on the disk.
        updates: Number of updates in the trainings that ended.
        violations: What was wrong.
    """

    kills: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    checkpoints: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    finished: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    in_snapshot: int = 0
    updates: int = 0
    violations: list[str] = dataclasses.field(default_factory=list)

    def table(self) -> str:
        """Return what was done and found as text, one line for each scenario."""
        lines = [f"{'scenario':48s} {'kills':>6s} {'checkpoints':>12s} {'finished':>9s}"]
        lines += [
            f"{name:48s} {kills:6d} {self.checkpoints[name]:12d} {self.finished[name]:9d}"
            for name, kills in self.kills.items()
        ]
        lines.append(
            f"{'together':48s} {self.kills.total():6d} {self.checkpoints.total():12d} {self.finished.total():9d}"
        )
        lines.append(f"{self.in_snapshot} kills left a snapshot unfinished; {len(self.violations)} violations")
        return "\n".join([*lines, *self.violations])


class Campaign:
    """Trains, kills, judges and resumes, over and over.

    Args:
        directory: Where the trainings live.
        seed: Seed of the random choices, such as the instants of kills.
        say: Called with lines about the progress.
        epochs: Length of a training.
    """

    def __init__(self, directory: Path, seed: int, say: Callable[[str], None], *, epochs: int = 3) -> None:
        self._directory = directory
        self._random = random.Random(seed)
        self._say = say
        self._epochs = epochs
        self.report = Report()

    def run(self, kills: int, scenarios: Sequence[Scenario] = SCENARIOS) -> Report:
        """Kill that many clusters, spread over the scenarios; each training is brought to its end."""
        for number, scenario in enumerate(scenarios):
            share = kills * (number + 1) // len(scenarios) - kills * number // len(scenarios)
            while self.report.kills[scenario.name] < share:
                self._train(scenario, share - self.report.kills[scenario.name])
                self._say(f"{self.report.kills.total()} kills, {len(self.report.violations)} violations so far")
        return self.report

    def _train(self, scenario: Scenario, kills: int) -> None:
        """Run one training, killed ``kills`` times unless it ends before."""
        root = self._directory / f"training-{sum(self.report.finished.values())}"
        basis = Job(str(root / "checkpoints"), epochs=self._epochs, options=scenario.options)
        basis = dataclasses.replace(basis, **scenario.changes)  # type: ignore[arg-type]
        trial = _Trial(scenario.name, CutStore(basis.root), self.report)
        for life in range(kills + 1):
            job = basis
            if scenario.elastic:
                job = dataclasses.replace(
                    basis, shards=self._random.choice(SHARDS), workers=self._random.choice(WORKERS)
                )
            cluster = Cluster(job, root / f"life-{life}")
            try:
                ended = _wait_for_the_end(cluster) if life == kills else self._wait_for_the_instant(cluster)
                broken = cluster.broken
            finally:
                cluster.kill(self._random)
            if broken:
                self.report.violations.append(f"{scenario.name}: a process failed by itself\n{cluster.logs()}")
                return
            if not ended:
                if life == kills:
                    self.report.violations.append(f"{scenario.name}: the training did not end\n{cluster.logs()}")
                    return
                self.report.kills[scenario.name] += 1
            trial.judge(job)
            if ended:
                trial.judge_end(job)
                shutil.rmtree(root)
                return

    def _wait_for_the_instant(self, cluster: Cluster) -> bool:
        """Wait until the cluster is to be killed: while it starts, or some time after its first snapshot has begun."""
        if self._random.random() < STARTING:
            return cluster.wait(self._random.uniform(0.0, 1.0))
        checkpoints = Path(cluster.job.root)
        before = set(checkpoints.glob("cut-*"))

        def snapshot_has_begun() -> bool:
            return any(checkpoints.glob(".cut-*")) or set(checkpoints.glob("cut-*")) != before

        return cluster.wait(LONGEST_RUN, snapshot_has_begun) or cluster.wait(self._random.uniform(0.0, 1.2))


def _wait_for_the_end(cluster: Cluster) -> bool:
    """Wait as long as there is progress, however slow the machine is; return whether the training has ended well."""
    store, newest = CutStore(cluster.job.root), None
    while not cluster.wait(LONGEST_RUN):
        committed = store.committed()[:1]
        if cluster.broken or committed == newest:
            return False
        newest = committed
    return True


class _Trial:
    """Judges one training's checkpoints, each once."""

    def __init__(self, scenario: str, store: CutStore, report: Report) -> None:
        self._scenario = scenario
        self._store = store
        self._report = report
        self._seen: set[str] = set()
        self._last = VectorClock()

    def judge(self, job: Job) -> None:
        """Judge what is on the disk after a kill."""
        self._report.in_snapshot += any(Path(job.root).glob(".cut-*"))
        for path in self._store.committed():
            if path in self._seen:
                continue
            self._seen.add(path)
            self._report.checkpoints[self._scenario] += 1
            with self._store.open(path) as checkpoint:
                checkpoint.verify()
                self._report.violations += [f"{self._scenario}: {text}" for text in violations(job, checkpoint)]
        newest = self._store.newest()
        if newest is None:
            if self._last:
                self._report.violations.append(f"{self._scenario}: all checkpoints are lost")
            return
        with newest:
            vector = newest.cut.vector
        lost = [stream for stream, count in self._last.items() if vector[stream] < count]
        if lost:
            self._report.violations.append(f"{self._scenario}: streams {lost} went back from {self._last} to {vector}")
        self._last = vector

    def judge_end(self, job: Job) -> None:
        """Check that every stream has reached its last batch, so that each sample was used once per epoch."""
        self._report.finished[self._scenario] += 1
        self._report.updates += sum(self._last.values())
        if any(count != job.batches for count in self._last.values()):
            self._report.violations.append(f"{self._scenario}: ended at {self._last}")


def wait_for_checkpoints(store: CutStore, count: int, timeout: float) -> bool:
    """Wait until that many checkpoints are committed; return whether they are."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if len(store.committed()) >= count:
            return True
        time.sleep(0.02)
    return False


def cut_off(cluster: Cluster, checkpoints: int, timeout: float) -> CutStore:
    """Kill all processes once there are so many checkpoints; return the store of these."""
    store = CutStore(cluster.job.root)
    try:
        assert wait_for_checkpoints(store, checkpoints, timeout), cluster.logs()
    finally:
        cluster.kill()
    return store


def run_to_end(cluster: Cluster, timeout: float) -> CutStore:
    """Wait until a training has ended by itself; return the store of its checkpoints."""
    try:
        assert cluster.wait(timeout), cluster.logs()
    finally:
        cluster.kill()
    return CutStore(cluster.job.root)


def judged(job: Job) -> int:
    """Judge all checkpoints of a job; return how many there are."""
    store = CutStore(job.root)
    paths = store.committed()
    for path in paths:
        with store.open(path) as checkpoint:
            checkpoint.verify()
            assert violations(job, checkpoint) == []
    return len(paths)


def assert_complete(job: Job) -> None:
    """Check that the newest checkpoint is of the end: every sample is in it as often as there were epochs."""
    with CutStore(job.root).newest() as newest:  # type: ignore[union-attr]
        assert dict(newest.cut.vector) == dict.fromkeys(range(job.streams), job.batches)
