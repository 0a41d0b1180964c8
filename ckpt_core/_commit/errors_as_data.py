"""Errors as plain data, so that the ranks can tell each other of them, and what an error calls ranks."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ckpt_core import errors
from ckpt_core.errors import CheckpointError, RankFailedError, StorageError

_NAMED_RANKS = 8


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
    }


def decode_error(encoded: dict[str, Any]) -> CheckpointError:
    """Rebuild an error of another rank, as the same class where it is one of ours."""
    known = (
        getattr(errors, encoded["class"], RankFailedError) if encoded["class"] in errors.__all__ else RankFailedError
    )
    fields = {name: encoded[name] for name in ("path", "key", "remedy")}
    if known is StorageError:
        return StorageError(encoded["message"], errno=encoded["errno"], **fields)
    error: CheckpointError = known(encoded["message"], **fields)
    return error


def names_of(ranks: Collection[int]) -> str:
    """Return ``rank 1``, or ``ranks 1, 2, 3``, for a message."""
    first = sorted(ranks)[:_NAMED_RANKS]
    more = f" and {len(ranks) - _NAMED_RANKS} more" if len(ranks) > _NAMED_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, first))}{more}"
