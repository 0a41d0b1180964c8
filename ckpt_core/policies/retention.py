"""Retention policies: which checkpoints to keep. Modelled on Orbax's preservation policies; combined by *any of*."""

from __future__ import annotations

import dataclasses
import datetime
import math
import numbers
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from ckpt_core.option_checks import check_count, check_options, check_text, one_of


@dataclasses.dataclass(frozen=True)
class SavedCheckpoint:
    """The record of a committed checkpoint, from which a policy decides.

    Attributes:
        path: Local path or URL.
        step: Optimizer steps taken.
        time: Unix time of the save in seconds.
        metrics: Values at that moment, by name.
    """

    path: str
    step: int
    time: float
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


@runtime_checkable
class RetentionPolicy(Protocol):
    """Decides which checkpoints to keep. Any object with this method is a policy."""

    def kept(self, checkpoints: Sequence[SavedCheckpoint]) -> Collection[SavedCheckpoint]:
        """Return the checkpoints to keep.

        Args:
            checkpoints: All committed checkpoints, in the order of their saves.
        """


def to_delete(
    policy: RetentionPolicy, checkpoints: Iterable[SavedCheckpoint], *, protected: Collection[str] = ()
) -> list[SavedCheckpoint]:
    """Return the checkpoints that may be deleted, oldest first.

    The newest one is never among them: a run that is killed now resumes from it.

    Args:
        policy: Decides which to keep.
        checkpoints: All committed checkpoints.
        protected: Paths to keep in any case, such as the one that the run was resumed from.

    Examples:
        >>> from ckpt_core.policies import KeepLatest, SavedCheckpoint, to_delete
        >>> saved = [SavedCheckpoint(f"step={step}", step, time=float(step)) for step in (1, 2, 3)]
        >>> [checkpoint.path for checkpoint in to_delete(KeepLatest(2), saved)]
        ['step=1']
    """
    ordered = sorted(checkpoints, key=lambda checkpoint: (checkpoint.time, checkpoint.step))
    kept = {checkpoint.path for checkpoint in policy.kept(ordered)} | set(protected)
    return [checkpoint for checkpoint in ordered[:-1] if checkpoint.path not in kept]


@dataclasses.dataclass(frozen=True)
class KeepLatest:
    """Keep the newest checkpoints.

    Args:
        count: How many.
    """

    count: int = 1

    def __post_init__(self) -> None:
        check_options({"count": check_count}, vars(self))

    def kept(self, checkpoints: Sequence[SavedCheckpoint]) -> Collection[SavedCheckpoint]:
        return checkpoints[-self.count :]


@dataclasses.dataclass(frozen=True)
class KeepBest:
    """Keep the checkpoints with the best values of a metric; of equal values, the later one.

    A checkpoint without the metric, or whose value is NaN, is never among the best.

    Args:
        metric: Name of the metric.
        count: How many.
        mode: Whether the smallest (``"min"``) or the largest (``"max"``) is the best.
    """

    metric: str
    count: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        check_options({"metric": check_text, "count": check_count, "mode": one_of("min", "max")}, vars(self))

    def kept(self, checkpoints: Sequence[SavedCheckpoint]) -> Collection[SavedCheckpoint]:
        sign = 1 if self.mode == "max" else -1
        measured = [c for c in checkpoints if not math.isnan(c.metrics.get(self.metric, math.nan))]
        return sorted(measured, key=lambda c: sign * c.metrics[self.metric])[-self.count :]


@dataclasses.dataclass(frozen=True)
class KeepEverySteps:
    """Keep the first checkpoint at or after each multiple of ``steps``.

    Args:
        steps: Number of optimizer steps.
    """

    steps: int

    def __post_init__(self) -> None:
        check_options({"steps": check_count}, vars(self))

    def kept(self, checkpoints: Sequence[SavedCheckpoint]) -> Collection[SavedCheckpoint]:
        return _first_of_each([(c.step // self.steps, c) for c in checkpoints if c.step >= self.steps])


def _check_hours(value: Any) -> None:
    hours = value.total_seconds() if isinstance(value, datetime.timedelta) else value
    if isinstance(hours, bool) or not isinstance(hours, (int, float)) or not 0 < hours < math.inf:
        raise ValueError(f"must be hours above 0, or a timedelta, not {value!r:.80}")


@dataclasses.dataclass(frozen=True)
class KeepEveryTime:
    """Keep the first checkpoint of each period; periods are counted from the start of Unix time.

    The periods do not depend on which checkpoints exist, so a deletion never changes what is kept.

    Args:
        interval: The length of a period; a number means hours.
    """

    interval: datetime.timedelta | float

    def __post_init__(self) -> None:
        check_options({"interval": _check_hours}, vars(self))

    @property
    def _seconds(self) -> float:
        hours = self.interval
        return hours.total_seconds() if isinstance(hours, datetime.timedelta) else hours * 3600

    def kept(self, checkpoints: Sequence[SavedCheckpoint]) -> Collection[SavedCheckpoint]:
        return _first_of_each([(math.floor(c.time / self._seconds), c) for c in checkpoints])


def _check_steps(value: Any) -> None:
    if not isinstance(value, Collection) or not all(isinstance(step, numbers.Integral) for step in value):
        raise ValueError(f"must be a list of whole numbers, not {value!r:.80}")


@dataclasses.dataclass(frozen=True)
class KeepAtSteps:
    """Keep the checkpoints of given steps.

    Args:
        steps: The steps.
    """

    steps: Sequence[int]

    def __post_init__(self) -> None:
        check_options({"steps": _check_steps}, vars(self))

    def kept(self, checkpoints: Sequence[SavedCheckpoint]) -> Collection[SavedCheckpoint]:
        wanted = set(self.steps)
        return [checkpoint for checkpoint in checkpoints if checkpoint.step in wanted]


def _check_policies(value: Any) -> None:
    is_list = isinstance(value, Collection) and not isinstance(value, str)
    if not is_list or any(isinstance(each, type) or not isinstance(each, RetentionPolicy) for each in value):
        raise ValueError(f"must be a list of policies such as KeepLatest(2), not {value!r:.80}")


@dataclasses.dataclass(frozen=True)
class AnyOf:
    """Keep the checkpoints that at least one of several policies keeps.

    Args:
        policies: The policies.

    Examples:
        >>> from ckpt_core.policies import AnyOf, KeepBest, KeepEverySteps, KeepLatest
        >>> policy = AnyOf([KeepLatest(2), KeepBest("val_loss"), KeepEverySteps(10_000)])
    """

    policies: Sequence[RetentionPolicy]

    def __post_init__(self) -> None:
        check_options({"policies": _check_policies}, vars(self))

    def kept(self, checkpoints: Sequence[SavedCheckpoint]) -> Collection[SavedCheckpoint]:
        kept = {checkpoint.path for policy in self.policies for checkpoint in policy.kept(checkpoints)}
        return [checkpoint for checkpoint in checkpoints if checkpoint.path in kept]


def _first_of_each(stretches: Iterable[tuple[int, SavedCheckpoint]]) -> list[SavedCheckpoint]:
    first: dict[int, SavedCheckpoint] = {}
    for number, checkpoint in stretches:
        first.setdefault(number, checkpoint)
    return list(first.values())
