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
from collections.abc import Callable

_threads: set[threading.Thread] = set()  # without a lock: a signal handler that saves may interrupt whoever holds it
_calls: list[Callable[[], None]] = []


def wait_for(thread: threading.Thread) -> None:
    """Let the interpreter wait for a thread before it ends."""
    for known in tuple(_threads):
        if not known.is_alive():
            _threads.discard(known)
    _threads.add(thread)


def call_after_threads(function: Callable[[], None]) -> None:
    """Call a function when all threads have ended that :func:`wait_for` knows."""
    _calls.append(function)


def _finish() -> None:
    while living := [thread for thread in tuple(_threads) if thread.is_alive()]:
        living[0].join()  # it may start another one
    for call in _calls:
        call()


getattr(threading, "_register_atexit", atexit.register)(_finish)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.clear)  # none of them runs there
