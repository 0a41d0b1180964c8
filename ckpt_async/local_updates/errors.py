"""What can go wrong with a snapshot of workers that step for themselves."""

from __future__ import annotations

from ckpt_core.errors import CheckpointError

__all__ = ["GateTimeoutError", "WorkerLostError"]


class GateTimeoutError(CheckpointError):
    """Some workers did not come to the end of their step in time. Training goes on, and the last checkpoint stays valid."""


class WorkerLostError(CheckpointError):
    """A worker is gone, and with it what only it knew, so that no checkpoint can be taken any more."""
