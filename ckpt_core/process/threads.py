"""Threads for work that releases the GIL; waiting that survives Ctrl-C; and callbacks in forked processes."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

_SECONDS_TO_BEGIN = 5.0
IO_THREADS = min(4, max(2, os.cpu_count() or 1))

Job = TypeVar("Job")
Owner = TypeVar("Owner")


class Latch:
    """An event that is set once, for threads that signal handlers interrupt.

    If a handler raises at a bad moment (Ctrl-C), or waits for the same event, it leaves the lock of a
    ``threading.Event`` taken, and a thread that calls ``set`` waits for ever. Here, waiters share no lock.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: list[threading.Lock] = []

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Set it, and wake all threads that wait."""
        self._is_set = True
        for waiter in tuple(self._waiters):
            with contextlib.suppress(RuntimeError):  # another thread sets it at the same time
                waiter.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, at most ``timeout`` seconds; return whether it is set."""
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        try:
            if not self._is_set:  # if it is set, set() may have read the waiters already, without this one
                waiter.acquire(timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX))
        finally:
            with contextlib.suppress(ValueError):
                self._waiters.remove(waiter)
        return self._is_set


def wait_uninterrupted(event: Latch) -> None:
    """Wait for ``event``, and only then raise what a signal handler raised meanwhile (Ctrl-C).

    Used when other threads use memory or files that the caller would release on the exception. ``Thread.join`` cannot
    be used for that: after an exception in it, Python before 3.13 takes the thread for ended.
    """
    interruption: BaseException | None = None
    while not event.is_set():
        try:
            event.wait()
        except BaseException as error:  # noqa: BLE001 - raised below
            interruption = error
    if interruption is not None:
        raise interruption


def do_uninterrupted(act: Callable[..., None], *arguments: object) -> None:
    """Call ``act``, again if a signal handler interrupts it (Ctrl-C), and only then raise what the handler raised.

    For actions that must be completed in any case, and that may be repeated.
    """
    interruption: BaseException | None = None
    while True:
        try:
            act(*arguments)
            break
        except Exception:
            raise
        except BaseException as error:  # noqa: BLE001 - raised below
            interruption = error
    if interruption is not None:
        raise interruption


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Switch garbage collection off, in all threads, while the body runs."""
    collects = gc.isenabled()  # if it is off, another thread may have switched it off, and switches it on again
    try:
        if collects:
            gc.disable()
        yield
    finally:
        if collects:
            do_uninterrupted(gc.enable)


class _Begun(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(_SECONDS_TO_BEGIN if timeout is None else timeout)


def start(thread: threading.Thread) -> None:
    """Start a thread, and raise if it does not begin in time; the caller must ensure that it does nothing later.

    Without memory for its first call, a thread ends before it reports that it has begun, for which ``Thread.start``
    would wait for ever.

    Raises:
        RuntimeError: It cannot be started: no memory, too many threads, or the interpreter is shutting down.
    """
    thread._started = _Begun()  # type: ignore[attr-defined]
    thread.start()
    if thread.ident is None:
        raise RuntimeError("a new thread has not begun")


def run_parallel(
    work: Callable[[Job], None],
    jobs: Iterable[Job],
    *,
    threads: int = IO_THREADS,
    meanwhile: Callable[[], None] | None = None,
) -> None:
    """Call ``work`` on every job from several threads, and raise the first error after all threads have stopped.

    Jobs are begun in their order. The calling thread is one of the ``threads``, so that this also works while the
    interpreter shuts down, when no thread can be started. Before it takes part, it calls ``meanwhile``.
    """
    errors: list[BaseException] = []
    lock = threading.Lock()
    remaining: Iterator[Job] = iter(jobs)

    def take() -> tuple[Job] | None:
        with lock:
            if errors:
                return None
            for job in remaining:
                return (job,)
            return None

    def loop(first: Callable[[], None] | None = None) -> None:
        try:
            if first is not None and not errors:
                first()
            while (taken := take()) is not None:
                work(*taken)
        except BaseException as error:  # noqa: BLE001 - raised again below, on the calling thread
            errors.append(error)  # without the lock: its holder may be waiting for the result of another job

    def help_out(claim: threading.Lock, ended: Latch) -> None:
        if claim.acquire(blocking=False):
            loop()
            ended.set()

    helpers: list[tuple[threading.Lock, Latch]] = []
    try:
        try:
            for _ in range(threads - 1):
                # Appended before the start: if Ctrl-C comes during the start, the thread may be working already.
                helpers.append((threading.Lock(), Latch()))
                start(threading.Thread(target=help_out, args=helpers[-1], name="ckpt-io"))
        except RuntimeError:
            pass  # no more threads can be started: use those that were
        loop(meanwhile)
    except BaseException as error:  # noqa: BLE001 - raised again below
        errors.append(error)
    for claim, ended in helpers:
        if claim.acquire(blocking=False):
            ended.set()  # a helper that has not begun yet finds its claim taken, and does nothing
    while not all(ended.is_set() for _, ended in helpers):
        try:
            for _, ended in helpers:
                wait_uninterrupted(ended)
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)
    if errors:
        raise errors[0]


# Keyed weakly by object instead of a WeakMethod, whose callback fails while the interpreter shuts down.
_in_child: weakref.WeakKeyDictionary[object, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def call_in_forked_child(instance: Owner, method: Callable[[Owner], None]) -> None:
    """Have a method called in each forked process, which lacks the parent's threads, as long as the object lives."""
    _in_child[instance] = method


def _call_methods() -> None:
    for instance, function in list(_in_child.items()):
        function(instance)


os.register_at_fork(after_in_child=_call_methods)
