"""Retention: deletes checkpoints beyond Accelerate's ``total_limit``, or that a policy no longer keeps."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Collection, Mapping
from typing import Any

from accelerate_ckpt._state.naming import NUMBER, automatic_root, by_number, number_of, numbered
from accelerate_ckpt._state.parts import FORMAT
from accelerate_ckpt.config import OptionError
from ckpt_core import Catalog
from ckpt_core.directory import DirectoryCheckpointer
from ckpt_core.errors import CheckpointError, StorageError
from ckpt_core.paths import full_path, is_remote
from ckpt_core.policies import RetentionHistory, RetentionPolicy, SavedCheckpoint

log = logging.getLogger(__name__)


def remove_unwanted(session: Any, target: str) -> None:
    """Delete, on rank 0, the checkpoints that neither the framework's own rule nor the policy keeps.

    They are deleted once ``target``, whose save has just begun or is done, is durable.
    """
    if session.rank or session.rehearsal is not None:
        return
    known_as = session.checkpointer.known_as
    session.passed_over.discard(known_as(target))  # it is saved again, and no longer damaged
    pending = [*session.checkpointer.pending, target]
    try:
        gone = _beyond_total_limit(session, pending) if session.limit is None else session.limit(pending)
    except StorageError as error:
        log.warning("nothing is deleted after this save: %s", error)
        return
    if session.retention is not None and session.retention.covers(target):
        given_up = session.retention.surplus(target, pending, session.protected, session.passed_over)
        by_rule = given_up if gone is None else set(map(known_as, gone))
        gone = [path for path in given_up if path in by_rule]
    for path in gone or []:
        if not session.was_passed_over(path):
            session.checkpointer.remove(path)


def _beyond_total_limit(session: Any, pending: list[str]) -> list[str] | None:
    """Return the committed checkpoints beyond Accelerate's ``total_limit``, the oldest first; None without a limit.

    Those whose save is ``pending`` count, and stay; damaged ones stay and do not count.
    """
    project = session.accelerator.project_configuration
    if not project.automatic_checkpoint_naming or project.total_limit is None:
        return None
    root = session.checkpointer.known_as(automatic_root(session.accelerator))
    committed = by_number(session.checkpointer.uploaded_in(root)) | numbered(root, session.config.storage_options)
    committed = {number: path for number, path in committed.items() if not session.was_passed_over(path)}
    under_way = {number for path in pending if (number := number_of(path)) is not None}
    kept = set(sorted(under_way | set(committed), reverse=True)[: project.total_limit])
    return [path for number, path in sorted(committed.items()) if number not in kept | under_way]


class Retention:
    """The history of one Accelerator's checkpoints, from which its policy chooses those to keep.

    Checkpoints of one directory whose names differ only in numbers (``step_100``, ``step_200``) are a series, in which
    the policy chooses; those with other names, or without ``prefix``, are left alone. What a policy needs to know is in
    each checkpoint's metadata, so that a resumed run knows it of the checkpoints of earlier runs. The policy may be a
    mapping that names its class; an invalid one raises ``OptionError``.
    """

    def __init__(
        self,
        policy: Any,
        checkpointer: DirectoryCheckpointer,
        storage_options: dict[str, Any] | None,
        prefix: str = "",
    ) -> None:
        self._prefix = prefix
        self._history = RetentionHistory(_built(policy) if isinstance(policy, Mapping) else policy)
        self._checkpointer = checkpointer
        self._storage_options = storage_options

    def covers(self, target: str) -> bool:
        """Return whether the policy applies to a checkpoint of that name."""
        return os.path.basename(target.rstrip("/")).startswith(self._prefix)

    def record(self, target: str, step: int, metrics: Mapping[str, float], time: float) -> None:
        """Note a checkpoint whose save has begun: its step, the logged metrics, Unix time in seconds."""
        self._history.record(self._checkpointer.known_as(target), step, metrics, time)

    def surplus(
        self, target: str, pending: Collection[str], protected: Collection[str], ignored: Collection[str] = ()
    ) -> list[str]:
        """Return the checkpoints to delete, the oldest first, of the series of which ``target`` is the newest.

        Paths that are pending (their save is under way) count and stay, protected ones stay, and ignored ones stay and
        do not count, because they are damaged.
        """
        newest = self._checkpointer.known_as(target)
        directory, name = os.path.split(newest)
        options = self._storage_options if is_remote(directory) else None
        there = [full_path(path) for path in Catalog(directory, suffix="", storage_options=options).paths()]
        there += self._checkpointer.uploaded_in(directory)
        under_way = {newest, *map(self._checkpointer.known_as, pending)}
        series = _series_of(name)
        paths = {path for path in {*there, *under_way} if os.path.dirname(path) == directory}
        paths = {path for path in paths if _series_of(os.path.basename(path)) == series} - set(ignored)
        self._history.read_back(paths, self._read)
        return self._history.surplus({*under_way, *map(self._checkpointer.known_as, protected)}, among=paths)

    def _read(self, path: str) -> SavedCheckpoint | None:
        """Return what the checkpoint of an earlier run records about itself; None if it is unreadable or not ours."""
        try:
            with self._checkpointer.load(path) as checkpoint:
                about, committed = checkpoint.metadata.get(FORMAT), checkpoint.stamp.committed
        except CheckpointError as error:
            log.warning("the checkpoint %s stays, because it cannot be read: %s", path, error.message)
            return None
        if about is None:
            return None
        step = about.get("step", number_of(path) or 0)
        return SavedCheckpoint(path, int(step), about.get("time", committed or 0.0), about.get("metrics", {}))


def _series_of(name: str) -> str:
    return NUMBER.sub("#", name)


def _built(policy: Any) -> Any:
    """Create the object that a mapping of class and arguments describes, also in lists; return other values as is."""
    if isinstance(policy, (list, tuple)):
        return [_built(item) for item in policy]
    if not isinstance(policy, Mapping) or "class_path" not in policy:
        return policy
    path = policy["class_path"]
    arguments = {name: _built(value) for name, value in (policy.get("init_args") or {}).items()}
    module, _, name = path.rpartition(".")
    try:
        built = getattr(importlib.import_module(module), name)(**arguments)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise OptionError(f"retention: {path} cannot be made: {error}") from error
    if not isinstance(built, RetentionPolicy):
        raise OptionError(f"retention: {path} is not a policy such as ckpt_core.policies.KeepLatest")
    return built
