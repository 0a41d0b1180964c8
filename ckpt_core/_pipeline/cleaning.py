"""Clean-up at the end of a save, whose outcome it does not change."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ckpt_core.errors import CheckpointError
from ckpt_core.storage import Storage

__all__ = ["discard", "leave"]

logger = logging.getLogger(__name__)


def discard(storage: Storage, path: str, token: str, created: Sequence[str]) -> None:
    """Delete what a save has left that is never going to be committed; a failure is logged."""
    try:
        storage.discard_directory(path, token, created)
    except CheckpointError as error:
        logger.warning("could not delete what a failed save of %s has left: %s", path, error)


def leave(storage: Storage, path: str, token: str) -> None:
    """End this process's work on a directory; a failure is logged."""
    try:
        storage.leave_directory(path, token)
    except CheckpointError as error:
        logger.warning("could not clean up after the save of %s: %s", path, error)
