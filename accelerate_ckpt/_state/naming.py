"""Where checkpoints are: Accelerate's automatic names, which of them exist, and which a policy or limit gives up."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from accelerate_ckpt._state.parts import FORMAT
from accelerate_ckpt.config import OptionError
from ckpt_core import Catalog, CheckpointInfo
from ckpt_core.catalog import newest_first
from ckpt_core.checkpointer import full_path
from ckpt_core.directory import DirectoryCheckpointer
from ckpt_core.errors import CheckpointError
from ckpt_core.paths import StrPath
from ckpt_core.policies import RetentionHistory, RetentionPolicy, SavedCheckpoint
from ckpt_core.tiers import Tiers

log = logging.getLogger(__name__)

_FOLDER = "checkpoints"
_PREFIX = "checkpoint"  # as Accelerate and the Trainer name theirs
_NAME = _PREFIX + "_{}"
# Accelerate's own rule: the first run of digits in the last component of the path.
_NUMBER = re.compile(r"[0-9]+")


def is_url(path: str) -> bool:
    """Whether the path names a place in a store (``s3://...``) and not in the local file system."""
    return "://" in path


def path_text(path: StrPath) -> str:
    """Return the path as text, ``~`` expanded."""
    text = os.fspath(path)
    return text if is_url(text) else os.path.expanduser(text)


def automatic_root(accelerator: Any) -> str:
    """Return the directory of automatically named checkpoints."""
    return os.path.join(accelerator.project_dir, _FOLDER)


def target_of(accelerator: Any, output_dir: StrPath | None) -> str:
    """Return where a save goes: as given, or the next automatic name; one of both there must be."""
    if accelerator.project_configuration.automatic_checkpoint_naming:
        return os.path.join(automatic_root(accelerator), _NAME.format(accelerator.save_iteration))
    if output_dir is None:
        raise TypeError("save_state needs output_dir, unless ProjectConfiguration(automatic_checkpoint_naming=True)")
    return path_text(output_dir)


def number_of(path: str) -> int | None:
    """Return the number in the name of a checkpoint, None if there is none or the name is hidden."""
    name = os.path.basename(path.rstrip("/"))
    found = None if name.startswith(".") else _NUMBER.search(name)
    return int(found.group()) if found else None


def numbered(root: str, storage_options: dict[str, Any] | None, tiers: Tiers | None = None) -> dict[int, str]:
    """Return the committed checkpoints in ``root``, or in both tiers of it, by number."""
    return by_number(Catalog(root, suffix="", storage_options=storage_options, tiers=tiers).paths())


def candidates(
    root: str, storage_options: dict[str, Any] | None = None, tiers: Tiers | None = None
) -> list[CheckpointInfo]:
    """Return the numbered checkpoints in ``root``, the newest first: ours, and directories that stock may have written.

    Ours know when they were committed; of the others, the number says how old they are, also beside ours.
    """
    infos = Catalog(root, suffix="", storage_options=storage_options, tiers=tiers).checkpoints()
    ours = {os.path.basename(info.path) for info in infos}
    if not is_url(root) and os.path.isdir(root):
        with os.scandir(root) as entries:
            infos += [
                CheckpointInfo(entry.path, 0, entry.stat().st_mtime, is_directory=True)
                for entry in entries
                if entry.name not in ours and entry.name.startswith(_PREFIX) and entry.is_dir()
            ]
    found = [(number_of(info.path), info) for info in infos]
    return newest_first(dataclasses.replace(info, step=number) for number, info in found if number is not None)


def by_number(paths: Iterable[str]) -> dict[int, str]:
    """Return the checkpoints whose names have a number, by it."""
    return {number: path for path in paths if (number := number_of(path)) is not None}


def unwanted(committed: dict[int, str], pending: list[str], keep: int) -> list[str]:
    """Return which committed checkpoints to delete, the oldest first, so that the ``keep`` highest numbers stay.

    Those whose save is ``pending`` count, and are not deleted.
    """
    under_way = {number for path in pending if (number := number_of(path)) is not None}
    kept = set(sorted(under_way | set(committed), reverse=True)[:keep])
    return [path for number, path in sorted(committed.items()) if number not in kept | under_way]


def next_iteration(
    accelerator: Any, loaded: int | None, storage_options: dict[str, Any] | None, tiers: Tiers | None = None
) -> int:
    """Return the number of the next automatic name: above the loaded one and above all that exist.

    A new process counts from 0 again, would take a name that exists or, with ``total_limit``, have its checkpoints
    deleted as the oldest. Whoever goes back to an older checkpoint keeps the newer ones, and the next one is the
    newest.
    """
    root = automatic_root(accelerator)
    # Also directories that stock Accelerate or a crash left: their names are taken.
    names = os.listdir(root) if not is_url(root) and os.path.isdir(root) else []
    if not names or tiers is not None:
        names += numbered(root, storage_options, tiers).values()
    taken = [number for name in names if (number := number_of(name)) is not None]
    known = [int(accelerator.project_configuration.iteration), *(number + 1 for number in taken)]
    return max(known if loaded is None else [*known, loaded + 1])


class Retention:
    """What is known of the checkpoints of one Accelerator, and which of them its policy gives up.

    Checkpoints whose names in one directory differ in nothing but numbers (``step_100``, ``step_200``) are a series, in
    which the policy chooses; what has another name, or one that does not begin with ``prefix``, is left alone. What a
    policy needs to know is in each checkpoint's metadata, so that a run that is resumed knows of those of the runs
    before. The policy may be the mapping that names its class; if that is none, it is refused with an ``OptionError``.
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
        """Return whether the policy is for a checkpoint of that name."""
        return os.path.basename(target.rstrip("/")).startswith(self._prefix)

    def record(self, target: str, step: int, metrics: Mapping[str, float], time: float) -> None:
        """Note a checkpoint whose save has begun: steps taken, what was logged, Unix time in seconds."""
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
