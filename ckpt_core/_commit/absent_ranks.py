"""Detect ranks that have certainly continued without joining a save in which another rank waits for them.

The waiting rank asks a question through the store. Each rank answers, on a thread that sleeps in the store until then,
how many collectives it has begun and which meetings it has joined. A rank that has begun more collectives than the
waiting rank has left the place in the script where that rank is: a collective that the waiting rank has not joined
cannot be over. A rank that is only slow has not begun more, however long it takes.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import json
import os
import threading
import time
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from ckpt_core._commit.tcp_store import TimedStore, seal
from ckpt_core.errors import RankFailedError

_SLEEP = datetime.timedelta(days=1)
_REMEMBERED = 64  # how many joined meetings, and how many passed over, a rank remembers
_ANSWER_SECONDS = 5.0  # these answers are not worth a longer wait
_PAUSE_WITHOUT_CLONE = 0.25  # seconds


def collectives_begun() -> int | None:
    """Return how many collectives of the default group this process has begun; None if unknown. Any thread may call it.

    Collectives of one group come in the same order on all ranks. torch counts them for its flight recorder, without
    a public API. If a release lacks the private function, or a backend does not count, a rank that does not come is
    detected only by the time limit.
    """
    try:
        group = dist.group.WORLD
        return None if group is None else int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None


class Progress:
    """Where this rank is in its script, for other ranks that ask; and what the other ranks have answered."""

    def __init__(self, rank: int, world_size: int, store: Store | None, timeout: float) -> None:
        self._rank = rank
        self._world_size = world_size
        self._joined: collections.deque[int] = collections.deque(maxlen=_REMEMBERED)
        self._skipped: collections.deque[int] = collections.deque(maxlen=_REMEMBERED)
        self._over = False
        self._answered = 0
        self._process = os.getpid()
        self._client: TimedStore | None = None
        self._thread: threading.Thread | None = None
        # Places are counted from here, because a backend may also have counted what only some ranks have done before.
        begun = collectives_begun()
        self._first = begun
        if store is None or begun is None:
            return
        store = PrefixStore("progress", store)
        self._client = TimedStore(store, answer_within=min(timeout, _ANSWER_SECONDS))
        # A daemon, because end() is not called if the script is interrupted. end() waits for the thread, which could
        # not run any more once the interpreter is gone.
        self._thread = threading.Thread(target=self._answer, args=(store,), name="ckpt-progress", daemon=True)
        self._thread.start()

    @property
    def place(self) -> int | None:
        """How many collectives this rank has begun since this object was made; None if that is not known."""
        begun = collectives_begun()
        return None if begun is None or self._first is None else begun - self._first

    # ---- answering ---------------------------------------------------------------------------------------------------

    def joined(self, meeting: int) -> None:
        """Record that this rank has joined a meeting."""
        if meeting not in self._joined:
            self._joined.append(meeting)

    def skipped(self, meeting: int) -> None:
        """Record that this rank passes over a meeting of other ranks, although it may have waited for it."""
        with contextlib.suppress(ValueError):
            self._joined.remove(meeting)
        self._skipped.append(meeting)
        self._publish_now()

    def end(self) -> None:
        """Record that this rank will come to no further meeting, and stop answering."""
        if self._over or self._thread is None or os.getpid() != self._process:
            return
        self._over = True
        self._publish_now()
        with contextlib.suppress(RankFailedError):
            self.ask()  # a question also wakes this rank's own thread
        self._thread.join(_ANSWER_SECONDS)

    def told(self) -> None:
        """Record that a signal ends this rank: it has not crashed, although it will stop answering."""
        if self._client is not None:
            with contextlib.suppress(RankFailedError):
                self._client.set(f"told/{self._rank}", "")

    def _publish_now(self) -> None:
        if self._client is not None:
            with contextlib.suppress(RankFailedError):  # rank 0 is gone, so no rank asks any more
                self._client.set(f"of/{self._rank}", self._report())

    def _report(self) -> str:
        place = self.place  # read first, so that the report includes all meetings that were joined before this place
        return json.dumps([place, list(self._joined), list(self._skipped), self._over, self._answered])

    def _answer(self, store: Store) -> None:
        """Publish where this rank is, each time that a rank asks; runs on the thread."""
        own = store.clone() if hasattr(store, "clone") else None  # a connection of its own, for the blocking wait
        while not self._over:
            question = f"question/{self._answered + 1}"
            try:
                if own is None:
                    time.sleep(_PAUSE_WITHOUT_CLONE)
                    if not store.check([question]):
                        continue
                else:
                    own.wait([question], _SLEEP)
                self._answered += 1
                (own or store).set(f"of/{self._rank}", seal(store, f"of/{self._rank}", self._report()))
            except RuntimeError:  # raised by torch.distributed: rank 0 is gone, or the wait has lasted for _SLEEP
                return

    # ---- asking ------------------------------------------------------------------------------------------------------

    def ask(self) -> int:
        """Ask all ranks to publish where they are; they do soon after this returns. Return the question number."""
        if self._client is None:
            return 0
        number = self._client.add("questions", 1)
        self._client.set(f"question/{number}", "")
        return number

    def silent(self, question: int) -> set[int]:
        """Return the ranks that have not answered a question and whose training is not over."""
        return {rank for rank, (over, answered) in self._reports().items() if not over and answered < question}

    def crashed(self, question: int) -> set[int]:
        """Return the other ranks that have ended, or not answered a question, although no signal told them to end."""
        gone = {rank for rank, (over, answered) in self._reports().items() if over or answered < question}
        return {rank for rank in gone - {self._rank} if self._client is None or not self._client.has(f"told/{rank}")}

    def _reports(self) -> dict[int, tuple[bool, int]]:
        """Return, by rank, whether it is over and the last question that it has answered; empty without a store."""
        client, found = self._client, dict[int, tuple[bool, int]]()
        if client is None:
            return found
        for rank in range(self._world_size):
            report = json.loads(client.get(f"of/{rank}")) if client.has(f"of/{rank}") else [None, [], [], False, 0]
            found[rank] = (bool(report[3]), int(report[4]))
        return found

    def ranks_past(self, meeting: int, place: int | None) -> set[int]:
        """Return the other ranks that will certainly not come to a meeting, and ask them again for the next call.

        ``place`` is this rank's place when it came to the meeting.
        """
        found: set[int] = set()
        if self._client is not None:
            with contextlib.suppress(RankFailedError):  # the caller, which waits for other ranks, will find out
                others = (rank for rank in range(self._world_size) if rank != self._rank)
                found.update(rank for rank in others if self._is_past(rank, meeting, place))
                self.ask()
        return found

    def _is_past(self, rank: int, meeting: int, place: int | None) -> bool:
        assert self._client is not None
        if not self._client.has(f"of/{rank}"):
            return False
        found: list[Any] = json.loads(self._client.get(f"of/{rank}"))
        theirs, joined, skipped, over, _ = found
        if meeting in joined:
            return False
        if meeting in skipped or over:
            return True
        is_known = len(joined) < _REMEMBERED or meeting > min(joined)  # earlier meetings are forgotten
        return is_known and theirs is not None and place is not None and theirs > place
