"""When to save: the interval between saves, chosen from the cost of a save and the rate of failures (Young/Daly).

A save costs the time for which training stands still. A failure costs the work since the last durable checkpoint. The
interval that minimises their sum is Young's (1974), here in the form of Daly (2006). The time until a checkpoint is
durable does not change the optimum, but a save that begins before that has to wait for the previous one.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckpt_core.option_checks import check_options, check_seconds, check_share, check_switch, one_of, or_none

# Llama 3 (2024): 419 unexpected interruptions in 54 days on 16,384 GPUs.
_HOURS_OF_A_RANK = 50_000
_LONGEST_ASSUMED_SECONDS = 24 * 3600.0
_FIRST_STEPS = 10
_GROWTH = 10
_SAVES_THAT_COUNT = 5
_WORTH_SAYING = 1.5


def best_interval(cost: float, mtbf: float) -> float:
    """Return the seconds of training between two saves that lose the least time (Daly 2006, equation 37).

    Args:
        cost: Seconds for which a save stops the training.
        mtbf: Mean time between failures in seconds.

    Raises:
        ValueError: One is below 0, or not a number.

    Examples:
        >>> round(best_interval(5, 24 * 3600))  # Young's sqrt(2 * cost * mtbf) is 930
        926
    """
    given: dict[str, Any] = {"cost": cost, "mtbf": mtbf}
    for name, value in given.items():
        if isinstance(value, str) or not value >= 0:
            raise ValueError(f"{name} must be a number of seconds, 0 or above, not {value!r:.80}")
    if cost >= 2 * mtbf:
        return mtbf
    ratio = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def expected_time_between_failures(world_size: int, run_seconds: float = 0.0, failures: int = 0) -> float:
    """Return the mean time between failures to expect, in seconds.

    The estimate starts from an assumed time, which counts like one observed failure: 24 hours, or for many ranks 50,000
    hours divided by their number (Llama 3, 2024). The failures and hours that the run observes soon weigh more.

    Args:
        world_size: Number of ranks.
        run_seconds: How long the run has trained, including its earlier starts.
        failures: How often the run was interrupted.
    """
    assumed = min(_LONGEST_ASSUMED_SECONDS, _HOURS_OF_A_RANK * 3600.0 / world_size)
    return (assumed + run_seconds) / (1 + failures)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveInterval:
    """How the time between two saves is chosen.

    Args:
        mtbf: Mean time between failures in seconds; None: estimated from an assumption and from observed failures.
        max_overhead: The share of the run that saves may take, such as 0.005. Without ``mtbf`` it is used in full; with
            ``mtbf`` it is a bound.
        continuous: Save as soon as the previous checkpoint is durable.

    Raises:
        ValueError: A value is invalid; the message names it.

    Examples:
        >>> SaveInterval(max_overhead=0.01).choose(1.0, 2.0, 86_400)
        (99.0, 'saves that take 1 s may be 1 % of the run')
    """

    mtbf: float | None = None
    max_overhead: float | None = None
    continuous: bool = False

    def __post_init__(self) -> None:
        checks = {"mtbf": or_none(check_seconds), "max_overhead": or_none(check_share), "continuous": check_switch}
        check_options(checks, vars(self))

    @classmethod
    def of(cls, interval: Any, mtbf: float | None = None, max_overhead: float | None = None) -> SaveInterval | None:
        """Return the interval for the options of these names.

        Args:
            interval: ``"auto"``, ``"continuous"``, or None, which gives None.
            mtbf: As for the class; only for ``"auto"``.
            max_overhead: As above.

        Raises:
            ValueError: They are invalid; the message names the option.
        """
        check_options({"interval": or_none(one_of("auto", "continuous"))}, locals())
        if interval != "auto" and (mtbf is not None or max_overhead is not None):
            name = "mtbf" if mtbf is not None else "max_overhead"
            raise ValueError(f"{name} is for interval='auto', and interval is {interval!r}")
        chosen = cls(mtbf=mtbf, max_overhead=max_overhead, continuous=interval == "continuous")
        return None if interval is None else chosen

    def choose(self, cost: float, commit: float, mtbf: float, failures: int = 0) -> tuple[float, str]:
        """Return the seconds of training between two saves, and the reason in words.

        Args:
            cost: Seconds for which a save stops the training.
            commit: Seconds from then until the checkpoint is durable.
            mtbf: Mean time between failures in seconds; ignored if the interval's own ``mtbf`` is set.
            failures: How many failures were observed.
        """
        words = seconds_in_words
        if self.continuous:
            return commit, f"each as soon as the previous one is durable, after {words(commit)}"
        wanted, why = 0.0, ""
        if self.mtbf is not None or self.max_overhead is None:
            seen = f"{failures} seen" if failures else "assumed, none seen"
            about = words(mtbf if self.mtbf is None else self.mtbf)
            wanted = best_interval(cost, mtbf if self.mtbf is None else self.mtbf)
            why = f"Young/Daly for saves that take {words(cost)} and a failure every {about}"
            why += "" if self.mtbf is not None else f" ({seen})"
        if self.max_overhead is not None:
            least = cost * (1 - self.max_overhead) / self.max_overhead
            if least >= wanted:
                wanted = least
                why = f"saves that take {words(cost)} may be {100 * self.max_overhead:g} % of the run"
        if commit > wanted:
            return commit, f"a checkpoint is durable after {words(commit)}; without that, {words(wanted)}: {why}"
        return wanted, why


class SaveSchedule:
    """Decides at which step to save next. Rank 0 decides at each save, and the other ranks adopt its decision there.

    The interval is counted in steps, so all ranks save at the same step without communication in between. The first
    saves are ten steps apart, to measure their cost. An interval is at most ten times as long as the previous one,
    because the duration of a step may change.

    Args:
        interval: How the interval is chosen.
        world_size: Number of ranks.
        clock: Returns seconds.

    Attributes:
        is_ending: Set before the last save of a run that ends on request. Such an end loses no work, so the resume
            after it does not count as a failure.

    Examples:
        >>> schedule = SaveSchedule(SaveInterval(mtbf=3600))
        >>> schedule.begin(step=0)
        >>> schedule.due(9), schedule.due(10)
        (False, True)
        >>> _ = schedule.agree(10, schedule.propose(10))  # what rank 0 proposes, on all ranks; then they save
        >>> schedule.took(0.05)
        >>> schedule.due(19), schedule.due(20)
        (False, True)
    """

    def __init__(
        self, interval: SaveInterval, world_size: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval, self._world_size, self._clock = interval, world_size, clock
        self._costs: collections.deque[float] = collections.deque(maxlen=_SAVES_THAT_COUNT)
        self._cost_since = 0.0
        self._begun = self._mark = clock()
        self._next, self._marked, self._steps = _FIRST_STEPS, 0, _FIRST_STEPS
        self._said: float | None = None
        self._seconds_before, self._failures = 0.0, 0
        self.is_ending = False

    def begin(self, step: int) -> None:
        """Start counting: training starts, or continues, at this step."""
        self._begun = self._mark = self._clock()
        self._marked, self._steps, self._next = step, _FIRST_STEPS, step + _FIRST_STEPS
        self._cost_since, self.is_ending = 0.0, False

    def due(self, step: int) -> bool:
        """Return whether to save at this step; the same on all ranks."""
        return step >= self._next

    def took(self, seconds: float) -> None:
        """Record for how many seconds a save, scheduled here or not, has stopped the training."""
        self._costs.append(seconds)
        self._cost_since += seconds

    def propose(self, step: int, commit_seconds: float = 0.0) -> list[Any]:
        """Return rank 0's proposal after the save that is due, as plain data for :meth:`agree`.

        Args:
            step: The step of all ranks.
            commit_seconds: How long the last save took in the background, until it was durable.
        """
        if not self._costs:
            return [_FIRST_STEPS, None]
        mtbf = expected_time_between_failures(self._world_size, self._run_seconds(), self._failures)
        cost = statistics.median(self._costs)
        seconds, why = self._interval.choose(cost, commit_seconds, mtbf, self._failures)
        of_a_step = (self._clock() - self._mark - self._cost_since) / max(1, step - self._marked)
        wanted = seconds / of_a_step if of_a_step > 0 else math.inf
        steps = math.ceil(min(max(1.0, wanted), _GROWTH * self._steps))
        told = None
        if self._said is None or not 1 / _WORTH_SAYING < seconds / self._said < _WORTH_SAYING:
            self._said = max(seconds, 1e-9)
            told = f"saving about every {seconds_in_words(seconds)} from now on: {why}"
        return [steps, told]

    def agree(self, step: int, proposal: Sequence[Any]) -> str | None:
        """Adopt rank 0's proposal; return a line to show if something has changed.

        Args:
            step: The step of all ranks.
            proposal: From :meth:`propose`.
        """
        steps, told = proposal
        self._steps, self._next, self._marked = int(steps), step + int(steps), step
        self._mark, self._cost_since = self._clock(), 0.0
        return None if told is None else str(told)

    def _run_seconds(self) -> float:
        return self._seconds_before + self._clock() - self._begun

    def state_dict(self) -> dict[str, Any]:
        """Return the training time and the failures so far, for a resumed run, as plain data."""
        return {"run_seconds": self._run_seconds(), "failures": self._failures, "told_to_end": self.is_ending}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the run that is resumed; counts a failure, unless that run had ended on request.

        Args:
            state: :meth:`state_dict` from the checkpoint; empty if it has none.
        """
        if state:
            self._seconds_before = float(state["run_seconds"])
            self._failures = int(state["failures"]) + (not state["told_to_end"])
            self._begun = self._clock()


def seconds_in_words(seconds: float) -> str:
    """Return a duration in words, such as ``"0.04 s"``, ``"7 min"`` or ``"3.1 h"``.

    Examples:
        >>> [seconds_in_words(seconds) for seconds in (0.0413, 12.0, 420, 11_160)]
        ['0.041 s', '12 s', '7 min', '3.1 h']
    """
    for unit, name in ((3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.3g} s"
