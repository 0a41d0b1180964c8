"""What the checkpoints of one Accelerator have cost: for its trackers, on the console, and as a page."""

from __future__ import annotations

import time
from collections.abc import Callable

from ckpt_core.events import Event, RunSummary, TrainingEnded, TrainingStarted
from ckpt_core.options import CheckpointerOptions
from ckpt_core.resume import ResumePoint


class RunReport:
    """Adds up what the checkpoints of one Accelerator cost, and says it.

    Args:
        options: How it saves.
        log_metrics: Whether its trackers get the figures.

    Attributes:
        summary: A listener, which adds up.
    """

    def __init__(self, options: CheckpointerOptions, *, log_metrics: bool) -> None:
        self.summary = RunSummary()
        self._options = options
        self._log_metrics = log_metrics
        self._begin = time.monotonic()
        self._has_started = False

    @property
    def seconds(self) -> float:
        """How long the run has taken."""
        return time.monotonic() - self._begin

    def new_metrics(self) -> dict[str, float]:
        """Return the figures, if they are wanted and have changed since the last call, else nothing."""
        return self.summary.new_metrics(self.seconds) if self._log_metrics else {}

    def resumed(self) -> None:
        """Note that training continues elsewhere: the next step tells from where."""
        self._has_started = False

    def stepped(self, notify: Callable[[Event], None], point: ResumePoint | None, directory: str) -> None:
        """Note a step of an optimizer.

        Args:
            notify: Tells the listeners.
            point: Where training was resumed; None if it was not.
            directory: Of the run.
        """
        if not self._has_started:
            self._has_started = True
            path, step = (directory, 0) if point is None else (point.path, point.step or 0)
            notify(TrainingStarted(path=path, resumed=point is not None, step=step))

    def ended(self, notify: Callable[[Event], None], step: int, directory: str) -> None:
        """Note that training is over.

        Args:
            notify: Tells the listeners.
            step: Steps that the run has taken.
            directory: Of the run.
        """
        if self._has_started:
            self._has_started = False
            notify(TrainingEnded(path=directory, step=step))

    def close(self, announce: Callable[[str], None], *, rank: int) -> None:
        """Say what the run has cost, if there is anything to say, and write the page, if it is wanted.

        Args:
            announce: Prints a line.
            rank: Of this process.
        """
        if self.summary.saves or self.summary.failures:
            announce(self.summary.in_words(self.seconds))
            self.summary.begin()
            if rank == 0:
                self._options.write_report()
