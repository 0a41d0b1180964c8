"""Retention policies as text, for options, YAML and the command line: ``latest=2,every_steps=1000``."""

from __future__ import annotations

import math
from collections.abc import Callable

from ckpt_core.option_checks import check_text
from ckpt_core.policies.retention import (
    AnyOf,
    KeepAtSteps,
    KeepBest,
    KeepEverySteps,
    KeepEveryTime,
    KeepLatest,
    RetentionPolicy,
)


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ValueError("a whole number of at least 1")
    return int(text)


def _hours(text: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = math.nan
    if not 0 < hours < math.inf:
        raise ValueError("a number of hours above 0")
    return hours


def _steps(text: str) -> list[int]:
    try:
        return [_whole(step) for step in text.split("+")]
    except ValueError:
        raise ValueError("steps with + between them") from None


def _best(text: str) -> KeepBest:
    metric, *rest = text.split(":")
    mode = "max" if rest[:1] == ["max"] else "min"
    rest = rest[1:] if rest[:1] in (["max"], ["min"]) else rest
    if not metric or len(rest) > 1 or (rest and not _is_whole(rest[0])):
        raise ValueError("METRIC, METRIC:max, or METRIC:min:3 for three of them")
    return KeepBest(metric, int(rest[0]) if rest else 1, mode)  # type: ignore[arg-type]


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) >= 1


_RULES: dict[str, Callable[[str], RetentionPolicy]] = {
    "latest": lambda text: KeepLatest(_whole(text)),
    "best": _best,
    "every_steps": lambda text: KeepEverySteps(_whole(text)),
    "every_hours": lambda text: KeepEveryTime(_hours(text)),
    "at_steps": lambda text: KeepAtSteps(_steps(text)),
}
RULES_IN_WORDS = tuple(_RULES)


def rules_of_words(text: str) -> list[tuple[str, RetentionPolicy]]:
    """Return the policies that a text describes, each with its part of the text.

    Args:
        text: Comma-separated rules: ``latest=N``, ``best=METRIC``, ``best=METRIC:max:N``, ``every_steps=N``,
            ``every_hours=N``, ``at_steps=N+N``.

    Raises:
        ValueError: There is no such rule, or its value is invalid; the message begins with a verb.

    Examples:
        >>> from ckpt_core.policies import rules_of_words
        >>> rules_of_words("latest=2,best=loss:max")
        [('latest=2', KeepLatest(count=2)), ('best=loss:max', KeepBest(metric='loss', count=1, mode='max'))]
    """
    found = []
    for word in check_text(text).split(","):
        name, _, value = (part.strip() for part in word.partition("="))
        if name not in _RULES:
            raise ValueError(f"has no rule {name!r}; rules are {', '.join(_RULES)}, as in 'latest=2,every_steps=1000'")
        try:
            found.append((f"{name}={value}", _RULES[name](value)))
        except ValueError as wanted:
            raise ValueError(f"needs {wanted} for {name}, not {value!r}") from None
    return found


def policy_of_words(text: str) -> RetentionPolicy:
    """Return the policy that a text describes; several rules are combined by :class:`AnyOf`.

    Args:
        text: As for :func:`rules_of_words`.

    Raises:
        ValueError: As :func:`rules_of_words`.
    """
    policies = [policy for _, policy in rules_of_words(text)]
    return policies[0] if len(policies) == 1 else AnyOf(policies)
