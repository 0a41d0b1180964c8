"""A shard and a worker, one message at a time."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_async.consistent_cut import (
    COORDINATOR,
    CutOptions,
    CutShard,
    CutWorker,
    InconsistentCutError,
    StaleGenerationError,
    UpdateId,
    VectorClock,
)
from ckpt_async.consistent_cut.effects import DiscardCopy, Effect, PersistShard, PersistWorker, Send
from ckpt_async.consistent_cut.messages import (
    Abort,
    Begin,
    Committed,
    Marker,
    Position,
    PullHeader,
    PushHeader,
    ShardAck,
    Takeover,
    Welcome,
    WorkerAck,
)
from ckpt_async.consistent_cut.types import MessageTag

ALIGNED = CutOptions(alignment="aligned", aligned_timeout=5.0)


def tag(snapshot_id: int, generation: int = 0) -> MessageTag:
    return MessageTag(generation, snapshot_id)


class Log:
    """A state that is the list of the updates that were applied to it."""

    def __init__(self, applied: list[Any] | None = None) -> None:
        self.applied = applied or []

    def apply(self, update: UpdateId, payload: Any) -> None:
        self.applied.append((*update, payload))

    def copy(self) -> Log:
        return Log(list(self.applied))


def shard_of(**arguments: Any) -> tuple[CutShard, Log]:
    log = Log()
    return CutShard("s", log, {0: 0, 1: 0}, **arguments), log


def push(snapshot_id: int, stream: int, seq: int, incarnation: int = 0) -> PushHeader:
    return PushHeader(tag(snapshot_id), UpdateId(stream, seq), seq, incarnation)


def marker(snapshot_id: int, **cut: int) -> Marker:
    clock = VectorClock({int(stream[1:]): count for stream, count in cut.items()})
    return Marker(tag(snapshot_id), "w", clock, clock)


def only(effects: list[Effect], kind: type[Any]) -> Any:
    (found,) = [effect for effect in effects if isinstance(effect, kind)]
    return found


# The shard


def test_a_shard_applies_in_order_and_once() -> None:
    shard, log = shard_of()
    for header in (push(0, 0, 2), push(0, 0, 2), push(0, 0, 1), push(0, 0, 1), push(0, 1, 1)):
        shard.on_push(header, "g", now=0.0)
    assert log.applied == [(0, 1, "g"), (0, 2, "g"), (1, 1, "g")]
    assert shard.version == 3


def test_an_unaligned_copy_takes_in_what_was_under_way_and_nothing_later() -> None:
    shard, log = shard_of()
    shard.on_push(push(0, 0, 1), "a", now=0.0)
    assert shard.on_message(marker(1, s0=2), now=0.0) == []
    shard.on_push(push(1, 0, 3), "late", now=0.0)  # overtakes 2
    assert shard.on_message(marker(1, s1=0), now=0.0) == []
    shard.on_push(push(1, 1, 1), "after the cut", now=0.0)
    saved = only(shard.on_push(push(0, 0, 2), "b", now=0.0), PersistShard)
    assert saved.copy.applied == [(0, 1, "a"), (0, 2, "b")]
    assert (saved.cut, saved.folded, saved.recorded) == ({0: 2, 1: 0}, 1, ())
    assert log.applied == [(0, 1, "a"), (1, 1, "after the cut"), (0, 2, "b"), (0, 3, "late")]
    assert shard.persisted(1, "digest") == [Send(COORDINATOR, ShardAck(tag(1), "s", saved.cut, saved.cut, "digest"))]
    assert shard.persisted(1, "digest") == []


def test_an_aligned_shard_holds_back_what_is_after_the_cut() -> None:
    shard, log = shard_of(options=ALIGNED)
    shard.on_push(push(1, 1, 1), "held", now=0.0)
    assert (log.applied, shard.held, shard.open_snapshot) == ([], 1, 1)
    shard.on_message(marker(1, s0=1, s1=0), now=0.0)
    saved = only(shard.on_push(push(0, 0, 1), "a", now=1.0), PersistShard)
    assert (saved.copy.applied, saved.held, saved.folded) == ([(0, 1, "a")], 1, 0)
    assert log.applied == [(0, 1, "a"), (1, 1, "held")]
    assert (shard.held, shard.open_snapshot) == (0, None)


def test_an_aligned_shard_goes_on_unaligned_after_the_timeout() -> None:
    shard, log = shard_of(options=ALIGNED)
    shard.on_push(push(1, 1, 1), "held", now=10.0)
    assert shard.tick(14.9) == [] and shard.held == 1
    shard.tick(15.0)
    assert log.applied == [(1, 1, "held")]
    shard.on_message(marker(1, s0=1, s1=0), now=16.0)
    assert only(shard.on_push(push(0, 0, 1), "a", now=17.0), PersistShard).copy.applied == [(0, 1, "a")]


def test_recorded_pieces_are_beside_the_copy() -> None:
    shard, _ = shard_of(options=CutOptions(channel_state="record"))
    shard.on_message(marker(1, s0=1, s1=0), now=0.0)
    saved = only(shard.on_push(push(0, 0, 1), "a", now=0.0), PersistShard)
    assert saved.copy.applied == []
    assert saved.recorded == ((push(0, 0, 1), "a"),)


@pytest.mark.parametrize("options", [CutOptions(), ALIGNED])
def test_a_late_message_does_not_open_an_aborted_snapshot_again(options: CutOptions) -> None:
    shard, log = shard_of(options=options)
    assert shard.on_message(Abort(tag(1), "why"), now=0.0) == []  # before anything else of snapshot 1
    shard.on_message(marker(1, s0=0, s1=0), now=0.0)
    shard.on_message(Begin(tag(1)), now=0.0)
    shard.on_push(push(1, 0, 1), "a", now=0.0)
    assert (shard.open_snapshot, shard.held, log.applied) == (None, 0, [(0, 1, "a")])
    shard.on_message(Begin(tag(2)), now=0.0)
    assert shard.open_snapshot == 2


@pytest.mark.parametrize("end", [Abort(tag(1), "why"), Welcome(tag(1)), Begin(tag(2))], ids=lambda m: type(m).__name__)
def test_the_end_of_an_aligned_snapshot_releases_what_it_held(end: Any) -> None:
    shard, log = shard_of(options=ALIGNED)
    shard.on_push(push(1, 0, 1), "held", now=0.0)
    shard.on_message(end, now=0.0)
    assert (log.applied, shard.held) == ([(0, 1, "held")], 0)


def test_an_abandoned_copy_is_given_back() -> None:
    shard, _ = shard_of()
    shard.on_message(Begin(tag(1)), now=0.0)
    shard.on_message(Abort(tag(0), "of an earlier one"), now=0.0)
    assert shard.open_snapshot == 1
    assert only(shard.on_message(Begin(tag(2)), now=0.0), DiscardCopy).snapshot_id == 1
    assert only(shard.on_message(Abort(tag(2), "why"), now=0.0), DiscardCopy).snapshot_id == 2


def test_other_generations_are_refused_and_change_nothing() -> None:
    shard, log = shard_of(generation=3)
    for stale in (2, 4):
        wrong = MessageTag(stale, 9)
        for attempt in (
            lambda: shard.on_push(PushHeader(wrong, UpdateId(0, 1), 1), "g", now=0.0),  # noqa: B023
            lambda: shard.on_pull(wrong, now=0.0),  # noqa: B023
            lambda: shard.on_message(Begin(wrong), now=0.0),  # noqa: B023
            lambda: shard.on_message(Abort(wrong, ""), now=0.0),  # noqa: B023
            lambda: shard.on_message(Committed(wrong), now=0.0),  # noqa: B023
        ):
            with pytest.raises(StaleGenerationError, match=f"generation {stale}") as caught:
                attempt()
            assert caught.value.receiver_is_stale == (stale > 3)
    assert (log.applied, shard.tag, shard.open_snapshot) == ([], MessageTag(3, 0), None)


def test_a_takeover_refuses_the_life_before() -> None:
    shard, log = shard_of()
    shard.on_push(push(0, 0, 1), "a", now=0.0)
    shard.on_push(push(0, 0, 3), "never to be applied", now=0.0)
    answer = only(shard.on_message(Takeover(tag(0), "w", (0,), 1), now=0.0), Send)
    assert answer.message == Position(tag(0), "s", 1, VectorClock({0: 1}), VectorClock({0: 1}))
    with pytest.raises(StaleGenerationError, match="replaced by life 1"):
        shard.on_push(push(0, 0, 2), "zombie", now=0.0)
    with pytest.raises(StaleGenerationError):
        shard.on_message(marker(1, s0=1), now=0.0)
    assert shard.open_snapshot is None
    shard.on_push(push(0, 0, 2, incarnation=1), "b", now=0.0)
    shard.on_push(push(0, 1, 1), "another worker's", now=0.0)
    assert log.applied == [(0, 1, "a"), (0, 2, "b"), (1, 1, "another worker's")]


def test_a_shard_refuses_what_is_not_for_it() -> None:
    with pytest.raises(TypeError, match="WorkerAck is not for a shard"):
        shard_of()[0].on_message(WorkerAck(tag(0), "w", VectorClock(), {}), now=0.0)


# The worker


def worker_of(**arguments: Any) -> CutWorker:
    return CutWorker("w", {0: 0, 1: 0}, ["a", "b"], lambda: "state", **arguments)


def reply(snapshot_id: int = 0, generation: int = 0, **applied: int) -> PullHeader:
    clock = VectorClock({0: applied.get("s0", 0), 1: applied.get("s1", 0)})
    return PullHeader(tag(snapshot_id, generation), sum(clock.values()), clock, clock)


def test_a_worker_cuts_between_two_updates_and_stamps_what_follows() -> None:
    worker = worker_of()
    assert worker.next_update(0)["a"] == push(0, 0, 1)
    assert worker.on_message(Begin(tag(1))) == []
    assert worker.next_update(1)["b"] == push(0, 1, 1), "a cut in the middle of an update"
    effects = worker.at_boundary()
    markers = [effect for effect in effects if isinstance(effect, Send)]
    assert [effect.to for effect in markers] == ["a", "b"]
    assert markers[0].message == marker(1, s0=1, s1=1)
    assert only(effects, PersistWorker).state == "state"
    assert worker.next_update(0)["a"] == push(1, 0, 2)
    assert worker.at_boundary() == []
    (ack,) = worker.persisted(1, "digest")
    assert ack.message.report == "digest" and ack.message.cut == {0: 1, 1: 1}, "as at the cut, not as of now"


def test_a_pull_that_shows_a_snapshot_cuts_before_it_is_used() -> None:
    worker = worker_of()
    effects = worker.at_boundary({"a": reply(0), "b": reply(1)})
    assert only(effects, PersistWorker).cut == {0: 0, 1: 0}
    with pytest.raises(StaleGenerationError):
        worker.at_boundary({"a": reply(1, generation=1)})


def test_flow_control_counts_what_shards_have_not_applied() -> None:
    worker = worker_of()
    worker.next_update(0)
    worker.next_update(0)
    assert not worker.may_push(0) and worker.may_push(1)
    with pytest.raises(InconsistentCutError, match="max_inflight_updates"):
        worker.next_update(0)
    worker.at_boundary({"a": reply(s0=2), "b": reply(s0=0)})
    assert not worker.may_push(0)
    worker.at_boundary({"b": reply(s0=1)})
    assert worker.may_push(0)


def test_pieces_of_sparse_updates_are_counted_per_shard() -> None:
    worker = worker_of()
    assert worker.next_update(0, ["b"]) == {"b": PushHeader(tag(0), UpdateId(0, 1), 1)}
    assert worker.next_update(0, ["b", "a"])["a"] == PushHeader(tag(0), UpdateId(0, 2), 1)
    worker.on_message(Begin(tag(1)))
    sent = {e.to: e.message.pieces for e in worker.at_boundary() if isinstance(e, Send)}
    assert sent == {"a": {0: 1, 1: 0}, "b": {0: 2, 1: 0}}


def test_an_aborted_snapshot_is_not_cut() -> None:
    worker = worker_of()
    worker.on_message(Begin(tag(1)))
    worker.on_message(Abort(tag(1), "why"))
    assert worker.at_boundary() == []
    worker.on_message(Begin(tag(1)))
    assert worker.at_boundary() == []
    assert worker.tag == tag(1)


def test_a_worker_that_rejoins_repeats_only_what_some_shard_lacks() -> None:
    worker = CutWorker.rejoining("w", [0], ["a", "b"], lambda: "state", incarnation=2)
    assert not worker.can_train and not worker.may_push(0)
    assert not worker.hello()[0].message.ready
    takeovers = worker.on_message(Welcome(tag(4)))
    assert [effect.message for effect in takeovers] == [Takeover(tag(4), "w", (0,), 2)] * 2
    for shard, seq in (("a", 7), ("b", 6)):
        worker.on_message(Position(tag(4), shard, 2, VectorClock({0: seq}), VectorClock({0: seq})))
    assert worker.can_train and worker.next_seq(0) == 7
    seen = PullHeader(tag(5), 7, VectorClock({0: 7}), VectorClock({0: 7}))
    assert worker.at_boundary({"a": seen}) == [], "it has not caught up, and no snapshot waits for it"
    assert worker.tag == tag(5)
    assert list(worker.next_update(0)) == ["b"]
    (hello,) = worker.at_boundary()
    assert hello.message.ready
    assert sorted(worker.next_update(0)) == ["a", "b"]
