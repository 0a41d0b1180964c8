"""The processes of a simulated training: their state machines are real, and network, disk and time are the world's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt_async.consistent_cut import (
    COORDINATOR,
    CutOptions,
    CutShard,
    CutWorker,
    SnapshotCoordinator,
    StaleGenerationError,
    UpdateId,
)
from ckpt_async.consistent_cut.effects import (
    CommitCut,
    Effect,
    PersistShard,
    PersistWorker,
    ReserveSnapshot,
    RollbackNeeded,
    Send,
    SnapshotAborted,
)
from ckpt_async.consistent_cut.messages import Abort, PullHeader
from tests.ckpt_async.consistent_cut.oracle import Applied, Ledger, Seen, Violation, touched_blocks

if TYPE_CHECKING:
    from tests.ckpt_async.consistent_cut.simulation import World

TIME_LIMIT = 4000.0


@dataclass(frozen=True)
class Plan:
    """What happens in a simulation. Times are in units of about one message delay."""

    options: CutOptions = field(default_factory=lambda: CutOptions(aligned_timeout=6.0, snapshot_timeout=80.0))
    workers: int = 3
    shards: int = 2
    streams: int = 4
    blocks: int = 4
    updates: int = 10  # number of updates of each stream
    sparse: bool = False
    snapshot_every: float = 12.0
    duplicated: float = 0.1
    lost: float = 0.05
    slow: float = 0.1
    crashes: int = 0
    worker_crashes: int = 0
    coordinator_crashes: int = 0
    zombies: bool = False
    elastic: bool = False
    staleness: int | None = None
    frozen: tuple[float, float] | None = None  # worker 0 does nothing between these times
    time_limit: float = TIME_LIMIT
    aborts_are_wrong: bool = False  # apart from lost workers, the plan has no reason to abort
    ack_before_durable: bool = False
    worker_class: type[CutWorker] = CutWorker
    shard_class: type[CutShard] = CutShard
    coordinator_class: type[SnapshotCoordinator] = SnapshotCoordinator


class Payload(NamedTuple):
    entry: Applied
    gradients: Mapping[int, Any]


class Blocks:
    """A shard's state: the ledgers of its blocks."""

    def __init__(self, plan: Plan, ledgers: dict[int, Ledger]) -> None:
        self.plan = plan
        self.ledgers = ledgers

    def apply(self, update: UpdateId, payload: Payload) -> None:
        entry = payload.entry
        for block in touched_blocks(entry.stream, entry.seq, self.plan.blocks, self.plan.sparse):
            if block in self.ledgers:
                self.ledgers[block].append(entry)

    def read(self) -> Mapping[int, Any]:
        """Return what a pull returns in addition to the ledgers."""
        return {}

    def copy(self) -> Blocks:
        return Blocks(self.plan, {block: list(ledger) for block, ledger in self.ledgers.items()})


class View(NamedTuple):
    """A shard's reply to a pull."""

    header: PullHeader
    seen: list[Seen]
    parameters: Mapping[int, Any]


class Process:
    """A process with a state machine, which can be killed."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.number = next(world.serials)

    def later(self, delay: float, action: Callable[[], None]) -> None:
        self.world.later(delay, lambda: action() if self.alive else None)

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self.world.send(effect.to, effect.message)
                case PersistWorker():
                    self.persist(effect.snapshot_id, effect)
                case PersistShard():
                    self.world.folded += effect.folded
                    self.world.held += effect.held
                    self.persist(effect.snapshot_id, effect)
                case ReserveSnapshot():
                    self.world.last_id = max(self.world.last_id, effect.snapshot_id)
                case SnapshotAborted():
                    is_due = "has come" in str(effect.error) or "was lost" in str(effect.error)
                    if self.world.plan.aborts_are_wrong and not is_due:
                        self.world.violations.append(Violation("liveness", str(effect.error)))
                    self.world.aborted[self.world.generation, effect.snapshot_id] = str(effect.error)
                case CommitCut():
                    self.later(self.world.dice.uniform(0.1, 6), lambda cut=effect: self.commit(cut))
                case RollbackNeeded():
                    self.world.rollbacks += 1

    def persist(self, snapshot_id: int, content: Any) -> None:
        # A process that was taken for dead may still write: no two processes may use one file name.
        file = f"{snapshot_id}/{self.name}.{self.number}"

        def durable() -> None:
            self.world.files[file] = content
            self.perform(self.machine.persisted(snapshot_id, report=file))

        if self.world.plan.ack_before_durable:
            self.perform(self.machine.persisted(snapshot_id, report=file))
        self.later(self.world.dice.uniform(0.1, 8), durable)

    def receive(self, message: Any) -> None:
        """Handle a message from the network."""
        try:
            self.handle(message)
        except StaleGenerationError as error:
            self.world.refused += 1
            if error.receiver_is_stale:
                self.alive = False


class ShardProcess(Process):
    def __init__(self, world: World, name: str, machine: CutShard) -> None:
        super().__init__(world, name)
        self.machine = machine
        self.aborted = -1
        self.perform(machine.hello())
        self.tick()

    def tick(self) -> None:
        self.perform(self.machine.tick(self.world.now))
        self.later(1.0, self.tick)

    def handle(self, message: Any) -> None:
        if isinstance(message, tuple):
            self.perform(self.machine.on_push(*message, self.world.now))
        else:
            self.perform(self.machine.on_message(message, self.world.now))
            if isinstance(message, Abort):
                self.aborted = max(self.aborted, message.tag.snapshot_id)
        if self.machine.open_snapshot is None and self.machine.held:
            self.world.violations.append(Violation("hold", f"{self.name} holds updates back for no snapshot"))
        if self.machine.open_snapshot is not None and self.machine.open_snapshot <= self.aborted:
            self.world.violations.append(Violation("reopened", f"{self.name} takes an aborted snapshot"))

    def pull(self, asker: WorkerProcess, request: int, tag: Any) -> None:
        try:
            header, effects = self.machine.on_pull(tag, self.world.now)
        except StaleGenerationError:
            self.world.refused += 1
            asker.alive = False
            return
        self.perform(effects)
        seen = [(ledger, len(ledger)) for ledger in self.machine.state.ledgers.values()]
        view = View(header, seen, self.machine.state.read())
        self.world.deliver(lambda: asker.reply(request, self.name, view) if asker.alive else None)


class WorkerProcess(Process):
    def __init__(self, world: World, name: str, build: Callable[[Callable[[], Any]], CutWorker]) -> None:
        super().__init__(world, name)
        self.machine = build(self.capture)
        self.layout = world.layout
        self.cursor = dict(self.machine.cut) if self.machine.can_train else {}
        self.replies: dict[str, View] = {}
        self.request = 0
        self.perform(self.machine.hello())
        self.step()

    def handle(self, message: Any) -> None:
        self.perform(self.machine.on_message(message))

    def step(self) -> None:
        plan, world = self.world.plan, self.world
        frozen = plan.frozen is not None and self.name == "worker-0" and plan.frozen[0] <= world.now < plan.frozen[1]
        if frozen or not self.machine.can_train:
            return self.later(1.0, self.step)
        if not self.cursor:
            self.cursor = dict(self.machine.cut)
        todo = [stream for stream in self.cursor if self.cursor[stream] < plan.updates]
        if not todo:
            self.perform(self.machine.at_boundary())
            return self.later(1.0, self.step)
        self.stream = min(todo, key=lambda stream: self.cursor[stream])
        shards = self.shards_of(self.stream, self.cursor[self.stream] + 1)
        if not self.machine.may_push(self.stream) or not shards:
            shards = list(self.layout)
        self.request += 1
        self.replies, self.wanted = {}, set(shards)
        for shard in shards:
            world.pull(self, shard, self.request, self.machine.tag)
        return None

    def capture(self) -> Any:
        """Return the worker's own state: here, its cursors."""
        return dict(self.cursor)

    def compute(self, stream: int, seq: int, parameters: Mapping[int, Any]) -> Mapping[int, Any]:
        """Return the gradient of a batch."""
        return {}

    def reply(self, request: int, shard: str, view: View) -> None:
        if request != self.request or shard in self.replies:
            return  # a duplicate
        self.replies[shard] = view
        if set(self.replies) == self.wanted:
            self.use_pull()

    def use_pull(self) -> None:
        headers = {shard: view.header for shard, view in self.replies.items()}
        self.perform(self.machine.at_boundary(headers))
        clock = min(min(header.applied.values()) for header in headers.values())
        staleness = self.world.plan.staleness
        too_far = staleness is not None and self.cursor[self.stream] + 1 - clock > staleness
        if too_far or not self.machine.may_push(self.stream):
            return self.later(self.world.dice.uniform(0.5, 2), self.step)
        views = list(self.replies.values())
        return self.later(self.world.dice.uniform(0.5, 4), lambda: self.push(views))

    def push(self, views: list[View]) -> None:
        world, stream = self.world, self.stream
        parameters = {block: value for view in views for block, value in view.parameters.items()}
        gradients = self.compute(stream, self.cursor[stream] + 1, parameters)
        self.cursor[stream] += 1
        entry = Applied(stream, self.cursor[stream], next(world.serials))
        world.oracle.seen[entry] = [part for view in views for part in view.seen]
        for shard, header in self.machine.next_update(stream, self.shards_of(stream, entry.seq)).items():
            world.send(shard, (header, Payload(entry, gradients)))
        self.step()

    def shards_of(self, stream: int, seq: int) -> list[str]:
        touched = touched_blocks(stream, seq, self.world.plan.blocks, self.world.plan.sparse)
        return [shard for shard, blocks in self.layout.items() if touched & set(blocks)]


class CoordinatorProcess(Process):
    def __init__(self, world: World, machine: SnapshotCoordinator) -> None:
        super().__init__(world, COORDINATOR)
        self.machine = machine
        self.next_trigger = world.now + world.plan.snapshot_every
        self.tick()

    def tick(self) -> None:
        self.perform(self.machine.tick(self.world.now))
        if self.machine.obstacle is None and self.world.now >= self.next_trigger:
            self.perform(self.machine.trigger(self.world.now))
            self.next_trigger = self.world.now + self.world.plan.snapshot_every
        self.later(1.0, self.tick)

    def handle(self, message: Any) -> None:
        self.perform(self.machine.on_message(message))

    def commit(self, effect: CommitCut) -> None:
        self.world.write_manifest(effect)
        self.perform(self.machine.committed(effect.cut.snapshot_id))
