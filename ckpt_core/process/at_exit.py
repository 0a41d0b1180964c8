"""What the interpreter waits for before it ends, while everything still works.

Functions of ``atexit``, and the wait for threads that are no daemons, come too late for an object store: executors take
no more work by then, and without them its clients open no connection. What ``threading`` calls before that has no
public way in: ``_register_atexit`` (Python 3.9 to 3.14 at least), which ``concurrent.futures`` uses too. Without it,
only what needs no new connection succeeds at the end.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - whose own call is registered before ours, and so comes after it
import os
import threading
import weakref
from collections.abc import Callable

# Without a lock, also without those that is_alive() takes: a signal handler that saves may interrupt whoever holds it.
_threads: set[weakref.ref[threading.Thread]] = set()
_calls_before: list[Callable[[], None]] = []
_calls: list[Callable[[], None]] = []


def wait_for(thread: threading.Thread) -> None:
    """Let the interpreter wait for a thread before it ends."""
    _threads.add(weakref.ref(thread, _threads.discard))


def call_before_threads(function: Callable[[], None]) -> None:
    """Call a function before the interpreter waits for the threads that :func:`wait_for` knows."""
    _calls_before.append(function)


def call_after_threads(function: Callable[[], None]) -> None:
    """Call a function when all threads have ended that :func:`wait_for` knows."""
    _calls.append(function)


def _finish() -> None:
    for call in _calls_before:
        call()
    while living := [thread for known in tuple(_threads) if (thread := known()) is not None and thread.is_alive()]:
        living[0].join()  # it may start another one
    for call in _calls:
        call()


getattr(threading, "_register_atexit", atexit.register)(_finish)
os.register_at_fork(after_in_child=_threads.clear)  # none of them runs there
