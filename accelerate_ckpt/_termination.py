"""A process that receives a signal to end finishes the saves that are under way, and then ends as it would have.

Schedulers, container runtimes and launchers send SIGTERM. By default the process is gone at once, and with it the save
in the background that a script without us would have waited for. A handler in Python alone does not help: the main
thread, which would run it, may be in a collective that never ends. So a thread reads the signal from the descriptor to
which Python's own handler writes its number, finishes the saves, and then lets the signal do what it does by default:
the parent sees the same status.

A start that is told to end has not crashed on the checkpoint that it was resumed from, which is noted, too.

Nothing is changed for scripts that handle the signal themselves, for children, and in processes that have neither saved
nor been resumed by ``resume="auto"``.
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

_SAME_SIGNAL_SECONDS = 3.0  # a launcher hands on the signal that its whole group got
_SILENCE_SECONDS = 3.0  # after which a rank that answers nothing counts as gone, and one that is awaited comes too late
_ENGINE = os.path.dirname(os.path.abspath(ckpt_core.__file__))
_exit = os._exit


class _Ending:
    """How far this process has come on its way to the end."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.began = itertools.count()
        self.since: float | None = None


_ending = _Ending()
_threads: list[SignalThread] = []  # at most one, which reads signals


# ---- signals ---------------------------------------------------------------------------------------------------------


def protect() -> None:
    """Let signals that end this process wait for its saves, where their disposition is the default."""
    if threading.current_thread() is not threading.main_thread():
        return
    ours = [each for each in ENDING if signal.getsignal(each) is signal.SIG_DFL and not _is_caught(each)]
    if ours:
        _read_signals()
    for number in ours:
        signal.signal(number, _handle)


def unprotect(names: Iterable[str] | None = None) -> None:
    """Give the signals their default disposition back, and end the thread that reads them: training is over.

    With ``names``, these signals alone, because somebody else handles them from now on.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in ENDING:
        if signal.getsignal(number) is _handle and (names is None or signal.Signals(number).name in names):
            signal.signal(number, signal.SIG_DFL)
    if names is None and _threads:
        _threads.pop().close()


def _is_caught(number: int) -> bool:
    """Whether something that is not Python handles the signal; false where that cannot be seen."""
    try:
        status = Path("/proc/self/status").read_text()
        caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt:")).split()[1], 16)
    except (OSError, StopIteration, ValueError):
        return False
    return bool(caught >> (number - 1) & 1)


def _read_signals() -> None:
    if _threads:
        _threads[0].listen()
        _threads[0].catch_up()  # what came before was for a handler that has gone, as that of a preemption
    else:
        _threads.append(SignalThread(_heard, _in_child))


def _heard(number: int) -> None:
    if number in ENDING and signal.getsignal(number) is _handle:  # not one that the script has put in its place
        _arrived(number)
    elif number == signal.SIGINT and _ending.since is not None:
        die_of(signal.SIGTERM)


def _handle(number: int, _: FrameType | None) -> None:
    _arrived(number)


def _arrived(number: int) -> None:
    """Begin the end, once; called by the thread, by the handler, or by both, for each signal."""
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
    """Whether another rank is gone that was not told to end: launchers send the signal to the others then."""
    progress, deadline = session.agreement.progress, time.monotonic() + _SILENCE_SECONDS
    with contextlib.suppress(RankFailedError):
        question = progress.ask()
        while progress.crashed(question):
            if time.monotonic() > deadline:
                return True
            time.sleep(0.05)
    return False


def _in_child() -> None:
    """Let a forked child end as it would have without us."""
    _ending.forget()
    _threads.clear()
    for number in ENDING:
        if signal.getsignal(number) is _handle:
            with contextlib.suppress(ValueError):
                signal.signal(number, signal.SIG_DFL)


# ---- os._exit --------------------------------------------------------------------------------------------------------


def finish_before_exit() -> None:
    """Let ``os._exit`` wait for saves, in this process and not in its children."""
    process = os.getpid()

    def exit_when_saved(status: int) -> NoReturn:
        if os.getpid() == process and _ending.since is None and not _is_in_engine():
            _finish()
        _exit(status)

    os._exit = exit_when_saved


def _is_in_engine() -> bool:
    """Whether the caller is inside a save, which would wait for itself."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith(_ENGINE):
            return True
        frame = frame.f_back
    return False


# ---- both ------------------------------------------------------------------------------------------------------------


def _finish() -> None:
    """Wait for the saves that are under way now, but not for ranks that are gone."""
    deadline = time.monotonic() + _SILENCE_SECONDS
    if threading.current_thread() is not threading.main_thread():  # which gets there meanwhile
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
    """Return the ranks that do not answer, by what was asked before."""
    now = time.monotonic()
    progress = session.agreement.progress
    try:
        asked.append((now, progress.ask()))
        old = [question for when, question in asked if now - when > _SILENCE_SECONDS]
        return progress.silent(old[-1]) if old else set()
    except RankFailedError:  # rank 0, which the saves have found out or will
        return set()


def _wait_for_no_silent() -> None:
    """Let no save that is under way keep the interpreter from ending because another rank is gone.

    Where just-in-time checkpoints are on, that rank's lock says so at once.
    """
    for session in unfinished_sessions():
        if session.world_size > 1 and session.just_in_time is None and session.checkpointer.is_busy:
            session.checkpointer.wait_for_no_dead(functools.partial(_silent, session, []))


call_before_threads(_wait_for_no_silent)
