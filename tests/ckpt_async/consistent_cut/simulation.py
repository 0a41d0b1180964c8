"""A whole asynchronous training in one thread: workers, shards, a coordinator, a bad network, a slow disk, and crashes.

Everything random comes from one seed. Messages arrive late and in any order, twice, or not at all: pushes and pulls
are sent again with the header they had, others may be lost for good.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any

from ckpt_async.consistent_cut import COORDINATOR, deal_streams
from ckpt_async.consistent_cut.effects import CommitCut
from ckpt_async.consistent_cut.messages import decode_message, encode_message
from tests.ckpt_async.consistent_cut.oracle import Ledger, Oracle, Violation
from tests.ckpt_async.consistent_cut.processes import (
    Blocks,
    CoordinatorProcess,
    Plan,
    Process,
    ShardProcess,
    WorkerProcess,
)

# These are never lost for good: a process that waits for one of them would send it again.
SENT_AGAIN = ("Hello", "Welcome", "Takeover", "Position")


class World:
    """The simulated machines, network, disk and time of a training.

    Args:
        plan: What happens in the simulation.
        seed: Decides everything that is random.
    """

    state_class = Blocks
    worker_process = WorkerProcess

    def __init__(self, plan: Plan, seed: int) -> None:
        self.plan = plan
        self.seed = seed
        self.dice = random.Random(seed)
        self.now = 0.0
        self.generation = 0
        self.last_id = 0
        self.refused = self.rollbacks = self.folded = self.held = self.restarts = 0
        self.serials = itertools.count()
        self.oracle = Oracle(plan.blocks, plan.sparse, plan.worker_crashes == 0, plan.staleness)
        self.violations: list[Violation] = []
        self.files: dict[str, Any] = {}
        self.aborted: dict[tuple[int, int], str] = {}
        self.manifests: list[CommitCut] = []
        self.processes: dict[str, Process] = {}
        self.layout: dict[str, tuple[int, ...]] = {}
        self.incarnation = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    # Time and network

    def later(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._numbers), action))

    def deliver(self, action: Callable[[], None], *, may_vanish: bool = False) -> None:
        plan, dice = self.plan, self.dice
        if may_vanish and dice.random() < plan.lost / 5:
            return
        for _ in range(2 if dice.random() < plan.duplicated else 1):
            delay = dice.uniform(10, 40) if dice.random() < plan.slow else dice.uniform(0.1, 2)
            retry = 15.0 if dice.random() < plan.lost else 0.0
            self.later(delay + retry, action)

    def send(self, to: str, message: Any) -> None:
        """Send a message to whichever process has that name when it arrives."""
        if not isinstance(message, tuple):
            message = decode_message(encode_message(message))
        may_vanish = not isinstance(message, tuple) and type(message).__name__ not in SENT_AGAIN

        def arrive() -> None:
            if (process := self.processes.get(to)) is not None and process.alive:
                process.receive(message)

        self.deliver(arrive, may_vanish=may_vanish)

    def pull(self, asker: WorkerProcess, shard: str, request: int, tag: Any) -> None:
        def arrive() -> None:
            process = self.processes.get(shard)
            if isinstance(process, ShardProcess) and process.alive:
                process.pull(asker, request, tag)

        self.deliver(arrive)

    # Life and death

    def start(self) -> None:
        """Start all processes, from the newest checkpoint."""
        plan = self.plan
        if plan.elastic and self.generation:
            workers, shards = self.dice.choice([1, 2, 3]), self.dice.choice([1, 2, 3])
        else:
            workers, shards = plan.workers, plan.shards
        vector, ledgers = self.restored()
        names = [f"shard-{number}" for number in range(shards)]
        self.layout = {name: tuple(range(number, plan.blocks, shards)) for number, name in enumerate(names)}
        start: dict[str, Any] = {"generation": self.generation, "snapshot_id": self.last_id, "options": plan.options}
        self.processes = {}
        self.start_coordinator()
        for name, blocks in self.layout.items():
            state = self.state_class(plan, {block: list(ledgers[block]) for block in blocks})
            self.processes[name] = ShardProcess(self, name, plan.shard_class(name, state, vector, **start))
        dealt = deal_streams(vector, [f"worker-{number}" for number in range(workers)])
        for name, streams in dealt.items():
            positions = {stream: vector[stream] for stream in streams}
            self.processes[name] = self.worker_process(
                self, name, lambda capture, n=name, p=positions: plan.worker_class(n, p, names, capture, **start)
            )

    def start_coordinator(self) -> None:
        machine = self.plan.coordinator_class(
            range(self.plan.streams),
            self.layout,
            generation=self.generation,
            last_snapshot_id=self.last_id,
            options=self.plan.options,
        )
        self.processes[COORDINATOR] = CoordinatorProcess(self, machine)

    def kill_everything(self) -> None:
        for process in self.processes.values():
            is_zombie = self.plan.zombies and isinstance(process, WorkerProcess) and self.dice.random() < 0.5
            process.alive = is_zombie
        self.generation += 1
        self.restarts += 1
        self.start()

    def kill_worker(self) -> None:
        name = self.dice.choice(
            [name for name, process in self.processes.items() if isinstance(process, WorkerProcess)]
        )
        lost = self.processes[name]
        streams = list(lost.machine.cut)
        lost.alive = self.plan.zombies and lost.machine.can_train
        known = lost.machine.incarnation
        self.incarnation += 1
        incarnation = self.incarnation
        coordinator = self.processes[COORDINATOR]
        if self.dice.random() < 0.5:  # otherwise, the coordinator learns of it when the new worker says hello
            self.later(
                self.dice.uniform(0, 12), lambda: coordinator.perform(coordinator.machine.member_lost(name, known))
            )

        def rejoin() -> None:
            self.processes[name] = self.worker_process(
                self,
                name,
                lambda capture: self.plan.worker_class.rejoining(
                    name,
                    streams,
                    self.layout,
                    capture,
                    incarnation=incarnation,
                    generation=self.generation,
                    options=self.plan.options,
                ),
            )

        self.later(self.dice.uniform(0.5, 10), rejoin)

    def kill_coordinator(self) -> None:
        self.processes[COORDINATOR].alive = False
        self.start_coordinator()
        for process in list(self.processes.values()):
            if isinstance(process, WorkerProcess | ShardProcess):
                process.later(self.dice.uniform(0, 5), lambda p=process: p.perform(p.machine.hello()))

    # Checkpoints

    def write_manifest(self, manifest: CommitCut) -> None:
        self.manifests.append(manifest)
        cut = manifest.cut
        if (cut.generation, cut.snapshot_id) in self.aborted:
            self.violations.append(Violation("aborted", f"snapshot {cut.snapshot_id} was aborted and committed"))
        self.violations += self.judge_manifest(manifest)

    def judge_manifest(self, manifest: CommitCut) -> list[Violation]:
        reports = {**manifest.worker_reports, **manifest.shard_reports}
        missing = [name for name, file in reports.items() if file not in self.files]
        if missing:
            return [Violation("durability", f"snapshot {manifest.cut.snapshot_id} was committed without {missing}")]
        return self.oracle.judge(*self.content(manifest))

    def content(self, manifest: CommitCut) -> tuple[dict[int, int], dict[int, Ledger]]:
        """Return cursors and ledgers as they are loaded from a checkpoint."""
        positions: dict[int, int] = {}
        for file in manifest.worker_reports.values():
            positions.update(self.files[file].state if file in self.files else {})
        ledgers: dict[int, Ledger] = {}
        for file in manifest.shard_reports.values():
            if (saved := self.files.get(file)) is not None:
                state = saved.copy.copy()
                for header, payload in saved.recorded:
                    state.apply(header.update, payload)
                ledgers.update(state.ledgers)
        return positions, ledgers

    def restored(self) -> tuple[Mapping[int, int], dict[int, Ledger]]:
        positions, ledgers = self.content(self.manifests[-1]) if self.manifests else ({}, {})
        return (
            {stream: positions.get(stream, 0) for stream in range(self.plan.streams)},
            {block: ledgers.get(block, []) for block in range(self.plan.blocks)},
        )

    # The run

    def run(self) -> World:
        """Train to the end, with all the crashes planned, and take a last snapshot."""
        self.start()
        plan = self.plan
        span = plan.updates * plan.streams * 2.0
        for number in range(plan.crashes):
            self.later(span * (number + 1) * self.dice.uniform(0.3, 0.7), self.kill_everything)
        for number in range(plan.worker_crashes):
            self.later(20 + 60 * number + self.dice.uniform(0, 20), self.kill_worker)
        for _ in range(plan.coordinator_crashes):
            self.later(span * self.dice.random(), self.kill_coordinator)
        if plan.frozen is not None:
            self.later(plan.frozen[1] - 1, self.check_progress)
        finished_at = None
        while self._events and self.now < plan.time_limit:
            self.now, _, action = heapq.heappop(self._events)
            action()
            if finished_at is None and self.is_trained():
                finished_at = self.now
            if finished_at is not None and self.is_saved(finished_at):
                return self.conclude()
        trained = "the last snapshot was never committed" if finished_at is not None else "training never ended"
        self.violations.append(Violation("stalled", trained))
        return self.conclude()

    def check_progress(self) -> None:
        """Check that a frozen worker holds up no other worker."""
        for process in self.processes.values():
            if isinstance(process, WorkerProcess) and process.name != "worker-0":
                behind = {stream: seq for stream, seq in process.cursor.items() if seq < self.plan.updates}
                if behind:
                    self.violations.append(Violation("frozen", f"{process.name} waited for worker-0: {behind}"))

    def is_trained(self) -> bool:
        workers = [process for process in self.processes.values() if isinstance(process, WorkerProcess)]
        cursors = {stream: count for worker in workers for stream, count in worker.cursor.items()}
        return len(cursors) == self.plan.streams and set(cursors.values()) == {self.plan.updates}

    def is_saved(self, finished_at: float) -> bool:
        """Return whether a checkpoint of the end exists, and all messages have had time to arrive."""
        newest = self.manifests[-1] if self.manifests else None
        return (
            newest is not None
            and newest.cut.generation == self.generation
            and set(newest.cut.vector.values()) == {self.plan.updates}
            and self.now > finished_at + 120
            and self.processes[COORDINATOR].machine.open_snapshot is None
        )

    def conclude(self) -> World:
        """Judge the live state as well."""
        if not any(violation.kind == "stalled" for violation in self.violations):
            live: dict[int, Ledger] = {}
            for process in self.processes.values():
                if isinstance(process, ShardProcess):
                    live.update(process.machine.state.ledgers)
            positions = dict.fromkeys(range(self.plan.streams), self.plan.updates)
            self.violations += self.oracle.judge(positions, live)
        return self

    @property
    def kinds(self) -> set[str]:
        return {violation.kind for violation in self.violations}
