"""Runs background jobs (saves, removals, uploads) in order on one thread, and keeps their failures to raise them."""

from __future__ import annotations

import collections
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Literal

from ckpt_core._layouts.image import ImageAbandonedError
from ckpt_core.errors import CheckpointError
from ckpt_core.process import at_exit, awaited_paths
from ckpt_core.process.threads import Latch, call_in_forked_child, do_uninterrupted, start, wait_uninterrupted

logger = logging.getLogger(__name__)

OnError = Literal["raise", "warn"]


class Job:
    """One background job on one checkpoint.

    ``is_pending`` says whether the checkpoint counts as pending until the job is over: saves and uploads do, removals
    do not. Unless ``raises``, a failure is only logged and counted. ``number`` is the count of pending jobs submitted
    up to and including this one. ``done`` is set when the job is over; ``settled`` when the checkpoint is there or will
    never be, possibly before listeners are called. ``is_blocked_by_caller`` returns whether the job waits for the
    calling thread, which then is in a signal handler that interrupted a save. ``let_go`` is called when the job has
    run, even if Ctrl-C ended it before ``action`` began; it must be safe to call twice.
    """

    def __init__(
        self,
        path: str,
        action: Callable[[], None],
        what: str,
        *,
        is_pending: bool = True,
        raises: bool = True,
        is_blocked_by_caller: Callable[[], bool] = lambda: False,
        let_go: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = path
        self.action = action
        self.what = what
        self.is_pending = is_pending
        self.raises = raises
        self.is_blocked_by_caller = is_blocked_by_caller
        self.let_go = let_go
        self.number = 0
        self.error: CheckpointError | None = None
        self.done = Latch()
        self.settled = Latch()
        self._is_expected = False

    def note(self, can_end: Callable[[], bool]) -> None:
        """Make other checkpointers of this process wait for the job before they load its checkpoint, if it can end."""
        awaited_paths.note(self.path, self.settled, can_end)

    def wait_when_touched(self) -> None:
        """Make any code of this process that accesses the path wait until the job is settled."""
        if not self._is_expected and not self.settled.is_set():
            self._is_expected = True
            awaited_paths.expect(self.path, self.settled)
            if self.settled.is_set():
                self.settle()

    def settle(self) -> None:
        """Declare that the checkpoint is there or will never be."""
        self.settled.set()
        awaited_paths.forget(self.settled)

    def end(self) -> None:
        """Declare that the job is over, and drop its references."""
        self.settle()
        self.action = self.let_go = _nothing
        self.done.set()


def _nothing() -> None:
    """Do nothing; replaces the action of a job that is over."""


class JobQueue:
    """Runs jobs one at a time, in order, on a thread that lives as long as there is work.

    With ``on_error="raise"``, failures are kept for :meth:`raise_failure`. ``report`` is called on the thread for each
    failed job, after its error was kept and counted, with the error and the level at which to log it.
    """

    def __init__(self, name: str, *, on_error: OnError, report: Callable[[Job, CheckpointError, int], None]) -> None:
        self.failures = 0
        self._name = name
        self._on_error = on_error
        self._report = report
        self._failed: list[tuple[int, CheckpointError]] = []  # failures with the numbers of their jobs
        self._raised_by_other_rank: tuple[int, CheckpointError] | None = None
        self._begun = 0
        self._forget_jobs()
        call_in_forked_child(self, type(self)._forget_jobs)

    def _forget_jobs(self) -> None:
        """Forget all jobs; also called in a forked child, which inherits the parent's jobs but not its thread."""
        self._jobs: collections.deque[Job] = collections.deque()  # in order: running, waiting, those in _later
        self._later: set[Job] = set()
        self._running: Job | None = None
        self._lock = threading.RLock()  # a signal handler that saves may interrupt a save on the same thread
        self._thread: threading.Thread | None = None

    # ---- jobs --------------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> tuple[str, ...]:
        """Paths with a save or upload that is not over, the next one first."""
        return tuple(job.path for job in self.jobs() if job.is_pending)

    def jobs(self, path: str | None = None) -> list[Job]:
        """Return the jobs (of ``path``, if given) that are not over, the next one first."""
        with self._lock:
            return [job for job in self._jobs if path is None or job.path == path]

    def waiting(self) -> list[Job]:
        """Return the jobs that have not begun, except those that run only when no other is left."""
        with self._lock:
            return [job for job in self._jobs if job is not self._running and job not in self._later]

    def submit(self, job: Job, *, place: Literal["next", "last", "later"] = "last") -> bool:
        """Queue a job: right after the running one, after all others, or (``later``) to run when no other is left.

        Returns whether a thread runs the queue; if none can be started, the caller has to call :meth:`run_queued`.
        """
        with self._lock:
            self._begun += job.is_pending
            job.number = self._begun
            if place == "later":
                self._later.add(job)
                self._jobs.append(job)
            else:
                begin = 0 if self._running is None else 1
                self._jobs.insert(begin if place == "next" else max(begin, len(self._jobs) - len(self._later)), job)
            return self._start()

    def cancel(self, path: str | None = None) -> bool:
        """Drop the saves and uploads of ``path``, or all jobs; return whether one of them is running, which stays."""
        with self._lock:
            found = [job for job in self._jobs if path is None or (job.path == path and job.is_pending)]
            for job in found:
                if job is not self._running:
                    self._jobs.remove(job)
                    self._later.discard(job)
                    job.end()
            return self._running in found

    def wait(self, path: str | None = None, *, timeout: float | None = None) -> bool:
        """Wait until all jobs submitted so far (of ``path``) are over, failed or not; return False at the timeout.

        In a signal handler, the interrupted save and the jobs after it are not waited for: they cannot end yet.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        return all(
            job.done.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            for job in self._can_end()
            if path is None or job.path == path
        )

    def can_end(self, job: Job) -> bool:
        """Return whether the job can end while the calling thread waits."""
        return job in self._can_end()

    @property
    def is_blocked_by_caller(self) -> bool:
        """Whether no job can end while this thread waits: it runs the jobs, or its handler interrupted the queue."""
        return self._thread is threading.current_thread() or self._lock._is_owned()  # type: ignore[attr-defined]

    def _can_end(self) -> list[Job]:
        if self.is_blocked_by_caller:
            return []
        return list(itertools.takewhile(lambda job: not job.is_blocked_by_caller(), self.jobs()))

    def wait_uninterrupted(self, path: str) -> None:
        """Wait until all jobs of ``path`` are over, and only then raise what a signal handler raised meanwhile."""
        for job in self.jobs(path)[-1:]:
            wait_uninterrupted(job.done)

    def wait_for_turn(self, limit: int) -> None:
        """Wait until fewer than ``limit`` saves are under way; raise if one that has to be over by now has failed.

        Ranks that save together all raise here: the number of the failed save decides, even if a later save has ended
        on some of them only. A failure that one rank raised in its own call of save is not raised here on the others,
        but by :meth:`raise_failure_of_other_rank`.
        """
        while len(saves := [job for job in self.jobs() if job.is_pending]) >= limit:
            if not self.can_end(saves[0]):
                return  # in a signal handler, see wait
            saves[0].done.wait()
        due = self.take_due(self.last_due(limit))
        if due:
            raise due[0]

    def last_due(self, limit: int) -> int:
        """Return the number of the last save that has to be over before the next one begins."""
        return self._begun + 1 - limit

    def take_due(self, last: int) -> list[CheckpointError]:
        """Remove and return the kept failures of jobs numbered up to ``last``."""
        with self._lock:
            due = [failure for number, failure in self._failed if number <= last]
            self._failed = [(number, failure) for number, failure in self._failed if number > last]
        return due

    def raise_failure_of_other_rank(self, limit: int) -> None:
        """Raise a failure that another rank raised in its own call of save, and that :meth:`wait_for_turn` left out.

        Called only when the next save has begun: the other rank takes part in that save, and would wait for this one.
        """
        with self._lock:
            if self._raised_by_other_rank is None or self._raised_by_other_rank[0] > self._begun - limit:
                return
            (_, failure), self._raised_by_other_rank = self._raised_by_other_rank, None
        raise failure

    # ---- failures ----------------------------------------------------------------------------------------------------

    @property
    def failure(self) -> CheckpointError | None:
        """The oldest failure that was not taken yet; it is kept for :meth:`wait_for_turn` to raise."""
        failed = self._failed[0] if self._failed else self._raised_by_other_rank
        return None if failed is None else failed[1]

    def take_failure(self) -> CheckpointError | None:
        """Return the oldest failure, and forget the later ones; None if there is none, or failures are only logged."""
        with self._lock:
            failure = self.failure
            if not self._failed:
                self._raised_by_other_rank = None
            self._failed = []
        return failure

    def raise_failure(self) -> None:
        """Raise the oldest failure, and forget the later ones; do nothing if there is none."""
        failure = self.take_failure()
        if failure is not None:
            raise failure

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _start(self) -> bool:
        if self._thread is not None:
            return True
        # During interpreter shutdown, Python before 3.12 does not wait for a new thread; later versions refuse one.
        if not threading.main_thread().is_alive():
            return False
        # Not a daemon: the interpreter waits for the checkpoint before it exits.
        thread = threading.Thread(target=self._run, name=self._name)
        try:
            start(thread)
        except RuntimeError:
            return False
        self._thread = thread  # if Ctrl-C skips this line, the thread finds that it is not self._thread, and ends
        at_exit.wait_for(thread)
        return True

    def run_queued(self) -> None:
        """Run the queued jobs on the calling thread, if no thread could be started for them."""
        is_ours = False
        try:
            with self._lock:
                if self._thread is not None or not self._jobs:
                    return
                is_ours = True
                self._thread = threading.current_thread()
            interruption = self._run()
            if interruption is not None:
                raise interruption
        finally:
            if is_ours:
                do_uninterrupted(self._leave)  # Ctrl-C

    def _leave(self) -> None:
        with self._lock:
            if self._thread is threading.current_thread():
                self._thread = None

    def _run(self) -> BaseException | None:
        """Run the jobs until none is left; return what a signal handler raised meanwhile (Ctrl-C ends only one job)."""
        interruption: BaseException | None = None
        with awaited_paths.without_waiting():
            while True:
                with self._lock:
                    if self._thread is not threading.current_thread():
                        return interruption
                    if not self._jobs:
                        self._thread = None
                        return interruption
                    job = self._running = self._jobs[0]
                    self._later.discard(job)
                try:
                    self._attempt(job)
                except BaseException as error:  # from a listener or a log handler: no caller may wait for ever
                    if _is_interruption(error):
                        interruption = error  # returned to the caller
                        job.error = job.error or _failed(job, error)
                    else:
                        logger.exception("could not report the failure of the %s of %s", job.what, job.path)
                finally:
                    do_uninterrupted(self._end, job)

    def _end(self, job: Job) -> None:
        job.settle()
        job.let_go()
        with self._lock:
            if job in self._jobs:
                self._jobs.remove(job)
            self._running = None
        job.end()

    def _attempt(self, job: Job) -> None:
        try:
            job.action()
        except ImageAbandonedError as error:
            job.error = error  # already raised on the thread that made the image
        except CheckpointError as error:
            self._record(job, error)
        except BaseException as error:  # a background failure must reach the training thread
            if _is_interruption(error):
                raise
            self._record(job, _failed(job, error))

    def _record(self, job: Job, error: CheckpointError) -> None:
        raises = job.raises and self._on_error == "raise"
        with self._lock:
            job.error = error
            self.failures += 1
            if raises and error.raised_at_once:
                self._raised_by_other_rank = self._raised_by_other_rank or (job.number, error)
            elif raises:
                self._failed.append((job.number, error))
        self._report(job, error, logging.ERROR if raises else logging.WARNING)


def _failed(job: Job, error: BaseException) -> CheckpointError:
    wrapped = CheckpointError(f"the {job.what} failed: {type(error).__name__}: {error}", path=job.path)
    wrapped.__cause__ = error
    return wrapped


def _is_interruption(error: BaseException) -> bool:
    return not isinstance(error, Exception) and threading.current_thread() is threading.main_thread()
