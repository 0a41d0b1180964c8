"""Which checkpoints the retention policies keep."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core import Catalog, Checkpointer, DirectoryCheckpointer
from ckpt_core.policies import (
    AnyOf,
    KeepAtSteps,
    KeepBest,
    KeepEverySteps,
    KeepEveryTime,
    KeepLatest,
    RetentionPolicy,
    SavedCheckpoint,
    SaveInterval,
    policy_of_words,
    to_delete,
)
from ckpt_core.storage import storage_for
from ckpt_core.tiers import MemoryTier


def saved(*steps: int, losses: Sequence[float] = (), seconds: float = 1.0) -> list[SavedCheckpoint]:
    metrics = [{"loss": loss} for loss in losses] or [{} for _ in steps]
    return [
        SavedCheckpoint(f"step={step}", step, step * seconds, values)
        for step, values in zip(steps, metrics, strict=True)
    ]


def left(policy: RetentionPolicy, checkpoints: list[SavedCheckpoint], *protected: str) -> list[int]:
    gone = to_delete(policy, checkpoints, protected=protected)
    return [checkpoint.step for checkpoint in checkpoints if checkpoint not in gone]


def test_latest() -> None:
    assert left(KeepLatest(2), saved(1, 2, 3, 4)) == [3, 4]
    assert left(KeepLatest(9), saved(1, 2)) == [1, 2]


def test_best_keeps_the_newest_too_and_the_later_of_equal_ones() -> None:
    checkpoints = saved(1, 2, 3, 4, losses=[0.5, 0.2, 0.2, 0.9])
    assert left(KeepBest("loss"), checkpoints) == [3, 4]
    assert left(KeepBest("loss", count=2), checkpoints) == [2, 3, 4]
    assert left(KeepBest("loss", mode="max"), checkpoints) == [4]


def test_what_has_no_number_is_none_of_the_best() -> None:
    checkpoints = saved(1, 2, 3, 4, losses=[math.nan, 0.7, math.nan, math.nan])
    for mode in ("min", "max"):
        assert left(KeepBest("loss", mode=mode), checkpoints) == [2, 4]  # type: ignore[arg-type]
        assert left(KeepBest("accuracy", mode=mode), checkpoints) == [4]  # type: ignore[arg-type]


def test_every_steps_keeps_the_first_at_or_after_each_multiple() -> None:
    assert left(KeepEverySteps(10), saved(3, 9, 10, 15, 21, 22, 39, 41, 42)) == [10, 21, 39, 41, 42]


def test_every_time() -> None:
    hours = saved(0, 10, 30, 61, 70, 119, 121, 125, seconds=60.0)
    assert left(KeepEveryTime(1), hours) == [0, 61, 121, 125]
    assert left(KeepEveryTime(datetime.timedelta(minutes=30)), hours) == [0, 30, 61, 119, 121, 125]


def test_at_steps() -> None:
    assert left(KeepAtSteps([2, 5]), saved(1, 2, 3, 4)) == [2, 4]
    assert left(KeepAtSteps(np.array([2, 5])), saved(1, 2, 3, 4)) == [2, 4]  # type: ignore[arg-type]


def test_any_of() -> None:
    policy = AnyOf([KeepLatest(2), KeepEverySteps(5), KeepAtSteps([1])])
    assert left(policy, saved(1, 2, 5, 6, 7, 8)) == [1, 5, 7, 8]


def test_the_protected_and_the_newest_stay() -> None:
    assert left(KeepAtSteps([]), saved(1, 2, 3), "step=1") == [1, 3]


def test_the_order_of_the_list_does_not_matter() -> None:
    assert left(KeepLatest(1), saved(3, 1, 2)) == [3]


REFUSED: list[tuple[str, Callable[[Any], object], list[Any]]] = [
    ("count must be a whole number", KeepLatest, [0, 1.5, "1", math.inf]),
    ("count must be a whole number", lambda count: KeepBest("loss", count=count), [-1, "1"]),
    ("metric must be a text", KeepBest, [None, 5]),
    ("mode must be", lambda mode: KeepBest("loss", mode=mode), ["lowest"]),
    ("steps must be a whole number", KeepEverySteps, [0, "10"]),
    ("steps must be a list of whole numbers", KeepAtSteps, [5, None, "12", ["1"], [1.5]]),
    ("policies must be a list of policies", AnyOf, [KeepLatest(1), "latest=2", ["latest=2"], [KeepLatest], None]),
    ("interval must be hours", KeepEveryTime, [0, math.nan, "1", datetime.timedelta(0)]),
    ("mtbf must be a number of seconds", lambda mtbf: SaveInterval(mtbf=mtbf), ["3600", math.inf, True]),
    ("max_overhead must be a share", lambda share: SaveInterval(max_overhead=share), ["0.1", 1]),
    ("continuous must be true or false", lambda switch: SaveInterval(continuous=switch), ["no"]),
    ("tiers must be a ckpt_core.tiers.Tiers", lambda tiers: Catalog("a", tiers=tiers), [("a", "b")]),
    ("tiers must be a ckpt_core.tiers.Tiers", lambda tiers: DirectoryCheckpointer(tiers=tiers), ["/fast"]),
    ("storage must be a ckpt_core.storage.Storage", lambda storage: Catalog("a", storage=storage), ["x", 0]),
    ("listeners must be a list of functions", lambda listeners: Catalog("a", listeners=listeners), ["x", print]),
    ("storage must be a ckpt_core.storage.Storage", lambda storage: Checkpointer(storage=storage), ["/fast", {}]),
    ("uploads must be true or false", lambda uploads: Checkpointer(uploads=uploads), ["no", 0]),
    ("ranks must be a ckpt_core.RankGroup", lambda ranks: DirectoryCheckpointer(ranks=ranks), [2, "x"]),
    ("slice_replicated must be", lambda switch: DirectoryCheckpointer(slice_replicated=switch), ["false"]),
    ("link_unchanged must be", lambda switch: DirectoryCheckpointer(link_unchanged=switch), ["false"]),
    ("every must be a whole number", lambda every: MemoryTier("run", every=every), [1.5, "x", math.nan]),
    ("run must be the path", MemoryTier, [5, ""]),
    ("storage_options must be a mapping", lambda given: storage_for("a", given), ["key=1", []]),
    ("must be a text", policy_of_words, [5, None]),
    ("suffix must be a text", lambda suffix: Catalog("a", suffix=suffix), [None, b".ckpt"]),
    ("storage_options must be a mapping", lambda given: Catalog("a", storage_options=given), ["key=1"]),
    ("memory must be", lambda memory: Catalog("a", memory=memory), [1, ""]),
    ("commit_timeout must be", lambda seconds: DirectoryCheckpointer(commit_timeout=seconds), [0.0, "1", math.nan]),
]


@pytest.mark.parametrize(("message", "make", "value"), [(m, f, value) for m, f, values in REFUSED for value in values])
def test_what_makes_no_sense_is_refused_by_name(message: str, make: Callable[[Any], object], value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        make(value)


policies = st.recursive(
    st.one_of(
        st.builds(KeepLatest, st.integers(1, 4)),
        st.builds(KeepBest, st.just("loss"), st.integers(1, 3), st.sampled_from(["min", "max"])),
        st.builds(KeepEverySteps, st.integers(1, 9)),
        st.builds(KeepEveryTime, st.floats(0.001, 0.01)),
        st.builds(KeepAtSteps, st.lists(st.integers(0, 40))),
    ),
    lambda inner: st.builds(AnyOf, st.lists(inner, max_size=3)),
)


@given(policies, st.lists(st.tuples(st.integers(0, 60), st.floats()), unique_by=lambda pair: pair[0], max_size=20))
def test_deleting_step_by_step_keeps_what_a_look_at_all_of_them_keeps(
    policy: RetentionPolicy, history: list[tuple[int, float]]
) -> None:
    """Retention runs after every save: what it deleted before must not change what it keeps now."""
    history = sorted(history)
    every = [SavedCheckpoint(f"step={step}", step, float(step), {"loss": loss}) for step, loss in history]
    there: list[SavedCheckpoint] = []
    for checkpoint in every:
        there.append(checkpoint)
        gone = to_delete(policy, there)
        assert checkpoint not in gone
        there = [c for c in there if c not in gone]
    assert {c.path for c in every} - {c.path for c in to_delete(policy, every)} <= {c.path for c in there}
