"""What values options take: a wrong one is refused where it is given, and not by what uses it, hours later.

A check returns the value, or raises a :class:`ValueError` that continues after the option's name.
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

_LEAST_HOST_BYTES = 32 * 2**20  # two windows of an image; written out, because torch is not imported here


def check_options(checks: Mapping[str, Check], values: Mapping[str, Any]) -> None:
    """Refuse the first of the ``values`` that its check refuses.

    Raises:
        ValueError: The message begins with the option's name.
    """
    for name, check in checks.items():
        try:
            check(values[name])
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None


def check_count(value: Any) -> int:
    """Take whole numbers of at least 1."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:  # NumPy's are no int
        raise ValueError(f"must be a whole number of at least 1, not {value!r:.80}")
    return int(value)


def check_max_host_bytes(max_host_bytes: int | None, max_pending: int) -> None:
    """Refuse what no state could pass through.

    Raises:
        ValueError: It is less than two windows for each save.
    """
    least = _LEAST_HOST_BYTES * max_pending
    if max_host_bytes is not None and max_host_bytes < least:
        raise ValueError(
            f"max_host_bytes must be at least {least}, 32 MiB for each of max_pending={max_pending} saves, "
            f"not {max_host_bytes}"
        )


def check_switch(value: Any) -> bool:
    """Take True and False: the text ``"false"`` would count as True."""
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {value!r:.80}")  # noqa: TRY004  a wrong value, as the others
    return value


def check_seconds(value: Any) -> float:
    """Take numbers of seconds above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"must be a number of seconds above 0, not {value!r:.80}")
    return float(value)


def check_share(value: Any) -> float:
    """Take shares of a run, between 0 and 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
        raise ValueError(f"must be a share of the run between 0 and 1, not {value!r:.80}")
    return float(value)


def check_signals(value: Any, what: str = "names of signals such as 'SIGTERM'") -> tuple[str, ...]:
    """Take names of signals that a program can handle, also as a text with commas between them."""
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
    """Take numbers of seconds from now, and times, also as text; return which time that is. None is no deadline."""
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
    """Refuse, with a ``ValueError``, options of which one makes no sense without another."""
    if (local_dir is None) != (upload_to is None):
        missing, given = ("local_dir", "upload_to") if local_dir is None else ("upload_to", "local_dir")
        raise ValueError(f"{given} needs {missing} too: checkpoints go to local_dir first, and from there to upload_to")
    if keep_local is not None and local_dir is None:
        raise ValueError("keep_local needs local_dir and upload_to: without them there is one tier only")


def check_notice(value: Any) -> Any:
    """Take None, paths, and functions."""
    return value if value is None or callable(value) else check_path(value, "the path of a file, or a function")


def check_preemption(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Take arguments of :class:`ckpt_core.preemption.Preemption` by name."""
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
    """Take paths that are not empty."""
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise ValueError(f"must be {what}, not {value!r:.80}")
    return os.fspath(value)


def check_text(value: Any) -> str:
    """Take texts."""
    if not isinstance(value, str):
        raise ValueError(f"must be a text, not {value!r:.80}")  # noqa: TRY004  a wrong value, as the others
    return value


def check_mapping(value: Any) -> dict[str, Any]:
    """Take mappings with names as keys."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        # The value is not shown: credentials belong here.
        raise ValueError("must be a mapping with names as keys; in a flag or a variable, a JSON object")
    return dict(value)


def check_functions(value: Any) -> Sequence[Callable[..., Any]]:
    """Take sequences of what can be called."""
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(map(callable, value)):
        raise ValueError(f"must be a list of functions, not {value!r:.80}")
    return value


def one_of(*choices: Any) -> Check:
    """Take one of some values."""

    def check(value: Any) -> Any:
        if value not in choices:
            *first, last = map(repr, choices)
            raise ValueError(f"must be {', '.join(first)} or {last}, not {value!r:.80}")
        return value

    return check


def instance_of(kind: type, name: str) -> Check:
    """Take instances of a class, which a message calls ``name``."""

    def check(value: Any) -> Any:
        if not isinstance(value, kind):
            raise ValueError(f"must be a {name}, not {value!r:.80}")  # noqa: TRY004  a wrong value, as the others
        return value

    return check


def or_none(check: Check) -> Check:
    """Take None, too."""
    return lambda value: None if value is None else check(value)
