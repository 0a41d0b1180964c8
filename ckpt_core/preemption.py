"""What tells a run to save and end: a signal, a time, a file or a question that a thread asks."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from ckpt_core.paths import StrPath

__all__ = ["EXIT_NOTICE", "Notices", "Preemption", "SignalNotes", "exit_status"]

logger = logging.getLogger(__name__)

#: Exit status of a run that ended at its deadline or on a notice: ``EX_TEMPFAIL``, "try again later".
EXIT_NOTICE = 75

_DEADLINE = "its deadline"
_NOTICE = "a notice"


@dataclass(frozen=True, kw_only=True)
class Preemption:
    """What tells a run to save a checkpoint at the next step and end.

    Args:
        signals: Names of signals. Handlers that the program has installed before are called, too.
        deadline: Seconds from now, or a time (without a zone: local time), also as text (``"2026-11-22T04:00"``).
            Leave room for a step and a save.
        notice: A file that appears, or a function without arguments that returns whether to end, called on a thread;
            both on one rank are enough.
        look_every: Seconds between two looks at the clock and the notice.

    Raises:
        ValueError: There is no such signal, it cannot be handled, or the deadline is none.

    Example:
        >>> Preemption(signals=["SIGTERM", "SIGUSR1"], deadline=4 * 3600).signals
        ('SIGTERM', 'SIGUSR1')
    """

    signals: Iterable[str] = ("SIGTERM",)
    deadline: float | str | datetime.datetime | None = None
    notice: StrPath | Callable[[], bool] | None = None
    look_every: float = 1.0
    ends_at: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        names = [self.signals] if isinstance(self.signals, str) else self.signals
        names = [name.strip().upper() for text in names for name in text.split(",") if name.strip()]
        for name in names:
            number = getattr(signal, name, None)
            if not isinstance(number, signal.Signals) or name in ("SIGKILL", "SIGSTOP"):
                raise ValueError(f"signals: {name!r} is no signal that a program can handle, such as 'SIGTERM'")
        object.__setattr__(self, "signals", tuple(dict.fromkeys(names)))
        object.__setattr__(self, "ends_at", _time_of(self.deadline))

    @classmethod
    def of(cls, value: Any) -> Preemption | None:
        """Return what an option says: True, False or None, names of signals, a mapping of arguments, or one of these.

        Raises:
            ValueError: It says none of that.
        """
        if value is None or value is False:
            return None
        if value is True:
            return cls()
        if isinstance(value, (str, list, tuple)):
            return cls(signals=value)
        if isinstance(value, Mapping):
            try:
                return cls(**value)
            except TypeError as error:
                raise ValueError(f"{error}: there are signals, deadline, notice and look_every") from None
        if isinstance(value, cls):
            return value
        raise ValueError(f"must be true, false, names of signals, or a Preemption, not {value!r}")


def _time_of(deadline: Any) -> float | None:
    if deadline is None:
        return None
    if isinstance(deadline, str):
        try:
            deadline = float(deadline)
        except ValueError:
            try:
                deadline = datetime.datetime.fromisoformat(deadline)
            except ValueError:
                raise ValueError(f"deadline must be seconds or a time as 2026-11-22T04:00, not {deadline!r}") from None
    if isinstance(deadline, datetime.datetime):
        return deadline.timestamp()
    if isinstance(deadline, bool) or not isinstance(deadline, (int, float)) or not deadline > 0:
        raise ValueError(f"deadline must be seconds above 0 or a time, not {deadline!r}")
    return time.time() + deadline


def exit_status(requests: Iterable[str]) -> int:
    """Return the exit status of a run that was told to end: 128 and the number of the signal, or 75.

    Example:
        >>> exit_status(["SIGTERM"]), exit_status(["a notice"])
        (143, 75)
    """
    numbers = [getattr(signal, request) for request in requests if request.startswith("SIG")]
    return 128 + min(numbers) if numbers else EXIT_NOTICE


class Notices:
    """Looks at the clock and for a notice, on a thread, which there is only if one of them can come.

    Args:
        preemption: What to look for.
        ask: Called once, on the thread, with what has come.
    """

    def __init__(self, preemption: Preemption, ask: Callable[[str], None]) -> None:
        self._preemption, self._ask = preemption, ask
        self._closed = threading.Event()
        if preemption.ends_at is not None or preemption.notice is not None:
            threading.Thread(target=self._watch, name="ckpt-notices", daemon=True).start()

    def close(self) -> None:
        """Look no longer."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.is_set():
            ends_at = self._preemption.ends_at
            came = _DEADLINE if ends_at is not None and time.time() >= ends_at else None
            came = came or (_NOTICE if self._has_notice() else None)
            if came is not None:
                self._ask(came)
                return
            self._closed.wait(self._preemption.look_every)

    def _has_notice(self) -> bool:
        notice = self._preemption.notice
        if notice is None:
            return False
        try:
            return bool(notice()) if callable(notice) else os.path.exists(notice)
        except Exception:
            logger.exception("could not ask whether this run is to end: asked no more")
            self.close()
            return False


class SignalNotes:
    """Notes signals of this process until it is closed, and calls the handlers that were there.

    Does nothing outside of the main thread, where Python takes no handlers.

    Args:
        names: Of the signals.
        note: Called in the handler with the name; must return at once.
    """

    def __init__(self, names: Iterable[str], note: Callable[[str], None]) -> None:
        self._note = note
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for name in names:
                number = getattr(signal, name)
                self._before[number] = signal.getsignal(number)
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._note(signal.Signals(number).name)
        before = self._before.get(number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def close(self) -> None:
        """Put back the handlers that were there, where nobody has replaced this one."""
        for number, before in self._before.items():
            with contextlib.suppress(ValueError):  # not on the main thread
                if signal.getsignal(number) == self._handle and before is not None:
                    signal.signal(number, before)
        self._before = {}
