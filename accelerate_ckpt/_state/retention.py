"""Which checkpoints a retention policy gives up: those that are named alike and saved side by side."""

from __future__ import annotations

import importlib
import logging
import os
import re
from collections.abc import Collection, Mapping
from typing import Any

from accelerate_ckpt._state.naming import is_url, number_of
from accelerate_ckpt._state.parts import FORMAT
from accelerate_ckpt.config import OptionError
from ckpt_core import Catalog
from ckpt_core.checkpointer import full_path
from ckpt_core.commit_time import commit_time
from ckpt_core.directory import DirectoryCheckpointer
from ckpt_core.errors import CheckpointError
from ckpt_core.policies import RetentionHistory, RetentionPolicy, SavedCheckpoint, numbers_in

__all__ = ["Retention"]

log = logging.getLogger(__name__)

_NUMBER = re.compile("[0-9]+")


class Retention:
    """What is known of the checkpoints of one Accelerator, and which of them its policy gives up.

    Checkpoints whose names in one directory differ in nothing but numbers (``step_100``, ``step_200``) are a series, in
    which the policy chooses; what has another name is left alone. What a policy needs to know is in each checkpoint's
    metadata, so that a run that is resumed knows of those of the runs before.

    Args:
        policy: A policy, or the mapping that names its class.
        checkpointer: What saves.
        storage_options: For checkpoints at URLs.

    Raises:
        OptionError: The mapping names no policy.
    """

    def __init__(
        self, policy: Any, checkpointer: DirectoryCheckpointer, storage_options: dict[str, Any] | None
    ) -> None:
        self._history = RetentionHistory(_built(policy) if isinstance(policy, Mapping) else policy)
        self._checkpointer = checkpointer
        self._storage_options = storage_options
        self._metrics: dict[str, float] = {}

    def note_metrics(self, values: Mapping[str, Any]) -> None:
        """Note what a script logs, so that checkpoints can be chosen by it; what is not a number is left out."""
        self._metrics |= numbers_in(values)

    def describe(self) -> dict[str, Any]:
        """Return what a policy will need to know of a checkpoint that is saved now, as plain data."""
        return {"time": commit_time(), "metrics": dict(self._metrics)}

    def record(self, target: str, step: int, about: Mapping[str, Any]) -> None:
        """Note a checkpoint whose save has begun, with what :meth:`describe` returned."""
        self._history.record(self._checkpointer.known_as(target), step, about["metrics"], about["time"])

    def surplus(
        self, target: str, pending: Collection[str], protected: Collection[str], ignored: Collection[str] = ()
    ) -> list[str]:
        """Return the checkpoints of a series to delete, the oldest first.

        Args:
            target: The newest of the series.
            pending: Paths whose save is under way; they count, and stay.
            protected: Paths that stay too.
            ignored: Paths that stay and do not count, because they are damaged.
        """
        newest = self._checkpointer.known_as(target)
        directory, name = os.path.split(newest)
        options = self._storage_options if is_url(directory) else None
        there = [full_path(path) for path in Catalog(directory, suffix="", storage_options=options).paths()]
        there += self._checkpointer.uploaded_in(directory)
        under_way = {newest, *map(self._checkpointer.known_as, pending)}
        series = _series_of(name)
        paths = {path for path in {*there, *under_way} if os.path.dirname(path) == directory}
        paths = {path for path in paths if _series_of(os.path.basename(path)) == series} - set(ignored)
        self._history.read_back(paths, self._read)
        return self._history.surplus({*under_way, *map(self._checkpointer.known_as, protected)}, among=paths)

    def _read(self, path: str) -> SavedCheckpoint | None:
        """Return what the checkpoint of an earlier run says of itself, None if it cannot or is not one of ours."""
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
    return _NUMBER.sub("#", name)


def _built(policy: Any) -> Any:
    """Return the object that a mapping of class and arguments describes; anything else as it is, lists item by item."""
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
        raise OptionError(f"retention: {path} is no policy such as ckpt_core.policies.KeepLatest")
    return built
