"""A run that is told to end saves first, on all ranks after the same batch, and ends when that is durable.

Handlers of signals only note them. Ranks talk about them on threads (:class:`ckpt_core.ranks.Meeting`), so that no step
has a collective because of it.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from accelerate_ckpt._state.resume import directory_of_run
from accelerate_ckpt.config import OptionError
from ckpt_core.errors import CheckpointError
from ckpt_core.preemption import Notices, Preemption, SignalNotes, exit_status
from ckpt_core.ranks import Meeting

__all__ = ["PreemptionWatch"]

log = logging.getLogger(__name__)


class PreemptionWatch:
    """Watches for one Accelerator; made on all ranks together, on their main threads.

    Args:
        value: What tells the run to end, as the option says it.
        store: Shared by all ranks; None for a single process.
        rank: This process's rank.
        world_size: Number of ranks.

    Raises:
        OptionError: The option says what makes no sense.

    Attributes:
        asks_itself: Whether somebody else knows better than the loaders where a step ends, and asks :meth:`due`.
    """

    def __init__(self, value: Any, store: Store | None, rank: int, world_size: int) -> None:
        try:
            preemption = Preemption.of(value) or Preemption()
        except ValueError as error:
            raise OptionError(f"preempt {error}") from None
        self._meeting = Meeting(None if store is None else PrefixStore("preemption", store), rank, world_size)
        self._notices = Notices(preemption, self._meeting.ask)
        self._signals = SignalNotes(preemption.signals, self._meeting.ask)
        self._batches = 0
        self.asks_itself = True

    def due(self) -> tuple[str, int] | None:
        """Return why the run is to end now and its exit status, None if it is not; asked by all ranks at each step."""
        self._batches += 1
        call = self._meeting.at((self._batches, 0))
        if not call.requests:
            return None
        reason = " and ".join(sorted(call.requests))
        if not call.together:
            log.error("%s ends this rank alone, and nothing is saved: the other ranks do not answer", reason)
            raise SystemExit(exit_status(call.requests))
        return reason, exit_status(call.requests)

    def after_batch(self, session: Any) -> None:
        """Save and end the program, if that is due.

        Raises:
            SystemExit: It was due.
        """
        due = self.due() if self.asks_itself else None
        if due is None:
            return
        reason, status = due
        if session.rank == 0:
            log.warning("this run ends because of %s: it saves first", reason)
        if session.interval is not None:
            session.interval.schedule.is_ending = True
        try:
            path = session.accelerator.save_state(_target_of(session))
            session.finish()
        except CheckpointError:
            log.exception("no checkpoint could be saved before this run ends")
        else:
            if session.rank == 0:
                log.warning("saved %s", path)
        session.ended_as_told()
        raise SystemExit(status)

    def close(self) -> None:
        """Watch no longer."""
        self._notices.close()
        self._signals.close()
        self._meeting.close()


def _target_of(session: Any) -> str | None:
    if session.accelerator.project_configuration.automatic_checkpoint_naming:
        return None  # the next automatic name
    return os.path.join(directory_of_run(session), f"checkpoint_{session.step}")
