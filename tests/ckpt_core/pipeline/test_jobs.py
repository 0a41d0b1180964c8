"""The queue of background work: in order, on one thread, and no failure is lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from ckpt_core import CheckpointError, StorageError
from ckpt_core._layouts.image import ImageAbandonedError
from ckpt_core._pipeline.jobs import Job, JobQueue

SECONDS = 200.0  # longer than anything here takes: what is not finished by then hangs


class Recorded(JobQueue):
    """A queue that remembers what it has reported."""

    def __init__(self, on_error: str = "raise") -> None:
        self.reported: list[tuple[str, str, int]] = []
        super().__init__("ckpt-test", on_error=on_error, report=self._remember)  # type: ignore[arg-type]

    def _remember(self, job: Job, error: CheckpointError, level: int) -> None:
        self.reported.append((job.path, str(error), level))


def job_of(path: str, action: Callable[[], object] = lambda: None, **options: bool) -> Job:
    def act() -> None:
        action()

    return Job(path, act, "test", **options)


def failing(error: BaseException) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


class Held:
    """The first job of a queue, which runs until ``let_go`` is set."""

    def __init__(self, queue: JobQueue) -> None:
        self.let_go = threading.Event()
        runs = threading.Event()
        queue.submit(job_of("held", lambda: (runs.set(), self.let_go.wait(SECONDS))))
        assert runs.wait(SECONDS)


def test_one_after_the_other() -> None:
    running, most, order = 0, 0, []
    lock = threading.Lock()

    def work(number: int) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        order.append(number)
        with lock:
            running -= 1

    queue = Recorded()
    for number in range(200):
        queue.submit(job_of(f"{number}", lambda number=number: work(number)))
    assert queue.wait()
    assert order == list(range(200))
    assert most == 1
    assert queue.pending == ()


def test_the_next_the_last_and_those_for_later() -> None:
    queue = Recorded()
    order: list[str] = []
    held = Held(queue)
    for name, place in [("late", "later"), ("one", "last"), ("later", "later"), ("two", "last"), ("now", "next")]:
        queue.submit(job_of(name, lambda name=name: order.append(name)), place=place)  # type: ignore[arg-type]
    assert [job.path for job in queue.waiting()] == ["now", "one", "two"]
    assert queue.pending == ("held", "now", "one", "two", "late", "later")
    held.let_go.set()
    assert queue.wait()
    assert order == ["now", "one", "two", "late", "later"]


def test_what_is_cancelled_is_over_and_the_running_one_is_not() -> None:
    queue = Recorded()
    done: list[str] = []
    held = Held(queue)
    for name in ("a", "b", "a"):
        queue.submit(job_of(name, lambda name=name: done.append(name)))
    queue.submit(job_of("a", lambda: done.append("removed"), is_pending=False))
    dropped = queue.jobs("a")[0]
    assert not queue.cancel("a")
    assert dropped.done.is_set()
    assert queue.cancel("held"), "it runs"
    assert queue.pending == ("held", "b")
    held.let_go.set()
    assert queue.wait()
    assert done == ["b", "removed"]
    held = Held(queue)
    queue.submit(job_of("c", lambda: done.append("c")))
    assert queue.cancel()
    held.let_go.set()
    assert queue.wait()
    assert done == ["b", "removed"]


def test_a_wait_that_takes_too_long_says_so() -> None:
    queue = Recorded()
    held = Held(queue)
    assert not queue.wait(timeout=0.0)
    assert queue.wait("another", timeout=0.0)
    held.let_go.set()
    assert queue.wait("held", timeout=SECONDS)


def test_a_failure_is_raised_in_its_turn_whenever_another_one_was() -> None:
    """Processes that save together must raise at the same saves, whichever failures they have heard of."""
    queue = Recorded()
    queue.submit(job_of("a", failing(StorageError("first"))))
    queue.submit(job_of("b", failing(StorageError("second"))))
    assert queue.wait()
    with pytest.raises(StorageError, match="first"):
        queue.wait_for_turn(2)
    queue.wait_for_turn(2)
    queue.submit(job_of("c", lambda: None))
    assert queue.wait()
    with pytest.raises(StorageError, match="second"):
        queue.wait_for_turn(2)


def test_the_first_failure_is_kept_and_every_one_is_counted_and_reported() -> None:
    queue = Recorded()
    held = Held(queue)
    queue.submit(job_of("quiet", failing(StorageError("quiet")), raises=False))
    queue.submit(job_of("given up", failing(ImageAbandonedError("raised where it was made"))))
    queue.submit(job_of("a", failing(StorageError("first"))))
    queue.submit(job_of("b", failing(ValueError("second"))))
    held.let_go.set()
    assert queue.wait()
    assert queue.failures == 3
    assert queue.reported == [
        ("quiet", "quiet", logging.WARNING),
        ("a", "first", logging.ERROR),
        ("b", "the test failed: ValueError: second\n  file: b", logging.ERROR),
    ]
    assert str(queue.failure) == "first"
    with pytest.raises(StorageError, match="first"):
        queue.raise_failure()
    assert queue.take_failure() is None


def test_failures_that_are_only_logged() -> None:
    queue = Recorded("warn")
    queue.submit(job_of("a", failing(StorageError("first"))))
    assert queue.wait()
    assert queue.failure is None
    assert queue.reported == [("a", "first", logging.WARNING)]


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_nobody_waits_for_ever_when_the_report_fails(error: type[BaseException]) -> None:
    queue = JobQueue("ckpt-test", on_error="raise", report=lambda *_: failing(error("from the log"))())
    queue.submit(job_of("a", failing(StorageError("first"))))
    queue.submit(job_of("b"))
    assert queue.wait(timeout=SECONDS)
    assert str(queue.take_failure()) == "first"
