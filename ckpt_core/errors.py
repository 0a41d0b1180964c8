"""One tree of exceptions.

Everything that goes wrong with a checkpoint is a :class:`CheckpointError`, so that one ``except`` is enough. Where
Python or torch has an exception for the same thing, ours is also that one, so that existing handlers keep working::

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
        path: The file or URL it happened to, if there is one.
        key: The part of the state it happened to (``"state_dict.layer.weight"``), if there is one.
        remedy: What the user can do: the option to change, the command to run.

    Attributes:
        raised_at_once: Whether one of several ranks has raised it in its call of save, where others hear of it later.
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
    """Return whether a text has a name in it that is not a part of another word."""
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is not None


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the path, or none that can be used."""


class CheckpointCorruptedError(CheckpointError):
    """The bytes read are not the bytes that were saved: truncated, flipped, or mixed with another file."""


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

    ``errno`` is that of the :class:`OSError` behind it, where there is one.
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
    """Return the error for a look-up that found checkpoints of which none can be used.

    Nothing may start from scratch then, so it is not a :class:`CheckpointNotFoundError`, which programs take for a
    directory that is still empty.

    Args:
        directory: Where the look-up was.
        passed_over: What is wrong with each checkpoint, by path, the newest first.
    """
    path, error = next(iter(passed_over.items()))
    return CheckpointCorruptedError(
        f"none of the checkpoints in the directory can be resumed from: {len(passed_over)} do not verify, such as "
        f"{os.path.basename(path.rstrip('/'))}: {error.message}",
        path=directory,
        remedy="move them away to start from scratch, or give the path of another checkpoint",
    )
