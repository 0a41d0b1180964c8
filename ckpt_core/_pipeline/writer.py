"""The save pipeline: an image goes to storage, now or in the background, in order, and no failure is lost."""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

from ckpt_core import at_exit, awaited_paths
from ckpt_core._layouts.image import WINDOW, Image, ImageAbandonedError
from ckpt_core.errors import CheckpointError
from ckpt_core.events import CheckpointRemoved, Listener, SaveCommitted, SaveFailed, notify
from ckpt_core.memory import ScratchBuffers, StagingBuffer
from ckpt_core.parallel import run_parallel
from ckpt_core.storage.base import FileWriter, Storage

__all__ = ["BackgroundWriter", "OnError", "write_image"]

logger = logging.getLogger(__name__)

OnError = Literal["raise", "warn"]

_BLOCK = 4096
_WINDOWS_IN_MEMORY = 7  # 112 MiB
_WINDOWS_AHEAD = 3


def write_image(
    image: Image,
    storage: Storage,
    path: str,
    *,
    scratch: ScratchBuffers,
    meanwhile: Callable[[], None] | None = None,
    before_commit: Callable[[], None] | None = None,
) -> int:
    """Write ``image`` to ``path`` so that it is durable and whole there, or not there at all.

    Args:
        image: What to write.
        storage: Where.
        path: Under which name.
        scratch: Lends up to 7 windows of memory (112 MiB); not used for a staged image.
        meanwhile: What the calling thread does while others write.
        before_commit: Called when all is written; if it raises, nothing appears.

    Returns:
        The file's size in bytes.

    Raises:
        StorageError: The storage refused; what was at ``path`` before is untouched.
    """
    writer = storage.create(path, image.approximate_size)

    # More windows are assembled than written at a time: the disk never waits for a copy.
    writing = threading.Semaphore(writer.threads)

    def write_window(begin: int) -> None:
        if image.is_staged:
            writer.write_through(begin, image.window(begin, None))
            return
        buffer = scratch.take(min(WINDOW, image.region_size))
        try:
            window = image.window(begin, buffer)
            with writing:
                writer.write_through(begin, window)
        finally:
            scratch.give(buffer)

    try:
        windows = range(0, image.region_size, WINDOW)
        threads = writer.threads if writer.parallel else 1
        if writer.parallel and not image.is_staged:
            threads = min(threads + _WINDOWS_AHEAD, _WINDOWS_IN_MEMORY)
        # With something else to do meanwhile, the calling thread comes late, and the first window is another's.
        useful = len(windows) + (meanwhile is not None)
        run_parallel(write_window, windows, threads=min(threads, useful), meanwhile=meanwhile)
        tail = image.tail()
        size = image.region_size + len(tail)
        if writer.parallel:
            _write_whole_blocks(writer, image.region_size, tail)
        else:
            writer.write_at(image.region_size, memoryview(tail))
        if before_commit is not None:
            before_commit()
        writer.commit(size)
    except BaseException:
        writer.abort()
        raise
    return size


def _write_whole_blocks(writer: FileWriter, offset: int, data: bytes) -> None:
    if not data:
        return
    # Direct I/O wants whole blocks from aligned memory; commit cuts the file to its size.
    aligned = StagingBuffer(len(data))
    try:
        aligned.memory[: len(data)] = data
        with aligned.memory[: -(-len(data) // _BLOCK) * _BLOCK] as whole_blocks:
            writer.write_at(offset, whole_blocks)
    finally:
        aligned.close()


class _Job:
    """One step of the background work.

    Attributes:
        path: The checkpoint it is about.
        number: How many saves were asked for before it, itself included.
        error: What went wrong; None while running and when all went well.
        done: Set when it is over.
        settled: Set when the checkpoint is there, or will not be; those who listen are not called yet.
        forget: Called then.
    """

    def __init__(self, path: str, action: Callable[[], None], number: int, *, is_save: bool) -> None:
        self.path = path
        self.action = action
        self.number = number
        self.is_save = is_save
        self.error: CheckpointError | None = None
        self.done = threading.Event()
        self.settled = threading.Event()
        self.forget: Callable[[], None] = _nothing


def _nothing() -> None:
    """What a job does that has been done."""


class BackgroundWriter:
    """Runs saves and removals one after the other on one thread, in the order in which they were asked for.

    A removal is carried out only if the save before it succeeded: the file that it would delete may be the last good one.

    Args:
        on_error: ``"raise"`` keeps a failure for :meth:`raise_failure`; ``"warn"`` logs it and counts it.
        listeners: Told about commits, failures and removals.
    """

    def __init__(self, *, on_error: OnError = "raise", listeners: Sequence[Listener] = ()) -> None:
        self._on_error = on_error
        self._listeners = listeners
        self._jobs: collections.deque[_Job] = collections.deque()
        self._lock = threading.RLock()  # a signal handler that saves may interrupt a save on the same thread
        self._thread: threading.Thread | None = None
        self._last_save: _Job | None = None
        self._failed: tuple[int, CheckpointError] | None = None
        self._begun = 0
        self.failures = 0

    @property
    def pending(self) -> tuple[str, ...]:
        """Paths whose save has not ended, oldest first."""
        with self._lock:
            return tuple(job.path for job in self._jobs if job.is_save)

    def save(self, path: str, write: Callable[[], int], *, staged_at: Callable[[], float] | None = None) -> bool:
        """Run ``write`` in the background; it makes ``path`` durable and returns its size in bytes.

        Args:
            path: The checkpoint.
            write: May wait for the calling thread.
            staged_at: Gives the ``time.perf_counter()`` from which the background time counts; by default, now.

        Returns:
            Whether it runs. If no thread can be started, it waits for :meth:`run_queued`.
        """
        now = time.perf_counter()

        def action() -> None:
            size = write()
            self._settle(job)  # those who listen may have others look at it
            seconds = time.perf_counter() - (now if staged_at is None else staged_at())
            notify(self._listeners, SaveCommitted(path=path, bytes=size, background_seconds=seconds))

        self._begun += 1
        job = _Job(path, action, self._begun, is_save=True)
        self._last_save = job
        return self._submit(job)

    def wait_when_touched(self, path: str) -> None:
        """Let others in this process who touch ``path`` wait for its save or removal, if one is under way."""
        with self._lock:
            job = next((job for job in reversed(self._jobs) if job.path == path), None)
            if job is not None and job.forget is _nothing and not job.settled.is_set():
                job.forget = awaited_paths.expect(path, job.settled)

    def _settle(self, job: _Job) -> None:
        job.settled.set()
        with self._lock:
            forget, job.forget = job.forget, _nothing
        forget()

    def copy(self, source: str, target: str, copy: Callable[[], int]) -> None:
        """Run ``copy``, which makes ``target`` a copy of ``source``, after the save of ``source``, unless that fails."""
        original = self._last_save if self._last_save is not None and self._last_save.path == source else None

        def copy_if_saved() -> int:
            if original is not None and original.error is not None:
                raise CheckpointError(f"not copied to {target}: the save of {source} failed", path=target)
            return copy()

        if not self.save(target, copy_if_saved):
            self.run_queued()

    def remove(self, path: str, delete: Callable[[], None]) -> None:
        """Run ``delete`` after all saves asked for so far, unless the newest of them fails; its own failure is logged."""
        successor = self._last_save

        def action() -> None:
            if successor is not None and successor.path != path and successor.error is not None:
                logger.warning(
                    "kept the checkpoint %s although it was to be deleted: the save of its successor %s failed",
                    path,
                    successor.path,
                )
                return
            delete()
            notify(self._listeners, CheckpointRemoved(path=path))

        if not self._submit(_Job(path, action, self._begun, is_save=False)):
            self.run_queued()

    def wait(self, path: str | None = None, *, timeout: float | None = None) -> None:
        """Return when everything asked for so far (about ``path``, if given) is over, failed or not.

        Args:
            path: The checkpoint to wait for.
            timeout: Seconds after which to return anyway; None waits for ever.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            jobs = [job for job in self._jobs if path is None or job.path == path]
        for job in jobs:
            job.done.wait(None if deadline is None else deadline - time.monotonic())

    def wait_for_turn(self, limit: int) -> None:
        """Return when fewer than ``limit`` saves are under way.

        Raises:
            CheckpointError: One of those that had to be over by now has failed. Where several processes save the same ones,
                all of them raise here, although a later save may have ended in some and not in others.
        """
        while True:
            with self._lock:
                saves = [job for job in self._jobs if job.is_save]
            if len(saves) < limit:
                break
            saves[0].done.wait()
        with self._lock:
            if self._failed is None or self._failed[0] > self._begun + 1 - limit:
                return
        self.raise_failure()

    @property
    def failure(self) -> CheckpointError | None:
        """The oldest failure that was not taken yet; it stays for :meth:`wait_for_turn` to raise."""
        with self._lock:
            return None if self._failed is None else self._failed[1]

    def take_failure(self) -> CheckpointError | None:
        """Return the oldest failure that was not taken yet, once; None if there is none or they are only logged."""
        with self._lock:
            failed, self._failed = self._failed, None
        return None if failed is None else failed[1]

    def raise_failure(self) -> None:
        """Raise the oldest failure that was not taken yet, once.

        Raises:
            CheckpointError: A background save or removal has failed, and ``on_error`` is ``"raise"``.
        """
        failure = self.take_failure()
        if failure is not None:
            raise failure

    def _submit(self, job: _Job) -> bool:
        with self._lock:
            self._jobs.append(job)
            if self._thread is not None:
                return True
            # While the interpreter shuts down, Python before 3.12 would not wait for a new thread, and later ones refuse it.
            if not threading.main_thread().is_alive():
                return False
            # Lives as long as there is work. Not a daemon: the interpreter waits for the checkpoint before it exits.
            self._thread = threading.Thread(target=self._run, name="ckpt-writer")
            thread = self._thread
        try:
            thread.start()
        except RuntimeError:
            with self._lock:
                self._thread = None
            return False
        at_exit.wait_for(thread)
        return True

    def run_queued(self) -> None:
        """Do on the calling thread what no thread could be started for."""
        with self._lock:
            if self._thread is not None or not self._jobs:
                return
            self._thread = threading.current_thread()
        self._run()

    def _run(self) -> None:
        with awaited_paths.waiting_for_nothing():
            self._run_jobs()

    def _run_jobs(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._thread = None
                    return
                job = self._jobs[0]
            try:
                self._attempt(job)
            except BaseException:  # whatever a listener or a log handler does: nobody may wait for ever
                logger.exception("could not report the failure of the checkpoint %s", job.path)
            finally:
                self._settle(job)
                with self._lock:
                    self._jobs.popleft()
                job.action = _nothing  # lets go of the state
                job.done.set()

    def _attempt(self, job: _Job) -> None:
        try:
            job.action()
        except ImageAbandonedError as error:
            job.error = error  # was raised where the image was made
        except CheckpointError as error:
            self._record(job, error)
        except BaseException as error:  # noqa: BLE001 - a background failure must reach the training thread
            wrapped = CheckpointError(f"the background save failed: {type(error).__name__}: {error}", path=job.path)
            wrapped.__cause__ = error
            self._record(job, wrapped)

    def _record(self, job: _Job, error: CheckpointError) -> None:
        job.error = error
        self.failures += 1
        if not job.is_save:
            # Nothing is lost by a file too many, and no other rank looks out for this.
            logger.warning("could not remove the checkpoint %s: %s", job.path, error)
            return
        if self._on_error == "raise":
            with self._lock:
                if self._failed is None:
                    self._failed = job.number, error
        level = logging.ERROR if self._on_error == "raise" else logging.WARNING
        logger.log(level, "could not save the checkpoint %s: %s", job.path, error)
        notify(self._listeners, SaveFailed(path=job.path, error=str(error)))
