"""A few threads over a list of jobs, for work that releases the GIL; and what a fork does without them."""

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

    A handler that raises at a bad moment (Ctrl-C), or that waits for the same event, leaves the lock of a
    ``threading.Event`` taken: whoever sets that waits for ever. Here, waiters share no lock.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: list[threading.Lock] = []

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Let all threads continue that wait."""
        self._is_set = True
        for waiter in tuple(self._waiters):
            with contextlib.suppress(RuntimeError):  # set by two at once
                waiter.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Return whether it is set, when it is, or after ``timeout`` seconds."""
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        try:
            if not self._is_set:  # and otherwise nobody may look at the waiters any more
                waiter.acquire(timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX))
        finally:
            with contextlib.suppress(ValueError):
                self._waiters.remove(waiter)
        return self._is_set


def wait_through(event: Latch) -> None:
    """Wait for ``event``, and only then raise what a signal handler raised meanwhile (Ctrl-C).

    For threads that use memory or files which the caller would take away on the exception. ``Thread.join`` cannot be
    used for that: an exception in it makes Python before 3.13 take the thread for ended.
    """
    interruption: BaseException | None = None
    while not event.is_set():
        try:
            event.wait()
        except BaseException as error:  # noqa: BLE001 - raised below
            interruption = error
    if interruption is not None:
        raise interruption


def do_through(act: Callable[..., None], *arguments: object) -> None:
    """Call ``act``, again where a signal handler ends it (Ctrl-C), and only then raise what that has raised.

    For what must be done whatever happens; doing it twice is doing it once.
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
    """Collect no garbage meanwhile, in all threads."""
    collects = gc.isenabled()  # if not, another thread may have stopped it, and starts it again
    try:
        if collects:
            gc.disable()
        yield
    finally:
        if collects:
            do_through(gc.enable)


class _Begun(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(_SECONDS_TO_BEGIN if timeout is None else timeout)


def start(thread: threading.Thread) -> None:
    """Start a thread, which does nothing if it begins when this has raised: the caller sees to that.

    Without memory for its first call, a thread ends before it says that it has begun, for which ``Thread.start`` would
    wait for ever.

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
    """Call ``work`` on every job from several threads and raise the first error, after all threads have stopped.

    Jobs are begun in their order. The calling thread is one of ``threads``, so that this also works while the
    interpreter shuts down, when no thread can be started; before it takes part, it does ``meanwhile``.
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
            errors.append(error)  # without the lock: whoever holds it may be waiting for what comes of another job

    def help_out(claim: threading.Lock, ended: Latch) -> None:
        if claim.acquire(blocking=False):
            loop()
            ended.set()

    helpers: list[tuple[threading.Lock, Latch]] = []
    try:
        try:
            for _ in range(threads - 1):
                # Before it starts: it works already where Ctrl-C comes while it is being started.
                helpers.append((threading.Lock(), Latch()))
                start(threading.Thread(target=help_out, args=helpers[-1], name="ckpt-io"))
        except RuntimeError:
            pass  # no more threads can be started: use those there are
        loop(meanwhile)
    except BaseException as error:  # noqa: BLE001 - raised again below
        errors.append(error)
    for claim, ended in helpers:
        if claim.acquire(blocking=False):
            ended.set()  # one that has not begun does not begin any more
    while not all(ended.is_set() for _, ended in helpers):
        try:
            for _, ended in helpers:
                wait_through(ended)
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)
    if errors:
        raise errors[0]


# by object and not as a WeakMethod, whose callback fails while the interpreter ends
_in_child: weakref.WeakKeyDictionary[object, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def call_in_forked_child(instance: Owner, method: Callable[[Owner], None]) -> None:
    """Call a method in each forked process, which has none of the parent's threads, as long as the object lives."""
    _in_child[instance] = method


def _call_methods() -> None:
    for instance, function in list(_in_child.items()):
        function(instance)


os.register_at_fork(after_in_child=_call_methods)
