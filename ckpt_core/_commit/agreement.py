"""Agreement between ranks on small values without a collective: a call on only one rank raises instead of hanging.

The outcome of a save is agreed on in ``save_outcome``.
"""

from __future__ import annotations

import collections
import contextlib
import json
import time
from collections.abc import Callable, Collection
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from ckpt_core._commit.absent_ranks import Progress
from ckpt_core._commit.announcement import Announcement, decode_error, encode_error, names_of
from ckpt_core._commit.raising_together import raise_together
from ckpt_core._commit.tcp_store import TimedStore
from ckpt_core.errors import CheckpointError, RankFailedError

_SHORTEST_PAUSE_SECONDS = 0.0005
_LONGEST_PAUSE_SECONDS = 0.02
_FIRST_LOOK_SECONDS = 0.1  # after which a waiting rank first checks whether another rank will never come
_LAST_LOOK_SECONDS = 1.0
_LINGER_SECONDS = 10.0
_LINGER_BESIDE_DEAD_SECONDS = 1.0  # a dead rank reads nothing more, and may already have read everything


class Agreement:
    """Passes plain data between the ranks of a run, through the store that checkpointing uses.

    A *meeting* is a call that all ranks make. Every rank counts its meetings, so all ranks must come to the same ones
    in the same order, as with collectives. Unlike those, a meeting has a time limit; its error names missing ranks.
    """

    def __init__(self, rank: int, world_size: int, store: Store | None, timeout: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self._timeout = timeout
        self._client = None if store is None else TimedStore(PrefixStore("meetings", store), answer_within=timeout)
        self.progress = Progress(rank, world_size, store, timeout)  # what the ranks know of each other
        self.find_dead: Callable[[], Collection[int]] = tuple  # returns ranks that will come to no further meeting
        self.meeting = 0  # number of the last meeting
        # On rank 0: meetings whose result other ranks still have to read, and this rank's place at each.
        self._unread: collections.deque[tuple[int, int | None]] = collections.deque()
        self._absent: dict[int | None, set[int]] = {}  # by place, the ranks that will not read the result
        # How many collectives this rank had begun when it came to the last meeting; None if unknown.
        self.place: int | None = None
        self.left_out: set[int] = set()  # the ranks that, as rank 0 knew, would not come to the last meeting

    def from_rank_zero(self, what: str, value: Any, *, may_be_absent: bool = False) -> Any:
        """Return rank 0's ``value`` on all ranks, once all have called this for ``what``, such as ``"save_state"``.

        Raises ``RankFailedError`` if a rank does not come, or comes for another ``what``. With ``may_be_absent``, ranks
        that have certainly passed this meeting are not waited for; they are in :attr:`left_out`.
        """
        _, value = self._meet(what, value, may_be_absent=may_be_absent)
        return value

    def announce(self, what: str, value: Any, failure: Exception | None = None) -> Any:
        """Return rank 0's ``value`` on all ranks; rank 0 does not wait for the others, which read it when they come.

        ``failure`` is the reason why rank 0 has no value. On rank 0, the caller raises it; on the other ranks, this
        method raises it.
        """
        brought = None if failure is None or self.rank else encode_error(failure)
        found, value = self._meet(what, value, brought, waits=False)
        if self.rank and found is not None:
            raise found
        return value

    def absent_from(self, meeting: int, place: int | None) -> set[int]:
        """Return, on rank 0, the ranks that will certainly not come to a meeting; any thread may call this.

        ``meeting`` and ``place`` are the values that the attributes of these names had right after that meeting.
        """
        absent = self.progress.ranks_past(meeting, place)
        self._absent[place] = self._absent.get(place, set()) | absent
        return absent

    def all_succeeded(self, what: str, action: Callable[[], None]) -> None:
        """Run ``action`` on every rank; if it fails on one, raise on all, on the others an error that quotes it."""

        def exchange(mine: Any) -> list[Any]:
            others, _ = self._meet(what, None, mine)
            return [None if others is None else encode_error(others)]

        raise_together(action, exchange)

    def asked_of_rank_zero(self, what: str, ask: Callable[[], Any]) -> Any:
        """Call ``ask`` on rank 0 only, and return its result on all ranks; it may take long. If it fails, all raise."""
        answers = [None]

        def answer() -> None:
            answers[0] = ask() if self.rank == 0 else None

        self.all_succeeded(what, answer)
        return self.from_rank_zero(what, answers[0])

    def leave(self) -> None:
        """End. Rank 0, which serves the store, waits once, at most 10 s, until live ranks have read all its values."""
        deadline = time.monotonic() + _LINGER_SECONDS
        look = time.monotonic() + _FIRST_LOOK_SECONDS
        with contextlib.suppress(RankFailedError):
            while self._unread and time.monotonic() < deadline:
                self._forget_what_all_have_read()
                if self._unread:
                    time.sleep(_LONGEST_PAUSE_SECONDS)
                    if time.monotonic() > look:
                        self.absent_from(*self._unread[0])
                        look = time.monotonic() + _LAST_LOOK_SECONDS
                        if self.find_dead():
                            deadline = min(deadline, look - _LAST_LOOK_SECONDS + _LINGER_BESIDE_DEAD_SECONDS)
        self._unread.clear()
        self.progress.end()

    def _meet(
        self, what: str, value: Any, failure: Any = None, *, waits: bool = True, may_be_absent: bool = False
    ) -> tuple[CheckpointError | None, Any]:
        """Return the failure that a rank reported, as the other ranks raise it, and rank 0's value.

        Unless rank 0 ``waits`` for the others, only its own failure counts.
        """
        self.left_out = set()
        if self._client is None:
            return None, value
        client, self.place = self._client, self.progress.place
        if self.rank:
            return self._join_next_meeting(client, what, failure)
        self.meeting += 1
        self.progress.joined(self.meeting)
        meeting = str(self.meeting)
        if waits:
            self._wait_for_others(client, what, may_be_absent=may_be_absent)
        others = _failed_on(what, 0, failure) if failure is not None else None
        if waits and others is None and client.has(f"{meeting}/failure"):
            others = _failed_on(what, *json.loads(client.get(f"{meeting}/failure")))
        is_optional = may_be_absent or not waits
        Announcement(client, meeting).make([what, value, self.place, is_optional, sorted(self.left_out)], others)
        self._forget_what_all_have_read()
        self._unread.append((self.meeting, self.place))
        return others, value

    def _join_next_meeting(self, client: TimedStore, what: str, failure: Any) -> tuple[CheckpointError | None, Any]:
        """Join the next meeting that rank 0 holds at this rank's place in the script, passing over earlier ones."""
        while True:
            self.meeting += 1
            meeting = str(self.meeting)
            said = Announcement(client, meeting)
            if not said.is_made:  # rank 0 may be waiting for this rank
                self.progress.joined(self.meeting)
                if failure is not None:
                    client.set(f"{meeting}/failure", json.dumps([self.rank, failure]))
                client.set(f"at/{self.rank}", meeting)
                client.add(f"{meeting}/arrived", 1)
                self._wait_for_rank_zero(client, what)
            (theirs, value, place, is_optional, left_out), others = said.read()
            if is_optional and (theirs != what or self._is_past(place)):
                self.progress.skipped(self.meeting)
                continue
            self.progress.joined(self.meeting)
            self.left_out = set(left_out)
            said.heard()
            if theirs != what:
                raise RankFailedError(
                    f"rank {self.rank} called {what}, but rank 0 called {theirs}",
                    remedy="call save_state and load_state on all ranks, in the same order",
                )
            return others, value

    @property
    def is_awaited(self) -> bool:
        """Whether rank 0 is at a meeting to which this rank has yet to come; any thread may read this."""
        client, here, meeting = self._client, self.progress.place, self.meeting + 1
        while self.rank and client is not None and (said := Announcement(client, str(meeting))).is_made:
            (_, _, place, is_optional, _), _ = said.read()
            if not is_optional or place is None or here is None or here <= place:
                return True
            meeting += 1
        return False

    def _is_past(self, place: int | None) -> bool:
        return place is not None and self.place is not None and self.place > place

    def _forget_what_all_have_read(self) -> None:
        client = self._client
        while client is not None and self._unread:
            oldest, place = self._unread[0]
            absent, said = len(self._absent.get(place, ())), Announcement(client, str(oldest))
            if not said.is_acknowledged_by(self.world_size - 1 - absent):
                return
            self._unread.popleft()  # before the deletion, or after Ctrl-C rank 0 would wait for deleted answers
            said.delete(keep=bool(absent))  # a rank that was absent passes it over when it comes to a later meeting
            client.delete([f"{oldest}/arrived", f"{oldest}/failure"])
            if not self._unread or self._unread[0][1] != place:
                self._absent.pop(place, None)

    def _wait_for_others(self, client: TimedStore, what: str, *, may_be_absent: bool) -> None:
        arrived = f"{self.meeting}/arrived"
        others = self.world_size - 1

        def complete() -> bool:
            return client.add(arrived, 0) >= others - len(self.left_out)

        def look() -> None:
            absent = self.absent_from(self.meeting, self.place)
            if absent and not may_be_absent:
                raise _continued_without(what, self.rank, absent)
            self.left_out = absent

        self._wait(complete, look, what)

    def _wait_for_rank_zero(self, client: TimedStore, what: str) -> None:
        meeting = self.meeting

        def look() -> None:
            if 0 in self.progress.ranks_past(meeting, self.place) and not client.has(str(meeting)):
                raise _continued_without(what, self.rank, {0})

        self._wait(lambda: client.has(str(meeting)), look, what)

    def _wait(self, complete: Callable[[], bool], look: Callable[[], None], what: str) -> None:
        began = time.monotonic()
        pause, looked, until_look = _SHORTEST_PAUSE_SECONDS, began, _FIRST_LOOK_SECONDS
        # Polling, because a request that waits in the store would block the requests of the background thread.
        while not complete():
            now = time.monotonic()
            if now > began + self._timeout:
                raise RankFailedError(
                    f"{what} was called on rank {self.rank}, and not on {self._missing()} within {self._timeout:g} s",
                    remedy=f"call {what} on all ranks, not under a condition such as `if is_main_process`; "
                    "if the other ranks only need longer to get there, raise commit_timeout",
                )
            if now > looked + until_look:
                look()
                if dead := set(self.find_dead()) - self.left_out:
                    raise RankFailedError(
                        f"{names_of(dead)} died, and others wait in {what}", remedy="look at the log of that rank"
                    )
                looked, until_look = now, min(2 * until_look, _LAST_LOOK_SECONDS)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _missing(self) -> str:
        if self.rank or self._client is None:
            return "rank 0"
        client, here = self._client, str(self.meeting)
        return names_of(
            [r for r in range(1, self.world_size) if not client.has(f"at/{r}") or client.get(f"at/{r}") != here]
        )


def _continued_without(what: str, rank: int, absent: Collection[int]) -> RankFailedError:
    return RankFailedError(
        f"{what} was called on rank {rank}, and not on {names_of(absent)}, which continued without it",
        remedy=f"call {what} on all ranks, not under `if is_main_process` or another condition on the rank",
    )


def _failed_on(what: str, rank: int, encoded: Any) -> RankFailedError:
    theirs = decode_error(encoded)
    return RankFailedError(f"{what} failed on rank {rank}: {theirs.message}", path=theirs.path, key=theirs.key)
