"""Where a run's checkpoints are looked for, besides what the engine's catalog knows: on stores, and after a requeue.

``ModelCheckpoint`` and the Trainer look at directories through fsspec, without the ``storage_options`` of the plugin.
On a store that needs them they fail, or take a directory for empty and start from scratch. Listings that fsspec
remembers hide files that were saved since. And ``"best"`` is a question to a callback that, before ``setup``, knows no
Trainer.

When SLURM requeues a job, Lightning saves at ``hpc_ckpt_N.ckpt`` in ``default_root_dir``, which may be the working
directory of several experiments. It belongs to a run whose checkpoints are in the same directory as those of this one.
"""

from __future__ import annotations

import datetime
import functools
import glob
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import fsspec

from ckpt_core import Catalog, CheckpointInfo
from ckpt_core.errors import CheckpointError
from ckpt_core.paths import is_remote

logger = logging.getLogger(__name__)

#: In storage_options; fsspec does not know them.
_OF_OUR_CLIENTS = ("backend", "client_options", "follow_links", "retry_config")
_STOCK_HINT = r'.*\(ckpt_path="last"\) is set, but there is no last checkpoint available'
_NAME = re.compile(r"hpc_ckpt_(\d+)\.ckpt$")


def newest_requeued(
    catalog: Catalog,
    root: str,
    directory: str,
    order: Callable[[list[CheckpointInfo]], list[CheckpointInfo]] = list,
) -> CheckpointInfo | None:
    """Return the newest checkpoint of a requeue that verifies and belongs to this run, or None.

    ``root`` is the Trainer's ``default_root_dir``, ``directory`` that of the callback's checkpoints, and ``order`` as
    for :meth:`ckpt_core.Catalog.newest_verified`.
    """
    for info in order([info for info in catalog.checkpoints() if _NAME.match(info.name)]):
        try:
            if _is_of_run(catalog.peek(info.path), root, directory):
                catalog.check(info.path)
                return info
        except CheckpointError as error:
            logger.warning("passed over the checkpoint %s: %s", info.path, error.message)
    return None


def older_requeued(catalog: Catalog, root: str, directory: str, resumed: str) -> list[str]:
    """Return the checkpoints of earlier requeues of a run that was ``resumed`` from that of the last one; else none."""
    if _NAME.match(os.path.basename(resumed)) is None or not _is_same(os.path.dirname(resumed), root):
        return []
    number = _number_of(resumed)
    found = [path for path in catalog.paths() if _NAME.match(os.path.basename(path)) and _number_of(path) < number]
    return [path for path in found if _is_of_run(catalog.peek(path), root, directory)]


def _is_same(directory: str, other: str) -> bool:
    return os.path.realpath(directory) == os.path.realpath(other)


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
    # the directory may have been moved since, together with what is in it
    moved = not inside.startswith("..") and inside != "."
    return any(
        path == directory or os.path.realpath(path) == wanted or (moved and path.endswith(os.sep + inside))
        for path in saved_in
    )


def left_in_another_version(directory: str) -> str | None:
    """Return where an earlier start of a script without ``dirpath`` has left its checkpoints, None if nowhere.

    ``directory`` is where this start will leave them: ``.../version_3/checkpoints``.
    """
    logs, _, version = os.path.dirname(directory).rpartition(os.sep)
    if is_remote(directory) or not version.startswith("version_"):
        return None
    for other in sorted(glob.glob(os.path.join(glob.escape(logs), "version_*", "checkpoints", "*.ckpt")), reverse=True):
        return os.path.dirname(other)
    return None


def stock_hint(*, is_shown: bool) -> None:
    """Let Lightning's warning of ``ckpt_path="last"`` through, or not: it asks for ``save_last``, set or not."""
    others = [each for each in warnings.filters if getattr(each[1], "pattern", None) != _STOCK_HINT]
    warnings.filters[:] = others  # type: ignore[index]
    if not is_shown:
        warnings.filterwarnings("ignore", message=_STOCK_HINT)


def open_filesystem(directory: str, storage_options: Mapping[str, Any] | None) -> Any:
    """Return fsspec's filesystem of a URL; it takes the options of the plugin and remembers no listings."""
    options = {name: value for name, value in (storage_options or {}).items() if name not in _OF_OUR_CLIENTS}
    filesystem, _ = fsspec.core.url_to_fs(directory, **{"use_listings_cache": False, **options})
    return filesystem


class _FoundCheckpoint:
    """Answers for a filesystem what the Trainer asks about the checkpoint that was found for ``"last"``."""

    def __init__(self, modified: float) -> None:
        self._modified = datetime.datetime.fromtimestamp(modified, tz=datetime.timezone.utc)

    def exists(self, path: str) -> bool:
        return True

    def modified(self, path: str) -> datetime.datetime:
        return self._modified


def tell_of_checkpoint(trainer: Any, path: str, modified: float) -> None:
    """Let the Trainer know a checkpoint on a store, and when it was committed (Unix time), without looking for it."""
    connector = sys.modules[type(trainer._checkpoint_connector).__module__]
    original = connector.get_filesystem
    known: dict[str, _FoundCheckpoint] | None = getattr(original, "found_checkpoints", None)
    if known is None:
        known = {}

        @functools.wraps(original)
        def get_filesystem(asked: Any, **options: Any) -> Any:
            found = known.pop(str(asked), None)
            return original(asked, **options) if found is None else found

        get_filesystem.found_checkpoints = known  # type: ignore[attr-defined]
        connector.get_filesystem = get_filesystem  # type: ignore[attr-defined]
    known[path] = _FoundCheckpoint(modified)
