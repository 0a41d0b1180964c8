"""What all of our ``CheckpointIO`` plugins have in common."""

from __future__ import annotations

import os
from abc import abstractmethod

from ckpt_core import Checkpointer, DirectoryCheckpointer, awaited_paths
from ckpt_core.events import Event, SaveFailed, SaveStarted
from lightning_ckpt._bases import CheckpointIOBase

__all__ = ["ReliableCheckpointIO", "SaveOutcomes"]

awaited_paths.own_packages.add("lightning_ckpt")


class SaveOutcomes:
    """A listener that knows whether the last save of a checkpoint has failed."""

    def __init__(self) -> None:
        self._failed: set[str] = set()

    def __call__(self, event: Event) -> None:
        if isinstance(event, SaveStarted):
            self._failed.discard(event.path)
        elif isinstance(event, SaveFailed):
            self._failed.add(event.path)

    def has_failed(self, path: str) -> bool:
        """Return whether the last save of ``path``, as the checkpointer knows it, has failed."""
        return path in self._failed


class ReliableCheckpointIO(CheckpointIOBase):
    """A plugin of ours.

    Attributes:
        outcomes: Hears of all its saves.
    """

    outcomes: SaveOutcomes

    @property
    @abstractmethod
    def checkpointer(self) -> Checkpointer | DirectoryCheckpointer:
        """What saves."""

    def before_change(self, path: str | os.PathLike[str], *, removes: bool) -> None:
        """Called before a checkpoint is saved or deleted; replaced while somebody has to look at what is there now."""
