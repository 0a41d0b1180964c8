"""The outcome of a save by many ranks: each reports that its part is durable, rank 0 commits, all learn the outcome.

No collective is involved and no training thread waits: ranks put their reports into the store, from the background, and
rank 0 collects them. If a rank has not reported in time, the save fails on all ranks, and the error names that rank.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ckpt_core._commit.announcement import Announcement, decode_error, encode_error, names_of
from ckpt_core._commit.rank_group import RankGroup
from ckpt_core._commit.tcp_store import TimedStore
from ckpt_core.errors import CheckpointError, RankFailedError
from ckpt_core.process.threads import do_uninterrupted

_GRACE = 1.25  # other ranks wait longer by this factor, so that rank 0 is the first to find out which rank is missing
_FIRST_LOOK = 0.1  # seconds after which rank 0 first checks which ranks will not report
_LAST_LOOK = 1.0
_UNMATCHED = 16  # how many saves back a rank that has missed some looks for one in common with rank 0

Identity = list[Any]  # path, and step or source path of a copy: equal on all ranks that take part in one save


class SaveSeries:
    """A series of saves, numbered equally on all ranks without communication.

    Each call of save has a number. A rank that has missed a call catches up when it finds, under its next number, the
    outcome of a save to a path other than its own. If rank 0 and another rank meet with different saves, as after
    Ctrl-C on one of them, both saves fail. Later saves match again: the other rank looks up what rank 0 has saved
    since, and passes over the saves that it has already tried.
    """

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self.concluded = 0  # number of the last save that is over, and was the same on rank 0
        self.unmatched: list[Identity] = []  # this rank's saves since then, during which rank 0 saved something else
        self.opened = 0  # how many saves this rank has begun; on rank 0, the number of the last one
        self.find_dead: Callable[[], Collection[int]] = tuple  # returns ranks that will report nothing more
        self.name = group.next_series()

    def dead(self) -> set[int]:
        """Return the other ranks that are known to be dead."""
        return {*self.group.find_dead(), *self.find_dead()}


class JointSave:
    """This rank's part in one save. Saves of one series are joined and concluded one after the other.

    ``timeout`` is in seconds: how long a rank whose part is done waits for the others. ``of`` distinguishes saves to
    the same path: a step, or the source path of a copy. ``number`` is the number of the save on rank 0, if the ranks
    have agreed on it; by default each rank counts its own saves. While rank 0 waits, it calls ``absent``, which returns
    the ranks that certainly do not take part.
    """

    def __init__(
        self,
        series: SaveSeries,
        path: str,
        *,
        timeout: float,
        of: int | str | None = None,
        number: int | None = None,
        absent: Callable[[], Collection[int]] | None = None,
    ) -> None:
        series.opened += 1
        self.group = group = series.group
        self.undecided = False  # whether conclude ended without an outcome: another rank may still commit the save
        self._agreed = number
        self._absent = absent
        self._series = series
        self._number = 0
        self._has_joined = False
        self._asked: list[str] = []
        self._path = path
        self._identity: Identity = [path, of]
        self._is_matched = True  # whether rank 0 has the same save under this number, as far as is known
        self._timeout = timeout
        self._patience = timeout  # seconds to wait for rank 0 to begin the save
        self._rank = group.rank
        if group.store is None and group.world_size > 1:
            raise ValueError("the ranks' connection is closed: connect them again")
        self._others = [rank for rank in range(group.world_size) if rank != group.rank]
        self._store = TimedStore(group.store, answer_within=timeout) if group.store is not None else None

    @property
    def token(self) -> str:
        """Identifies this save: equal on all its ranks, different for every other save; valid after :meth:`join`."""
        return f"{self._series.name}-{self._number}"

    def join(self) -> None:
        """Announce that this rank takes part. If this raises, do not call :meth:`conclude`.

        It raises ``RankFailedError`` if rank 0 does not answer; Ctrl-C is raised after this rank has reported failure.
        """
        try:
            self._join()
        except Exception:
            raise
        except BaseException as error:
            do_uninterrupted(self._give_up, error)
            raise

    def _give_up(self, error: BaseException) -> None:
        if self._store is None:
            return
        failure = CheckpointError(f"the save failed: {type(error).__name__}: {error}", path=self._path)
        with contextlib.suppress(CheckpointError):  # the caller raises the error that has ended the save
            if not self._has_joined:
                self._join()
            if self._rank == 0:
                self.conclude(failure, lambda _: 0)
            else:
                self._fail(self._store, self._identity, failure)
                self._series.concluded = self._number

    def _join(self) -> None:
        self._number = self._series.concluded + 1 if self._agreed is None else self._agreed
        if self._store is None:
            return
        try:
            while self._rank != 0 and self._agreed is None and self._is_of_another_save(self._store):
                self._number += 1
            self._store.set(self._key(f"begun/{self._rank}"), json.dumps(self._identity))
            self._has_joined = True
        except RankFailedError:
            self._series.concluded = self._number
            self.undecided = True
            raise

    def _is_of_another_save(self, store: TimedStore) -> bool:
        """Return whether rank 0 saves something else under this number, so that this rank passes over the number."""
        outcome, tried = self._outcome(store), self._series.unmatched
        if tried:  # this rank or rank 0 has missed a save: find out which save rank 0 is at
            begun = self._key("begun/0")
            if not store.wait_until(lambda: outcome.is_made or store.has(begun), self._timeout):
                self._patience = 0.0
            if not outcome.is_made and store.has(begun) and (other := json.loads(store.get(begun))) in tried:
                error = RankFailedError(
                    "this rank and rank 0 are at different calls of save: one of the ranks has missed a save",
                    path=other[0],
                    remedy="call save on all ranks together, the same number of times",
                )
                self._fail(store, other, error)
                return True
        if not outcome.is_made:
            return False
        (identity, _), _ = outcome.read()
        return not self._is_this(identity)  # if it is the same save, the others have given up waiting for this rank

    def _fail(self, store: TimedStore, identity: Identity, error: CheckpointError) -> None:
        """Report, on a rank other than 0, that this rank does not take part, unless it has already reported.

        Also acknowledge the outcome in advance, so that rank 0 does not wait for that.
        """
        report = self._key(f"report/{self._rank}")
        if not store.has(report):
            store.set(report, f"{json.dumps([identity, encode_error(error)])}\n")
        self._outcome(store).heard()

    def _is_this(self, identity: Identity) -> bool:
        (path, of), (own_path, own) = identity, self._identity
        is_vague = None in (of, own) and not self._series.unmatched  # a rank that refuses a save may not know its step
        return bool(path == own_path and (of == own or is_vague))

    def ask_rank_0(self, question: str, answer: Callable[[], bool]) -> bool:
        """Call ``answer`` on rank 0, return its result on all; between :meth:`join` and :meth:`conclude`."""
        if self._store is None:
            return answer()
        said, outcome = Announcement(self._store, self._key(question)), self._outcome(self._store)
        self._asked.append(question)
        if self._rank == 0:
            found = answer()
            said.make(found)
            return found
        if not self._store.wait_until(lambda: said.is_made or outcome.is_made, self._timeout):
            raise self._too_late([0]) if self._store.has(self._key("begun/0")) else self._not_called([0])
        # If rank 0 has not answered, the save already has an outcome, which the answer would not change.
        return said.is_made and bool(said.read()[0])

    def conclude(self, report: str | CheckpointError, commit: Callable[[Sequence[str | None]], int]) -> int:
        """Report the result of this rank's part, and return the size of the checkpoint once it is committed.

        ``report`` describes this rank's part, which is durable, to ``commit``; or it is the error why there is none.
        ``commit`` is called on rank 0 only, with the reports of all ranks in rank order, if none has failed; None
        stands for an absent rank. A failure is raised on all ranks alike; a ``RankFailedError`` means that a rank is
        gone, is stopped, or has not called save.
        """
        try:
            if self._store is None:
                return commit([_text_of(report)])
            if self._rank == 0:
                return self._decide(self._store, report, commit)
            try:
                return self._learn(self._store, report)
            except Exception:
                raise
            except BaseException as error:
                do_uninterrupted(self._give_up, error)
                raise
        finally:
            self._note_concluded()

    def _note_concluded(self) -> None:
        series = self._series
        if self._is_matched:
            series.concluded = self._number
            series.unmatched.clear()
        else:
            series.concluded = max(series.concluded, self._number - _UNMATCHED)
            series.unmatched = [*series.unmatched, self._identity][-_UNMATCHED:]

    def refuse(self, error: CheckpointError) -> int:
        """Join, and report ``error``: why this rank cannot begin its part. Raises the same failure as all ranks."""
        self.join()
        return self.conclude(error, lambda _: 0)

    # ---- rank 0 ------------------------------------------------------------------------------------------------------

    def _decide(
        self, store: TimedStore, report: str | CheckpointError, commit: Callable[[Sequence[str | None]], int]
    ) -> int:
        size, failure = 0, None
        reported: list[int] = []
        absent: set[int] = set()
        try:
            store.set(self._key("collecting"), "")
            reported, absent = self._collect(store)
            store.set(self._key("collected"), "")
            size = commit(self._texts(store, report, reported, absent))
        except CheckpointError as error:
            failure = error
        except BaseException as error:
            failure = CheckpointError(f"rank 0: {type(error).__name__}: {error}", path=self._path)
            raise
        finally:
            outcome = self._outcome(store)
            outcome.make([self._identity, size], failure)
            if outcome.wait_until_acknowledged(len(reported), self._timeout):
                keep = failure is not None or bool(absent)  # ranks that were left out may still look for these keys
                self._forget(store, *self._asked, *([] if keep else ["begun/0", "collecting", "collected"]))
                outcome.delete(keep=keep)
        if failure is not None:
            raise failure
        return size

    def _collect(self, store: TimedStore) -> tuple[list[int], set[int]]:
        """Wait for reports; return the other ranks that have reported, and those that are absent."""
        deadline = time.monotonic() + self._timeout
        wait, absent = _FIRST_LOOK, set[int]()
        while True:
            awaited = [rank for rank in self._others if rank not in absent]
            left = deadline - time.monotonic()
            keys = [self._key(f"report/{rank}") for rank in awaited]
            if not keys or store.wait(keys, max(0.0, min(wait, left))):
                return awaited, absent
            if self._absent is not None:  # a rank that has begun takes part, even if absent() returns it
                absent |= {rank for rank in self._absent() if not store.has(self._key(f"begun/{rank}"))}
            dead = self._series.dead() - absent
            if left <= wait or any(self._lacks(store, rank) for rank in awaited if rank in dead):
                return [rank for rank in awaited if rank not in absent and not self._lacks(store, rank)], absent
            wait = min(2 * wait, _LAST_LOOK)

    def _lacks(self, store: TimedStore, rank: int) -> bool:
        return not store.has(self._key(f"report/{rank}"))

    def _texts(
        self, store: TimedStore, report: str | CheckpointError, reported: Sequence[int], absent: Collection[int]
    ) -> list[str | None]:
        """Return the reports of all ranks in rank order (None: absent); raise if one failed, differs or is missing."""
        failure: CheckpointError | None = _named(report, 0) if isinstance(report, CheckpointError) else None
        at_once = failure is not None and failure.raised_at_once
        texts: list[str | None] = [None] * self.group.world_size
        texts[0] = "" if isinstance(report, CheckpointError) else report
        for rank in reported:
            head, _, text = store.get(self._key(f"report/{rank}")).partition("\n")
            identity, error = json.loads(head)
            if error is None and failure is None and identity != self._identity:
                raise self._differs(rank, *identity)
            at_once = at_once or (error is not None and error["raised_at_once"])
            if error is not None and failure is None:
                failure = _named(decode_error(error), rank)
            texts[rank] = text
        missing = [rank for rank in self._others if rank not in {*reported, *absent}]
        if failure is None and missing:
            failure = self._missing(store, missing)
        if failure is not None:
            failure.raised_at_once = at_once  # if that was so on any rank
            raise failure
        return texts

    def _differs(self, rank: int, path: str, of: int | str | None) -> RankFailedError:
        mine, theirs = f"saves to {self._path}", f"to {path}"
        remedy = "pass the same path to save() on all ranks, without the rank or the time of day in it"
        if path == self._path:
            mine, theirs = f"saves {_content(self._identity[1])}", _content(of)
            remedy = "call save on all ranks together, the same number of times"
        return RankFailedError(
            f"rank 0 {mine}, but rank {rank} {theirs}: they cannot save one checkpoint together",
            path=self._path,
            remedy=remedy,
        )

    def _missing(self, store: TimedStore, ranks: Sequence[int]) -> RankFailedError:
        found = self._series.dead()
        begun = [rank for rank in ranks if store.has(self._key(f"begun/{rank}"))]
        if dead := [rank for rank in begun if rank in found]:
            return RankFailedError(
                f"{names_of(dead)} died before the save of {self._path} was complete",
                path=self._path,
                remedy="look at the log of that rank",
            )
        if ended := [rank for rank in ranks if rank in found]:
            return RankFailedError(
                f"{names_of(ended)} did not begin the save of {self._path}, and cannot any more: the process has ended",
                path=self._path,
                remedy="look at the log of that rank; if it ended normally, call save on all ranks together",
            )
        if begun:
            return self._too_late(begun)
        return self._not_called(ranks)

    # ---- the other ranks ---------------------------------------------------------------------------------------------

    def _learn(self, store: TimedStore, report: str | CheckpointError) -> int:
        own_error = report if isinstance(report, CheckpointError) else None
        head = json.dumps([self._identity, None if own_error is None else encode_error(own_error)])
        self.undecided = True  # also if Ctrl-C ends the wait
        store.set(self._key(f"report/{self._rank}"), f"{head}\n{report if own_error is None else ''}")
        self._wait_for_outcome(store)
        (identity, size), error = self._outcome(store).read()
        self._is_matched = self._agreed is not None or self._is_this(identity)
        self.undecided = False
        with contextlib.suppress(RankFailedError):  # rank 0 may have ended by now, normally
            self._forget(store, f"begun/{self._rank}", f"report/{self._rank}")
            self._outcome(store).heard()
        if error is not None:
            raise error from own_error
        return int(size)

    def _wait_for_outcome(self, store: TimedStore) -> None:
        """Return when there is an outcome; each step of rank 0 (begin, collect, commit) has its own time limit."""
        if not store.wait([self._key("collecting")], self._patience):
            if store.has(self._key("begun/0")):
                raise self._too_late([0])
            self._is_matched = self._agreed is not None
            raise self._not_called([0])
        if not (
            store.wait([self._key("collected")], self._timeout * _GRACE)
            and store.wait([self._key("outcome")], self._timeout)
        ):
            raise self._too_late([0])

    # ---- both --------------------------------------------------------------------------------------------------------

    def _key(self, name: str) -> str:
        return f"{self.token}/{name}"

    def _outcome(self, store: TimedStore) -> Announcement:
        return Announcement(store, self._key("outcome"))

    def _forget(self, store: TimedStore, *names: str) -> None:
        store.delete([self._key(name) for name in names])

    def _not_called(self, ranks: Sequence[int]) -> RankFailedError:
        return RankFailedError(
            f"{names_of(ranks)} did not begin the save of {self._path} within {self._timeout:g} s of rank {self._rank}",
            path=self._path,
            remedy="call save on all ranks together; commit_timeout= sets how far apart they may be",
        )

    def _too_late(self, ranks: Sequence[int]) -> RankFailedError:
        return RankFailedError(
            f"{names_of(ranks)} began the save of {self._path} and did not finish within {self._timeout:g} s of "
            f"rank {self._rank}: dead, stopped, or writing slowly",
            path=self._path,
            remedy="look at the log of that rank; if its storage is slow, give it more time with commit_timeout=",
        )


def _named(error: CheckpointError, rank: int) -> CheckpointError:
    """Return an error of the same class whose message begins with the rank that it happened on."""
    named = decode_error({**encode_error(error), "message": f"rank {rank}: {error.message}"})
    named.__cause__ = error
    return named


def _content(of: int | str | None) -> str:
    return f"a copy of {of}" if isinstance(of, str) else f"step {of}"


def _text_of(report: str | CheckpointError) -> str:
    if isinstance(report, CheckpointError):
        raise report
    return report
