"""The directories that a checkpointer saves into: whether another job has them, orphans, and what lies there."""

from __future__ import annotations

import os

from ckpt_core._pipeline.loading import note_commits
from ckpt_core.storage import Storage, is_remote
from ckpt_core.storage.claims import Claims


class SavedDirectories:
    """Claims on the directories, and what is done once in each."""

    def __init__(self) -> None:
        self._claims = Claims()
        self._cleaned: set[str] = set()
        self._read: set[str] = set()

    def claim(self, storage: Storage, path: str) -> None:
        """Claim the directory of a checkpoint, and warn if another job has it."""
        self._claims.hold(os.path.dirname(path), storage.claim)

    def is_alone(self, path: str) -> bool:
        """Return whether no other job may be writing files of the same names next to ``path``."""
        return self._claims.is_alone(os.path.dirname(path))

    def remove_orphans(self, storage: Storage, path: str) -> None:
        """Delete, once, what dead processes have left unfinished next to ``path``; a store is not asked."""
        directory = os.path.dirname(path)
        if directory not in self._cleaned and not is_remote(path):
            self._cleaned.add(directory)
            storage.remove_orphans(directory)

    def note_commits(self, storage: Storage, path: str) -> None:
        """Read, once, how old the checkpoints next to ``path`` are; a store is not asked."""
        directory = os.path.dirname(path)
        if directory not in self._read and not is_remote(path):
            self._read.add(directory)
            note_commits(storage, directory, os.path.splitext(path)[1])

    def release(self) -> None:
        """End the claims."""
        self._claims.release()
