"""Simpler schemes, used in place of consistent cuts: the same oracle finds their errors, in the same simulation."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_async.consistent_cut import CutShard, CutWorker, VectorClock
from ckpt_async.consistent_cut.effects import Effect, PersistShard
from ckpt_async.consistent_cut.messages import Begin, ShardAck
from ckpt_async.consistent_cut.types import MessageTag
from tests.ckpt_async.consistent_cut.oracle import Ledger
from tests.ckpt_async.consistent_cut.processes import Plan, ShardProcess, WorkerProcess
from tests.ckpt_async.consistent_cut.simulation import World
from tests.ckpt_async.consistent_cut.test_mutations import Unchecked


class SavesAtOnce(CutShard):
    """Saves as soon as it is told to: no markers, and nothing of what the network holds."""

    def _observe(self, tag: MessageTag, now: float) -> list[Effect]:
        return []

    def on_message(self, message: Any, now: float) -> list[Effect]:
        if not isinstance(message, Begin) or message.tag.snapshot_id <= self._snapshot_id:
            return []
        self._snapshot_id = message.tag.snapshot_id
        applied = VectorClock(self._applied)
        self._acks = {self._snapshot_id: ShardAck(self.tag, self.name, applied, applied)}
        return [PersistShard(self._snapshot_id, applied, self.state.copy())]


class WorkerSavesAtOnce(CutWorker):
    def on_message(self, message: Any) -> list[Effect]:
        if isinstance(message, Begin) and message.tag.snapshot_id > self._snapshot_id:
            return self._take_cut(message.tag.snapshot_id)
        return []


ONE_TRIGGER = Plan(worker_class=WorkerSavesAtOnce, shard_class=SavesAtOnce, coordinator_class=Unchecked)


def test_one_trigger_and_everybody_saves_is_inconsistent() -> None:
    bad = commits = 0
    for seed in range(10):
        world = World(ONE_TRIGGER, seed).run()
        in_training = [m for m in world.manifests if any(n < ONE_TRIGGER.updates for n in m.cut.vector.values())]
        verdicts = [world.judge_manifest(manifest) for manifest in in_training]
        commits += len(verdicts)
        bad += sum("ledger" in {violation.kind for violation in verdict} for verdict in verdicts)
    assert commits > 20
    assert bad > commits / 2, f"{bad} of {commits}"


class Timers(World):
    """Every process saves by its own timer; from time to time, what would be restored at that moment is judged."""

    interval = 25.0

    def run(self) -> World:
        self.saved_positions: dict[str, dict[int, int]] = {}
        self.saved_ledgers: dict[str, dict[int, Ledger]] = {}
        self.verdicts: list[set[str]] = []
        for number in range(10):
            self.later(50 + 5 * number, self.look)
        self.later(0.0, self.set_timers)
        return super().run()

    def set_timers(self) -> None:
        for process in self.processes.values():
            self.later(self.dice.uniform(0, self.interval), lambda p=process: self.save(p))

    def save(self, process: Any) -> None:
        if isinstance(process, ShardProcess):
            self.saved_ledgers[process.name] = process.machine.state.copy().ledgers
        elif isinstance(process, WorkerProcess):
            self.saved_positions[process.name] = dict(process.cursor)
        self.later(self.interval, lambda: self.save(process))

    def look(self) -> None:
        if self.is_trained():
            return  # the state does not change any more
        positions = {stream: n for cursors in self.saved_positions.values() for stream, n in cursors.items()}
        ledgers = {block: ledger for blocks in self.saved_ledgers.values() for block, ledger in blocks.items()}
        self.verdicts.append({violation.kind for violation in self.oracle.judge(positions, ledgers)})


def test_a_timer_in_each_process_is_inconsistent() -> None:
    verdicts = []
    for seed in range(10):
        world = Timers(Plan(updates=30), seed)
        world.run()
        assert world.violations == [], "the cuts taken beside it are good"
        verdicts += world.verdicts
    bad = sum("ledger" in verdict for verdict in verdicts)
    assert len(verdicts) > 40
    assert bad > 0.8 * len(verdicts), f"{bad} of {len(verdicts)}"


@pytest.mark.parametrize("seed", range(3))
def test_the_oracle_notices_a_forged_checkpoint(seed: int) -> None:
    world = World(Plan(), seed).run()
    positions, ledgers = world.content(world.manifests[0])
    assert world.oracle.judge(positions, ledgers) == []
    first = ledgers[0].pop()
    assert {violation.kind for violation in world.oracle.judge(positions, ledgers)} >= {"ledger"}
    ledgers[0] += [first, first]
    assert {violation.kind for violation in world.oracle.judge(positions, ledgers)} == {"ledger"}
    ledgers[0].pop()
    stream = first.stream
    one_more = next(e for e in sorted(world.oracle.seen) if e.stream == stream and e.seq == positions[stream] + 1)
    for ledger in ledgers.values():
        ledger.append(one_more)
    assert {violation.kind for violation in world.oracle.judge(positions, ledgers)} >= {"ledger"}
