"""A run that is told to end saves first, on all ranks after the same batch, and ends when that is durable.

Handlers of signals only note them. Ranks talk about them on threads (:class:`ckpt_core.ranks.Meeting`), so that no step
has a collective because of it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from accelerate_ckpt._state.naming import target_of
from accelerate_ckpt._state.resume import directory_of_run
from accelerate_ckpt.config import OptionError
from ckpt_core import RankGroup
from ckpt_core.errors import CheckpointError
from ckpt_core.preemption import EndWatch

log = logging.getLogger(__name__)


class PreemptionWatch:
    """Watches for what tells one Accelerator's run to end; made on all ranks together, on their main threads.

    ``value`` says what that is, as the option does; what makes no sense is an ``OptionError``. The store of ``ranks``
    is that of this Accelerator.

    Attributes:
        asks_itself: Whether somebody else knows better than the loaders where a step ends, and asks :meth:`due`.
        due: Returns why the run is to end now and its exit status, None if it is not; asked by all ranks at each step.
        close: Watches no longer.
    """

    def __init__(self, value: Any, ranks: RankGroup, is_rank_gone: Callable[[], bool]) -> None:
        try:
            watch = EndWatch(value, ranks, is_rank_gone)
        except ValueError as error:
            raise OptionError(str(error)) from None
        self.due, self.close = watch.due, watch.close
        self.asks_itself = True

    def after_batch(self, session: Any) -> None:
        """Save and end the program (``SystemExit``), if that is due."""
        due = self.due() if self.asks_itself else None
        if due is None:
            return
        reason, status = due
        if session.rank == 0:
            log.warning("this run ends because of %s: it saves first", reason)
        if session.interval is not None:
            session.interval.schedule.is_ending = True
        try:
            path = session.accelerator.save_state(target_of_run(session))
            session.finish()
        except CheckpointError:
            log.exception("no checkpoint could be saved before this run ends")
            if session.memory is not None:
                session.memory.leave()
        else:
            if session.rank == 0:
                log.warning("saved %s", path)
        session.ended_as_told()
        raise SystemExit(status)


def target_of_run(session: Any) -> str:
    """Return where a run saves that nobody has asked to, so that ``resume="auto"`` finds it."""
    if session.accelerator.project_configuration.automatic_checkpoint_naming:
        return target_of(session.accelerator, None)  # the next automatic name
    return os.path.join(directory_of_run(session), f"checkpoint_{session.step}")
