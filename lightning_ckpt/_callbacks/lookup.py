"""Finds the checkpoints for ``ckpt_path="last"`` and ``"best"``: on disks, on stores, and after a SLURM requeue.

``ModelCheckpoint`` and the Trainer look at directories through fsspec, without the ``storage_options`` of the plugin.
On a store that needs them they fail, or take a directory for empty and start from scratch. Listings cached by fsspec
hide files that were saved since. And a callback that is asked for ``"best"`` before ``setup`` has no Trainer yet.

When SLURM requeues a job, Lightning saves at ``hpc_ckpt_N.ckpt`` in ``default_root_dir``, which may be the working
directory of several experiments. Such a file is this run's if it records the directory of this run's checkpoints.
"""

from __future__ import annotations

import dataclasses
import glob
import itertools
import logging
import os
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import fsspec

from ckpt_core import Catalog, CheckpointInfo
from ckpt_core.catalog import newest_first
from ckpt_core.errors import CheckpointCorruptedError, CheckpointError, CheckpointNotFoundError
from ckpt_core.paths import is_remote
from ckpt_core.resume import ResumeAttempts
from ckpt_core.tiers import Tiers

logger = logging.getLogger(__name__)

#: Keys of storage_options that are for our own clients; fsspec does not know them.
_OF_OUR_CLIENTS = ("backend", "client_options", "follow_links", "retry_config")
_STOCK_HINT = r'.*\(ckpt_path="last"\) is set, but there is no last checkpoint available'
_NAME = re.compile(r"hpc_ckpt_(\d+)\.ckpt$")
_Order = Callable[[list[CheckpointInfo]], list[CheckpointInfo]]


@dataclasses.dataclass
class Lookup:
    """Finds what one callback has saved: the newest checkpoint that verifies, and the best.

    ``suffix`` is that of checkpoint names, ``last`` the prefix of names of copies of the newest checkpoint, and
    ``levels`` the number of subdirectories in names with slashes.
    """

    suffix: str
    last: str
    passed_over: set[str] = dataclasses.field(default_factory=set)  # by the last look-up: damaged, or crashed too often
    storage_options: dict[str, Any] | None = None
    tiers: Tiers | None = None
    levels: int = 0
    _best: str | None = None

    def set_access(self, storage_options: dict[str, Any] | None, tiers: Tiers | None) -> None:
        """Set how the checkpoints are accessed."""
        if (storage_options, tiers) != (self.storage_options, self.tiers):
            self._best = None  # the earlier options may not have found it
        self.storage_options, self.tiers = storage_options, tiers

    def catalog(self, directory: str, memory: str | None = None) -> Catalog:
        """Return the catalog of a directory, and of the snapshots in this machine's ``memory`` if that is given."""
        options, tiers, levels = self.storage_options, self.tiers, self.levels
        return Catalog(
            directory, suffix=self.suffix, storage_options=options, tiers=tiers, memory=memory, levels=levels
        )

    def is_last(self, path: str) -> bool:
        """Return whether ``path`` has the name of a copy of the newest checkpoint, such as ``last.ckpt``."""
        return os.path.basename(path).startswith(self.last)

    def was_passed_over(self, path: str) -> bool:
        """Return whether the last look-up found this checkpoint and did not take it."""
        return any(is_same_path(path, other) for other in self.passed_over)

    def newest(
        self, directory: str, root: str, memory: str | None = None, attempts: ResumeAttempts | None = None
    ) -> CheckpointInfo | None:
        """Return the newest checkpoint of ``directory`` that verifies, whatever its name, or one of a requeue.

        ``root`` is the Trainer's ``default_root_dir``; ``attempts`` puts those last on which the run crashed too often.
        If there are checkpoints and none verifies, that is an error.
        """
        order = list if attempts is None else attempts.in_order
        requeued = self._newest_requeued(directory, root, order)
        try:
            found = self.newest_verified(directory, memory, order)
        except CheckpointCorruptedError:
            if requeued is None:
                raise
            found = None
        infos = order(newest_first([info for info in (requeued, found) if info is not None]))
        if attempts is not None:
            self.passed_over |= set(attempts.stepped_over)
        return infos[0] if infos else None

    def newest_verified(self, directory: str, memory: str | None = None, order: _Order = list) -> CheckpointInfo | None:
        """Return the newest checkpoint of a directory that verifies; ``order`` as :meth:`Catalog.newest_verified`."""
        catalog = self.catalog(directory, memory)
        newest = catalog.newest_verified(is_training_state, lambda infos: order(self._copies_first(infos)))
        self.passed_over = set(catalog.passed_over)
        if newest is None:
            return None
        # If it is the same file as a copy's (a hard link), return the copy's name: Lightning never deletes the name
        # that a run was resumed from.
        others = [info for info in catalog.checkpoints() if self.is_last(info.path)]
        return next((info for info in others if _is_same_file(info.path, newest.path)), newest)

    def _copies_first(self, infos: list[CheckpointInfo]) -> list[CheckpointInfo]:
        # The state in a run's first checkpoint does not know last.ckpt; resumed from it, the run would add last-v1.ckpt
        def is_original(info: CheckpointInfo) -> bool:
            return info.committed is not None and not self.is_last(info.path)

        alike = itertools.groupby(infos, lambda info: (info.committed, info.step))
        return [info for _, group in alike for info in sorted(group, key=is_original)]

    def best(self, directory: str, state_key: str, monitor: str | None) -> str:
        """Return the best checkpoint that the newest one records, or the newest if that is unusable; "" if none."""
        # Kept apart from the callback's own best_model_path: a run that starts later must not delete it.
        if self._best is None:
            self._best = self._look_up_best(directory, state_key, monitor)
        return self._best

    def _look_up_best(self, directory: str, state_key: str, monitor: str | None) -> str:
        found = self.newest_verified(directory)
        if found is None:
            return ""
        newest = found.path
        catalog = self.catalog(directory)
        known = catalog.peek(newest).get("callbacks", {}).get(state_key, {})
        best = known.get("best_model_path")
        if not best:
            if monitor is not None:
                logger.warning(
                    "using %s as the best checkpoint: it does not record which one has the best %s", newest, monitor
                )
            return newest
        for path in dict.fromkeys([moved_path(best, known.get("dirpath"), directory), best]):
            try:
                catalog.check(path)
            except CheckpointNotFoundError:
                continue
            except CheckpointError as error:
                logger.warning("using %s instead of the best checkpoint %s: %s", newest, path, error.message)
                return newest
            return str(path)
        logger.warning("using %s instead of the best checkpoint %s, which is not there", newest, best)
        return newest

    def _newest_requeued(self, directory: str, root: str, order: _Order) -> CheckpointInfo | None:
        """Return the newest checkpoint of a requeue that verifies and belongs to this run."""
        if is_remote(root) or not os.path.isdir(root):
            return None
        catalog = dataclasses.replace(self, levels=0).catalog(root)
        for info in order([info for info in catalog.checkpoints() if _NAME.match(info.name)]):
            try:
                if _is_of_run(catalog.peek(info.path), root, directory):
                    catalog.check(info.path)
                    return info
            except CheckpointError as error:
                logger.warning("passed over the checkpoint %s: %s", info.path, error.message)
        return None

    def older_requeued(self, directory: str, root: str, resumed: str) -> list[str]:
        """Return the checkpoints of a run's earlier requeues, if it was ``resumed`` from that of its last requeue."""
        if is_remote(root) or not resumed or _NAME.match(os.path.basename(resumed)) is None:
            return []
        if os.path.realpath(os.path.dirname(resumed)) != os.path.realpath(root):
            return []
        catalog, number = dataclasses.replace(self, levels=0).catalog(root), _number_of(resumed)
        found = [path for path in catalog.paths() if _NAME.match(os.path.basename(path)) and _number_of(path) < number]
        return [path for path in found if _is_of_run(catalog.peek(path), root, directory)]


def moved_path(path: str, before: str | None, directory: str) -> str:
    """Return the path of a checkpoint that was saved in ``before``, after that was moved or copied to ``directory``."""
    inside = f"{(before or '').rstrip('/')}/"
    return f"{directory.rstrip('/')}/{path[len(inside) :]}" if before and path.startswith(inside) else path


def follow(known: Any, directory: str) -> bool:
    """Update a ``ModelCheckpoint``'s saved paths in place if its directory was moved; return whether it was."""
    before = known.get("dirpath") if isinstance(known, dict) else None
    if not before or before == directory:
        return False
    for name, value in known.items():
        if isinstance(value, str) and name != "dirpath":
            known[name] = moved_path(value, before, directory)
    known["best_k_models"] = {
        moved_path(path, before, directory): score for path, score in known.get("best_k_models", {}).items()
    }
    known["dirpath"] = directory
    return True


def is_training_state(state: Any) -> bool:
    """Return whether a checkpoint holds more than weights."""
    return isinstance(state, Mapping) and "optimizer_states" in state


def is_same_path(path: Any, other: Any) -> bool:
    """Return whether two paths or URLs are the same, however they are spelled."""
    return _normal(os.fspath(path)) == _normal(os.fspath(other))


def _normal(path: str) -> str:
    protocol, found, rest = path.partition("://")
    # fsspec spells one path in several ways: memory://a and memory:///a
    return f"{protocol}://{rest.strip('/')}" if found else os.path.abspath(path)


def _is_same_file(path: str, other: str) -> bool:
    return os.path.exists(path) and os.path.exists(other) and os.path.samefile(path, other)


def _number_of(path: str) -> int:
    return int(_NAME.match(os.path.basename(path)).group(1))  # type: ignore[union-attr]


def _is_of_run(state: Any, root: str, directory: str) -> bool:
    callbacks = state.get("callbacks", {}) if isinstance(state, Mapping) else {}
    saved_in = [
        str(callback["dirpath"])
        for callback in callbacks.values()
        if isinstance(callback, Mapping) and "dirpath" in callback
    ]
    wanted, inside = os.path.realpath(directory), os.path.relpath(os.path.realpath(directory), os.path.realpath(root))
    # the root may have been moved since, together with the directory in it
    moved = not inside.startswith("..") and inside != "."
    return any(
        path == directory or os.path.realpath(path) == wanted or (moved and path.endswith(os.sep + inside))
        for path in saved_in
    )


def left_in_another_version(directory: str) -> str | None:
    """Return where an earlier start of a script without ``dirpath`` saved its checkpoints; None if nowhere.

    ``directory`` is where this start saves: ``.../version_3/checkpoints``.
    """
    logs, _, version = os.path.dirname(directory).rpartition(os.sep)
    if is_remote(directory) or not version.startswith("version_"):
        return None
    for other in sorted(glob.glob(os.path.join(glob.escape(logs), "version_*", "checkpoints", "*.ckpt")), reverse=True):
        return os.path.dirname(other)
    return None


def stock_hint(*, is_shown: bool) -> None:
    """Show or hide Lightning's warning about ``ckpt_path="last"``: it recommends ``save_last`` even if that is set."""
    others = [each for each in warnings.filters if getattr(each[1], "pattern", None) != _STOCK_HINT]
    warnings.filters[:] = others  # type: ignore[index]
    if not is_shown:
        warnings.filterwarnings("ignore", message=_STOCK_HINT)


def open_filesystem(directory: str, storage_options: Mapping[str, Any] | None) -> Any:
    """Return fsspec's filesystem for a URL, with the options of the plugin and without a cache of listings."""
    options = {name: value for name, value in (storage_options or {}).items() if name not in _OF_OUR_CLIENTS}
    filesystem, _ = fsspec.core.url_to_fs(directory, **{"use_listings_cache": False, **options})
    return filesystem
