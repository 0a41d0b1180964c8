"""The checkpoint that SLURM requeued a job with, for ``ckpt_path="last"``.

Lightning puts it at ``hpc_ckpt_N.ckpt`` in ``default_root_dir``, which may be the working directory of several experiments. It
belongs to a run whose checkpoints are in the same directory as those of this one.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from typing import Any

from ckpt_core import Catalog
from ckpt_core.errors import CheckpointError

__all__ = ["newest_requeued", "progress_of"]

logger = logging.getLogger(__name__)

_NAME = re.compile(r"^hpc_ckpt_(\d+)\.ckpt$")


def newest_requeued(catalog: Catalog, root: str, directory: str) -> str | None:
    """Return the newest checkpoint of a requeue that verifies and belongs to this run, or None.

    Args:
        catalog: Of ``root``.
        root: ``default_root_dir`` of the Trainer.
        directory: Where the callback keeps its checkpoints.
    """
    numbers = {info.path: _NAME.match(os.path.basename(info.path)) for info in catalog.checkpoints()}
    found = {path: int(match[1]) for path, match in numbers.items() if match is not None}
    for path in sorted(found, key=lambda path: found[path], reverse=True):
        try:
            if _is_of_run(catalog.peek(path), root, directory):
                catalog.check(path)
                return path
        except CheckpointError as error:
            logger.warning("passed over the checkpoint %s: %s", path, error.message)
    return None


def progress_of(state: Any) -> tuple[int, int]:
    """Return how far a checkpoint says that its run was: optimizer steps and batches."""
    try:
        loops = state["loops"]["fit_loop"]
        return int(state["global_step"]), int(loops["epoch_loop.batch_progress"]["total"]["ready"])
    except (KeyError, TypeError):
        return -1, -1


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
