"""Pin checkpoints that the user wants to keep, so that no retention deletes them.

A pin is a small hidden file next to the checkpoint, ``.NAME.keep``, with a line of JSON. The checkpoint itself, which
must not change once it is committed, stays as it is; other programs ignore the hidden file.
"""

from __future__ import annotations

import json
import os
import time

from ckpt_core.errors import CheckpointError, CheckpointNotFoundError
from ckpt_core.storage import Storage

__all__ = ["is_pin", "is_pinned", "note_of_pin", "pin", "pin_path", "unpin"]

_ENDING = ".keep"


def pin_path(path: str) -> str:
    """Return the path of a checkpoint's pin file: ``runs/.last.ckpt.keep`` for ``runs/last.ckpt``."""
    directory, name = os.path.split(path.rstrip("/"))
    return os.path.join(directory, f".{name}{_ENDING}")


def is_pin(path: str) -> bool:
    """Return whether a file is a pin, judging by its name."""
    name = os.path.basename(path)
    return name.startswith(".") and name.endswith(_ENDING)


def is_pinned(path: str, storage: Storage) -> bool:
    """Return whether a checkpoint is pinned."""
    return storage.exists(pin_path(path))


def note_of_pin(path: str, storage: Storage) -> str | None:
    """Return the reason given for a pin, ``""`` if none was given; None if the checkpoint is not pinned."""
    try:
        with storage.open(pin_path(path)) as reader:
            note = json.loads(reader.read_whole())["note"]
    except CheckpointNotFoundError:
        return None
    except (CheckpointError, ValueError, LookupError, TypeError):
        return ""  # the pin exists, though its content cannot be read
    return note if isinstance(note, str) else ""


def pin(path: str, storage: Storage, note: str = "") -> None:
    """Pin a checkpoint; ``note`` is the reason in a few words."""
    data = json.dumps({"version": 1, "note": note, "time": time.time()}).encode()
    storage.write_whole(pin_path(path), data)


def unpin(path: str, storage: Storage) -> None:
    """Let retention delete a checkpoint again; does nothing if it is not pinned."""
    storage.remove(pin_path(path))
