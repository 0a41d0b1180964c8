"""Events of saves, loads and uploads: frozen data that is passed to listeners, and a log file of them.

A listener is any callable that takes one :class:`Event`. It is called on the thread where the event happens (the
training thread or the writer thread), so it must be quick and must not raise.

Example:
    >>> from ckpt_core.events import SaveCommitted
    >>> seconds = []
    >>> def listener(event):
    ...     if isinstance(event, SaveCommitted):
    ...         seconds.append(event.background_seconds)
"""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ckpt_core.errors import StorageError
from ckpt_core.paths import StrPath

__all__ = [
    "CheckpointLoaded",
    "CheckpointRemoved",
    "CheckpointSkipped",
    "CheckpointUploaded",
    "Event",
    "EventLog",
    "Listener",
    "ResumeCompared",
    "RunSummary",
    "SaveCommitted",
    "SaveFailed",
    "SaveStarted",
    "SnapshotTaken",
    "TrainingEnded",
    "TrainingStarted",
    "UploadFailed",
    "UploadProgressed",
    "notify",
    "size_in_words",
]

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """Something happened to one checkpoint.

    Attributes:
        path: The checkpoint's path or URL.
        time: Unix time in seconds at which it happened.
    """

    path: str
    time: float = dataclasses.field(default_factory=time.time)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveStarted(Event):
    """The training thread entered a save."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapshotTaken(Event):
    """The training thread continues; the rest of the save happens in the background (or, if synchronous, is done).

    Attributes:
        bytes: Size of the checkpoint in bytes; 0 if it is a second name of a checkpoint that was saved before.
        stall_seconds: Time for which the training thread was blocked, including ``waited_seconds``.
        waited_seconds: The part spent waiting for an earlier save to release its buffer.
        memory_seconds: The part spent waiting until some of the state was written, because ``max_host_bytes`` is
            smaller than the state.
    """

    bytes: int
    stall_seconds: float
    waited_seconds: float = 0.0
    memory_seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveCommitted(Event):
    """The checkpoint is durable and visible under its final name.

    Attributes:
        bytes: Size of the checkpoint in bytes.
        background_seconds: Time from the end of the stall until now.
        is_copy: Whether it is a second name of a checkpoint that was saved before (``last.ckpt``).
    """

    bytes: int
    background_seconds: float
    is_copy: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveFailed(Event):
    """The save failed; an earlier checkpoint of that name is unchanged, unless a store lost bytes of the upload.

    Attributes:
        error: The error in words.
    """

    error: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointRemoved(Event):
    """A checkpoint was deleted by retention or by the user."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointLoaded(Event):
    """A checkpoint was read.

    Attributes:
        bytes: Size of the checkpoint in bytes.
        seconds: Time that the load took.
        verified: Whether every byte was compared with its digest (False for files of other programs).
    """

    bytes: int
    seconds: float
    verified: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointSkipped(Event):
    """A resume passed over a checkpoint that does not verify.

    Attributes:
        reason: Why it was passed over, in words.
    """

    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointUploaded(Event):
    """A checkpoint that is durable in the local tier is now also durable and visible in the remote tier.

    Attributes:
        target: Its path or URL in the remote tier.
        bytes: Size of the checkpoint in bytes.
        seconds: Time the upload took, not counting the time it waited for its turn.
    """

    target: str
    bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class UploadFailed(Event):
    """An upload failed; the local checkpoint stays, and the next save tries again.

    Attributes:
        error: The error in words.
    """

    error: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class UploadProgressed(Event):
    """Progress of an upload that takes more than two seconds; sent at growing intervals.

    Attributes:
        target: The checkpoint's path or URL in the remote tier.
        bytes: Bytes sent so far.
        total: Size of the checkpoint in bytes.
        seconds: Time since the upload began.
    """

    target: str
    bytes: int
    total: int
    seconds: float

    def __str__(self) -> str:
        left = self.seconds * (self.total - self.bytes) / self.bytes
        sent = f"{size_in_words(self.bytes)} of {size_in_words(self.total)}"
        return f"uploading to {self.target}: {sent}, about {left:,.0f} s left"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResumeCompared(Event):
    """A resumed run has compared the steps that it repeated with those of the interrupted run.

    Attributes:
        path: The directory of the checkpoints.
        rank: The rank that compared.
        steps: How many steps were equal.
        differs: What differed at the next one (``"data"``, ``"generators"``, ...); empty if all were equal.
        message: The same in words.
    """

    rank: int
    steps: int
    differs: list[str]
    message: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingStarted(Event):
    """A process starts training, from scratch or resumed from a checkpoint.

    Attributes:
        path: The checkpoint that it resumes from; if there is none, the directory of the checkpoints.
        resumed: Whether it resumes from a checkpoint.
        step: Optimizer steps so far, including those before a resume.
    """

    resumed: bool
    step: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingEnded(Event):
    """A process has finished its training (it was not killed or preempted, and did not raise).

    Attributes:
        path: The directory of the checkpoints.
        step: Optimizer steps so far, including those before a resume.
    """

    step: int


Listener = Callable[[Event], None]
_SINCE = round(time.time(), 3)  # distinguishes processes of several starts of a container, which have the same pid
_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


_delivery = threading.local()  # per thread: queue of events that are still to be delivered


def notify(listeners: Sequence[Listener], event: Event) -> None:
    """Call every listener with an event; if a listener raises, that is logged and does not stop the save.

    An event in a signal handler that has interrupted a listener is delivered after that listener has returned, because
    the listener may hold a lock.

    Args:
        listeners: Called in their order, on this thread.
        event: The event.
    """
    waiting: collections.deque[tuple[Sequence[Listener], Event]] | None = getattr(_delivery, "waiting", None)
    if waiting is not None:
        waiting.append((listeners, event))
        return
    waiting = _delivery.waiting = collections.deque([(listeners, event)])
    try:
        while waiting:
            each, what = waiting.popleft()
            for listener in each:
                try:
                    listener(what)
                except Exception:
                    logger.exception("an event listener failed on %s", type(what).__name__)
    finally:
        _delivery.waiting = None
        while waiting:  # events added since the last check, or left because Ctrl-C has ended a listener
            notify(*waiting.popleft())


class RunSummary:
    """A listener that adds up what checkpointing cost a run, as seen by this process.

    Attributes:
        saves: States that became durable; a second name of the same state (``last.ckpt``) does not count.
        failures: Saves and uploads that failed.
        uploads: Checkpoints that were uploaded.
        bytes: Size of the last checkpoint in bytes.
        stall_seconds: Total time for which saves blocked training.
        longest_stall_seconds: The longest stall.
        commit_seconds: Time from the end of the stall until the last checkpoint was durable.
        pending: Paths of pending saves.
        loaded: The event of the last load; None if there was none.
        say: Called with lines about slow operations, to print them; None if there is no console.

    Examples:
        >>> from ckpt_core.events import RunSummary, SaveCommitted, SnapshotTaken
        >>> summary = RunSummary()
        >>> summary(SnapshotTaken(path="a.ckpt", bytes=13_600_000, stall_seconds=0.02))
        >>> summary(SaveCommitted(path="a.ckpt", bytes=13_600_000, background_seconds=0.1))
        >>> summary.in_words(run_seconds=10)
        '1 checkpoint saved (13.6 MB); training stood still for 0.02 s, 0.20 % of the run'
    """

    def __init__(self) -> None:
        self.loaded: CheckpointLoaded | None = None
        self.say: Callable[[str], None] | None = None
        self.begin()

    def begin(self) -> None:
        """Reset the counts for the next run in this process; a load before this call counts for that run."""
        self.saves = self.failures = self.uploads = self.bytes = self._bytes_in_all = 0
        self.stall_seconds = self.longest_stall_seconds = self.commit_seconds = 0.0
        self.pending: set[str] = set()
        self._told = (0, 0, 0.0)

    def __call__(self, event: Event) -> None:
        if isinstance(event, SaveStarted):
            self.pending.add(event.path)
        elif isinstance(event, SaveCommitted | SaveFailed):
            self.pending.discard(event.path)
        if isinstance(event, SnapshotTaken):
            self.stall_seconds += event.stall_seconds
            self.longest_stall_seconds = max(self.longest_stall_seconds, event.stall_seconds)
        elif isinstance(event, SaveCommitted):
            if event.is_copy:
                return
            self.saves += 1
            self.bytes = event.bytes
            self._bytes_in_all += event.bytes
            self.commit_seconds = event.background_seconds
        elif isinstance(event, SaveFailed | UploadFailed):
            self.failures += 1
        elif isinstance(event, CheckpointUploaded):
            self.uploads += 1
        elif isinstance(event, UploadProgressed) and self.say is not None:
            self.say(str(event))
        elif isinstance(event, CheckpointLoaded):
            self.loaded = event

    def metrics(self, run_seconds: float) -> dict[str, float]:
        """Return the numbers of the last save and of the run, by the names under which experiment trackers show them.

        Args:
            run_seconds: How long the run has taken so far.
        """
        return {
            "checkpoint/bytes": float(self.bytes),
            "checkpoint/commit_seconds": self.commit_seconds,
            "checkpoint/stall_seconds_total": self.stall_seconds,
            "checkpoint/share_of_run": self.stall_seconds / run_seconds if run_seconds > 0 else 0.0,
            "checkpoint/saves": float(self.saves),
            "checkpoint/pending": float(len(self.pending)),
            "checkpoint/failures": float(self.failures),
        }

    def new_metrics(self, run_seconds: float) -> dict[str, float]:
        """Return :meth:`metrics` if a save has become durable or has failed since the last call, otherwise nothing.

        ``checkpoint/stall_seconds`` is the stall time since the last call that returned metrics.

        Args:
            run_seconds: How long the run has taken so far.
        """
        saves, failures, stall = self._told
        if (saves, failures) == (self.saves, self.failures):
            return {}
        self._told = (self.saves, self.failures, self.stall_seconds)
        return {"checkpoint/stall_seconds": self.stall_seconds - stall, **self.metrics(run_seconds)}

    def in_words(self, run_seconds: float) -> str:
        """Return one line about what checkpointing cost the run.

        Args:
            run_seconds: How long the run took.
        """
        is_alike = 0.98 * self.saves * self.bytes < self._bytes_in_all < 1.02 * self.saves * self.bytes
        size = f"{size_in_words(self.bytes)} each" if is_alike else f"{size_in_words(self._bytes_in_all)} in all"
        each = f" ({size if self.saves > 1 else size_in_words(self.bytes)})" if self.saves else ""
        parts = [f"{self.saves} checkpoint{'' if self.saves == 1 else 's'} saved{each}"]
        if self.saves:
            share = f", {self.stall_seconds / run_seconds:.2%} of the run".replace("%", " %") if run_seconds > 0 else ""
            most = f", {self.longest_stall_seconds:.2f} s at most" if self.saves > 1 else ""
            parts.append(f"training stood still for {self.stall_seconds:.2f} s{most}{share}")
        if self.uploads:
            parts.append(f"{self.uploads} uploaded")
        if self.failures:
            parts.append(f"{self.failures} FAILED")
        return "; ".join(parts)


def size_in_words(nbytes: float) -> str:
    """Return a size such as ``"13.6 MB"``, in powers of 1000.

    Args:
        nbytes: Bytes.
    """
    size, unit = float(nbytes), 0
    while size >= 999.95 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.1f} {_UNITS[unit]}" if unit else f"{nbytes:.0f} bytes"


class EventLog:
    """A listener that appends each event to a file as one line of JSON.

    Each line is one ``write`` to a file opened for appending. So several threads and processes may share the file, and
    a killed process leaves only complete lines. In addition to the event's own fields, a line has its name (``event``),
    the process (``pid``, ``host``, its start time ``since``) and its ``rank``.

    Args:
        path: The local file; its directory is created.

    Raises:
        StorageError: There is a file at the path that is not an event log, such as a checkpoint.
    """

    def __init__(self, path: StrPath) -> None:
        self.path = Path(path).absolute()  # the program may change its working directory
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.is_file():
            with self.path.open("rb") as file:
                if file.read(1) not in (b"", b"{"):
                    message = "something is already there: a file that is not an event log"
                    raise StorageError(message, path=os.fspath(path), remedy="give another name")

    def __call__(self, event: Event) -> None:
        process = {"pid": os.getpid(), "host": socket.gethostname(), "since": _SINCE, "rank": rank_of_process()}
        record = {"event": type(event).__name__, **process, **dataclasses.asdict(event)}
        line = (json.dumps(record) + "\n").encode()
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


def rank_of_process() -> int:
    """Return the rank of this process in the default process group; 0 if there is none."""
    import torch.distributed as dist  # imported here because the command line's help must not import torch

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
