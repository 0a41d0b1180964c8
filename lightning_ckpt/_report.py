"""The lines on the Trainer's console that say what a run resumed from and what its checkpoints have cost."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from ckpt_core.events import RunSummary, TrainingEnded, TrainingStarted
from ckpt_core.process.console import beside_bars
from ckpt_core.resume import ResumePoint
from lightning_ckpt._plugin_base import ReliableCheckpointIO
from lightning_ckpt._private.replacing import Live


def announce(trainer: Any, message: str) -> None:
    """Print a line on rank 0, where Lightning prints its own."""
    if trainer.is_global_zero:
        package = type(trainer).__module__.partition(".trainer")[0]
        # a child of the package's logger, which has a handler and shows INFO
        parent = package if package in ("lightning.pytorch", "pytorch_lightning") else "lightning.pytorch"
        logger = logging.getLogger(f"{parent}.lightning_ckpt")
        with beside_bars(logger):
            logger.info("%s", message)


def summary_of(trainer: Any) -> RunSummary | None:
    """Return what our plugin on a Trainer has added up; None with any other plugin."""
    plugin = trainer.strategy.checkpoint_io
    return plugin.summary if isinstance(plugin, ReliableCheckpointIO) else None


def resumed_in_words(trainer: Any, path: Any, progress: Mapping[str, Any]) -> Callable[[str], str]:
    """Return what makes the line about a resume, when the Trainer's counters are as they were.

    ``progress`` are those of the training loop. It is told whether the resume is exact, or what else comes of it.
    """
    batch = progress["batch"]["current"]["processed"]
    point = ResumePoint(path, trainer.global_step, trainer.current_epoch, batch)
    summary = summary_of(trainer)
    if summary is None or summary.loaded is None:
        return point.in_words
    loaded = summary.loaded
    return functools.partial(point.in_words, nbytes=loaded.bytes, seconds=loaded.seconds, is_verified=loaded.verified)


class RunReport(Live):
    """Says what the checkpoints of one fit have cost: to its loggers after each save, on the console at its end."""

    def __init__(self, trainer: Any, *, log_metrics: bool) -> None:
        self._trainer = trainer
        self._log_metrics = log_metrics
        self._begin = time.monotonic()
        plugin = trainer.strategy.checkpoint_io
        self._plugin = plugin if isinstance(plugin, ReliableCheckpointIO) else None
        if self._plugin is not None:
            self._plugin.summary.begin()
            self._plugin.summary.say = functools.partial(announce, trainer)

    def training_starts(self, directory: Any) -> None:
        """Note that the fit, whose checkpoints are in a directory, trains from now on."""
        if self._plugin is not None:
            path, step = self._trainer.ckpt_path, self._trainer.global_step
            at = self._plugin.checkpointer.known_as(path or directory or ".")
            self._plugin.checkpointer.notify(TrainingStarted(path=at, resumed=path is not None, step=step))
        self._begin = time.monotonic()

    def training_ends(self, directory: Any) -> None:
        """Note that the fit has trained to its end."""
        if self._plugin is not None:
            at = self._plugin.checkpointer.known_as(directory or ".")
            self._plugin.checkpointer.notify(TrainingEnded(path=at, step=self._trainer.global_step))

    def tell_loggers(self) -> None:
        """Give the loggers the figures of the last save that has ended, if they have not got them."""
        if self._log_metrics and self._plugin is not None:
            metrics = self._plugin.summary.new_metrics(time.monotonic() - self._begin)
            for logger in self._trainer.loggers if metrics and self._trainer.is_global_zero else []:
                logger.log_metrics(metrics, step=self._trainer.global_step)

    def close(self) -> None:
        """Tell the loggers of the last save, print the line about the run, and write the page, if it is wanted."""
        if self._plugin is None:
            return
        self.tell_loggers()
        summary = self._plugin.summary
        summary.say = None
        if summary.saves or summary.failures:
            announce(self._trainer, summary.in_words(time.monotonic() - self._begin))
        if self._trainer.is_global_zero:
            self._plugin.options.write_report()
