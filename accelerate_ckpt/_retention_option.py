"""The option ``retention``, as it is written in a flag, a variable or a file; nothing heavy is imported here.

In words, ``latest=2,every_steps=1000``, or as Lightning's configuration files name a class::

    retention:
      class_path: ckpt_core.policies.KeepBest
      init_args: {metric: loss, count: 3}
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["RULES", "check_retention", "parse_retention"]

_POLICIES = "ckpt_core.policies."


def _count(text: str) -> int:
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
        return [_count(step) for step in text.split("+")]
    except ValueError:
        raise ValueError("steps with + between them") from None


def _best(text: str) -> dict[str, Any]:
    metric, *rest = text.split(":")
    found: dict[str, Any] = {"metric": metric, "mode": "min", "count": 1}
    if rest and rest[0] in ("min", "max"):
        found["mode"] = rest.pop(0)
    try:
        if rest:
            found["count"] = _count(rest.pop(0))
    except ValueError:
        rest = [text]
    if rest or not metric:
        raise ValueError("METRIC, METRIC:max, or METRIC:min:3 for three of them")
    return found


def _one(name: str, read: Callable[[str], Any]) -> Callable[[str], dict[str, Any]]:
    return lambda text: {name: read(text)}


RULES: dict[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    "latest": ("KeepLatest", _one("count", _count)),
    "best": ("KeepBest", _best),
    "every_steps": ("KeepEverySteps", _one("steps", _count)),
    "every_hours": ("KeepEveryTime", _one("interval", _hours)),
    "at_steps": ("KeepAtSteps", _one("steps", _steps)),
}


def parse_retention(text: str) -> Any:
    """Return the mapping that a text in JSON is; another text is left to :func:`check_retention`."""
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return found if isinstance(found, Mapping) else text


def check_retention(value: Any) -> Any:
    """Return a policy or the mapping that names its class; None if nothing is to be deleted.

    Raises:
        ValueError: The value is neither; the message goes on after the option's name.
    """
    if value is None or callable(getattr(value, "kept", None)):
        return value
    if isinstance(value, str):
        return _from_words(value)
    if isinstance(value, Mapping) and isinstance(value.get("class_path"), str) and set(value) <= _KEYS:
        return dict(value)
    raise ValueError(
        "must be a policy such as ckpt_core.policies.KeepLatest(2), 'latest=2', or a mapping with class_path and init_args, "
        f"not {value!r}"
    )


_KEYS = {"class_path", "init_args"}


def _from_words(text: str) -> dict[str, Any]:
    policies = []
    for word in text.split(","):
        name, _, argument = (part.strip() for part in word.partition("="))
        if name not in RULES:
            raise ValueError(f"has no rule {name!r}: there are {', '.join(RULES)}, as in 'latest=2,every_steps=1000'")
        policy, read = RULES[name]
        try:
            policies.append({"class_path": _POLICIES + policy, "init_args": read(argument)})
        except ValueError as wanted:
            raise ValueError(f"needs for {name} {wanted}, not {argument!r}") from None
    if len(policies) == 1:
        return policies[0]
    return {"class_path": f"{_POLICIES}AnyOf", "init_args": {"policies": policies}}
