"""``resume="auto"``: finds the checkpoint that a ``fit`` without ``ckpt_path`` continues from.

Each rank looks on its own, before the ranks are connected, as for ``ckpt_path="last"``. Once connected, they compare
what they have found, and rank 0 counts the attempt.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ckpt_core import CheckpointInfo
from ckpt_core.catalog import newest_first
from ckpt_core.errors import RankFailedError
from ckpt_core.paths import is_remote
from ckpt_core.resume import ResumeAttempts, ResumePoint, folder_of_run
from lightning_ckpt._private.loops import checkpoint_directory
from lightning_ckpt._report import announce
from lightning_ckpt._routing.trainer import raise_on_all_ranks


class AutoResume:
    """The checkpoint that one callback has found, and the count of attempts to resume from it.

    After ``limit`` failed attempts in a row, an older checkpoint is tried first; None: never.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._attempts: ResumeAttempts | None = None
        self.asked = False  # whether this fit resumes from what was found here
        self._chosen: CheckpointInfo | None = None
        self._newest: CheckpointInfo | None = None

    def look(self, directory: str, **options: Any) -> ResumeAttempts:
        """Return the recorded attempts to resume from a directory's checkpoints, for the look-up of this fit."""
        self.asked, self._attempts = True, ResumeAttempts(directory, self._limit, **options)
        return self._attempts

    def choose(self, newest: CheckpointInfo | None, *, is_mine: bool) -> None:
        """Note the checkpoint that the Trainer resumes from, and whether this callback has found it."""
        self._newest = newest
        self._chosen = newest if is_mine else None

    def begin(self, trainer: Any) -> None:
        """Compare the choice with that of the other ranks and count the attempt; all ranks raise together."""
        if not self.asked:
            return
        mine = None if self._chosen is None else self._chosen.path
        theirs = trainer.strategy.broadcast(mine)

        def compare() -> None:
            if mine != theirs:
                raise RankFailedError(
                    f"rank {trainer.global_rank} would resume from {mine or 'nothing'}, and rank 0 from "
                    f"{theirs or 'nothing'}",
                    remedy="give all ranks the same directory: on several machines it must be on a shared filesystem "
                    "or a store",
                )

        raise_on_all_ranks(compare, world_size=trainer.world_size)
        if self._chosen is not None and self._attempts is not None and trainer.is_global_zero:
            self._attempts.begin(self._chosen)

    def is_newer(self, info: CheckpointInfo) -> bool:
        """Return whether a checkpoint is newer than the one that the Trainer resumes from, of whichever callback."""
        return self._newest is None or newest_first([info, self._newest])[0] == info

    def crashed(self) -> None:
        """Count the attempt as failed, however this run ends, because another rank is dead."""
        self._chosen = None

    def end(self, trainer: Any) -> None:
        """Note that the run has not crashed."""
        if self._chosen is not None and self._attempts is not None and trainer.is_global_zero:
            self._attempts.end()
        self._chosen, self._newest, self.asked = None, None, False


def find_resume(trainer: Any) -> list[str | None]:
    """Return what a ``fit`` without a path resumes from; passed to ``_private.hooks.find_path_when_none``."""
    callbacks = [callback for callback in trainer.callbacks if getattr(callback, "auto_resume", None) is not None]
    if not callbacks:
        return []
    found = {}
    for callback in callbacks:
        info = callback.look_for_resume(trainer)
        if info is not None:
            found[info] = callback
    newest = newest_first(found)[0] if found else None
    for callback in callbacks:
        callback.auto_resume.choose(newest, is_mine=newest is not None and found[newest] is callback)
    if newest is None:
        places = ", ".join(checkpoint_directory(callback, trainer) for callback in callbacks)
        announce(trainer, f"There is nothing to resume in {places}: this run starts from the beginning.")
        return [None]
    return [newest.path]


def stable_directory(trainer: Any) -> str:
    """Return where a callback without ``dirpath`` saves, independent of the version that a logger gives this start."""
    root, folder = os.fspath(trainer.default_root_dir), folder_of_run()
    return f"{root.rstrip('/')}/{folder}" if is_remote(root) else os.path.realpath(os.path.join(root, folder))


def point_of(path: str, checkpoint: Mapping[str, Any]) -> ResumePoint:
    """Return the step, epoch and batch at which a Trainer's checkpoint was saved."""
    try:
        batch = int(checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["processed"])
    except (KeyError, TypeError):
        batch = None
    return ResumePoint(path, checkpoint.get("global_step"), checkpoint.get("epoch"), batch)
