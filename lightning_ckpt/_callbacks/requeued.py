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

from ckpt_core import Catalog, CheckpointInfo
from ckpt_core.errors import CheckpointError

__all__ = ["newest_requeued"]

logger = logging.getLogger(__name__)

_NAME = re.compile(r"hpc_ckpt_\d+\.ckpt$")


def newest_requeued(catalog: Catalog, root: str, directory: str) -> CheckpointInfo | None:
    """Return the newest checkpoint of a requeue that verifies and belongs to this run, or None.

    Args:
        catalog: Of ``root``.
        root: ``default_root_dir`` of the Trainer.
        directory: Where the callback keeps its checkpoints.
    """
    for info in catalog.checkpoints():
        if _NAME.match(info.name) is None:
            continue
        try:
            if _is_of_run(catalog.peek(info.path), root, directory):
                catalog.check(info.path)
                return info
        except CheckpointError as error:
            logger.warning("passed over the checkpoint %s: %s", info.path, error.message)
    return None


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
