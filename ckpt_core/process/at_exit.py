"""Exit hooks: threads and functions that the interpreter waits for at exit, while everything still works.

``atexit`` functions, and the interpreter's wait for non-daemon threads, come too late for an object store: executors
take no more work by then, and without them its clients open no connection. The earlier hook of ``threading``,
``_register_atexit`` (Python 3.9 to 3.14 at least), is private; ``concurrent.futures`` uses it, too. If a release lacks
it, only work that needs no new connection succeeds at exit.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - whose own call is registered before ours, and so comes after it
import os
import threading
import weakref
from collections.abc import Callable

# No locks, not even those that is_alive() takes: a signal handler that saves may interrupt the thread that holds one.
_threads: set[weakref.ref[threading.Thread]] = set()
_calls_before: list[Callable[[], None]] = []
_calls: list[Callable[[], None]] = []


def wait_for(thread: threading.Thread) -> None:
    """Make the interpreter wait for a thread at exit."""
    _threads.add(weakref.ref(thread, _threads.discard))


def call_before_threads(function: Callable[[], None]) -> None:
    """Register a function that is called at exit before the wait for the threads passed to :func:`wait_for`."""
    _calls_before.append(function)


def call_after_threads(function: Callable[[], None]) -> None:
    """Register a function that is called at exit after all threads passed to :func:`wait_for` have ended."""
    _calls.append(function)


def _finish() -> None:
    for call in _calls_before:
        call()
    while living := [thread for known in tuple(_threads) if (thread := known()) is not None and thread.is_alive()]:
        living[0].join()  # one at a time, because a thread may start another one
    for call in _calls:
        call()


getattr(threading, "_register_atexit", atexit.register)(_finish)
os.register_at_fork(after_in_child=_threads.clear)  # threads do not run in a forked process
