"""Raise the failure of a background save on all ranks, at the same step boundary.

:class:`RunOutcome` looks for rank 0's announcement on the training thread, and only while a save is under way.
"""

from __future__ import annotations

import contextlib
from typing import Protocol

from torch.distributed import Store  # type: ignore[attr-defined]

from ckpt_core._commit.announcement import Announcement
from ckpt_core._commit.tcp_store import TimedStore
from ckpt_core.errors import CheckpointError, RankFailedError


class BackgroundSaves(Protocol):
    """The part of a checkpointer that :class:`RunOutcome` uses: the background saves of its rank."""

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way."""

    @property
    def failure(self) -> CheckpointError | None:
        """The oldest failure that :meth:`take_failure` has not yet returned."""

    def take_failure(self) -> CheckpointError | None:
        """Return that failure, once."""

    def drain(self) -> None:
        """Wait for all saves, whether they fail or not."""


class RunOutcome:
    """Makes every rank raise the failure of a background save at the same step boundary.

    Rank 0 finds a failure at one boundary, in ``saves``, and announces it for the next one. Between the two, all ranks
    take part in the gradient exchange of a step, so the announcement reaches each of them before it gets to that
    boundary. Therefore a boundary is the end of a batch in which the optimizers stepped.
    """

    def __init__(self, saves: BackgroundSaves, store: Store | None = None, rank: int = 0, world_size: int = 1) -> None:
        self._saves = saves
        self._store = None if store is None else TimedStore(store, answer_within=None)
        self._rank = rank
        self._others = world_size - 1
        self._raised = 0
        self._start()

    def _start(self) -> None:
        self._begun = 0
        self._ended = 0
        self._boundary = 0
        self._announced: tuple[int, CheckpointError | None] | None = None

    def save_begun(self) -> None:
        """Record that a save has begun; called on every rank."""
        self._begun += 1

    def at_boundary(self) -> None:
        """Raise, as the same class on all ranks, if a background save has failed and all ranks know it by now."""
        self._boundary += 1
        pending = self._saves.is_busy  # read before the failure, which may occur between the two
        # The failure is not taken: some ranks know of it sooner than others, and all must refuse the next save, which
        # finds it there.
        failure = self._saves.failure
        if self._store is None:
            if failure is not None:
                self.was_raised()
                raise failure
            return
        if self._announced is None:
            if self._rank == 0:
                self._announce(self._store, failure, pending=pending)
            elif self._ended < self._begun:
                self._look(self._store)
        if self._announced is not None and self._boundary >= self._announced[0]:
            error = self._announced[1]
            assert error is not None  # only failures are announced under this key
            if self._rank == 0:
                self._announcement(self._store).wait_until_acknowledged(self._others)
            self.was_raised()
            raise error

    def _announce(self, store: TimedStore, failure: CheckpointError | None, *, pending: bool) -> None:
        if failure is not None:
            self._announced = (self._boundary + 1, failure)
            self._announcement(store).make(*self._announced)
        elif not pending and self._ended < self._begun:
            self._ended = self._begun
            self._announcement(store, "ended").make(self._begun)

    def _announcement(self, store: TimedStore, what: str = "failure") -> Announcement:
        # A key for each failure, so that a failure that was raised is not found again.
        return Announcement(store, f"outcome-{self._raised}/{what}")

    def _look(self, store: TimedStore) -> None:
        announcement = self._announcement(store)
        if announcement.is_made:
            self._announced = announcement.read()
            with contextlib.suppress(RankFailedError):  # rank 0 may have stopped waiting and be gone
                announcement.heard()
        elif (ended := self._announcement(store, "ended")).is_made:
            self._ended, _ = ended.read()

    @property
    def unraised(self) -> CheckpointError | None:
        """A failure that no boundary has raised yet."""
        return self._announced[1] if self._announced is not None else self._saves.failure

    def was_raised(self) -> None:
        """Start over after a failure that all ranks raise now; called on every rank."""
        if self._rank:
            self._saves.drain()  # until this rank's own save has failed, too
        self._saves.take_failure()
        self._raised += 1
        self._start()
        self.save_begun()  # other saves may be under way
