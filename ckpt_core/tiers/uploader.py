"""Uploads committed checkpoints in the background, in order, and removes them there; no failure is lost."""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence

from ckpt_core import at_exit
from ckpt_core._pipeline.writer import OnError
from ckpt_core.errors import CheckpointCorruptedError, CheckpointError
from ckpt_core.events import CheckpointUploaded, Event, Listener, SaveCommitted, UploadFailed, notify
from ckpt_core.tiers.ledger import Identity, identity_of
from ckpt_core.tiers.nearest import TieredStorage
from ckpt_core.tiers.sending import Sender

__all__ = ["Uploader"]

logger = logging.getLogger(__name__)

Delete = Callable[[], None]

_SECONDS_WITHOUT_A_WORD = 3.0  # in which most uploads end


@dataclasses.dataclass(frozen=True)
class _Job:
    """One step of the uploader's work.

    Attributes:
        path: The checkpoint's local path; of a look for leftovers, a directory's.
        act: Does it.
        is_upload: Whether it uploads ``path``.
        raises: Whether its failure may be raised; otherwise it is only logged and counted.
    """

    path: str
    act: Callable[[], None]
    is_upload: bool
    raises: bool = True


class Uploader:
    """Brings the remote tier to where the local one is, checkpoint by checkpoint, on a thread of its own.

    A listener: each commit that it hears of is uploaded. Uploads run in the order of the commits. One that fails is tried
    again before the next; a checkpoint that is removed before its turn is not uploaded. What the remote tier is to remove goes
    when all uploads asked for before have succeeded, so that it always has the newest checkpoint that it ever had.

    Args:
        storage: The tiers.
        on_error: ``"raise"`` keeps a failure for :meth:`take_failure`; ``"warn"`` only logs and counts it.
        listeners: Told about uploads and their failures.

    Attributes:
        failures: How many uploads and removals have failed so far.
    """

    def __init__(
        self, storage: TieredStorage, *, on_error: OnError = "raise", listeners: Sequence[Listener] = ()
    ) -> None:
        self.failures = 0
        self._storage = storage
        self._tiers = storage.tiers
        self._sender = Sender(storage)
        self._on_error = on_error
        self._listeners = listeners
        self._change = threading.Condition(threading.RLock())  # a signal handler may save inside a save
        self._jobs: collections.deque[_Job] = collections.deque()
        self._leftovers: collections.deque[_Job] = collections.deque()
        self._running: _Job | None = None
        self._thread: threading.Thread | None = None
        self._unsent: dict[str, None] = {}
        self._withheld: list[str] = []
        self._deletes: dict[str, tuple[Identity | None, Delete]] = {}
        self._seen: set[str] = set()
        self._failed: CheckpointError | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, SaveCommitted) and self._tiers.covers(event.path):
            self.upload(event.path)

    def covers(self, path: str) -> bool:
        """Return whether ``path`` lies in one of the tiers."""
        return self._tiers.covers(path)

    @property
    def pending(self) -> tuple[str, ...]:
        """Local paths of the checkpoints whose upload has not ended, the next one first."""
        with self._change:
            running = [] if self._running is None else [self._running]
            return tuple(job.path for job in (*running, *self._jobs, *self._leftovers) if job.is_upload)

    def uploaded_in(self, directory: str) -> list[str]:
        """Return the local paths of the checkpoints of a directory that are in the remote tier, which is asked once."""
        return self._sender.uploaded_in(directory)

    def upload(self, path: str) -> None:
        """Upload the checkpoint at ``path`` when those before are over; returns at once."""
        local = self._tiers.local_path(path)
        with self._change:
            self.resume(path)
            for each in (*(unsent for unsent in self._unsent if unsent != local), local):
                if not any(job.path == each and job.is_upload for job in self._jobs):
                    self._jobs.append(_Job(each, functools.partial(self._upload, each), is_upload=True))
            self._start()

    def resume(self, path: str) -> None:
        """Upload, once for each directory, what earlier processes have committed beside ``path`` and not uploaded.

        Args:
            path: A checkpoint; what has the same ending, or is a directory too, counts.
        """
        directory, ending = os.path.dirname(self._tiers.local_path(path)), os.path.splitext(path)[1]
        with self._change:
            if directory in self._seen:
                return
            self._seen.add(directory)
            look = functools.partial(self._look_for_leftovers, directory, ending, time.time())
            self._jobs.append(_Job(directory, look, is_upload=False, raises=False))
            self._start()

    def remove(self, path: str, delete: Delete) -> None:
        """Delete both copies of a checkpoint: the local one now, or when its upload is over if that has begun.

        Args:
            path: The checkpoint.
            delete: Deletes the local copy.
        """
        local = self._tiers.local_path(path)
        with self._change:
            self._unsent.pop(local, None)
            for jobs in (self._jobs, self._leftovers):
                for job in [job for job in jobs if job.path == local and job.is_upload]:
                    jobs.remove(job)
            begun = self._running is not None and self._running.path == local and self._running.is_upload
            if begun:
                self._deletes[local] = identity_of(local), delete
        if not begun:
            delete()
        with self._change:
            self._jobs.append(_Job(local, functools.partial(self._remove, local), is_upload=False, raises=False))
            self._start()

    def wait(self, *, timeout: float | None = None) -> None:
        """Return when everything asked for so far is over, failed or not; at most after ``timeout`` seconds."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        tell_at = time.monotonic() + _SECONDS_WITHOUT_A_WORD
        with self._change:
            while self._thread is not None and (now := time.monotonic()) < deadline:
                if now >= tell_at:
                    tell_at = math.inf
                    names = ", ".join(map(os.path.basename, self.pending))
                    logger.warning("waiting for uploads to %s: %s", self._tiers.upload_to, names)
                until = min(deadline, tell_at)
                self._change.wait(None if until == math.inf else max(0.0, until - now))

    def take_failure(self) -> CheckpointError | None:
        """Return the oldest failure that was not taken yet, once; None if there is none or they are only logged."""
        with self._change:
            failed, self._failed = self._failed, None
        return failed

    @property
    def failure(self) -> CheckpointError | None:
        """A failure that was not taken yet."""
        return self._failed

    def close(self) -> None:
        """Wait for everything, and say so if that means to wait for uploads. It may be used again."""
        self.wait()
        self._sender.close()

    # ---- the thread ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is not None:
            return
        # Lives as long as there is work. Not a daemon: the interpreter waits for the uploads before it exits.
        self._thread = threading.Thread(target=self._run, name="ckpt-uploader")
        try:
            self._thread.start()
            at_exit.wait_for(self._thread)
        except RuntimeError:
            self._thread = None
            logger.warning("not uploaded: the interpreter is shutting down; the next run does it")

    def _run(self) -> None:
        while True:
            with self._change:
                self._running = None
                jobs = self._jobs or self._leftovers
                if not jobs:
                    self._thread = None
                    self._change.notify_all()
                    return
                job = self._running = jobs.popleft()
            try:
                self._attempt(job)
            except BaseException:  # whatever a listener or a log handler does: nobody may wait for ever
                logger.exception("could not report the failure of the upload of %s", job.path)

    def _attempt(self, job: _Job) -> None:
        try:
            job.act()
        except CheckpointError as error:
            self._record(job, error)
        except BaseException as error:  # noqa: BLE001 - a background failure must reach the training thread
            wrapped = CheckpointError(f"the upload failed: {type(error).__name__}: {error}", path=job.path)
            wrapped.__cause__ = error
            self._record(job, wrapped)
        finally:
            if job.is_upload:
                self._delete_if_asked_to(job.path)

    def _record(self, job: _Job, error: CheckpointError) -> None:
        self.failures += 1
        raises = job.raises and self._on_error == "raise"
        with self._change:
            if job.is_upload and not isinstance(error, CheckpointCorruptedError):
                self._unsent[job.path] = None  # a damaged one does not get better
            if raises and self._failed is None:
                self._failed = error
        action = "upload the checkpoint" if job.is_upload else "bring the remote tier up to date about"
        logger.log(logging.ERROR if raises else logging.WARNING, "could not %s %s: %s", action, job.path, error)
        if job.is_upload:
            notify(self._listeners, UploadFailed(path=job.path, error=str(error)))

    def _delete_if_asked_to(self, path: str) -> None:
        with self._change:
            identity, delete = self._deletes.pop(path, (None, None))
            if delete is not None:
                self._unsent.pop(path, None)
        if delete is not None and identity_of(path) == identity:  # otherwise it was saved anew
            try:
                delete()
            except CheckpointError as error:
                logger.warning("could not remove the checkpoint %s: %s", path, error)

    # ---- the work ------------------------------------------------------------------------------------------------------

    def _upload(self, path: str) -> None:
        started = time.perf_counter()
        size = self._sender.send(path)
        with self._change:
            self._unsent.pop(path, None)
            withheld = [] if self._unsent else self._withheld
            if withheld:
                self._withheld = []
        if size is not None:
            seconds = time.perf_counter() - started
            target = self._tiers.remote_path(path)
            notify(self._listeners, CheckpointUploaded(path=path, target=target, bytes=size, seconds=seconds))
        for old in withheld:
            self._remove(old)
        if self._tiers.keep_local is not None:
            self._sender.evict(os.path.dirname(path), self._tiers.keep_local)

    def _remove(self, path: str) -> None:
        if identity_of(path) is not None:
            return  # it was saved anew
        with self._change:
            if self._unsent:
                self._withheld.append(path)
                logger.warning("kept the checkpoint %s: what is newer was not uploaded", self._tiers.remote_path(path))
                return
        self._sender.remove(path)

    def _look_for_leftovers(self, directory: str, ending: str, before: float) -> None:
        found = self._sender.leftovers(directory, ending, before)
        with self._change:
            waiting = {job.path for job in self._jobs if job.is_upload}
            left = [path for path in found if path not in waiting]
            for path in left:
                act = functools.partial(self._upload, path)
                self._leftovers.append(_Job(path, act, is_upload=True, raises=False))
        if left:
            logger.info(
                "uploading what an earlier run has left in %s: %s", directory, ", ".join(map(os.path.basename, left))
            )
