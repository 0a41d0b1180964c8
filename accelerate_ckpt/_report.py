"""What the checkpoints of one Accelerator have cost: for its trackers, on the console, and as a page."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable

from ckpt_core import DirectoryCheckpointer
from ckpt_core.events import Event, RunSummary, TrainingEnded, TrainingStarted, rank_of_process
from ckpt_core.options import CheckpointerOptions
from ckpt_core.process.console import beside_bars
from ckpt_core.resume import ResumePoint

log = logging.getLogger(__name__)

_open: list[RunReport] = []  # of Accelerators that may be gone: a script need not call end_training


def announce(message: str) -> None:
    """Print a line: through logging where the script has set that up, else to the standard error."""
    with beside_bars(log):
        if log.hasHandlers():
            log.info("%s", message)
        elif sys.stderr is not None:  # print would write to the standard output
            with contextlib.suppress(OSError, ValueError):  # closed, at this end or the other
                print(message, file=sys.stderr, flush=True)  # noqa: T201  as Lightning shows its own


def announce_on_main(message: str) -> None:
    """Print a line on rank 0."""
    if rank_of_process() == 0:
        announce(message)


@atexit.register
def close_reports() -> None:
    """Say what was not said yet: the interpreter ends, and has waited for all saves."""
    for report in _open[:]:
        report.close()


def forget_reports() -> None:
    """Say nothing more of the runs up to here."""
    _open.clear()


class RunReport:
    """Adds up what the checkpoints of one Accelerator cost, and says it, on rank 0.

    ``summary`` is the listener that adds up.
    """

    def __init__(self, options: CheckpointerOptions, *, log_metrics: bool, rank: int) -> None:
        self.summary = RunSummary()
        self.summary.say = announce
        self._process = os.getpid() if rank == 0 else None
        self._options = options
        self._log_metrics = log_metrics
        self._begin = time.monotonic()
        self._has_started = False
        _open.append(self)

    @property
    def seconds(self) -> float:
        """How long the run has trained."""
        return time.monotonic() - self._begin

    def new_metrics(self) -> dict[str, float]:
        """Return the figures, if they are wanted and have changed since the last call, else nothing."""
        return self.summary.new_metrics(self.seconds) if self._log_metrics else {}

    def resumed(self) -> None:
        """Note that training continues elsewhere: the next step tells from where."""
        self._has_started = False

    def stepped(self, checkpointer: DirectoryCheckpointer, point: ResumePoint | None, directory: str) -> None:
        """Note a step of an optimizer in a run of a directory that was resumed at ``point``; None if it was not."""
        if not self._has_started:
            self._has_started = True
            path, step = (directory, 0) if point is None else (checkpointer.known_as(point.path), point.step or 0)
            checkpointer.notify(TrainingStarted(path=path, resumed=point is not None, step=step))
            if not self.summary.stall_seconds:  # as long as nothing was saved, the run begins here
                self._begin = time.monotonic()

    def ended(self, notify: Callable[[Event], None], step: int, directory: str) -> None:
        """Note that the training of a directory's run is over, after so many steps."""
        if self._has_started:
            self._has_started = False
            notify(TrainingEnded(path=directory, step=step))

    def close(self) -> None:
        """Say what the run has cost, if there is anything to say, and write the page, if it is wanted."""
        if self in _open:
            _open.remove(self)
        if self._process == os.getpid() and (self.summary.saves or self.summary.failures):  # and not in a fork of it
            announce(self.summary.in_words(self.seconds))
            self.summary.begin()
            self._options.write_report()
