"""Which tensors get files of their own: decided from what changed, without thrashing."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_core._plan import Grouping
from ckpt_core._plan.grouping import MOST_GROUPS, WORTH_A_FILE

SIZE = WORTH_A_FILE
KEYS = ["a", "b", "c", "d"]
SIZES = dict.fromkeys(KEYS, SIZE)


def test_what_stays_gets_a_group_and_keeps_it() -> None:
    grouping = Grouping()
    assert grouping.update(SIZES, []) == {}
    assert [grouping.update(SIZES, {"a", "b"}) for _ in range(5)] == [{"a": 1, "b": 1}] * 5


def test_all_or_nothing_tells_nothing() -> None:
    grouping = Grouping()
    assert grouping.update(SIZES, KEYS) == {}
    grouping.update(SIZES, {"a"})
    assert grouping.update(SIZES, KEYS) == grouping.update(SIZES, []) == {"a": 1}


def test_what_joins_later_does_not_touch_the_file_that_is_there() -> None:
    grouping = Grouping()
    grouping.update(SIZES, {"a"})
    assert grouping.update(SIZES, {"a", "b"}) == {"a": 1, "b": 2}


def test_little_is_not_worth_a_file() -> None:
    sizes = {"a": WORTH_A_FILE - 1, "b": 10**9}
    assert Grouping().update(sizes, {"a"}) == {}
    assert Grouping().update({**sizes, "c": 1}, {"a", "c"}) == {"a": 1, "c": 1}


def test_one_that_comes_and_goes_has_to_stay_longer_each_time() -> None:
    grouping = Grouping()
    grouping.update(SIZES, {"a", "b"})
    waits = []
    for _ in range(4):
        assert grouping.update(SIZES, {"a"}) == {"a": 1}, "it has changed"
        saves = itertools.count(1)
        waits.append(next(n for n in saves if "b" in grouping.update(SIZES, {"a", "b"})))
    assert waits == [2, 4, 8, 16]


def test_there_are_never_many_groups() -> None:
    keys = [f"k{n}" for n in range(3 * MOST_GROUPS)]
    sizes = {**dict.fromkeys(keys, SIZE), "trained": SIZE}
    grouping = Grouping()
    for count in range(1, len(keys) + 1):
        groups = grouping.update(sizes, keys[:count])
        assert groups.keys() == set(keys[:count])
        assert len(set(groups.values())) <= MOST_GROUPS


def test_groups_of_a_checkpoint_are_gone_on_with() -> None:
    grouping = Grouping()
    grouping.restore({"a": 3, "b": 0})
    assert grouping.update(SIZES, {"a"}) == {"a": 3}
    assert grouping.update(SIZES, {"a", "b"}) == {"a": 3, "b": 4}


@given(st.lists(st.sets(st.sampled_from(KEYS)), max_size=30))
@settings(deadline=None)
def test_a_group_of_a_save_that_told_something_has_only_what_seemed_unchanged(history: list[set[str]]) -> None:
    grouping = Grouping()
    for unchanged in history:
        groups = grouping.update(SIZES, unchanged)
        assert all(groups.values())
        if 0 < len(unchanged) < len(KEYS):
            assert groups.keys() <= unchanged
