"""What can go wrong with a snapshot of asynchronous training."""

from __future__ import annotations

from ckpt_core.errors import CheckpointError

__all__ = ["InconsistentCutError", "SnapshotAbortedError", "StaleGenerationError"]


class InconsistentCutError(CheckpointError):
    """The saved states do not belong to one cut, or a rule that makes them belong together was not kept."""


class SnapshotAbortedError(CheckpointError):
    """A snapshot was given up, or cannot begin. Training is not disturbed and the previous checkpoint stays valid."""


class StaleGenerationError(CheckpointError):
    """A message crossed the border between two lives of the run, or of one worker; it must not be processed.

    Attributes:
        receiver_is_stale: True if the *receiver* belongs to the earlier life and has to stop; False if the sender does.
    """

    def __init__(self, message: str, *, receiver_is_stale: bool = False) -> None:
        remedy = "stop this process: a newer one has taken its place" if receiver_is_stale else None
        super().__init__(message, remedy=remedy)
        self.receiver_is_stale = receiver_is_stale
