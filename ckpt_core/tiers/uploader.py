"""The uploader: uploads committed checkpoints in the background, in order, and removes them; no failure is lost."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from ckpt_core._pipeline.jobs import Job, JobQueue, OnError
from ckpt_core.errors import CheckpointCorruptedError, CheckpointError
from ckpt_core.events import CheckpointUploaded, Event, Listener, SaveCommitted, UploadFailed, UploadProgressed, notify
from ckpt_core.tiers.ledger import Identity, identity_of
from ckpt_core.tiers.nearest import TieredStorage
from ckpt_core.tiers.sending import Sender

logger = logging.getLogger(__name__)

Delete = Callable[[], None]

_SECONDS_BEFORE_LOG = 3.0  # how long close() waits without a log line; most uploads end in this time


class Uploader:
    """Uploads checkpoints from the local to the remote tier, one after the other, on a thread of its own.

    It is a listener: each committed checkpoint is uploaded, in the order of the commits. Before each upload, the oldest
    failed one is tried again. A checkpoint that is removed before its turn is not uploaded. Removals from the remote
    tier wait until all earlier uploads have succeeded, so that it always keeps the newest checkpoint that it ever had.
    ``queue`` holds the jobs under way, and the failures.
    """

    def __init__(
        self, storage: TieredStorage, *, on_error: OnError = "raise", listeners: Sequence[Listener] = ()
    ) -> None:
        self.queue = JobQueue("ckpt-uploader", on_error=on_error, report=self._report)
        self._storage, self._tiers = storage, storage.tiers
        self._sender = Sender(storage)
        self._listeners = listeners
        self._lock = threading.RLock()  # a signal handler may save inside a save
        self._unsent: dict[str, None] = {}
        self._withheld: list[str] = []
        self._seen: set[str] = set()

    def __call__(self, event: Event) -> None:
        if isinstance(event, SaveCommitted) and self._tiers.covers(event.path):
            self.upload(event.path)

    def uploaded_in(self, directory: str) -> list[str]:
        """Return the local paths of the checkpoints of a directory that are in the remote tier; lists it only once."""
        return self._sender.uploaded_in(directory)

    def upload(self, path: str) -> None:
        """Queue the upload of the checkpoint at ``path``; returns at once.

        Of failed uploads, the oldest is tried again before it; the others after the next upload that succeeds.
        """
        local = self._tiers.local_path(path)
        with self._lock:
            self.resume(path)
            self._submit_unless_waiting([*itertools.islice(self._unsent, 1), local])

    def _submit_unless_waiting(self, paths: Iterable[str]) -> None:
        waiting = {job.path for job in self.queue.waiting() if job.is_pending}
        for each in dict.fromkeys(paths):
            if each not in waiting:
                self._submit(self._upload_of(each))

    def resume(self, path: str) -> None:
        """Queue, once per directory, the uploads of checkpoints next to ``path`` that earlier processes did not upload.

        Checkpoints are the files with the same ending as ``path``, and directories.
        """
        directory, ending = os.path.dirname(self._tiers.local_path(path)), os.path.splitext(path)[1]
        with self._lock:
            if directory in self._seen:
                return
            self._seen.add(directory)
        try:
            names = set(os.listdir(directory)) if os.path.isdir(directory) else set()
        except OSError as error:
            logger.warning("could not list the checkpoints in %s: %s", directory, error)
            return
        look = functools.partial(self._look_for_leftovers, directory, ending, names)
        self._submit(Job(directory, look, "search for leftovers", is_pending=False, raises=False))

    def remove(self, path: str, delete: Delete) -> None:
        """Delete both copies of a checkpoint: the local one now, or, if its upload has begun, when that is over."""
        local = self._tiers.local_path(path)
        with self._lock:
            self._unsent.pop(local, None)
        if self.queue.cancel(local):
            act = functools.partial(self._delete, local, identity_of(local), delete)
            self._submit(Job(local, act, "removal", is_pending=False, raises=False), place="next")
        else:
            delete()
        act = functools.partial(self._remove, local)
        self._submit(Job(local, act, "removal", is_pending=False, raises=False))

    def close(self) -> None:
        """Wait for all jobs, and log a line if that takes long. The uploader may be used again afterwards.

        The newest checkpoint is uploaded next, because the process may be killed before the others end. If the store
        has failed for minutes, the remaining uploads are left to the next run.
        """
        with self._lock:
            waiting = [job.path for job in self.queue.waiting() if job.is_pending]
            if len(waiting) > 1:
                newest = max(reversed(waiting), key=_committed)  # not the last: a path saved again keeps its place
                self.queue.cancel(newest)
                self._submit(self._upload_of(newest), place="next")
        if not self.queue.wait(timeout=_SECONDS_BEFORE_LOG):
            names = ", ".join(map(os.path.basename, self.queue.pending))
            logger.warning("waiting for uploads to %s: %s", self._tiers.upload_to, names)
        while jobs := self.queue.jobs():  # an upload may have queued others
            if self._unsent and self._storage.remote.has_given_up:
                self._leave_waiting()
            self.queue.wait(jobs[0].path)
        self._sender.close()

    def _leave_waiting(self) -> None:
        with self._lock:
            left = [job.path for job in self.queue.waiting() if job.is_pending]
            self._unsent.update(dict.fromkeys(left))
            self.queue.cancel()
        if left:
            names = ", ".join(map(os.path.basename, left))
            logger.warning("not uploaded: the store has failed for minutes; the next run uploads %s", names)

    def _upload_of(self, path: str, *, raises: bool = True) -> Job:
        return Job(path, functools.partial(self._upload, path), "upload", raises=raises)

    def _submit(self, job: Job, place: Literal["next", "last", "later"] = "last") -> None:
        if not self.queue.submit(job, place=place):
            self.queue.cancel()
            logger.warning("not uploaded: the interpreter is shutting down; the next run uploads it")

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _report(self, job: Job, error: CheckpointError, level: int) -> None:
        if job.is_pending and not isinstance(error, CheckpointCorruptedError):
            with self._lock:
                self._unsent[job.path] = None  # to be tried again, unlike a damaged checkpoint
        logger.log(level, "the %s of %s failed: %s", job.what, job.path, error)
        if job.is_pending:
            notify(self._listeners, UploadFailed(path=job.path, error=str(error)))

    def _upload(self, path: str) -> None:
        started, target = time.perf_counter(), self._tiers.remote_path(path)

        def say(done: int, total: int, seconds: float) -> None:
            notify(
                self._listeners, UploadProgressed(path=path, target=target, bytes=done, total=total, seconds=seconds)
            )

        size = self._sender.send(path, say)
        with self._lock:
            self._unsent.pop(path, None)
            if size is not None:
                self._submit_unless_waiting(self._unsent)
            withheld, self._withheld = ([], self._withheld) if self._unsent else (self._withheld, [])
        if size is not None:
            seconds = time.perf_counter() - started
            notify(self._listeners, CheckpointUploaded(path=path, target=target, bytes=size, seconds=seconds))
        for old in withheld:
            self._remove(old)
        if self._tiers.keep_local is not None:
            self._sender.evict(os.path.dirname(path), self._tiers.keep_local)

    def _delete(self, path: str, identity: Identity | None, delete: Delete) -> None:
        with self._lock:
            self._unsent.pop(path, None)
        if identity_of(path) == identity:  # otherwise it was saved again
            delete()

    def _remove(self, path: str) -> None:
        if identity_of(path) is not None:
            return  # it was saved again
        with self._lock:
            if self._unsent:
                self._withheld.append(path)
                logger.warning("kept the checkpoint %s: newer ones were not uploaded", self._tiers.remote_path(path))
                return
        self._sender.remove(path)

    def _look_for_leftovers(self, directory: str, ending: str, names: set[str]) -> None:
        found = self._sender.leftovers(directory, ending, names)
        with self._lock:
            waiting = {job.path for job in self.queue.waiting() if job.is_pending}
            left = [path for path in found if path not in waiting]
            for path in left:
                self._submit(self._upload_of(path, raises=False), place="later")
        if left:
            logger.info(
                "uploading what an earlier run has left in %s: %s", directory, ", ".join(map(os.path.basename, left))
            )


def _committed(path: str) -> float:
    identity = identity_of(path)
    return 0.0 if identity is None else identity.committed
