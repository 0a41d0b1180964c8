"""How ranks learn an outcome: rank 0 announces it in the store, once, and every other rank reads it.

A rank that needs the outcome at once waits for it; a rank at a step boundary only checks. Rank 0 serves the store, so
it lingers until the other ranks have acknowledged the announcement, and then deletes it.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from ckpt_core import errors
from ckpt_core._commit.tcp_store import TimedStore
from ckpt_core.errors import CheckpointError, RankFailedError, StorageError

_NAMED_RANKS = 8
_LINGER = 10.0  # seconds for which rank 0, which may be about to exit, waits until all ranks have read it


class Announcement:
    """An outcome that rank 0 publishes in the store. Constructed on all ranks, with the same key, unique to it."""

    def __init__(self, store: TimedStore, key: str) -> None:
        self._store, self._key = store, key

    def make(self, value: Any, failure: CheckpointError | None = None) -> None:
        """Publish it, on rank 0: ``value`` is plain data, ``failure`` is raised by every rank that reads it."""
        self._store.set(self._key, json.dumps([value, None if failure is None else encode_error(failure)]))

    @property
    def is_made(self) -> bool:
        """Whether rank 0 has published it."""
        return self._store.has(self._key)

    def read(self) -> tuple[Any, CheckpointError | None]:
        """Return what rank 0 has published; the failure has the same class as on rank 0."""
        value, failure = json.loads(self._store.get(self._key))
        return value, None if failure is None else decode_error(failure)

    def heard(self) -> None:
        """Acknowledge it: this rank does not need it any more."""
        self._store.add(f"{self._key}/heard", 1)

    def is_acknowledged_by(self, ranks: int) -> bool:
        """Return whether at least so many other ranks have acknowledged it."""
        return self._store.add(f"{self._key}/heard", 0) >= ranks

    def wait_until_acknowledged(self, ranks: int, seconds: float = _LINGER) -> bool:
        """Wait until so many other ranks have acknowledged it, at most :data:`_LINGER`; return whether they have."""
        return self._store.wait_until(lambda: self.is_acknowledged_by(ranks), min(seconds, _LINGER))

    def delete(self, *, keep: bool = False) -> None:
        """Delete the acknowledgements from the store and, unless ranks that come later need it, the announcement."""
        self._store.delete([f"{self._key}/heard", *([] if keep else [self._key])])


# ---- errors as plain data --------------------------------------------------------------------------------------------


def encode_error(error: Exception) -> dict[str, Any]:
    """Return the error as plain data from which another rank can rebuild it; foreign classes become CheckpointError."""
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
    """Rebuild the error of another rank, of the same class if that is in ``ckpt_core.errors``."""
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
