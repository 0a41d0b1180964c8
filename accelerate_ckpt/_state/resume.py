"""``resume="auto"``: where ``load_state`` without a directory looks, and the count of attempts to resume."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from accelerate_ckpt._state.naming import automatic_root, path_text
from ckpt_core.catalog import Catalog, CheckpointInfo
from ckpt_core.errors import StateMismatchError
from ckpt_core.paths import is_remote
from ckpt_core.resume import ResumeAttempts, ResumePoint, folder_of_run

_NO_CRASH = (KeyboardInterrupt, StateMismatchError, type(None))


def directory_of_run(session: Any) -> str:
    """Return the directory to look for checkpoints in, and to save in before the run ends.

    That is the option ``checkpoint_dir``, else ``checkpoints`` in the ``project_dir``, where automatic names are, else
    ``checkpoints`` in the working directory, or for a task of a SLURM array its own folder there.
    """
    if session.config.checkpoint_dir is not None:
        return as_at_start(session, path_text(session.config.checkpoint_dir))
    stay_where_it_began(session)
    accelerator = session.accelerator
    return automatic_root(accelerator) if accelerator.project_dir else os.path.join(session.began_in, folder_of_run())


def refuse_unwritable(session: Any, directory: str | None = None) -> None:
    """Raise before training, once, if the run could not save; called on all ranks together.

    ``directory`` is that of a Trainer. By default, it is that of automatic names, or the one in which the run looks for
    a checkpoint to resume or saves without a request. If the script chooses the paths, its first save raises instead.
    """
    if session.has_tried_to_save:
        return
    session.has_tried_to_save = True
    accelerator, config = session.accelerator, session.config
    if directory is None and accelerator.project_dir and accelerator.project_configuration.automatic_checkpoint_naming:
        stay_where_it_began(session)
        directory = automatic_root(accelerator)
    elif directory is None and (
        config.resume == "auto" or config.just_in_time or session.preemption or session.interval
    ):
        directory = directory_of_run(session)
    if directory is None:
        return
    catalog = Catalog(directory, storage_options=config.storage_options, tiers=session.tiers)
    session.agreement.all_succeeded("training", catalog.refuse_unwritable if session.rank == 0 else lambda: None)


def stay_where_it_began(session: Any) -> None:
    """With ``resume="auto"``, resolve a relative ``project_dir`` as at the start of the run, as the next start will."""
    project = session.accelerator.project_configuration
    if session.config.resume == "auto" and project.project_dir:
        project.project_dir = as_at_start(session, path_text(project.project_dir))


def as_at_start(session: Any, path: str) -> str:
    """Return a path, resolved as at the start of the run if the script has changed its working directory since."""
    has_moved = not is_remote(path) and not os.path.isabs(path) and os.getcwd() != session.began_in
    return os.path.join(session.began_in, path) if has_moved else path


class AutoResume:
    """Counts, on rank 0, how often the run was resumed from the checkpoints of one directory."""

    def __init__(self, session: Any, root: str) -> None:
        config = session.config
        options = config.storage_options if is_remote(root) else None
        self.root = root
        self._session = session
        self._is_counted = False
        self._attempts = ResumeAttempts(root, config.resume_attempts, storage_options=options, tiers=session.tiers)

    def in_order(self, found: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
        """Return checkpoints in the order to try; those on which the run crashed too often come last, and are kept."""
        ordered = self._attempts.in_order(found)
        self._session.note_passed_over(self._attempts.stepped_over)
        return ordered

    def begin(self, info: CheckpointInfo) -> None:
        """Count an attempt, once for each start, until the program has ended without a crash."""
        self._is_counted = True
        self._attempts.begin(info)
        atexit.register(self.end)

    def end(self) -> None:
        """Clear the count when training or the program ends, unless an exception has ended it.

        Ctrl-C does not count as a crash, nor does a model that does not fit the checkpoint: older ones fit no better.
        """
        atexit.unregister(self.end)
        is_counted, self._is_counted = self._is_counted, False
        if is_counted and isinstance(getattr(sys, "last_value", None), _NO_CRASH):
            self._attempts.end()

    def crashed(self) -> None:
        """Count the attempt as failed, however the program ends, because another rank is dead."""
        atexit.unregister(self.end)

    def told_to_end(self) -> None:
        """Note that a signal ends the process, which is no crash; callable from any thread."""
        if self._is_counted:
            self._attempts.end()


def point_of(path: str, step: int, data: Mapping[str, Any]) -> ResumePoint:
    """Return the step, epoch and batch at which a run continues, from a checkpoint's data position."""
    loaders = [loader for loader in data.get("loaders", ()) if loader]
    trained = next((loader for loader in loaders if loader.get("trained")), None)
    if trained is None:
        return ResumePoint(path, step)
    return ResumePoint(path, step, int(trained["iteration"]), int(trained["steps"]))
