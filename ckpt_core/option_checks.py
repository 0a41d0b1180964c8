"""Validate option values where they are passed, so that a wrong value does not fail hours later where it is used.

A check returns the value, or raises a :class:`ValueError` whose message continues after the option's name.
"""

from __future__ import annotations

import datetime
import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Check = Callable[[Any], Any]

_LEAST_HOST_BYTES = 32 * 2**20  # two windows of 16 MiB; not taken from their module, because that imports torch


def check_options(checks: Mapping[str, Check], values: Mapping[str, Any]) -> None:
    """Apply each check to the value of the same name, and refuse the first invalid value.

    Raises:
        ValueError: The message begins with the option's name.
    """
    for name, check in checks.items():
        try:
            check(values[name])
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None


def check_count(value: Any) -> int:
    """Accept whole numbers of at least 1."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:  # NumPy's integers are not an int
        raise ValueError(f"must be a whole number of at least 1, not {value!r:.80}")
    return int(value)


def check_max_host_bytes(max_host_bytes: int | None, max_pending: int) -> None:
    """Refuse a limit that is too small for any state.

    Raises:
        ValueError: It is less than two windows for each pending save.
    """
    least = _LEAST_HOST_BYTES * max_pending
    if max_host_bytes is not None and max_host_bytes < least:
        raise ValueError(
            f"max_host_bytes must be at least {least}, 32 MiB for each of max_pending={max_pending} saves, "
            f"not {max_host_bytes}"
        )


def check_switch(value: Any) -> bool:
    """Accept True and False only: the text ``"false"`` would count as True."""
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {value!r:.80}")  # noqa: TRY004  a wrong value, as the others
    return value


def check_seconds(value: Any) -> float:
    """Accept finite numbers of seconds above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"must be a number of seconds above 0, not {value!r:.80}")
    return float(value)


def check_share(value: Any) -> float:
    """Accept shares of a run, between 0 and 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
        raise ValueError(f"must be a share of the run between 0 and 1, not {value!r:.80}")
    return float(value)


def check_signals(value: Any, what: str = "names of signals such as 'SIGTERM'") -> tuple[str, ...]:
    """Accept names of signals that a program can handle, also as a text with commas between them."""
    given = [value] if isinstance(value, str) else value
    names = list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"must be {what}, not {value!r:.80}")
    names = [name.strip().upper() for text in names for name in text.split(",") if name.strip()]
    for name in names:
        if not isinstance(getattr(signal, name, None), signal.Signals) or name in ("SIGKILL", "SIGSTOP"):
            raise ValueError(f"must be {what}: {name!r} is not a signal that a program can handle")
    return tuple(dict.fromkeys(names))


def check_deadline(value: Any) -> float | None:
    """Accept a number of seconds from now or a time, also as text; return it as Unix time. None means no deadline."""
    if value is None:
        return None
    given = value
    if isinstance(given, str):
        try:
            given = float(given)
        except ValueError:
            try:
                given = datetime.datetime.fromisoformat(given)
            except ValueError:
                raise ValueError(f"must be seconds or a time as 2026-11-22T04:00, not {value!r:.80}") from None
    if isinstance(given, datetime.datetime):
        try:
            return given.timestamp()
        except (ValueError, OverflowError) as error:
            raise ValueError(f"must be a time that the system's clock can represent, not {given}: {error}") from None
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not given > 0:
        raise ValueError(f"must be seconds above 0 or a time, not {value!r:.80}")
    return time.time() + given


def check_two_tiers(local_dir: object, upload_to: object, keep_local: object) -> None:
    """Raise a ``ValueError`` if one of these options is given without another that it needs."""
    if (local_dir is None) != (upload_to is None):
        missing, given = ("local_dir", "upload_to") if local_dir is None else ("upload_to", "local_dir")
        raise ValueError(f"{given} needs {missing} too: checkpoints go to local_dir first, and from there to upload_to")
    if keep_local is not None and local_dir is None:
        raise ValueError("keep_local needs local_dir and upload_to: without them there is one tier only")


def check_notice(value: Any) -> Any:
    """Accept None, paths and functions."""
    return value if value is None or callable(value) else check_path(value, "the path of a file, or a function")


def check_preemption(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Accept a mapping with arguments of :class:`ckpt_core.preemption.Preemption`."""
    known: dict[str, Check] = {
        "signals": check_signals,
        "deadline": check_deadline,
        "notice": check_notice,
        "look_every": check_seconds,
    }
    unknown = [name for name in value if name not in known]
    if unknown:
        raise ValueError(f"has no argument {unknown[0]!r}; it has signals, deadline, notice and look_every")
    check_options({name: known[name] for name in value}, value)
    return value


def check_path(value: Any, what: str = "the path of a file") -> str:
    """Accept paths that are not empty."""
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise ValueError(f"must be {what}, not {value!r:.80}")
    return os.fspath(value)


def check_text(value: Any) -> str:
    """Accept strings."""
    if not isinstance(value, str):
        raise ValueError(f"must be a text, not {value!r:.80}")  # noqa: TRY004  a wrong value, as the others
    return value


def check_mapping(value: Any) -> dict[str, Any]:
    """Accept mappings with names as keys."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        # The message does not show the value, because it may contain credentials.
        raise ValueError("must be a mapping with names as keys; in a flag or a variable, a JSON object")
    return dict(value)


def check_functions(value: Any) -> Sequence[Callable[..., Any]]:
    """Accept sequences of callables."""
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(map(callable, value)):
        raise ValueError(f"must be a list of functions, not {value!r:.80}")
    return value


def one_of(*choices: Any) -> Check:
    """Return a check that accepts one of the given values."""

    def check(value: Any) -> Any:
        if value not in choices:
            *first, last = map(repr, choices)
            raise ValueError(f"must be {', '.join(first)} or {last}, not {value!r:.80}")
        return value

    return check


def instance_of(kind: type, name: str) -> Check:
    """Return a check that accepts instances of a class, which the message calls ``name``."""

    def check(value: Any) -> Any:
        if not isinstance(value, kind):
            raise ValueError(f"must be a {name}, not {value!r:.80}")  # noqa: TRY004  a wrong value, as the others
        return value

    return check


def or_none(check: Check) -> Check:
    """Return a check that accepts None in addition to the values that ``check`` accepts."""
    return lambda value: None if value is None else check(value)
