"""``interval="auto"``: saves at an interval computed from the cost of saves and the rate of failures."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from accelerate_ckpt._state.resume import directory_of_run
from ckpt_core.policies import SaveInterval, SaveSchedule

#: Prefix of the names of checkpoints that the script did not request, without automatic names.
PREFIX = "auto_"


class AutoInterval:
    """Saves after the steps of one Accelerator at which its schedule says so."""

    def __init__(self, interval: SaveInterval, world_size: int) -> None:
        self.schedule = SaveSchedule(interval, world_size)
        # False: an integration knows better than the loaders where a step ends, and calls `due`
        self.asks_itself = True

    def resumed(self, step: int, state: Mapping[str, Any] | None) -> None:
        """Continue at ``step`` after a checkpoint was loaded, with the schedule's ``state`` in it."""
        self.schedule.begin(step)
        self.schedule.load_state_dict(state or {})

    def due(self, session: Any) -> bool:
        """Return whether to save now; called by all ranks after each step."""
        step = session.step
        if not self.schedule.due(step) or session.window_is_open:
            return False
        if session.step_of_all is None:
            session.tell_once(
                "interval",
                "the option interval does not save by itself, because the ranks may take different numbers of "
                "steps: call save_state at a point that all ranks reach",
            )
            return False
        proposal = self.schedule.propose(step, session.commit_seconds) if session.rank == 0 else None
        line = self.schedule.agree(step, session.agreement.announce("interval", proposal))
        if line is not None:
            session.announce(f"interval: {line}")
        return True

    def after_batch(self, session: Any) -> None:
        """Save if a save is due."""
        if self.asks_itself and self.due(session):
            automatic = session.accelerator.project_configuration.automatic_checkpoint_naming
            target = None if automatic else os.path.join(directory_of_run(session), f"{PREFIX}{session.step}")
            session.accelerator.save_state(target)
