"""The interval of saves: against the closed form, its bounds, and that ranks with different clocks agree."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from ckpt_core.policies import SaveInterval, SaveSchedule, best_interval
from ckpt_core.policies.interval import expected_time_between_failures

DAY = 24 * 3600.0


def seconds_for_work(work: float, cost: float, mtbf: float) -> float:
    """Return the expected time per second of work, with random failures (Daly 2006, equation 13)."""
    return mtbf * math.expm1((work + cost) / mtbf) / work


@pytest.mark.parametrize("cost", [0.001, 0.1, 5.0, 300.0])
@pytest.mark.parametrize("mtbf", [600.0, 3600.0, DAY, 30 * DAY])
def test_no_other_interval_is_better(cost: float, mtbf: float) -> None:
    chosen = best_interval(cost, mtbf)
    at_best = seconds_for_work(chosen, cost, mtbf)
    for factor in (0.25, 0.5, 0.8, 1.25, 2.0, 4.0):
        assert at_best <= seconds_for_work(chosen * factor, cost, mtbf)


@pytest.mark.parametrize(
    ("cost", "mtbf", "name"),
    [(-1.0, 60.0, "cost"), (1.0, -1.0, "mtbf"), (1.0, math.nan, "mtbf"), (1.0, "6 hours", "mtbf")],
)
def test_times_below_0_have_no_best_interval(cost: float, mtbf: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a number of seconds, 0 or above"):
        best_interval(cost, mtbf)


def test_a_budget_is_used_up_alone_and_a_bound_with_a_failure_rate() -> None:
    alone, why = SaveInterval(max_overhead=0.01).choose(2.0, 0.0, DAY)
    assert 2.0 / (alone + 2.0) == pytest.approx(0.01)
    assert why == "saves that take 2 s may be 1 % of the run"
    often, _ = SaveInterval(mtbf=100.0, max_overhead=0.01).choose(2.0, 0.0, DAY)
    assert often == alone  # Young/Daly alone would spend a tenth of the run
    seldom, why = SaveInterval(mtbf=30 * DAY, max_overhead=0.01).choose(2.0, 0.0, DAY)
    assert seldom == best_interval(2.0, 30 * DAY) > alone
    assert why == "Young/Daly for saves that take 2 s and a failure every 720 h"


def test_no_save_begins_before_the_one_before_is_durable() -> None:
    seconds, why = SaveInterval(mtbf=3600.0).choose(0.001, 60.0, DAY)
    assert seconds == 60.0 and "durable after 60 s" in why
    assert SaveInterval(continuous=True).choose(5.0, 7.0, DAY)[0] == 7.0


def test_what_a_run_sees_takes_the_place_of_what_is_assumed() -> None:
    assert expected_time_between_failures(1) == DAY
    assert expected_time_between_failures(16_384) == pytest.approx(3.05 * 3600, rel=0.01)
    assert expected_time_between_failures(1, 300 * 3600.0, 100) == pytest.approx(3.2 * 3600, rel=0.01)
    assert expected_time_between_failures(1, 1000 * 3600.0, 0) > 40 * DAY


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("auto", 0.0, None), "mtbf must be a number of seconds above 0"),
        (("auto", None, 1.0), "max_overhead must be a share"),
        (("sometimes", None, None), "interval must be 'auto' or 'continuous'"),
        ((None, 60.0, None), "mtbf is for interval='auto'"),
        (("continuous", None, 0.1), "max_overhead is for interval='auto'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SaveInterval.of(*options)


class Run:
    """Ranks that step at their own speed and save when the schedule says so."""

    def __init__(self, interval: SaveInterval, *, step_seconds: tuple[float, ...] = (0.5,), cost: float = 1.0) -> None:
        self.clocks = [0.0] * len(step_seconds)
        self.schedules = [
            SaveSchedule(interval, len(step_seconds), clock=lambda rank=rank: self.clocks[rank])
            for rank in range(len(step_seconds))
        ]
        self.step_seconds, self.cost = step_seconds, cost
        self.step = 0
        self.lines: list[str] = []

    def until(self, step: int, *, begins: bool = True) -> list[int]:
        if begins:
            for schedule in self.schedules:
                schedule.begin(self.step)
        saved = []
        while self.step < step:
            self.step += 1
            for rank, seconds in enumerate(self.step_seconds):
                self.clocks[rank] += seconds
            due = {schedule.due(self.step) for schedule in self.schedules}
            assert len(due) == 1  # all ranks or none
            if due == {True}:
                proposal = self.schedules[0].propose(self.step, 0.1)
                for rank, schedule in enumerate(self.schedules):
                    line = schedule.agree(self.step, proposal)
                    schedule.took(self.cost * (rank + 1))
                    self.clocks[rank] += self.cost * (rank + 1)
                    self.lines += [line] if line and rank == 0 else []
                saved.append(self.step)
        return saved


def test_ranks_agree_on_steps_whatever_their_clocks_say() -> None:
    run = Run(SaveInterval(mtbf=3600.0), step_seconds=(0.5, 0.7, 0.1))
    saved = run.until(2000)
    steps = math.ceil(best_interval(1.0, 3600.0) / 0.5)
    assert saved[:4] == [10, 20, 20 + 100, 120 + steps]
    assert {later - earlier for earlier, later in itertools.pairwise(saved[3:])} == {steps}
    assert run.lines == [
        "saving about every 84.2 s from now on: Young/Daly for saves that take 1 s and a failure every 60 min"
    ]


def test_it_adapts_to_slower_steps_and_says_so_only_when_it_chooses_another_time() -> None:
    run = Run(SaveInterval(mtbf=3600.0))
    run.until(3000)
    run.step_seconds = (5.0,)
    later = run.until(6000, begins=False)
    assert later[-1] - later[-2] == math.ceil(best_interval(1.0, 3600.0) / 5.0)
    assert len(run.lines) == 1
    run.cost = 100.0
    run.until(9000, begins=False)
    assert len(run.lines) > 1 and "saves that take 100 s" in run.lines[-1]


def test_a_crash_counts_as_a_failure_and_an_end_that_was_told_does_not() -> None:
    def resumed(state: dict[str, Any]) -> SaveSchedule:
        schedule = SaveSchedule(SaveInterval(), clock=lambda: 0.0)
        schedule.begin(0)
        schedule.load_state_dict(state)
        return schedule

    first = Run(SaveInterval())
    first.until(100)
    (schedule,) = first.schedules
    state = schedule.state_dict()
    assert state == {"run_seconds": pytest.approx(52.0), "failures": 0, "told_to_end": False}
    second = resumed(state)
    assert second.state_dict()["failures"] == 1
    second.is_ending = True
    third = resumed(second.state_dict())
    assert third.state_dict() == {"run_seconds": pytest.approx(52.0), "failures": 1, "told_to_end": False}
    assert resumed({}).state_dict()["failures"] == 0
