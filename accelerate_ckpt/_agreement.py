"""Ranks agree on small things without a collective, so that a call on one rank alone ends in an error and not in a hang."""

from __future__ import annotations

import collections
import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from ckpt_core.commit import decode_error, encode_error
from ckpt_core.commit.store import StoreLine
from ckpt_core.errors import CheckpointError, RankFailedError

__all__ = ["Agreement"]

_SHORTEST_PAUSE_SECONDS = 0.0005
_LONGEST_PAUSE_SECONDS = 0.02
_LINGER_SECONDS = 10.0
_NAMED_RANKS = 8


class Agreement:
    """Passes plain data between the ranks of a run, through the store that checkpointing uses.

    Every rank counts its meetings, so all ranks must come to the same ones in the same order, as with collectives. Unlike
    those, they have a time limit, and the error says who did not come.

    Args:
        rank: This process's rank.
        world_size: Number of ranks.
        store: Shared by all ranks; None for a single process.
        timeout: Seconds to wait for another rank.
    """

    def __init__(self, rank: int, world_size: int, store: Store | None, timeout: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self._timeout = timeout
        self._line = None if store is None else StoreLine(PrefixStore("meetings", store), answer_within=timeout)
        self._meetings = 0
        self._unread: collections.deque[str] = (
            collections.deque()
        )  # on rank 0: meetings that others still have to hear of

    def from_rank_zero(self, what: str, value: Any) -> Any:
        """Return what rank 0 gives, when all ranks have come.

        Args:
            what: What is being done, for the error: ``"save_state"``.
            value: Plain data; only that of rank 0 counts.

        Raises:
            RankFailedError: A rank did not come, or came to do something else.
        """
        _, value = self._meet(what, value)
        return value

    def announce(self, what: str, value: Any, failure: Exception | None = None) -> Any:
        """Return what rank 0 gives, which does not wait for the others: they hear it when they come.

        Args:
            what: What is being done, for the error.
            value: Plain data; only that of rank 0 counts.
            failure: Why rank 0 has none; raised there by the caller, and here on the other ranks.

        Raises:
            RankFailedError: Rank 0 did not come, came to do something else, or has failed.
        """
        brought = None if failure is None or self.rank else _encode(failure)
        found, value = self._meet(what, value, brought, waits=False)
        if self.rank and found is not None:
            raise _elsewhere(what, *found)
        return value

    def all_succeeded(self, what: str, action: Callable[[], None]) -> None:
        """Run ``action`` on every rank; if it fails on one, raise on all of them.

        Raises:
            CheckpointError: That of this rank, or a :class:`RankFailedError` that quotes another's.
        """
        failure: BaseException | None = None
        try:
            action()
        except Exception as error:  # noqa: BLE001 - whatever it is, the others must know before it is raised
            failure = error
        others, _ = self._meet(what, None, None if failure is None else _encode(failure))
        if failure is not None:
            raise failure
        if others is not None:
            raise _elsewhere(what, *others)

    def part(self) -> None:
        """Wait, on rank 0, until the others have heard what it said: it serves the store, and may be about to end."""
        deadline = time.monotonic() + _LINGER_SECONDS
        with contextlib.suppress(RankFailedError):
            while self._unread and time.monotonic() < deadline:
                self._forget_what_all_have_read()
                if self._unread:
                    time.sleep(_LONGEST_PAUSE_SECONDS)

    def _meet(self, what: str, value: Any, failure: Any = None, *, waits: bool = True) -> tuple[Any, Any]:
        """Return the failure that a rank brought, with the rank's number, and what rank 0 gave.

        Unless rank 0 ``waits`` for the others, it is the only one whose failure counts.
        """
        if self._line is None:
            return None, value
        self._meetings += 1
        meeting, line = str(self._meetings), self._line
        if self.rank:
            if failure is not None:
                line.set(f"{meeting}/failure", json.dumps([self.rank, failure]))
            line.set(f"at/{self.rank}", meeting)
            line.add(f"{meeting}/arrived", 1)
            self._wait(lambda: line.has(meeting), what)
            theirs, others, value = json.loads(line.get(meeting))
            line.add(f"{meeting}/read", 1)
            if theirs != what:
                raise RankFailedError(
                    f"rank {self.rank} called {what}, and rank 0 called {theirs}",
                    remedy="call save_state and load_state on all ranks, in the same order",
                )
            return others, value
        if waits:
            self._wait(lambda: line.add(f"{meeting}/arrived", 0) == self.world_size - 1, what)
        others = [0, failure] if failure is not None else None
        if waits and others is None and line.has(f"{meeting}/failure"):
            others = json.loads(line.get(f"{meeting}/failure"))
        line.set(meeting, json.dumps([what, others, value]))
        self._forget_what_all_have_read()
        self._unread.append(meeting)
        return others, value

    def _forget_what_all_have_read(self) -> None:
        line = self._line
        while line is not None and self._unread:
            oldest = self._unread[0]
            if line.add(f"{oldest}/read", 0) < self.world_size - 1:
                return
            line.delete([oldest, *(f"{oldest}/{what}" for what in ("arrived", "failure", "read"))])
            self._unread.popleft()

    def _wait(self, complete: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self._timeout
        pause = _SHORTEST_PAUSE_SECONDS
        # Polling, because waiting in the store would block what the background thread has to say to it.
        while not complete():
            if time.monotonic() > deadline:
                raise RankFailedError(
                    f"{what} was called on rank {self.rank}, and not on {self._absent()} within {self._timeout:g} s",
                    remedy=f"call {what} on all ranks, not under `if accelerator.is_main_process`; "
                    "if the other ranks only need longer to get there, raise commit_timeout",
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _absent(self) -> str:
        if self.rank or self._line is None:
            return "rank 0"
        line, here = self._line, str(self._meetings)
        ranks = [r for r in range(1, self.world_size) if not line.has(f"at/{r}") or line.get(f"at/{r}") != here]
        named = ", ".join(map(str, ranks[:_NAMED_RANKS]))
        more = f" and {len(ranks) - _NAMED_RANKS} more" if len(ranks) > _NAMED_RANKS else ""
        return f"rank{'s' if len(ranks) > 1 else ''} {named}{more}"


def _elsewhere(what: str, rank: int, encoded: Any) -> RankFailedError:
    theirs = decode_error(encoded)
    return RankFailedError(f"{what} failed on rank {rank}: {theirs.message}", path=theirs.path, key=theirs.key)


def _encode(failure: BaseException) -> dict[str, Any]:
    if isinstance(failure, CheckpointError):
        return encode_error(failure)
    return encode_error(CheckpointError(f"{type(failure).__name__}: {failure}"))
