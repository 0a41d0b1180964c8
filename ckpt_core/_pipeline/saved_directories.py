"""Prepares the directories that a checkpointer saves into: claims them, removes orphans, reads old commit times."""

from __future__ import annotations

import os

from ckpt_core._pipeline.loading import note_commits
from ckpt_core.storage import Storage, is_remote
from ckpt_core.storage.claims import Claims


class SavedDirectories:
    """The directories that one checkpointer saves into: its claims on them, and the work done once in each."""

    def __init__(self) -> None:
        self._claims = Claims()
        self._cleaned: set[str] = set()
        self._read: set[str] = set()

    def claim(self, storage: Storage, path: str) -> None:
        """Claim the directory of a checkpoint, and warn if another job has claimed it."""
        self._claims.hold(os.path.dirname(path), storage.claim)

    def is_alone(self, path: str) -> bool:
        """Return whether no other job can be writing files of the same names next to ``path``."""
        return self._claims.is_alone(os.path.dirname(path))

    def remove_orphans(self, storage: Storage, path: str) -> None:
        """Delete, once per directory, unfinished files of dead processes next to ``path``; does nothing for a URL."""
        directory = os.path.dirname(path)
        if directory not in self._cleaned and not is_remote(path):
            self._cleaned.add(directory)
            storage.remove_orphans(directory)

    def note_commits(self, storage: Storage, path: str) -> None:
        """Read, once per directory, the commit times of the checkpoints next to ``path``; does nothing for a URL."""
        directory = os.path.dirname(path)
        if directory not in self._read and not is_remote(path):
            self._read.add(directory)
            note_commits(storage, directory, os.path.splitext(path)[1])

    def release(self) -> None:
        """Release the claims."""
        self._claims.release()
