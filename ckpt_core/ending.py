"""A training loop of one's own that is told to end: all ranks hear of it after the same step, without a collective."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from ckpt_core.preemption import Notices, Preemption, SignalNotes, exit_status
from ckpt_core.ranks import Meeting, RankGroup

__all__ = ["End", "EndWatch"]

log = logging.getLogger(__name__)


class End(NamedTuple):
    """Why a run is to end.

    Attributes:
        reason: In words: ``"SIGTERM"``, ``"its deadline"``, ``"a notice"``.
        status: The exit status that tells whoever starts runs again: 128 and the signal's number, or 75.
    """

    reason: str
    status: int


class EndWatch:
    """Notes signals, a deadline and notices; made on all ranks together, on their main threads.

    Args:
        preempt: What tells the run to end: True (SIGTERM), names of signals, or a
            :class:`ckpt_core.preemption.Preemption`.
        ranks: The ranks of the run; None for a single process.
        is_rank_gone: Called on a thread while this rank waits for answers: whether another one will not answer.

    Raises:
        ValueError: ``preempt`` makes no sense.

    Examples:
        >>> import signal
        >>> watch = EndWatch("SIGUSR1")
        >>> watch.due() is None
        True
        >>> signal.raise_signal(signal.SIGUSR1)
        >>> watch.due().reason  # save, wait until that is durable, and raise SystemExit(end.status)
        'SIGUSR1'
        >>> watch.close()
    """

    def __init__(
        self, preempt: Any = True, ranks: RankGroup | None = None, is_rank_gone: Callable[[], bool] = lambda: False
    ) -> None:
        preemption = Preemption.of(preempt) or Preemption(signals=())
        rank, world_size = (0, 1) if ranks is None else (ranks.rank, ranks.world_size)
        store: Store | None = None if ranks is None else ranks.store
        store = None if store is None else PrefixStore("preemption", store)
        self._meeting = Meeting(store, rank, world_size, is_rank_gone=is_rank_gone)
        self._notices = Notices(preemption, self._meeting.ask)
        self._signals = SignalNotes(preemption.signals, self._meeting.ask)
        self._steps = 0

    def due(self) -> End | None:
        """Return why the run is to end now, None if it is not; asked by all ranks after each step.

        Raises:
            SystemExit: It is to end, and the other ranks do not answer, so that nothing can be saved.
        """
        self._steps += 1
        call = self._meeting.at((self._steps, 0))
        if not call.requests:
            return None
        end = End(" and ".join(sorted(call.requests)), exit_status(call.requests))
        if not call.together:
            log.error("%s ends this rank alone, and nothing is saved: the other ranks do not answer", end.reason)
            raise SystemExit(end.status)
        return end

    def close(self) -> None:
        """Watch no longer, and put the handlers of signals back."""
        self._notices.close()
        self._signals.close()
        self._meeting.close()
