"""Preemption: at a signal or notice to end, all ranks save after the same batch; the run ends when that is durable.

Signal handlers only note the signals. Ranks exchange them on threads (:class:`ckpt_core.ranks.Meeting`), so that steps
need no collective for it.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

from accelerate_ckpt._state.naming import target_of
from accelerate_ckpt._state.resume import directory_of_run
from accelerate_ckpt.config import OptionError
from ckpt_core import RankGroup
from ckpt_core.errors import CheckpointError
from ckpt_core.preemption import NOT_SAVED, EndWatch, Preemption, SignalNotes

log = logging.getLogger(__name__)


class PreemptionWatch:
    """Watches for signals and notices that end one Accelerator's run; created on all ranks together, on main threads.

    Signals count while the script trains. Before that, and after the training of a Trainer, there is nothing to save,
    and signals have their usual effect, also while the main thread waits for another rank.

    ``value`` is that of the option ``preempt``; an invalid one is an ``OptionError``. The store of ``ranks`` is that of
    this Accelerator.
    """

    def __init__(self, value: Any, ranks: RankGroup, is_rank_gone: Callable[[], bool]) -> None:
        try:
            preemption = Preemption.of(value) or Preemption(signals=())
        except ValueError as error:
            raise OptionError(f"preempt: {error}") from None
        self.signals = tuple(preemption.signals)  # names of the signals that count
        silent = copy.copy(preemption)
        vars(silent).update(vars(preemption) | {"signals": ()})  # deadlines count from the creation of the original
        self._watch = EndWatch(silent, ranks, is_rank_gone)
        self._notes: SignalNotes | None = None
        # False: an integration knows better than the loaders where a step ends, and calls `due`
        self.asks_itself = True

    @property
    def is_training(self) -> bool:
        """Whether signals count."""
        return self._notes is not None

    def begin(self) -> None:
        """Make signals count, because the script trains from now on."""
        if self._notes is None:
            self._notes = SignalNotes(self.signals, self._watch.ask)

    def end(self) -> None:
        """Restore the effect that signals had before :meth:`begin`."""
        if self._notes is not None:
            self._notes.close()
            self._notes = None

    def close(self) -> None:
        """Stop watching."""
        self.end()
        self._watch.close()

    def due(self, session: Any, *, last: bool = False) -> int | None:
        """Return the exit status if the run is to end now, and log why; ``last`` as for :class:`EndWatch`."""
        try:
            due = self._watch.due(last=last)
        except SystemExit:
            if session.auto_resume is not None:
                session.auto_resume.crashed()
            raise
        if due is None:
            return None
        if session.rank == 0:
            log.warning("this run ends because of %s: it saves first", due.reason)
        if session.interval is not None:
            session.interval.schedule.is_ending = True
        return due.status

    def after_batch(self, session: Any) -> None:
        """If the run has to end, save, and end the program by ``SystemExit``."""
        status = self.due(session) if self.asks_itself else None
        if status is None:
            return
        has_failed = True
        try:
            path = session.accelerator.save_state(target_of_run(session))
            with failures_of_trackers_logged():
                session.tell_trackers()
            session.finish()
            has_failed = session.checkpointer.has_failed(path)
            if has_failed:  # with on_error="warn", which has logged why
                log.error(NOT_SAVED)
            elif session.rank == 0:
                log.warning("saved %s", path)
        except (CheckpointError, OSError) as error:  # OSError: from a file that a hook of the script writes
            log.error("%s: %s", NOT_SAVED, error)  # noqa: TRY400 - the message says it all
        if has_failed and session.memory is not None:
            session.memory.leave()
        session.note_clean_end()
        raise SystemExit(status)


@contextlib.contextmanager
def failures_of_trackers_logged() -> Iterator[None]:
    """Log whatever the script's trackers raise, so that the run still ends with its own exit status."""
    try:
        yield
    except Exception:
        log.exception("the trackers were not given the figures of the last save")


def target_of_run(session: Any) -> str:
    """Return the path of a save that the script did not request, where ``resume="auto"`` finds it."""
    if session.accelerator.project_configuration.automatic_checkpoint_naming:
        return target_of(session.accelerator, None)  # the next automatic name
    return os.path.join(directory_of_run(session), f"checkpoint_{session.step}")
