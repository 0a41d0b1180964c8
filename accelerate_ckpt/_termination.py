"""Makes a process that receives a terminating signal finish its pending saves, and then end as it would have.

Schedulers, container runtimes and launchers send SIGTERM. By default the process is gone at once, and with it the
background save, for which a script with stock Accelerate would have waited. A handler in Python alone does not help:
the main thread, which would run it, may be in a collective that never ends. So a thread reads the signal from the
descriptor to which Python's own handler writes its number, finishes the saves, and then lets the signal have its
default effect: the parent sees the same status.

It is also noted that a run that was signalled has not crashed on the checkpoint from which it was resumed.

Nothing changes for scripts that handle the signal themselves, for child processes, and in processes that have neither
saved nor been resumed by ``resume="auto"``.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import ckpt_core
from accelerate_ckpt._state.session import Session, live_sessions, unfinished_sessions
from ckpt_core.errors import RankFailedError
from ckpt_core.process.at_exit import call_before_threads
from ckpt_core.process.signal_thread import ENDING, SignalThread, die_of

log = logging.getLogger(__name__)

_SAME_SIGNAL_SECONDS = 3.0  # a launcher may forward a signal that its whole process group has got already
_SILENCE_SECONDS = 3.0  # after which a rank that does not answer counts as gone, and an awaited one as too late
_ENGINE = os.path.dirname(os.path.abspath(ckpt_core.__file__))
_exit = os._exit


class _Ending:
    """Whether, and since when, this process is ending because of a signal."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.began = itertools.count()
        self.since: float | None = None


_ending = _Ending()
_threads: list[SignalThread] = []  # at most one, which reads signals


# ---- signals ---------------------------------------------------------------------------------------------------------


def protect() -> None:
    """Make signals that end this process wait for its saves, if their disposition is the default."""
    if threading.current_thread() is not threading.main_thread():
        return
    ours = [each for each in ENDING if signal.getsignal(each) is signal.SIG_DFL and not _is_caught(each)]
    if ours:
        _read_signals()
    for number in ours:
        signal.signal(number, _handle)


def unprotect(names: Iterable[str] | None = None) -> None:
    """Restore the signals' default disposition when training is over, and end the thread that reads them.

    With ``names``, only for these signals, because other code handles them from now on.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in ENDING:
        if signal.getsignal(number) is _handle and (names is None or signal.Signals(number).name in names):
            signal.signal(number, signal.SIG_DFL)
    if names is None and _threads:
        _threads.pop().close()


def _is_caught(number: int) -> bool:
    """Return whether native code handles the signal; False if that cannot be found out."""
    try:
        status = Path("/proc/self/status").read_text()
        caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt:")).split()[1], 16)
    except (OSError, StopIteration, ValueError):
        return False
    return bool(caught >> (number - 1) & 1)


def _read_signals() -> None:
    if _threads:
        _threads[0].listen()
        _threads[0].catch_up()  # earlier signals were for a handler that was removed, such as that of a preemption
    else:
        _threads.append(SignalThread(_heard, _in_child))


def _heard(number: int) -> None:
    if number in ENDING and signal.getsignal(number) is _handle:  # unless the script has replaced our handler
        _arrived(number)
    elif number == signal.SIGINT and _ending.since is not None:
        die_of(signal.SIGTERM)


def _handle(number: int, _: FrameType | None) -> None:
    _arrived(number)


def _arrived(number: int) -> None:
    """Start to end the process, once; called by the thread, by the handler, or by both, for each signal."""
    if next(_ending.began) == 0:
        _ending.since = time.monotonic()
        try:
            threading.Thread(target=_finish_and_die, args=(number,), name="ckpt-ending").start()
        except RuntimeError:  # the interpreter is shutting down: no new threads
            _finish_and_die(number)
    elif _ending.since is not None and time.monotonic() - _ending.since > _SAME_SIGNAL_SECONDS:
        die_of(number)


def _finish_and_die(number: int) -> None:
    try:
        for session in live_sessions():
            session.agreement.progress.told()
        for session in live_sessions():
            if session.auto_resume is not None and session.rank == 0 and not _has_another_crashed(session):
                session.auto_resume.told_to_end()
        _finish()
    finally:
        die_of(number)


def _has_another_crashed(session: Session) -> bool:
    """Return whether another rank has died without being signalled: launchers then signal the other ranks."""
    progress, deadline = session.agreement.progress, time.monotonic() + _SILENCE_SECONDS
    with contextlib.suppress(RankFailedError):
        question = progress.ask()
        while progress.crashed(question):
            if time.monotonic() > deadline:
                return True
            time.sleep(0.05)
    return False


def _in_child() -> None:
    """Restore the default behavior in a forked child."""
    _ending.forget()
    _threads.clear()
    for number in ENDING:
        if signal.getsignal(number) is _handle:
            with contextlib.suppress(ValueError):
                signal.signal(number, signal.SIG_DFL)


# ---- os._exit --------------------------------------------------------------------------------------------------------


def finish_before_exit() -> None:
    """Make ``os._exit`` wait for saves, in this process but not in its children."""
    process = os.getpid()

    def exit_when_saved(status: int) -> NoReturn:
        if os.getpid() == process and _ending.since is None and not _is_in_engine():
            _finish()
        _exit(status)

    os._exit = exit_when_saved


def _is_in_engine() -> bool:
    """Return whether the caller is inside a save, which would wait for itself."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith(_ENGINE):
            return True
        frame = frame.f_back
    return False


# ---- both ------------------------------------------------------------------------------------------------------------


def _finish() -> None:
    """Wait for the saves that are pending now, but not for ranks that are gone."""
    deadline = time.monotonic() + _SILENCE_SECONDS
    if threading.current_thread() is not threading.main_thread():  # the main thread may be about to start a save
        while time.monotonic() < deadline and any(map(_is_about_to_save, live_sessions())):
            time.sleep(0.01)
        for session in live_sessions():
            if session.just_in_time is not None and session.just_in_time.survivors.is_rank_lost():
                session.just_in_time.survivors.wait_until_over()
    for session in [session for session in unfinished_sessions() if session.checkpointer.is_busy]:
        waiting = threading.Thread(target=session.checkpointer.drain, name="ckpt-last-saves", daemon=True)
        waiting.start()
        if session.rank == 0:
            log.warning("finishing pending checkpoints before this process ends")
        asked: list[tuple[float, int]] = []
        deadline = time.monotonic() + session.config.commit_timeout
        while waiting.is_alive() and time.monotonic() < deadline:
            waiting.join(0.5)
            if session.world_size > 1 and _silent(session, asked):
                log.warning("another rank is gone: giving up the checkpoints that wait for it")
                break


def _is_about_to_save(session: Any) -> bool:
    try:
        return bool(session.saving or session.agreement.is_awaited)
    except RankFailedError:
        return False


def _silent(session: Session, asked: list[tuple[float, int]]) -> set[int]:
    """Return the ranks that have not answered earlier questions; ``asked`` holds these, and is extended."""
    now = time.monotonic()
    progress = session.agreement.progress
    try:
        asked.append((now, progress.ask()))
        old = [question for when, question in asked if now - when > _SILENCE_SECONDS]
        return progress.silent(old[-1]) if old else set()
    except RankFailedError:  # rank 0 is gone, which the saves find out themselves
        return set()


def _wait_for_no_silent() -> None:
    """Prevent pending saves that wait for a dead rank from keeping the interpreter from ending.

    With just-in-time checkpoints, the lock of a dead rank already shows at once that it is gone.
    """
    for session in unfinished_sessions():
        if session.world_size > 1 and session.just_in_time is None and session.checkpointer.is_busy:
            session.checkpointer.wait_for_no_dead(functools.partial(_silent, session, []))


call_before_threads(_wait_for_no_silent)
