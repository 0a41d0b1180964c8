"""Reports what the checkpoints of one Accelerator have cost: to its trackers, on the console, and as a page."""

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
from ckpt_core.process.console import progress_bars_cleared
from ckpt_core.resume import ResumePoint

log = logging.getLogger(__name__)

_open: list[RunReport] = []  # kept beyond their Accelerators, because a script need not call end_training


def announce(message: str) -> None:
    """Print a line: through logging if the script has configured it, otherwise to standard error."""
    with progress_bars_cleared(log):
        if log.hasHandlers():
            log.info("%s", message)
        elif sys.stderr is not None:  # with None, print would write to standard output
            with contextlib.suppress(OSError, ValueError):  # it may be closed, at either end
                print(message, file=sys.stderr, flush=True)  # noqa: T201  as Lightning shows its own


def announce_on_main(message: str) -> None:
    """Print a line on rank 0."""
    if rank_of_process() == 0:
        announce(message)


@atexit.register
def close_reports() -> None:
    """Print the reports that were not printed yet; at exit, when the interpreter has waited for all saves."""
    for report in _open[:]:
        report.close()


def forget_reports() -> None:
    """Drop the reports of all runs so far without printing them."""
    _open.clear()


class RunReport:
    """Adds up what the checkpoints of one Accelerator cost, and prints it on rank 0.

    ``summary`` is the listener that adds up the events.
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
        """Return the figures if they have changed since the last call; empty without ``log_metrics``."""
        return self.summary.new_metrics(self.seconds) if self._log_metrics else {}

    def resumed(self) -> None:
        """Note that training continues from a checkpoint; the next step notifies listeners of the start."""
        self._has_started = False

    def stepped(self, checkpointer: DirectoryCheckpointer, point: ResumePoint | None, directory: str) -> None:
        """Note a step of an optimizer; the first one notifies listeners of the start, or the resume at ``point``."""
        if not self._has_started:
            self._has_started = True
            path, step = (directory, 0) if point is None else (checkpointer.known_as(point.path), point.step or 0)
            checkpointer.notify(TrainingStarted(path=path, resumed=point is not None, step=step))
            if not self.summary.stall_seconds:  # nothing was saved yet, so the run's time counts from here
                self._begin = time.monotonic()

    def ended(self, notify: Callable[[Event], None], step: int, directory: str) -> None:
        """Notify listeners that training is over, after ``step`` steps."""
        if self._has_started:
            self._has_started = False
            notify(TrainingEnded(path=directory, step=step))

    def close(self) -> None:
        """Print what the run's checkpoints have cost, if it made any, and write the page if one is configured."""
        if self in _open:
            _open.remove(self)
        if self._process == os.getpid() and (self.summary.saves or self.summary.failures):  # not in a forked child
            announce(self.summary.in_words(self.seconds))
            self.summary.begin()
            self._options.write_report()
