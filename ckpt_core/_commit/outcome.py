"""Ranks agree on the outcome of background saves, without a collective and without waiting for each other.

One rank writes; the others must learn of a failure and raise it at the same step, or the job hangs in the next
collective. They talk through a ``TCPStore`` of their own, on the training thread, and only while a save is under way.
"""

from __future__ import annotations

import json
import time

from torch.distributed import Store  # type: ignore[attr-defined]

from ckpt_core._commit.errors_as_data import decode_error, encode_error
from ckpt_core._commit.store import seal, unseal
from ckpt_core.errors import CheckpointError, RankFailedError

__all__ = ["SharedOutcome"]

_FAILURE = "failure"
_ENDED = "ended"
_HEARD = "heard"
_LINGER = 10.0  # seconds that the rank that writes, which may be about to exit, waits until all have heard


class SharedOutcome:
    """Makes every rank raise the failure of a background save at the same step boundary.

    The rank that finds a failure at one boundary announces it for the next one. Between the two, all ranks take part in
    the gradient exchange of a step, so the announcement reaches each of them before it gets to that boundary. Therefore
    a boundary is the end of a batch in which the optimizers stepped.

    Args:
        store: Shared by all ranks and served by the one that writes; None for a single process.
        world_size: Number of ranks.
    """

    def __init__(self, store: Store | None, world_size: int = 1) -> None:
        self._store = store
        self._others = world_size - 1
        self._begun = 0
        self._ended = 0
        self._boundary = 0
        self._announced: tuple[int, CheckpointError] | None = None

    def save_begun(self) -> None:
        """Note that a save has begun; called on every rank."""
        self._begun += 1

    def at_boundary(self, *, writes: bool, pending: bool, failure: CheckpointError | None) -> None:
        """Raise if a background save has failed and all ranks know it by now.

        Args:
            writes: Whether this rank writes (and so is the one that knows).
            pending: Whether one of this rank's saves is still under way.
            failure: A failure of a save, found on this rank since the last call.

        Raises:
            CheckpointError: The failure, as the same class on every rank.
            RankFailedError: The rank that writes is gone.
        """
        self._boundary += 1
        if self._store is None:
            if failure is not None:
                raise failure
            return
        if writes and self._announced is None:
            if failure is not None:
                self._announced = (self._boundary + 1, failure)
                announcement = json.dumps([self._boundary + 1, encode_error(failure)])
                self._store.set(_FAILURE, seal(self._store, _FAILURE, announcement))
            elif not pending and self._ended < self._begun:
                self._ended = self._begun
                self._store.set(_ENDED, seal(self._store, _ENDED, str(self._begun)))
        elif self._announced is None and self._ended < self._begun:
            self._look(self._store)
        if self._announced is not None and self._boundary >= self._announced[0]:
            _, error = self._announced
            self._announced = None
            if writes:
                self._wait_until_heard(self._store)
            raise error

    def _look(self, store: Store) -> None:
        try:
            if store.check([_FAILURE]):
                boundary, encoded = json.loads(unseal(store, _FAILURE, store.get(_FAILURE)))
                self._announced = (boundary, decode_error(encoded))
                store.add(_HEARD, 1)
            elif store.check([_ENDED]):
                self._ended = int(unseal(store, _ENDED, store.get(_ENDED)))
        except RuntimeError as error:  # what torch.distributed raises
            if self._announced is None:
                raise RankFailedError(
                    f"rank 0, which knows of the outcome of saves, is gone: {str(error).splitlines()[0]}",
                    remedy="look at the log of rank 0: its process has ended or cannot be reached",
                ) from error

    def _wait_until_heard(self, store: Store) -> None:
        deadline = time.monotonic() + _LINGER
        while store.add(_HEARD, 0) < self._others and time.monotonic() < deadline:
            time.sleep(0.001)

    @property
    def unraised(self) -> CheckpointError | None:
        """A failure that was announced but whose boundary has not come."""
        return self._announced[1] if self._announced is not None else None
