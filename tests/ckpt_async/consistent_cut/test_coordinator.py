"""The coordinator, one message at a time."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ckpt_async.consistent_cut import (
    ConsistentCut,
    CutOptions,
    InconsistentCutError,
    SnapshotAbortedError,
    SnapshotCoordinator,
    StaleGenerationError,
    VectorClock,
)
from ckpt_async.consistent_cut.effects import CommitCut, ReserveSnapshot, RollbackNeeded, Send, SnapshotAborted
from ckpt_async.consistent_cut.messages import (
    Abort,
    Begin,
    Committed,
    Hello,
    PersistFailed,
    ShardAck,
    Welcome,
    WorkerAck,
)
from tests.ckpt_async.consistent_cut.test_state_machines import only, shard_of, tag, worker_of


def coordinator_of(**arguments: Any) -> SnapshotCoordinator:
    coordinator = SnapshotCoordinator([0, 1], ["a", "b"], **arguments)
    for name in ("a", "b"):
        coordinator.on_message(Hello(tag(0), name, "shard"))
    coordinator.on_message(Hello(tag(0), "w", "worker", (0, 1)))
    return coordinator


def worker_ack(snapshot_id: int, incarnation: int = 0, **cut: int) -> WorkerAck:
    clock = VectorClock({int(stream[1:]): count for stream, count in cut.items()})
    return WorkerAck(tag(snapshot_id), "w", clock, {"a": clock, "b": clock}, incarnation, "worker's report")


def shard_ack(name: str, snapshot_id: int, **cut: int) -> ShardAck:
    clock = VectorClock({int(stream[1:]): count for stream, count in cut.items()})
    return ShardAck(tag(snapshot_id), name, clock, clock, f"report of {name}")


def test_a_snapshot_is_committed_when_all_agree() -> None:
    coordinator = coordinator_of(last_snapshot_id=4)
    effects = coordinator.trigger(now=0.0)
    assert effects[0] == ReserveSnapshot(5), "the id is durable before anybody hears of it"
    assert effects[1:] == [Send(name, Begin(tag(5))) for name in ("w", "a", "b")]
    assert coordinator.on_message(shard_ack("b", 5, s0=3, s1=4)) == []
    assert coordinator.on_message(worker_ack(5, s0=3, s1=4)) == []
    commit = only(coordinator.on_message(shard_ack("a", 5, s0=3, s1=4)), CommitCut)
    assert commit.cut == ConsistentCut(5, 0, VectorClock({0: 3, 1: 4}), ("w",), ("a", "b"))
    assert commit.shard_reports == {"a": "report of a", "b": "report of b"}
    assert coordinator.on_message(shard_ack("a", 5, s0=3, s1=4)) == [], "it is committed once"
    assert coordinator.tick(now=1e9) == [] and coordinator.abort("too late") == []
    assert coordinator.last_committed is None
    assert coordinator.committed(5) == [Send(name, Committed(tag(5))) for name in ("w", "a", "b")]
    assert coordinator.last_committed == commit.cut
    assert coordinator.obstacle is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (shard_ack("a", 1, s0=3, s1=5), "shard a holds 5 updates of stream 1 where the cut has 4"),
        (shard_ack("a", 1, s0=3), "shard a holds None updates of stream 1"),
        (
            dataclasses.replace(shard_ack("a", 1, s0=3, s1=4), pieces=VectorClock({0: 2, 1: 4})),
            "shard a holds 2 pieces of stream 0 where the cut has 3",
        ),
    ],
)
def test_shards_that_disagree_are_never_committed(wrong: ShardAck, message: str) -> None:
    coordinator = coordinator_of()
    coordinator.trigger(now=0.0)
    coordinator.on_message(worker_ack(1, s0=3, s1=4))
    coordinator.on_message(shard_ack("b", 1, s0=3, s1=4))
    effects = coordinator.on_message(wrong)
    error = only(effects, SnapshotAborted).error
    assert isinstance(error, InconsistentCutError) and message in str(error)
    assert not any(isinstance(effect, CommitCut) for effect in effects)
    assert sum(isinstance(effect, Send) and isinstance(effect.message, Abort) for effect in effects) == 3
    assert coordinator.on_message(shard_ack("a", 1, s0=3, s1=4)) == [], "late acknowledgements are ignored"
    assert coordinator.trigger(now=1.0)[0] == ReserveSnapshot(2)


def test_what_stands_in_the_way_of_a_snapshot_is_said() -> None:
    coordinator = SnapshotCoordinator([0, 1], ["a"])
    assert coordinator.obstacle == "shard a has not said hello"
    coordinator.on_message(Hello(tag(0), "a", "shard"))
    coordinator.on_message(Hello(tag(0), "w", "worker", (0,)))
    assert coordinator.obstacle == "stream 1 has 0 workers"
    with pytest.raises(SnapshotAbortedError, match="stream 1 has 0 workers"):
        coordinator.trigger(now=0.0)
    coordinator.on_message(Hello(tag(0), "v", "worker", (1,), ready=False))
    assert coordinator.obstacle == "worker v is catching up"
    coordinator.on_message(Hello(tag(0), "v", "worker", (1,)))
    coordinator.trigger(now=0.0)
    assert coordinator.obstacle == "snapshot 1 is not finished"
    with pytest.raises(InconsistentCutError, match="is not one of the run's shards"):
        coordinator.on_message(Hello(tag(0), "z", "shard"))


@pytest.mark.parametrize("on_worker_failure", ["rollback", "rejoin"])
def test_a_change_of_membership_aborts(on_worker_failure: Any) -> None:
    coordinator = coordinator_of(options=CutOptions(on_worker_failure=on_worker_failure))
    coordinator.trigger(now=0.0)
    assert not any(isinstance(e, SnapshotAborted) for e in coordinator.on_message(Hello(tag(1), "w", "worker", (0, 1))))
    effects = coordinator.member_lost("w", 0)
    assert isinstance(only(effects, SnapshotAborted).error, SnapshotAbortedError)
    assert any(isinstance(effect, RollbackNeeded) for effect in effects) == (on_worker_failure == "rollback")
    coordinator.on_message(Hello(tag(1), "w", "worker", (0, 1), incarnation=1))
    assert (coordinator.obstacle is None) == (on_worker_failure == "rejoin")
    assert coordinator.member_lost("w", 0) == [], "the report is about a life that was replaced"
    with pytest.raises(StaleGenerationError):
        coordinator.on_message(Hello(tag(1), "w", "worker", (0, 1)))
    assert any(isinstance(effect, RollbackNeeded) for effect in coordinator.member_lost("a"))


def test_a_snapshot_that_takes_too_long_is_aborted_by_name() -> None:
    coordinator = coordinator_of(options=CutOptions(snapshot_timeout=10.0))
    coordinator.trigger(now=5.0)
    coordinator.on_message(worker_ack(1, s0=0, s1=0))
    assert coordinator.tick(now=14.9) == []
    assert "nothing was heard from a, b within 10.0 s" in str(only(coordinator.tick(now=15.0), SnapshotAborted).error)


def test_bytes_that_cannot_be_written_abort() -> None:
    coordinator = coordinator_of()
    coordinator.trigger(now=0.0)
    assert coordinator.on_message(PersistFailed(tag(7), "a", "of another snapshot")) == []
    effects = coordinator.on_message(PersistFailed(tag(1), "a", "disk full"))
    assert "a could not write its state: disk full" in str(only(effects, SnapshotAborted).error)
    assert worker_of().persist_failed(1, "x")[0].message == PersistFailed(tag(1), "w", "x")
    assert shard_of()[0].persist_failed(1, "x")[0].message == PersistFailed(tag(1), "s", "x")


def test_a_manifest_that_cannot_be_written_aborts() -> None:
    coordinator = coordinator_of()
    coordinator.trigger(now=0.0)
    with pytest.raises(SnapshotAbortedError, match="not being committed"):
        coordinator.committed(1)
    for ack in (worker_ack(1, s0=0, s1=0), shard_ack("a", 1, s0=0, s1=0), shard_ack("b", 1, s0=0, s1=0)):
        coordinator.on_message(ack)
    effects = coordinator.commit_failed(1, "disk full")
    assert "the manifest could not be written: disk full" in str(only(effects, SnapshotAborted).error)
    assert coordinator.obstacle is None and coordinator.last_committed is None


def test_a_restarted_coordinator_uses_no_id_again() -> None:
    coordinator = SnapshotCoordinator([0, 1], ["a"], last_snapshot_id=3)
    (welcome,) = coordinator.on_message(Hello(tag(6), "a", "shard"))
    assert welcome.message == Welcome(tag(6)), "what the shard has open is over"
    coordinator.on_message(Hello(tag(5), "w", "worker", (0, 1)))
    assert coordinator.trigger(now=0.0)[0] == ReserveSnapshot(7)
    (welcome,) = coordinator.on_message(Hello(tag(7), "a", "shard"))
    assert welcome.message == Welcome(tag(6)), "the open snapshot is not over"


def test_an_acknowledgement_of_an_earlier_life_does_not_count() -> None:
    coordinator = coordinator_of()
    coordinator.on_message(Hello(tag(0), "w", "worker", (0, 1), incarnation=2))
    coordinator.trigger(now=0.0)
    for name in ("a", "b"):
        coordinator.on_message(shard_ack(name, 1, s0=0, s1=0))
    assert coordinator.on_message(worker_ack(1, incarnation=1, s0=0, s1=0)) == []
    assert only(coordinator.on_message(worker_ack(1, incarnation=2, s0=0, s1=0)), CommitCut).cut.snapshot_id == 1
