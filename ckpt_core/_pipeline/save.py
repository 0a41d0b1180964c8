"""Runs the saves of one checkpointer, for both layouts: stages a state, writes it meanwhile, seals and commits it.

A :class:`Save` implements the steps for one layout, and :class:`Pipeline` calls them in order: lay out -> stage ->
write windows as they are staged -> seal -> report -> commit -> release. In the background, the training thread lays
out, stages and seals, and the writer thread does the rest; in the foreground, one thread does everything.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Protocol

from ckpt_core._layouts.image import ImageAbandonedError
from ckpt_core._pipeline.buffer_pool import BufferPool
from ckpt_core._pipeline.device_copy import watch_optimizers
from ckpt_core._pipeline.jobs import Job, JobQueue, OnError
from ckpt_core._pipeline.saved_directories import SavedDirectories
from ckpt_core._pipeline.staging import Snapshot
from ckpt_core.buffers import ScratchBuffers
from ckpt_core.errors import CheckpointError, OutOfMemoryError, SnapshotTornError
from ckpt_core.events import (
    CheckpointRemoved,
    Listener,
    SaveCommitted,
    SaveFailed,
    SaveStarted,
    SnapshotTaken,
    notify,
)
from ckpt_core.preflight import RefusedKeys
from ckpt_core.process.threads import Latch, call_in_forked_child, do_uninterrupted, no_collections

logger = logging.getLogger(__name__)


class Save(Protocol):
    """One save of one layout."""

    @property
    def path(self) -> str:
        """The path or URL of the checkpoint."""

    is_known: bool  # whether the other ranks will learn the outcome in any case, because the save is queued or written

    @property
    def is_shared(self) -> bool:
        """Whether other ranks take part in the save: they have to learn of a failure before anything is written."""

    @property
    def size(self) -> int:
        """The approximate number of bytes that this process writes; known once the state is taken."""

    def take(self, snapshot: Snapshot) -> None:
        """Lay the state out and begin to copy it; on the training thread."""

    def complete(self, snapshot: Snapshot) -> None:
        """Take the rest of the state, and return when training may change it; on the training thread.

        In the foreground, :meth:`write` calls it.
        """

    def write(self, snapshot: Snapshot) -> int:
        """Write windows as they are staged, wait for the seal, report and commit; return the size in bytes."""

    def close(self) -> None:
        """Release all references and files, however the save has ended."""


class Pipeline:
    """Runs the saves, copies and removals of one checkpointer.

    ``buffers`` lends memory for copies of states, ``scratch`` for windows of live tensors; ``queue`` runs background
    work. ``directories`` tracks the directories saved into; ``refused`` warns about what torch's loading will refuse.
    """

    def __init__(
        self,
        *,
        strategy: Literal["sync", "async"],
        max_pending: int,
        on_error: OnError,
        listeners: Sequence[Listener],
        overlap: bool = False,
        max_host_bytes: int | None = None,
    ) -> None:
        self._max_pending = max_pending
        self._max_host_bytes = max_host_bytes
        self.directories = SavedDirectories()
        self.refused = RefusedKeys()
        self.queue = JobQueue("ckpt-writer", on_error=on_error, report=self._report)
        self._strategy = strategy
        self._listeners = listeners
        self._forget_saves()
        call_in_forked_child(self, type(self)._forget_saves)
        self._has_warned_of_memory = False
        self._overlaps = overlap and strategy == "async"
        if self._overlaps:
            watch_optimizers()

    def _forget_saves(self) -> None:
        """Forget all saves; also called in a forked child, which inherits the parent's saves but not their threads."""
        self.buffers = BufferPool(self._max_pending, self._max_host_bytes)
        self.scratch = ScratchBuffers()
        self._last_save: Job | None = None
        self._last_copy: Job | None = None
        self._failed: set[str] = set()  # paths whose last save or copy failed: an older checkpoint may be there
        # Places in use, as many as there are buffers at most. A thread takes one before it queues its save: otherwise,
        # a save later in the queue could hold the buffer that the first one waits for.
        self._places: list[Latch] = []
        self._lock = threading.RLock()  # for _places; reentrant: a signal handler that saves may interrupt a save
        self._saving_threads: set[int] = set()

    @property
    def is_inside_a_save(self) -> bool:
        """Whether this thread is inside a save (for example in a signal handler), and so cannot wait for that save."""
        return threading.get_ident() in self._saving_threads

    @property
    def in_foreground(self) -> bool:
        """Whether a save that begins now would run in the foreground."""
        return self._strategy == "sync" or self.is_inside_a_save or self.queue.is_blocked_by_caller

    @contextlib.contextmanager
    def attempt(self, path: str) -> Iterator[None]:
        """Notify listeners that a save of ``path`` begins, and of its failure if it fails on the calling thread."""
        with self._inside():
            notify(self._listeners, SaveStarted(path=path))
        try:
            yield
        except BaseException as error:
            self._failed.add(path)
            with self._inside():
                notify(self._listeners, SaveFailed(path=path, error=str(error)))
            raise

    def has_failed(self, path: str) -> bool:
        """Return whether the last save or copy to ``path`` has failed; also true while it is being written."""
        return path in self._failed

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """Mark the calling thread as inside a save while the block runs."""
        is_inside = self.is_inside_a_save
        try:
            self._saving_threads.add(threading.get_ident())
            yield
        finally:
            if not is_inside:
                self._saving_threads.discard(threading.get_ident())

    def close(self) -> None:
        """Release the claims on directories, and free the memory that is not lent; the pipeline stays usable."""
        self.directories.release()
        self.buffers.close()
        self.scratch.close()

    # ---- saves -------------------------------------------------------------------------------------------------------

    def wait_for_buffer(self) -> float:
        """Wait until a buffer is free for the next save, and return the seconds waited."""
        started = time.perf_counter()
        if self.in_foreground or not self.buffers.exhausted:
            return 0.0
        self.buffers.wait()
        return time.perf_counter() - started

    def save(self, save: Save, *, started: float, waited: float = 0.0) -> int:
        """Run a save, and return the size in bytes of the checkpoint or, in the background, of what will be written.

        ``started`` is the value of ``time.perf_counter()`` when the training thread stopped for the save; ``waited``
        is the number of seconds since then for which it waited for an earlier save.
        """
        in_foreground = self.in_foreground
        with self._inside():
            if in_foreground:
                return self._save_now(save, started)
            return self._save_later(save, started, waited)

    def _save_now(self, save: Save, started: float) -> int:
        self._failed.add(save.path)
        snapshot = Snapshot(save.path)
        try:
            try:
                save.take(snapshot)
                snapshot.begin_writing()
            except BaseException as error:
                snapshot.give_up(error)
                if save.is_shared:
                    self._fail_together(save, snapshot, error)
                raise
            save.is_known = True
            size = save.write(snapshot)
        finally:
            save.close()
        self._report_taken(save.path, size, started)
        self._failed.discard(save.path)
        notify(self._listeners, SaveCommitted(path=save.path, bytes=size, background_seconds=0.0))
        return size

    def _fail_together(self, save: Save, snapshot: Snapshot, error: BaseException) -> None:
        """Report the failure to the other ranks, and raise the same error as they do; after Ctrl-C, only report it."""
        save.is_known = True
        try:
            save.write(snapshot)
        except CheckpointError as failure:
            if isinstance(error, Exception):
                raise failure from error

    def leave_out(self, save: Save, error: BaseException, *, waited: bool, limit: int) -> None:
        """Tell the other ranks that Ctrl-C came before this rank's part was queued; safe to call twice.

        Unless this rank has ``waited`` for its turn (``limit`` saves may be under way), an earlier save may have
        failed, whose error the other ranks raise instead of making this save; the queued job checks that.
        """
        if save.is_known or not save.is_shared:
            return
        snapshot = Snapshot(save.path)
        snapshot.give_up(error)
        if self.in_foreground:
            self._fail_together(save, snapshot, error)
            return
        last = self.queue.last_due(limit)

        def action() -> int:
            if not waited and self.queue.take_due(last):  # the queue is in order: earlier saves are over now
                raise ImageAbandonedError("an earlier save has failed, which the other ranks raise")
            return self._write_in_background(save, snapshot, save.close)

        if not self._submit(save.path, action, lambda: snapshot.sealed_at, save=save):
            self.queue.run_queued()

    def _save_later(self, save: Save, started: float, waited: float) -> int:
        snapshot = Snapshot(save.path, self.buffers, overlaps=self._overlaps)
        try:
            try:
                return self._take_and_submit(save, snapshot, started, waited)
            finally:
                self._wait_for_live(save.path, snapshot)
        finally:  # again, in case Ctrl-C interrupted the first wait
            self._wait_for_live(save.path, snapshot)

    def _wait_for_live(self, path: str, snapshot: Snapshot) -> None:
        """Return when no live tensors are being written any more, so that the caller may change them."""
        if snapshot.not_copied is not None:
            self.queue.run_queued()
            self.queue.wait_uninterrupted(path)

    def _take_and_submit(self, save: Save, snapshot: Snapshot, started: float, waited: float) -> int:
        place = Latch()
        let_go = functools.partial(self._let_go, save, snapshot, place)
        action = functools.partial(self._write_in_background, save, snapshot, let_go)
        thread = threading.get_ident()

        def is_blocked_by_caller() -> bool:
            return threading.get_ident() == thread and not snapshot.is_sealed

        runs = False
        try:
            self._take(place)
            # Staging makes a few short-lived objects per tensor; a garbage collection frees none, and may take 200 ms.
            with no_collections():
                runs = snapshot.may_relay = self._submit(
                    save.path,
                    action,
                    lambda: snapshot.sealed_at,
                    save=save,
                    is_blocked_by_caller=is_blocked_by_caller,
                    let_go=let_go,
                )
                save.take(snapshot)
                save.complete(snapshot)
                size = save.size
                if snapshot.not_copied is None:
                    self._report_taken(save.path, size, started, waited, snapshot.seconds_without_memory)
                snapshot.seal()
        except BaseException as error:
            # On Ctrl-C, too: the other ranks must not wait for this one, nor the next save for memory.
            do_uninterrupted(self._give_up, snapshot, place, error)
            if not save.is_shared:
                self.queue.run_queued()
                self.queue.wait(save.path)  # until its unfinished files are deleted
            raise
        finally:
            if not runs:
                do_uninterrupted(self.queue.run_queued)
        if snapshot.not_copied is not None:
            self._warn_of_memory(snapshot.not_copied)
            self._wait_for_live(save.path, snapshot)
            self._report_taken(save.path, size, started, waited)
        return size

    def _give_up(self, snapshot: Snapshot, place: Latch, error: BaseException) -> None:
        snapshot.give_up(error)
        self._leave(place)  # the job may not be in the queue, which would otherwise free the place

    def _take(self, place: Latch) -> None:
        while True:
            with self._lock:
                if len(self._places) < self._max_pending:
                    self._places.append(place)
                    return
                other = self._places[0]
            other.wait()

    def _leave(self, place: Latch) -> None:
        with contextlib.suppress(ValueError):  # a save that is given up frees its place twice
            self._places.remove(place)
        place.set()

    def _write_in_background(self, save: Save, snapshot: Snapshot, let_go: Callable[[], None]) -> int:
        try:
            snapshot.wait_begun()
            return save.write(snapshot)
        except BaseException as error:
            if snapshot.failure is not None:
                raise ImageAbandonedError("the save was given up") from error
            if isinstance(error, SnapshotTornError):
                self._overlaps = False
            raise
        finally:
            do_uninterrupted(let_go)  # before the listeners are called, which may take long

    def _let_go(self, save: Save, snapshot: Snapshot, place: Latch) -> None:
        snapshot.release()
        self._leave(place)
        save.close()

    def _submit(
        self,
        path: str,
        write: Callable[[], int],
        begun_at: Callable[[], float],
        *,
        save: Save | None = None,
        is_copy: bool = False,
        is_blocked_by_caller: Callable[[], bool] = lambda: False,
        let_go: Callable[[], None] = lambda: None,
    ) -> bool:
        def action() -> None:
            self._failed.add(path)
            size = write()
            self._failed.discard(path)
            job.settle()  # before listeners are called: they may make other code read the checkpoint
            seconds = time.perf_counter() - begun_at()
            committed = SaveCommitted(path=path, bytes=size, background_seconds=seconds, is_copy=is_copy)
            notify(self._listeners, committed)

        job = Job(path, action, "background save", is_blocked_by_caller=is_blocked_by_caller, let_go=let_go)
        if is_copy:
            self._last_copy = job
        else:
            self._last_save = job
        try:
            job.note(functools.partial(self.queue.can_end, job))
            if save is not None:
                save.is_known = True
            return self.queue.submit(job)
        except BaseException:  # Ctrl-C: nothing may wait for a job that is not in the queue
            if job not in self.queue.jobs(path):
                if save is not None:
                    save.is_known = job.done.is_set()
                job.end()
            raise

    def _report_taken(
        self, path: str, size: int, started: float, waited: float = 0.0, without_memory: float = 0.0
    ) -> None:
        stall = time.perf_counter() - started
        if without_memory and not self._has_warned_of_memory:
            self._has_warned_of_memory = True
            logger.warning(
                "training has waited %.1f of %.1f s in the save of %s until parts of it were written, because the "
                "state is larger than max_host_bytes allows copies to be: raise it, or save less often",
                without_memory,
                stall,
                path,
            )
        notify(
            self._listeners,
            SnapshotTaken(
                path=path, bytes=size, stall_seconds=stall, waited_seconds=waited, memory_seconds=without_memory
            ),
        )

    def _warn_of_memory(self, error: OutOfMemoryError) -> None:
        if not self._has_warned_of_memory:
            self._has_warned_of_memory = True
            logger.warning(
                "training waits while the checkpoint is written: a copy of the state does not fit into memory: %s; %s",
                error.message,
                error.remedy,
            )

    # ---- copies and removals -----------------------------------------------------------------------------------------

    def copy(self, source: str, target: str, act: Callable[[Callable[[], None]], int], *, started: float) -> None:
        """Run ``act``, which makes ``target`` a copy of ``source`` and returns its size, after the save of ``source``.

        ``act`` is called with a function that raises if the save of ``source`` failed, in which case an older
        checkpoint may be there.
        """

        def refuse_older() -> None:
            if source in self._failed:
                raise CheckpointError(f"not copied to {target}: the save of {source} failed", path=target)

        def copy() -> int:
            return act(refuse_older)

        if self._strategy == "sync":
            try:
                size = copy()
            except BaseException:
                self._failed.add(target)
                raise
            self._failed.discard(target)
            self._report_taken(target, 0, started)
            notify(self._listeners, SaveCommitted(path=target, bytes=size, background_seconds=0.0, is_copy=True))
            return
        self._report_taken(target, 0, started)
        begun = time.perf_counter()
        if not self._submit(target, copy, lambda: begun, is_copy=True):
            self.queue.run_queued()

    def remove(self, path: str, delete: Callable[[], None], *, is_kept: Callable[[], bool] = lambda: False) -> None:
        """Run ``delete`` after all saves requested so far, unless the newest one fails; log a failure of ``delete``.

        ``is_kept`` is called right before ``delete``, on the same thread: if it returns True, the checkpoint stays.
        With the strategy "sync", ``delete`` runs at once, and its failure is raised.
        """

        def delete_now() -> None:
            if not is_kept():
                delete()
                notify(self._listeners, CheckpointRemoved(path=path))

        if self._strategy == "sync":
            delete_now()
            return
        successors = [job for job in (self._last_save, self._last_copy) if job is not None and job.path != path]

        def action() -> None:
            for successor in successors:
                if successor.error is not None:
                    logger.warning(
                        "kept the checkpoint %s although it was to be deleted: the save of its successor %s failed",
                        path,
                        successor.path,
                    )
                    return
            delete_now()

        if not self.queue.submit(Job(path, action, "removal", is_pending=False, raises=False)):
            self.queue.run_queued()
        if not self.queue.pending:
            self.queue.wait(path)  # a caller that has saved nothing does not expect background work

    def _report(self, job: Job, error: CheckpointError, level: int) -> None:
        if not job.is_pending:
            # A checkpoint that was not removed loses nothing, and no other rank waits for its removal.
            logger.warning("could not remove the checkpoint %s: %s", job.path, error)
            return
        logger.log(level, "could not save the checkpoint %s: %s", job.path, error)
        notify(self._listeners, SaveFailed(path=job.path, error=str(error)))
