"""``interval="auto"``: saves at an interval computed from the cost of saves and the rate of failures."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ckpt_core.policies import SaveInterval, SaveSchedule
from lightning_ckpt._private.replacing import Live
from lightning_ckpt._report import announce, summary_of


class AutoInterval(Live):
    """Saves after the steps of one fit at which its schedule says so; created once the processes are connected."""

    def __init__(self, interval: SaveInterval, trainer: Any) -> None:
        self.schedule = SaveSchedule(interval, trainer.world_size)
        self._trainer = trainer
        self._step = trainer.global_step
        self._stops = False

    def begin(self) -> None:
        """Start the schedule; called after a resume has restored everything."""
        self._step, self._stops = self._trainer.global_step, False
        self.schedule.begin(self._step)

    def after_batch(self, save: Callable[[], None]) -> None:
        """Save if a save is due; called after each batch on all ranks together, ignored if no optimizer stepped."""
        step = self._trainer.global_step
        if step == self._step:
            return
        self._step = step
        if self.schedule.due(step):
            summary = summary_of(self._trainer)
            proposal = None
            if self._trainer.is_global_zero:
                proposal = self.schedule.propose(step, 0.0 if summary is None else summary.commit_seconds)
            line = self.schedule.agree(step, self._trainer.strategy.broadcast(proposal))
            if line is not None:
                announce(self._trainer, f"interval: {line}")
        elif not self._ends_here():
            return
        begin = time.monotonic()
        save()
        self.schedule.took(time.monotonic() - begin)

    def _ends_here(self) -> bool:
        # When training ends in the middle of an epoch, Lightning counts the epoch as over. If only the save after that
        # existed, a run resumed with more steps would begin with the next epoch.
        stops, self._stops = self._stops, bool(self._trainer.should_stop)
        return self._step == self._trainer.max_steps or (self._stops and not stops)
