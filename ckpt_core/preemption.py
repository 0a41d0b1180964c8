"""Preemption: make a run save and end on a signal, at a deadline, or on a notice (a file or a polled function).

:class:`EndWatch` is for your own training loops: all ranks learn of it after the same step, without a collective.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import FrameType
from typing import Any, NamedTuple

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from ckpt_core.option_checks import check_deadline, check_options, check_preemption, check_signals
from ckpt_core.paths import StrPath
from ckpt_core.process.threads import Latch
from ckpt_core.ranks import Meeting, RankGroup

__all__ = ["EXIT_NOTICE", "NOT_SAVED", "End", "EndWatch", "Notices", "Preemption", "SignalNotes", "exit_status"]

logger = logging.getLogger(__name__)

#: Exit status of a run that ended at its deadline or on a notice: ``EX_TEMPFAIL``, "try again later".
EXIT_NOTICE = 75

#: Logged, with the error, when the last save of a run that is about to end has failed.
NOT_SAVED = "no checkpoint could be saved before this run ends; the next start resumes from the previous one"

_DEADLINE = "its deadline"
_NOTICE = "a notice"


@dataclass(frozen=True, kw_only=True)
class Preemption:
    """The conditions on which a run saves a checkpoint at the next step and ends.

    Args:
        signals: Names of signals. Handlers that the program has already installed are called, too.
        deadline: Seconds from now (unaffected by changes of the machine's clock), or a time: a ``datetime``, or text
            such as ``"2026-11-22T04:00"``, which is local time without a zone. Leave time for a step and a save.
        notice: The path of a file that will appear, or a function without arguments that returns whether to end, called
            on a thread. If one rank sees the notice, all ranks end. If the function raises, the first failure is
            logged, and the function is called again.
        look_every: Seconds between two checks of the clock and the notice.

    Raises:
        ValueError: A value is invalid; the message begins with the argument's name.

    Example:
        >>> Preemption(signals=["SIGTERM", "SIGUSR1"], deadline=4 * 3600).signals
        ('SIGTERM', 'SIGUSR1')
    """

    signals: Iterable[str] = ("SIGTERM",)
    deadline: float | str | datetime.datetime | None = None
    notice: StrPath | Callable[[], bool] | None = None
    look_every: float = 1.0
    ends_at: float | None = field(init=False, default=None)
    _ends_at_monotonic: float | None = field(init=False, default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_preemption({each.name: getattr(self, each.name) for each in fields(self) if each.init})
        object.__setattr__(self, "signals", check_signals(self.signals))
        object.__setattr__(self, "ends_at", check_deadline(self.deadline))
        if self.ends_at is not None and _is_number(self.deadline):
            object.__setattr__(self, "_ends_at_monotonic", time.monotonic() + (self.ends_at - time.time()))
        if self.ends_at is not None and self.ends_at <= time.time():
            logger.warning("the deadline %s is over: this run saves after its first step, and ends", self.deadline)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_ends_at_monotonic": None}  # another process has another monotonic clock

    @classmethod
    def of(cls, value: Any) -> Preemption | None:
        """Convert the value of the option ``preempt`` to a :class:`Preemption`, or to None if it is off.

        Args:
            value: True for the defaults, False or None for off, the names of signals, a mapping of the arguments, or a
                :class:`Preemption`.

        Raises:
            ValueError: The value is none of these.
        """
        if value is None or value is False:
            return None
        if value is True:
            return cls()
        if isinstance(value, (str, list, tuple)):
            return cls(signals=value)
        if isinstance(value, Mapping):
            return cls(**check_preemption(value))
        if isinstance(value, cls):
            return value
        raise ValueError(f"must be true, false, names of signals, or a Preemption, not {value!r:.80}")


def exit_status(requests: Iterable[str]) -> int:
    """Return the exit status of a run that ended on request: 128 plus the number of the signal, or 75.

    Args:
        requests: Why the run ended: names of signals, or other reasons in words.

    Example:
        >>> exit_status(["SIGTERM"]), exit_status(["a notice"])
        (143, 75)
    """
    numbers = [getattr(signal, request) for request in requests if request.startswith("SIG")]
    return 128 + min(numbers) if numbers else EXIT_NOTICE


class Notices:
    """Threads that check the deadline and the notice; each thread exists only if its condition is set.

    Args:
        preemption: The conditions.
        ask: Called on a thread, once, with the reason in words when a condition is met.
    """

    def __init__(self, preemption: Preemption, ask: Callable[[str], None]) -> None:
        self._preemption, self._ask = preemption, ask
        # A deadline in seconds must not move when the machine's clock is set.
        self._clock = time.monotonic if _is_number(preemption.deadline) else time.time
        self._ends_at = preemption._ends_at_monotonic
        if self._ends_at is None and preemption.ends_at is not None:
            self._ends_at = self._clock() + (preemption.ends_at - time.time())
        self._closed = Latch()
        self._has_failed = False
        for has_come, reason, is_set in (
            (self._is_over, _DEADLINE, self._ends_at is not None),
            (self._has_notice, _NOTICE, preemption.notice is not None),  # may wait for a network
        ):
            if is_set:
                threading.Thread(target=self._watch, args=(has_come, reason), name="ckpt-notices", daemon=True).start()

    def close(self) -> None:
        """Stop checking."""
        self._closed.set()

    def _watch(self, has_come: Callable[[], bool], reason: str) -> None:
        while not self._closed.is_set():
            if has_come() and not self._closed.is_set():
                self._closed.set()
                self._ask(reason)
                return
            self._closed.wait(self._preemption.look_every)

    def _is_over(self) -> bool:
        return self._ends_at is not None and self._clock() >= self._ends_at

    def _has_notice(self) -> bool:
        notice = self._preemption.notice
        if notice is None:
            return False
        try:
            return bool(notice()) if callable(notice) else os.path.exists(notice)
        except Exception:
            if not self._has_failed:  # logged once: it may fail every second
                logger.exception(
                    "preempt: could not check %r for whether this run should end; checking again every %g s. This is "
                    "logged only once",
                    notice,
                    self._preemption.look_every,
                )
            self._has_failed = True
            return False


def _is_number(deadline: Any) -> bool:
    try:
        float(deadline)
    except (TypeError, ValueError):
        return False
    return True


class SignalNotes:
    """Signal handlers that note each signal until closed, and call the previous handlers.

    Does nothing if created outside the main thread, where Python accepts no handlers.

    Args:
        names: The names of the signals.
        note: Called in the handler with the signal's name; must return at once.
    """

    def __init__(self, names: Iterable[str], note: Callable[[str], None]) -> None:
        self._note = note
        self._is_closed = False
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for name in names:
                number = getattr(signal, name)
                self._before[number] = signal.getsignal(number)
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._is_closed:
            self._note(signal.Signals(number).name)
        before = self._handler_before(number)
        if callable(before) and not _only_ends(before):
            before(number, frame)
        elif self._is_closed and before is not None and signal.getsignal(number) == self._handle:
            signal.signal(number, before)  # close() ran on another thread, where handlers cannot be restored
            os.kill(os.getpid(), number)

    def _handler_before(self, number: int) -> Any:
        before = self._before[number]
        other = getattr(before, "__self__", None)
        return other._handler_before(number) if isinstance(other, SignalNotes) and other._is_closed else before

    def close(self) -> None:
        """Restore the previous handlers, unless other code has replaced this one; on any thread, in any order."""
        self._is_closed = True
        for number in self._before:
            with contextlib.suppress(ValueError):  # not on the main thread
                before = self._handler_before(number)
                if signal.getsignal(number) == self._handle and before is not None:
                    signal.signal(number, before)


def _only_ends(handler: Callable[..., Any]) -> bool:
    """Return whether a handler does nothing but end the process: Python's own, or one inherited from a launcher."""
    of_launcher = str(getattr(handler, "__module__", "")).startswith("torch.distributed.elastic.")
    return of_launcher or handler is signal.default_int_handler


class End(NamedTuple):
    """Why a run should end.

    Attributes:
        reason: In words: ``"SIGTERM"``, ``"its deadline"``, ``"a notice"``.
        status: The exit status for the scheduler that restarts the run: 128 plus the signal's number, or 75.
    """

    reason: str
    status: int


class EndWatch:
    """Watches for signals, a deadline and a notice. Create it on all ranks together, on their main threads.

    Args:
        preempt: What makes the run end: True (SIGTERM), names of signals, or a :class:`Preemption`.
        ranks: The ranks of the run; None for a single process.
        is_rank_gone: Called on a thread while this rank waits for answers; returns whether another rank is gone.

    Raises:
        ValueError: ``preempt`` is invalid.

    Examples:
        >>> import signal
        >>> watch = EndWatch("SIGUSR1")
        >>> watch.due() is None
        True
        >>> signal.raise_signal(signal.SIGUSR1)
        >>> watch.due().reason  # save, wait until that is durable, and raise SystemExit(end.status)
        'SIGUSR1'
        >>> watch.close()
    """

    def __init__(
        self, preempt: Any = True, ranks: RankGroup | None = None, is_rank_gone: Callable[[], bool] = lambda: False
    ) -> None:
        check_options({"preempt": Preemption.of}, locals())
        preemption = Preemption.of(preempt) or Preemption(signals=())
        rank, world_size = (0, 1) if ranks is None else (ranks.rank, ranks.world_size)
        store: Store | None = None if ranks is None else ranks.store
        store = None if store is None else PrefixStore("preemption", store)
        find_dead = list if ranks is None else ranks.find_dead
        self._meeting = Meeting(store, rank, world_size, is_rank_gone=lambda: is_rank_gone() or len(find_dead()) > 0)
        self._notices = Notices(preemption, self._meeting.ask)
        self._signals = SignalNotes(preemption.signals, self._meeting.ask)
        self._steps = 0

    def ask(self, reason: str) -> None:
        """Make the run end for a reason of your own. May be called on any thread and in a signal handler."""
        self._meeting.ask(reason)

    def due(self, *, last: bool = False) -> End | None:
        """Return why the run should end now, or None. Call it on all ranks after each step.

        Args:
            last: Whether this is the last step. Requests that any rank got so far count; from now on, signals have
                their previous effect.

        Raises:
            SystemExit: The run should end, but the other ranks do not answer, so nothing can be saved.
        """
        self._steps += 1
        if last:
            self._signals.close()
        call = (self._meeting.at_last if last else self._meeting.at)((self._steps, 0))
        if not call.requests:
            return None
        end = End(" and ".join(sorted(call.requests)), exit_status(call.requests))
        if not call.together:
            logger.error("%s ends this rank alone, and nothing is saved: the other ranks do not answer", end.reason)
            raise SystemExit(end.status)
        return end

    def close(self) -> None:
        """Stop watching, and restore the signal handlers."""
        self._notices.close()
        self._signals.close()
        self._meeting.close()
