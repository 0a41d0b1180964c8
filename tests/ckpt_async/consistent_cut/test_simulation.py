"""Random interleavings, an unordered network, and crashes: every committed checkpoint is a consistent cut."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt_async.consistent_cut import CutOptions
from tests.ckpt_async.consistent_cut.processes import Plan
from tests.ckpt_async.consistent_cut.simulation import World

# More for a campaign: CUT_SEEDS=100 pytest tests/ckpt_async/consistent_cut/test_simulation.py
SEEDS = int(os.environ.get("CUT_SEEDS", "8"))
UNALIGNED = CutOptions(snapshot_timeout=80.0)
ALIGNED = CutOptions(alignment="aligned", aligned_timeout=6.0, snapshot_timeout=80.0)
PATIENT = dataclasses.replace(ALIGNED, aligned_timeout=900.0)
RECORD = dataclasses.replace(UNALIGNED, channel_state="record")
OPTIONS = {"unaligned": UNALIGNED, "aligned": ALIGNED, "aligned, patient": PATIENT, "record": RECORD}
SITUATIONS = {
    "no failure": Plan(),
    "sparse": Plan(sparse=True),
    "many workers": Plan(workers=6, streams=7, shards=3, updates=6),
    "one worker, one shard": Plan(workers=1, streams=2, shards=1),
    "everything killed": Plan(crashes=3, zombies=True),
    "elastic": Plan(crashes=3, zombies=True, elastic=True),
    "elastic, sparse": Plan(crashes=3, zombies=True, elastic=True, sparse=True),
    "coordinator killed": Plan(coordinator_crashes=3),
    "workers rejoin": Plan(worker_crashes=3, zombies=True, updates=16),
    "workers rejoin, sparse": Plan(worker_crashes=3, zombies=True, updates=16, sparse=True),
    "workers rejoin, coordinator killed": Plan(worker_crashes=2, coordinator_crashes=3, zombies=True, updates=16),
    "stale synchronous": Plan(staleness=3),
}


def plan_of(situation: str, options: str) -> Plan:
    plan = SITUATIONS[situation]
    on_worker_failure = "rejoin" if plan.worker_crashes else "rollback"
    return dataclasses.replace(plan, options=dataclasses.replace(OPTIONS[options], on_worker_failure=on_worker_failure))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_every_checkpoint_is_consistent(situation: str, options: str) -> None:
    """T1, T2, T4 and T5 for each checkpoint and for the end; no aborted one is committed, and everything ends."""
    plan = plan_of(situation, options)
    worlds = [World(plan, seed).run() for seed in range(SEEDS)]
    assert {world.seed: world.violations for world in worlds if world.violations} == {}
    seen = Counter(
        commits=sum(len(world.manifests) for world in worlds),
        before_end=sum(manifest.cut.vector[0] < plan.updates for world in worlds for manifest in world.manifests),
        folded=sum(world.folded for world in worlds),
        held=sum(world.held for world in worlds),
        refused=sum(world.refused for world in worlds),
        restarts=sum(world.restarts for world in worlds),
    )
    # The simulation would show nothing if these events did not happen in it.
    assert seen["commits"] >= 3 * SEEDS and seen["before_end"] >= SEEDS
    assert seen["held" if options == "aligned, patient" else "folded"] > 0
    assert (seen["held"] > 0) == options.startswith("aligned")
    assert (seen["refused"] > 0) == plan.zombies
    assert seen["restarts"] == plan.crashes * SEEDS


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32),
    options=st.builds(
        CutOptions,
        alignment=st.sampled_from(["unaligned", "aligned"]),
        aligned_timeout=st.sampled_from([0.5, 6.0, 900.0]),
        snapshot_timeout=st.sampled_from([60.0, 200.0]),
        channel_state=st.sampled_from(["fold", "record"]),
        max_inflight_updates=st.sampled_from([1, 2, 5]),
    ),
    plan=st.builds(
        Plan,
        workers=st.integers(1, 4),
        shards=st.integers(1, 4),
        streams=st.integers(4, 6),
        updates=st.integers(1, 8),
        sparse=st.booleans(),
        snapshot_every=st.sampled_from([1.0, 12.0, 40.0]),
        duplicated=st.sampled_from([0.0, 0.3]),
        lost=st.sampled_from([0.0, 0.1]),
        slow=st.sampled_from([0.0, 0.1, 0.5]),
        crashes=st.integers(0, 2),
        coordinator_crashes=st.integers(0, 2),
        zombies=st.booleans(),
        elastic=st.booleans(),
    ),
)
def test_any_run_is_consistent(seed: int, options: CutOptions, plan: Plan) -> None:
    assert World(dataclasses.replace(plan, options=options, time_limit=20000.0), seed).run().violations == []


def test_a_lost_worker_is_a_reason_to_roll_back_where_nobody_may_rejoin() -> None:
    plan = dataclasses.replace(plan_of("workers rejoin", "unaligned"), options=UNALIGNED, time_limit=200.0)
    worlds = [World(plan, seed).run() for seed in range(4)]
    assert sum(world.rollbacks for world in worlds) > 0


@pytest.mark.parametrize("options", ["unaligned", "aligned"])
def test_a_frozen_worker_holds_up_nobody(options: str) -> None:
    plan = dataclasses.replace(Plan(), options=OPTIONS[options], frozen=(20.0, 400.0), slow=0.0)
    for seed in range(SEEDS):
        world = World(plan, seed).run()
        assert world.violations == []
        assert any("worker-0" in reason for reason in world.aborted.values()), "the snapshot must not wait for ever"
