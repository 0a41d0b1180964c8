"""Each rule is needed: without it, the oracle finds something wrong, and with it, on the same seeds, nothing.

The kinds tell what noticed it. ``ledger``, ``orphan``, ``durability``: a bad checkpoint was committed. ``liveness``:
snapshots were aborted for no reason from outside, which is how the commit's checks show when a rule is broken below
them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from ckpt_async.consistent_cut import CutOptions, CutShard, CutWorker, SnapshotCoordinator, VectorClock
from ckpt_async.consistent_cut.effects import Effect, Send
from ckpt_async.consistent_cut.messages import Marker, PullHeader, PushHeader, ShardAck
from ckpt_async.consistent_cut.types import MessageTag
from tests.ckpt_async.consistent_cut.processes import Plan
from tests.ckpt_async.consistent_cut.simulation import World

SEEDS = 25
QUIET = Plan(options=CutOptions(snapshot_timeout=500.0), lost=0.0, aborts_are_wrong=True)
ALIGNED = CutOptions(alignment="aligned", aligned_timeout=6.0, snapshot_timeout=80.0)
PATIENT = CutOptions(alignment="aligned", aligned_timeout=900.0, snapshot_timeout=500.0)
REJOIN = CutOptions(on_worker_failure="rejoin", snapshot_timeout=500.0)


class Unchecked(SnapshotCoordinator):
    """Commits whatever comes, so that what the rules below the check do on their own is visible."""

    def _verify(self, snapshot: Any) -> VectorClock:
        vector = VectorClock()
        for ack in snapshot.worker_acks.values():
            vector = vector.joined_with(ack.cut)
        return vector


class NoIdOnReplies(CutShard):
    def on_pull(self, tag: MessageTag, now: float) -> tuple[PullHeader, list[Effect]]:
        header, effects = super().on_pull(tag, now)
        return dataclasses.replace(header, tag=MessageTag(header.tag.generation, 0)), effects


class UsesPullBeforeCut(CutWorker):
    """Gets the id on replies, and does not act on it before using them."""

    def _note_pull(self, shard: str, header: PullHeader) -> None:
        observed = self._observed
        super()._note_pull(shard, header)
        self._observed = observed


class CutsWithoutStamping(CutWorker):
    """Sends its markers, but stamps later pushes as if it had not."""

    def next_update(self, stream: int, shards: Any = None) -> dict[str, PushHeader]:
        headers = super().next_update(stream, shards)
        return {
            shard: dataclasses.replace(header, tag=MessageTag(header.tag.generation, header.tag.snapshot_id - 1))
            for shard, header in headers.items()
        }


class ProcessesBeforeCopy(CutShard):
    def on_push(self, header: PushHeader, payload: Any, now: float) -> list[Effect]:
        old = dataclasses.replace(header, tag=self.tag)
        effects = super().on_push(old if header.tag.snapshot_id > self.tag.snapshot_id else header, payload, now)
        return [*effects, *self._observe(header.tag, now)]


class Hasty(CutShard):
    """Hands its copy over once the markers are there, whatever is still under way."""

    def _is_complete(self, snapshot: Any) -> bool:
        return len(snapshot.cut) == len(self._applied)


class HastyProcessesBeforeCopy(ProcessesBeforeCopy):
    def _is_complete(self, snapshot: Any) -> bool:
        pieces = self._applied if snapshot.copy is None else snapshot.pieces
        return Hasty._is_complete(self, snapshot) and all(pieces[i] >= sent for i, sent in snapshot.sent.items())


class IgnoresSomeMarkers(CutShard):
    """Does not wait for the markers of all workers."""

    def _is_complete(self, snapshot: Any) -> bool:
        if not snapshot.cut:
            return False
        for stream in self._applied:
            snapshot.cut.setdefault(stream, snapshot.last.get(stream, self._last_applied[stream]))
            snapshot.sent.setdefault(stream, snapshot.pieces.get(stream, self._applied[stream]))
        return super()._is_complete(snapshot)


class NeverFolds(CutShard):
    def _add_to_copy(self, snapshot: Any, piece: Any) -> None:
        pass


class CountsWithoutFolding(CutShard):
    def _fold(self, snapshot: Any, piece: Any) -> None:
        pass


class FoldsEverything(CutShard):
    def _take(self, piece: Any) -> None:
        super()._take(piece)
        snapshot = self._snapshot
        if snapshot is not None and snapshot.copy is not None and piece[0].tag.snapshot_id >= snapshot.snapshot_id:
            self._fold(snapshot, piece)


class NoDeduplication(CutShard):
    def on_push(self, header: PushHeader, payload: Any, now: float) -> list[Effect]:
        stream = header.update.stream
        came_before = header.piece <= self._taken[stream] or header.piece in self._early[stream]
        effects = super().on_push(header, payload, now)
        if came_before:
            self.state.apply(header.update, payload)
        return effects


class NoOrder(CutShard):
    """Takes pieces in the order in which they arrive, and drops those that are older than the newest."""

    def on_push(self, header: PushHeader, payload: Any, now: float) -> list[Effect]:
        self._taken[header.update.stream] = max(self._taken[header.update.stream], header.piece - 1)
        return super().on_push(header, payload, now)


class DenseCounts(CutWorker):
    """Tells every shard that it was sent a piece of each update."""

    def _take_cut(self, snapshot_id: int) -> list[Effect]:
        return [
            Send(effect.to, dataclasses.replace(effect.message, pieces=effect.message.cut))
            if isinstance(effect, Send) and isinstance(effect.message, Marker)
            else effect
            for effect in super()._take_cut(snapshot_id)
        ]


class CommitsEarly(SnapshotCoordinator):
    """Does not wait for the shards."""

    def _is_whole(self, snapshot: Any) -> bool:
        if len(snapshot.worker_acks) < len(snapshot.workers):
            return False
        vector = Unchecked._verify(self, snapshot)  # type: ignore[arg-type]
        for shard in self._shards:
            ack = ShardAck(self._tag(snapshot.snapshot_id), shard, vector, vector, "not yet written")
            snapshot.shard_acks.setdefault(shard, ack)
        return True


class AnyGenerationShard(CutShard):
    def _check_generation(self, tag: MessageTag) -> None:
        pass


class AnyGenerationWorker(CutWorker):
    def _check_generation(self, tag: MessageTag) -> None:
        pass


class AnyGenerationCoordinator(SnapshotCoordinator):
    def _check_generation(self, tag: MessageTag) -> None:
        pass


class AnyIncarnation(CutShard):
    def _check_incarnation(self, streams: Any, incarnation: int) -> None:
        pass


class Reopens(CutShard):
    """Forgets that a snapshot was aborted."""

    def _give_up(self, snapshot_id: int) -> list[Effect]:
        before = self._snapshot_id
        effects = super()._give_up(snapshot_id)
        self._snapshot_id = min(before, snapshot_id - 1)
        return effects


class DropsHeldUpdates(CutShard):
    def _give_up(self, snapshot_id: int) -> list[Effect]:
        self._held.clear()
        return super()._give_up(snapshot_id)


class KeepsHeldUpdates(CutShard):
    """Does not release what an aborted snapshot held."""

    def _give_up(self, snapshot_id: int) -> list[Effect]:
        held, self._held = self._held, []
        effects = super()._give_up(snapshot_id)
        self._held = held
        return effects


class NeverHolds(CutShard):
    def _take(self, piece: Any) -> None:
        snapshot = self._snapshot
        if snapshot is None or snapshot.copy is not None:
            super()._take(piece)
        else:
            self._apply(piece)


class HastyNeverHolds(NeverHolds):
    _is_complete = HastyProcessesBeforeCopy._is_complete


class NoTimeout(CutShard):
    def tick(self, now: float) -> list[Effect]:
        return []


class NoFlowControl(CutWorker):
    """Issues updates without limit, and rejoins as if there were one."""

    def may_push(self, stream: int) -> bool:
        return self.can_train


@dataclasses.dataclass(frozen=True)
class Mutation:
    without: str
    plan: Plan
    broken: Mapping[str, Any]
    noticed_as: set[str]

    @property
    def broken_plan(self) -> Plan:
        return dataclasses.replace(self.plan, **self.broken)


UNCHECKED = {"coordinator_class": Unchecked}
CRASHES = Plan(crashes=3, zombies=True)
REJOINS = dataclasses.replace(QUIET, options=REJOIN, worker_crashes=3, zombies=True, updates=25)
# Pushes often overtake the markers and the coordinator.
OVERTAKING = dataclasses.replace(QUIET, slow=0.5)
IMPATIENT = Plan(options=dataclasses.replace(PATIENT, snapshot_timeout=40.0))
PATIENT_PLAN = dataclasses.replace(QUIET, options=PATIENT)
FROZEN = dataclasses.replace(
    QUIET,
    options=dataclasses.replace(ALIGNED, snapshot_timeout=900.0),
    frozen=(20.0, 500.0),
    slow=0.0,
)
MUTATIONS = [
    Mutation("the id on replies to pulls", QUIET, {"shard_class": NoIdOnReplies}, {"orphan"}),
    Mutation("cutting before a pull is used", QUIET, {"worker_class": UsesPullBeforeCut}, {"orphan"}),
    Mutation("the stamp on pushes", QUIET, {"worker_class": CutsWithoutStamping}, {"liveness"}),
    Mutation("copying before processing", OVERTAKING, {"shard_class": ProcessesBeforeCopy}, {"liveness"}),
    Mutation(
        "copying before processing, and the check",
        OVERTAKING,
        {"shard_class": HastyProcessesBeforeCopy, **UNCHECKED},
        {"ledger"},
    ),
    Mutation("folding", QUIET, {"shard_class": NeverFolds}, {"liveness"}),
    Mutation("applying what is folded", QUIET, {"shard_class": CountsWithoutFolding}, {"ledger"}),
    Mutation("folding only what is from before the cut", QUIET, {"shard_class": FoldsEverything}, {"ledger"}),
    Mutation("waiting for updates under way", QUIET, {"shard_class": Hasty}, {"liveness"}),
    Mutation("waiting for updates, and the check", QUIET, {"shard_class": Hasty, **UNCHECKED}, {"ledger"}),
    Mutation("waiting for all markers", QUIET, {"shard_class": IgnoresSomeMarkers}, {"liveness"}),
    Mutation("waiting for markers, and the check", QUIET, {"shard_class": IgnoresSomeMarkers, **UNCHECKED}, {"ledger"}),
    Mutation("deduplication", QUIET, {"shard_class": NoDeduplication}, {"ledger"}),
    Mutation("the order within a stream", QUIET, {"shard_class": NoOrder}, {"stalled"}),
    Mutation(
        "counts per shard of sparse pushes",
        dataclasses.replace(QUIET, sparse=True),
        {"worker_class": DenseCounts},
        {"liveness"},
    ),
    Mutation("waiting for the shards before the commit", QUIET, {"coordinator_class": CommitsEarly}, {"durability"}),
    Mutation("acknowledging only what is durable", QUIET, {"ack_before_durable": True}, {"durability"}),
    Mutation(
        "generations",
        CRASHES,
        {
            "shard_class": AnyGenerationShard,
            "worker_class": AnyGenerationWorker,
            "coordinator_class": AnyGenerationCoordinator,
        },
        {"orphan", "torn"},
    ),
    Mutation("lives of a worker", REJOINS, {"shard_class": AnyIncarnation}, {"liveness"}),
    Mutation("lives of a worker, and the check", REJOINS, {"shard_class": AnyIncarnation, **UNCHECKED}, {"ledger"}),
    Mutation(
        "the limit on updates under way, where a sparse worker rejoins",
        dataclasses.replace(REJOINS, sparse=True),
        {"worker_class": NoFlowControl},
        {"ledger"},
    ),
    Mutation("remembering what was aborted", Plan(), {"shard_class": Reopens}, {"reopened"}),
    Mutation("releasing when a new snapshot comes", IMPATIENT, {"shard_class": KeepsHeldUpdates}, {"hold"}),
    Mutation("keeping what is held", IMPATIENT, {"shard_class": DropsHeldUpdates}, {"stalled"}),
    Mutation("holding back", PATIENT_PLAN, {"shard_class": NeverHolds}, {"liveness"}),
    Mutation("holding, and the check", PATIENT_PLAN, {"shard_class": HastyNeverHolds, **UNCHECKED}, {"ledger"}),
    Mutation("the timeout of alignment", FROZEN, {"shard_class": NoTimeout}, {"frozen"}),
]


def kinds_of(plan: Plan, seeds: range, until: set[str]) -> Counter[str]:
    """Return which kinds of violations are found, in how many runs; stop once all of ``until`` are found."""
    found: Counter[str] = Counter()
    for seed in seeds:
        found.update(World(plan, seed).run().kinds)
        if until and until <= set(found):
            break
    return found


@pytest.mark.sampled(9)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.without)
def test_a_missing_rule_is_noticed(mutation: Mutation) -> None:
    found = kinds_of(mutation.broken_plan, range(SEEDS), mutation.noticed_as)
    assert mutation.noticed_as <= set(found), f"only {dict(found)} in {SEEDS} runs"


PLANS = list(dict.fromkeys(mutation.plan for mutation in MUTATIONS))


@pytest.mark.sampled(1)
@pytest.mark.extended_cells("1", "2", "3", "4", "5", "7", "9")
@pytest.mark.parametrize("plan", PLANS, ids=map(str, range(len(PLANS))))
def test_with_all_rules_nothing_is_wrong(plan: Plan) -> None:
    assert kinds_of(plan, range(SEEDS), set()) == {}


def test_counts_do_not_see_a_missing_id_on_replies() -> None:
    found = kinds_of(dataclasses.replace(QUIET, shard_class=NoIdOnReplies), range(SEEDS), set())
    assert set(found) == {"orphan"}


@pytest.mark.parametrize("shard_class", [Hasty, IgnoresSomeMarkers])
def test_the_check_at_commit_keeps_bad_cuts_out(shard_class: type[CutShard]) -> None:
    refused = 0
    for seed in range(SEEDS):
        world = World(dataclasses.replace(QUIET, shard_class=shard_class), seed).run()
        assert world.kinds <= {"liveness"}
        refused += sum("where the cut has" in reason for reason in world.aborted.values())
    assert refused > SEEDS
