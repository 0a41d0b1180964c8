"""Raise on all ranks what fails on one of them, in a call that all ranks make together.

If the failing rank alone raised, the job would hang in the next collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ckpt_core._commit.announcement import decode_error, encode_error


def raise_together(action: Callable[[], None], exchange: Callable[[Any], Sequence[Any]] | None) -> None:
    """Run ``action``; if it raises on one rank, raise on every rank. Called on all ranks together.

    ``exchange`` takes this rank's failure as plain data, or None, and returns those of all ranks whose failures count,
    through the framework's collectives or an :class:`~ckpt_core.ranks.Agreement`. A rank without a failure of its own
    raises the first of these, as the same class. ``exchange`` is None for a single process.
    """
    failure: Exception | None = None
    try:
        action()
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must know before it is raised
        failure = error
    if exchange is not None:
        found = exchange(None if failure is None else encode_error(failure))
        failure = failure or next((decode_error(encoded) for encoded in found if encoded is not None), None)
    if failure is not None:
        raise failure
