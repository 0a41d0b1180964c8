"""The one way in which ranks learn an outcome: rank 0 announces it in the store, once, and each other rank hears it.

Who needs it at once waits for it, who only passes by looks. Rank 0 serves the store, so it stays until those who are to
hear it have; then the announcement is deleted.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from ckpt_core import errors
from ckpt_core._commit.tcp_store import TimedStore
from ckpt_core.errors import CheckpointError, RankFailedError, StorageError

_NAMED_RANKS = 8
_LINGER = 10.0  # seconds that rank 0, which may be about to exit, stays until all have heard


class Announcement:
    """An outcome; made on all ranks, with the same key, which no other announcement has."""

    def __init__(self, store: TimedStore, key: str) -> None:
        self._store, self._key = store, key

    def make(self, value: Any, failure: CheckpointError | None = None) -> None:
        """Say it, on rank 0: plain data, and what every rank that hears it is to raise."""
        self._store.set(self._key, json.dumps([value, None if failure is None else encode_error(failure)]))

    @property
    def is_made(self) -> bool:
        """Whether rank 0 has said it."""
        return self._store.has(self._key)

    def read(self) -> tuple[Any, CheckpointError | None]:
        """Return what rank 0 has said; the failure is of the class that it had there."""
        value, failure = json.loads(self._store.get(self._key))
        return value, None if failure is None else decode_error(failure)

    def heard(self) -> None:
        """Tell rank 0 that this rank needs it no more."""
        self._store.add(f"{self._key}/heard", 1)

    def is_heard_by(self, ranks: int) -> bool:
        """Return whether so many other ranks have heard it."""
        return self._store.add(f"{self._key}/heard", 0) >= ranks

    def linger(self, ranks: int, seconds: float = _LINGER) -> bool:
        """Wait until so many other ranks have heard it, for :data:`_LINGER` at the most; return whether they have."""
        return self._store.wait_until(lambda: self.is_heard_by(ranks), min(seconds, _LINGER))

    def delete(self, *, keep: bool = False) -> None:
        """Forget who has heard it, and it itself unless it is to be kept for ranks that come later."""
        self._store.delete([f"{self._key}/heard", *([] if keep else [self._key])])


# ---- errors as plain data --------------------------------------------------------------------------------------------


def encode_error(error: Exception) -> dict[str, Any]:
    """Return the error as plain data that another rank can rebuild it from, one of another tree as one of ours."""
    if not isinstance(error, CheckpointError):
        error = CheckpointError(f"{type(error).__name__}: {error}")
    return {
        "class": type(error).__name__,
        "message": error.message,
        "path": error.path,
        "key": error.key,
        "remedy": error.remedy,
        "errno": getattr(error, "errno", None),
        "raised_at_once": error.raised_at_once,
    }


def decode_error(encoded: dict[str, Any]) -> CheckpointError:
    """Rebuild an error of another rank, as the same class where it is one of ours."""
    known = (
        getattr(errors, encoded["class"], RankFailedError) if encoded["class"] in errors.__all__ else RankFailedError
    )
    fields = {name: encoded[name] for name in ("path", "key", "remedy")}
    if known is StorageError:
        fields["errno"] = encoded["errno"]
    error: CheckpointError = known(encoded["message"], **fields)
    error.raised_at_once = encoded["raised_at_once"]
    return error


def names_of(ranks: Collection[int]) -> str:
    """Return ``rank 1``, or ``ranks 1, 2, 3``, for a message."""
    first = sorted(ranks)[:_NAMED_RANKS]
    more = f" and {len(ranks) - _NAMED_RANKS} more" if len(ranks) > _NAMED_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, first))}{more}"
