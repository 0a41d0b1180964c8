"""Exceptions of the package, as one tree.

Every problem with a checkpoint is a :class:`CheckpointError`, so one ``except`` is enough. Where Python or torch has an
exception for the same problem, ours derives from that one, too, so that existing handlers keep working::

    CheckpointError
    ├── CheckpointNotFoundError   (also FileNotFoundError)        nothing there, or nothing usable
    ├── CheckpointCorruptedError                                  bytes are missing or differ from what was saved
    ├── CheckpointFormatError                                     not a checkpoint, or written by a newer version
    ├── UnsafeCheckpointError     (also pickle.UnpicklingError)   reading it would run code from the file
    ├── SerializationError        (also TypeError)                an object in the state cannot be saved
    ├── StateMismatchError        (also RuntimeError)             the checkpoint is of another model or another run
    ├── StorageError              (also OSError)                  the disk or the store refused: full, read-only, ...
    ├── OutOfMemoryError          (also MemoryError)              the copy of the state does not fit into memory
    ├── SnapshotTornError                                         a tensor changed while it was being copied
    └── RankFailedError                                           another rank's part of a save failed
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Mapping

__all__ = [
    "CheckpointCorruptedError",
    "CheckpointError",
    "CheckpointFormatError",
    "CheckpointNotFoundError",
    "OutOfMemoryError",
    "RankFailedError",
    "SerializationError",
    "SnapshotTornError",
    "StateMismatchError",
    "StorageError",
    "UnsafeCheckpointError",
    "none_verifies",
]


class CheckpointError(Exception):
    """A checkpoint could not be saved, found, verified or restored.

    Args:
        message: What happened.
        path: The file or URL concerned, if any.
        key: The part of the state concerned (``"state_dict.layer.weight"``), if any.
        remedy: What the user can do: the option to change, the command to run.

    Attributes:
        raised_at_once: Whether a rank raised it in its call of save itself; the other ranks learn of it later.
    """

    raised_at_once = False

    def __init__(
        self, message: str, *, path: str | None = None, key: str | None = None, remedy: str | None = None
    ) -> None:
        self.message = message
        self.path = path
        self.key = key
        self.remedy = remedy
        super().__init__(message)

    def __str__(self) -> str:
        text = self.message
        if self.path is not None and not _names(text, self.path):
            text += f"\n  file: {self.path}"
        if self.key is not None and not _names(text, self.key):
            text += f"\n  key: {self.key}"
        if self.remedy is not None:
            text += f"\n  what to do: {self.remedy}"
        return text


def _names(text: str, name: str) -> bool:
    """Return whether a text contains a name as a whole word."""
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is not None


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the path, or none that can be used."""


class CheckpointCorruptedError(CheckpointError):
    """The bytes differ from those that were saved: truncated, flipped, or mixed with another file."""


class CheckpointFormatError(CheckpointError):
    """The file is not a checkpoint, or its format is newer than this version can read."""


class UnsafeCheckpointError(CheckpointError, pickle.UnpicklingError):
    """Reading the checkpoint would run code from it, and the caller did not ask for that."""


class SerializationError(CheckpointError, TypeError):
    """An object in the state cannot be written."""


class StateMismatchError(CheckpointError, RuntimeError):
    """The checkpoint does not fit the model, the optimizers or the run it is loaded into."""


class StorageError(CheckpointError, OSError):
    """The disk or the object store refused: full, read-only, permission, connection.

    ``errno`` is that of the underlying :class:`OSError`, if there is one.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        key: str | None = None,
        remedy: str | None = None,
        errno: int | None = None,
    ) -> None:
        super().__init__(message, path=path, key=key, remedy=remedy)
        self.errno = errno


class OutOfMemoryError(CheckpointError, MemoryError):
    """There is no memory for the copy of the state, or for the buffers through which it is written."""


class SnapshotTornError(CheckpointError):
    """A tensor was changed while it was being copied; the snapshot would be a mix of two moments."""


class RankFailedError(CheckpointError):
    """The save failed on another rank, whose error is quoted in the message."""


def none_verifies(directory: str, passed_over: Mapping[str, CheckpointError]) -> CheckpointCorruptedError:
    """Return the error for a look-up that found checkpoints, none of which can be used.

    It is not a :class:`CheckpointNotFoundError`, because programs take that for an empty directory and start from
    scratch.

    Args:
        directory: The directory of the look-up.
        passed_over: The problem of each checkpoint, by path, newest first.
    """
    # A checkpoint that the storage refused to read may be intact, so its remedy comes first.
    refused = [item for item in passed_over.items() if isinstance(item[1], StorageError) and item[1].remedy]
    path, error = next(iter([*refused, *passed_over.items()]))
    remedy = error.remedy if refused else "move them away to start from scratch"
    return CheckpointCorruptedError(
        f"none of the checkpoints in the directory can be resumed from: {len(passed_over)} do not verify, such as "
        f"{os.path.basename(path.rstrip('/'))}: {error.message}",
        path=directory,
        remedy=f"{remedy}, or give the path of another checkpoint",
    )
