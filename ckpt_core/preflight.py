"""Warn after the first save about problems that later saves or a resume will have, while a user may still watch."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from ckpt_core.commit_time import seconds_behind
from ckpt_core.errors import CheckpointError
from ckpt_core.events import Event, SaveCommitted, rank_of_process, size_in_words
from ckpt_core.storage import is_remote, storage_for
from ckpt_core.storage.base import PROBE_NAME

logger = logging.getLogger(__name__)

_CLOCK_SECONDS = 60.0
_MOST_SHOWN = 5  # keys


class Preflight:
    """A listener that checks once, when the first checkpoint is durable, and warns; it never stops a save.

    It checks four things: room for a second checkpoint, since the old one is deleted only when its successor is
    durable; whether an object store that allows writes also allows deletions; whether the clock is behind existing
    checkpoints; and whether ranks that torchrun restarts would find remains of the last attempt in its store. Writing,
    renaming and deleting in a local directory needs no check: the commit itself has done that.
    """

    def __init__(self, storage_options: dict[str, Any] | None = None) -> None:
        self._storage_options = storage_options
        self._is_done = False

    def __call__(self, event: Event) -> None:
        if self._is_done or not isinstance(event, SaveCommitted):
            return
        self._is_done = True
        if rank_of_process():
            return  # only rank 0 warns
        directory = os.path.dirname(event.path.rstrip("/"))
        problem = self._of_store(directory) if is_remote(event.path) else _of_disk(directory, event.bytes)
        for said in filter(None, (problem, _of_restarts())):
            logger.warning("%s", said)
        behind = seconds_behind()
        if behind > _CLOCK_SECONDS:
            logger.warning(
                "the clock of this machine is %s behind the newest checkpoint. Checkpoints stay in "
                "order, but have wrong dates: set the clock",
                datetime.timedelta(minutes=round(behind / 60)),
            )

    def _of_store(self, directory: str) -> str | None:
        storage, path = storage_for(directory, self._storage_options), f"{directory}/{PROBE_NAME}"
        try:
            storage.write_whole(path, b"\0")
        except CheckpointError:
            return None  # the checkpoint itself could be written, so this failure will be reported where it matters
        try:
            storage.remove(path)
            is_gone = not storage.exists(path)
        except CheckpointError as error:
            return (
                f"nothing can be deleted in {directory}, so {path} and all checkpoints will stay there: "
                f"{error.message}; allow this program to delete objects, or keep all checkpoints on purpose"
            )
        return None if is_gone else f"{path} is still there after it was deleted: are objects there held or versioned?"


def _of_disk(directory: str, size: int) -> str | None:
    try:
        disk = os.statvfs(directory or ".")
    except (AttributeError, OSError):
        return None
    if not disk.f_blocks:
        return None  # a filesystem that does not report its size
    free = disk.f_bavail * disk.f_frsize
    if free < size:
        return (
            f"the next checkpoint may not fit: {directory} has {size_in_words(free)} left, and the first took "
            f"{size_in_words(size)}; an old one is deleted only after the new one is durable. Make room for two"
        )
    if disk.f_files and disk.f_favail < 100:
        return f"the filesystem of {directory} has only {disk.f_favail} files (inodes) left: delete some"
    return None


def _of_restarts() -> str | None:
    """Return the warning if ranks that torchrun restarts may not find each other; None if they will.

    torch gives each attempt its own store only if the launcher does not share the store of its rendezvous.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or os.environ.get("WORLD_SIZE", "1") == "1":
        return None
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return None
    return (
        "ranks that torchrun starts again may fail or hang before they resume, because they share one store with the "
        "attempt before: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"
    )


class RefusedKeys:
    """Warns once per checkpointer, after its first commit, about keys that a load with default options will refuse."""

    def __init__(self) -> None:
        self._has_looked = False

    def warn_of(self, path: str, find: Callable[[], Mapping[str, str]]) -> None:
        """Warn about refused objects in the committed checkpoint at ``path``; ``find`` returns their types by key."""
        if self._has_looked:
            return
        self._has_looked = True
        refused: Mapping[str, str] = {}
        with contextlib.suppress(MemoryError):  # the checkpoint is committed, so a failure of this check is no error
            refused = find()
        if not refused:
            return
        shown = "; ".join(f"{key or 'somewhere'}: {what}" for key, what in list(refused.items())[:_MOST_SHOWN])
        more = f"; and {len(refused) - _MOST_SHOWN} more" if len(refused) > _MOST_SHOWN else ""
        logger.warning(
            "the checkpoint %s is saved, but a load with the default weights_only=True will refuse it: %s%s. "
            "Save plain data instead (numbers, strings, lists, dictionaries, tensors; float(x), x.tolist()), or "
            "allow the types with torch.serialization.add_safe_globals, or load with weights_only=False (with "
            "Accelerate: allow_pickle=True), which runs code from the checkpoint",
            path,
            shown,
            more,
        )
