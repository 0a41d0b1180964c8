"""Prints what a run resumed from and what its checkpoints have cost, on the Trainer's console and to its loggers."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from ckpt_core.events import RunSummary, TrainingEnded, TrainingStarted
from ckpt_core.process.console import progress_bars_cleared
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
        with progress_bars_cleared(logger):
            logger.info("%s", message)


def summary_of(trainer: Any) -> RunSummary | None:
    """Return the totals of our plugin on a Trainer; None with any other plugin."""
    plugin = trainer.strategy.checkpoint_io
    return plugin.summary if isinstance(plugin, ReliableCheckpointIO) else None


def resumed_in_words(trainer: Any, path: Any, progress: Mapping[str, Any]) -> Callable[[str], str]:
    """Return a function that formats the line about a resume; call this once the Trainer's counters are restored.

    ``progress`` holds the counters of the training loop. The function takes the outcome: ``"exact"``, or what else.
    """
    batch = progress["batch"]["current"]["processed"]
    point = ResumePoint(path, trainer.global_step, trainer.current_epoch, batch)
    summary = summary_of(trainer)
    if summary is None or summary.loaded is None:
        return point.in_words
    loaded = summary.loaded
    return functools.partial(point.in_words, nbytes=loaded.bytes, seconds=loaded.seconds, is_verified=loaded.verified)


class RunReport(Live):
    """Reports what the checkpoints of one fit cost: to its loggers after each save, on the console at its end."""

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
        """Notify listeners that training starts; ``directory`` is that of its checkpoints."""
        if self._plugin is not None:
            path, step = self._trainer.ckpt_path, self._trainer.global_step
            at = self._plugin.checkpointer.known_as(path or directory or ".")
            self._plugin.checkpointer.notify(TrainingStarted(path=at, resumed=path is not None, step=step))
        self._begin = time.monotonic()

    def training_ends(self, directory: Any) -> None:
        """Notify listeners that training has reached its end."""
        if self._plugin is not None:
            at = self._plugin.checkpointer.known_as(directory or ".")
            self._plugin.checkpointer.notify(TrainingEnded(path=at, step=self._trainer.global_step))

    def tell_loggers(self) -> None:
        """Log the figures of the last finished save, unless they were logged already."""
        if self._log_metrics and self._plugin is not None:
            metrics = self._plugin.summary.new_metrics(time.monotonic() - self._begin)
            for logger in self._trainer.loggers if metrics and self._trainer.is_global_zero else []:
                logger.log_metrics(metrics, step=self._trainer.global_step)

    def close(self) -> None:
        """Log the figures of the last save, print the summary line, and write the report page if one is configured."""
        if self._plugin is None:
            return
        self.tell_loggers()
        summary = self._plugin.summary
        summary.say = None
        if summary.saves or summary.failures:
            announce(self._trainer, summary.in_words(time.monotonic() - self._begin))
        if self._trainer.is_global_zero:
            self._plugin.options.write_report()
