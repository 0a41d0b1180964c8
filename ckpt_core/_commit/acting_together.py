"""Make all ranks act on a request, such as a signal to save, at the same step boundary of their training loops.

A signal reaches each rank at a different moment. A rank that waited for the others inside its signal handler would wait
for ever: they are in the gradient exchange of a step that it never enters. So a handler only records the request. A
thread on each rank tells the others, without the training thread, which boundary its rank has passed, and all ranks act
at the first boundary that none has passed yet. Until that is settled, no rank passes another, so none can be too late.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]

from ckpt_core._commit.tcp_store import TimedStore
from ckpt_core.errors import RankFailedError

logger = logging.getLogger(__name__)

Position = tuple[int, int]

_ANSWER_SECONDS = 10.0  # each rank's thread checks twice a second; launchers allow 30 s for this and the save
_SAME_WAVE_SECONDS = 30.0  # a signal to a job reaches its last rank at most this long after its first
_START: Position = (-1, 0)
_LOOK = ""  # wakes the thread, and requests nothing


class Call(NamedTuple):
    """What a rank has to do at the boundary where it is."""

    requests: frozenset[str]  # the requests that any rank has received
    together: bool  # whether all ranks act now; if not, the others did not answer


_NOTHING = Call(frozenset(), True)


class Meeting:
    """The ranks of one training loop; constructed on all ranks, with rank 0's store, or None for a single process.

    Every ``look_every`` seconds, the thread checks whether another rank has received a request. A rank that does not
    report its boundary within ``answer_within`` seconds counts as lost, and at once if ``is_rank_gone``, called on the
    thread, returns True.

    Examples:
        >>> from ckpt_core._commit.acting_together import Meeting
        >>> meeting = Meeting(None)
        >>> meeting.ask("save")
        >>> sorted(meeting.at((1, 0)).requests)
        ['save']
    """

    def __init__(
        self,
        store: Store | None,
        rank: int = 0,
        world_size: int = 1,
        *,
        look_every: float = 0.5,
        answer_within: float = _ANSWER_SECONDS,
        is_rank_gone: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store = TimedStore(store, answer_within=answer_within) if store is not None else None
        self._rank, self._world_size = rank, world_size
        self._look_every, self._answer_within, self._is_rank_gone = look_every, answer_within, is_rank_gone
        self._asked: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._passed: Position = _START
        self._settling = self._is_last = False
        self._due: tuple[Position, Call] | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        if self._store is not None:
            self._thread = threading.Thread(target=self._watch, args=(self._store,), name="ckpt-meeting", daemon=True)
            self._thread.start()

    def ask(self, request: str) -> None:
        """Request that all ranks act at the same boundary; returns at once, also inside a signal handler."""
        self._asked.put(request)

    def at(self, position: Position) -> Call:
        """Return what all ranks have to do now; called by the training thread at each boundary.

        ``position`` identifies the boundary: it increases, and is equal on all ranks for the same boundary.
        """
        if self._store is None:
            return Call(frozenset(self._taken()), True)
        with self._changed:
            while self._settling:
                self._changed.wait()
            self._passed = position
            if self._due is None or position <= self._due[0]:
                return _NOTHING
            (_, call), self._due = self._due, None
            self._changed.notify_all()
        return call

    def at_last(self, position: Position) -> Call:
        """Like :meth:`at`, at the last boundary for now: include every request that any rank has received by then.

        Waits until all ranks have reported where they are, or until ``answer_within`` has passed.
        """
        if self._store is None:
            return self.at(position)
        with self._changed:
            while self._settling:
                self._changed.wait()
            if self._due is None and self._thread is not None and self._thread.is_alive():
                self._settling = self._is_last = True
                self._asked.put(_LOOK)
        return self.at(position)

    def close(self) -> None:
        """End the thread; later requests are ignored."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._asked.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():  # a finalizer may run on it
            self._thread.join(timeout=1.0)

    def _taken(self) -> list[str]:
        taken = []
        while not self._asked.empty():
            request = self._asked.get()
            if request:
                taken.append(request)
        return taken

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _watch(self, store: TimedStore) -> None:
        number = 0
        # Requests of other ranks that were acted on, and until when the same signal may still reach this rank.
        done_before: dict[str, float] = {}
        while True:
            mine = self._newly_asked(done_before)
            if self._closed:
                return
            try:
                if not mine and not self._is_last and not store.has(f"{number}/asked"):
                    continue
                call, after = self._settle(store, number, mine)
            except Exception as error:  # noqa: BLE001 - training waits for this thread
                if not isinstance(error, RankFailedError):
                    logger.warning("the ranks cannot settle where to act together: %r", error)
                if not mine:
                    self._give_up()
                    return  # rank 0 has ended, with its part of the training
                call, after = Call(frozenset(mine), together=False), self._passed
            with self._changed:
                self._due, self._settling, self._is_last = (after, call), False, False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._due is None or self._closed)
            until = time.monotonic() + _SAME_WAVE_SECONDS
            done_before.update(dict.fromkeys(call.requests - mine, until))
            number += 1

    def _give_up(self) -> None:
        with self._changed:
            self._settling = self._is_last = False
            self._changed.notify_all()

    def _newly_asked(self, done_before: dict[str, float]) -> set[str]:
        found: set[str] = set()
        try:
            first = self._asked.get(timeout=self._look_every)
        except queue.Empty:
            return found
        for request in [first, *self._taken()]:
            if request and done_before.pop(request, 0.0) < time.monotonic():
                found.add(request)
        return found

    def _settle(self, store: TimedStore, number: int, mine: set[str]) -> tuple[Call, Position]:
        """Agree with the other ranks on what to do; return that, and the last boundary that a rank has passed."""
        with self._changed:
            self._settling = True
            passed = self._passed
        store.set(f"{number}/{self._rank}", json.dumps([passed, sorted(mine)]))
        store.set(f"{number}/asked", "")
        ranks = [f"{number}/{rank}" for rank in range(self._world_size)]
        store.wait_until(lambda: store.have(ranks) or self._is_rank_gone(), self._answer_within)
        if not store.have(ranks):
            return Call(frozenset(mine), together=False), passed
        answers = [json.loads(store.get(rank)) for rank in ranks]
        requests = frozenset(request for _, asked in answers for request in asked)
        return Call(requests, together=True), max((position[0], position[1]) for position, _ in answers)
