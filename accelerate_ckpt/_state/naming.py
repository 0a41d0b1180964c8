"""Paths of checkpoints: Accelerate's automatic names, and which numbered checkpoints exist."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Iterable
from typing import Any

from ckpt_core import Catalog, CheckpointInfo
from ckpt_core.catalog import newest_first
from ckpt_core.paths import StrPath, is_remote, local_path
from ckpt_core.tiers import Tiers

log = logging.getLogger(__name__)

_FOLDER = "checkpoints"
_PREFIX = "checkpoint"  # as Accelerate and the Trainer name theirs
_NAME = _PREFIX + "_{}"
# Accelerate's own rule: the first run of digits in the last component of the path.
NUMBER = re.compile(r"[0-9]+")


def path_text(path: StrPath) -> str:
    """Return the path as text, ``~`` expanded, without the prefix of a local URL (``file://``)."""
    text = local_path(path)
    return text if is_remote(text) else os.path.expanduser(text)


def automatic_root(accelerator: Any) -> str:
    """Return the directory of automatically named checkpoints."""
    return os.path.join(local_path(accelerator.project_dir), _FOLDER)


def target_of(accelerator: Any, output_dir: StrPath | None) -> str:
    """Return the path of a save: the next automatic name if enabled, else ``output_dir``; ``TypeError`` without either.

    A link to a directory is followed and kept, as by Accelerate: users place it to have checkpoints on another disk.
    """
    if accelerator.project_configuration.automatic_checkpoint_naming:
        return os.path.join(automatic_root(accelerator), _NAME.format(accelerator.save_iteration))
    if output_dir is None:
        raise TypeError("save_state needs output_dir, unless ProjectConfiguration(automatic_checkpoint_naming=True)")
    text = path_text(output_dir)
    is_link = not is_remote(text) and os.path.islink(text.rstrip("/")) and os.path.isdir(text)
    return os.path.realpath(text) if is_link else text


def number_of(path: str) -> int | None:
    """Return the number in the name of a checkpoint; None if there is none or the name begins with a dot."""
    name = os.path.basename(path.rstrip("/"))
    found = None if name.startswith(".") else NUMBER.search(name)
    return int(found.group()) if found else None


def numbered(root: str, storage_options: dict[str, Any] | None, tiers: Tiers | None = None) -> dict[int, str]:
    """Return the committed checkpoints in ``root``, or in both tiers of it, by number."""
    return by_number(Catalog(root, suffix="", storage_options=storage_options, tiers=tiers).paths())


def candidates(
    root: str, storage_options: dict[str, Any] | None = None, tiers: Tiers | None = None
) -> list[CheckpointInfo]:
    """Return the numbered checkpoints in ``root``, the newest first: ours, and directories that stock may have written.

    Ours record when they were committed; the others are ordered by their number, also relative to ours.
    """
    infos = Catalog(root, suffix="", storage_options=storage_options, tiers=tiers).checkpoints()
    ours = {os.path.basename(info.path) for info in infos}
    if not is_remote(root) and os.path.isdir(root):
        with os.scandir(root) as entries:
            infos += [
                CheckpointInfo(entry.path, 0, entry.stat().st_mtime, is_directory=True)
                for entry in entries
                if entry.name not in ours and entry.name.startswith(_PREFIX) and entry.is_dir()
            ]
    found = [(number_of(info.path), info) for info in infos]
    return newest_first(dataclasses.replace(info, step=number) for number, info in found if number is not None)


def by_number(paths: Iterable[str]) -> dict[int, str]:
    """Return the checkpoints whose names have a number, by that number."""
    return {number: path for path in paths if (number := number_of(path)) is not None}


def next_iteration(
    accelerator: Any, loaded: int | None, storage_options: dict[str, Any] | None, tiers: Tiers | None = None
) -> int:
    """Return the number of the next automatic name: above the loaded one and above all that exist.

    A new process would count from 0 again: it would take a name that exists or, with ``total_limit``, have its
    checkpoints deleted as the oldest. A run that goes back to an older checkpoint keeps the newer ones, and the next
    one is the newest.
    """
    root = automatic_root(accelerator)
    # Also directories that stock Accelerate or a crash has left: their names are in use.
    names = os.listdir(root) if not is_remote(root) and os.path.isdir(root) else []
    if not names or tiers is not None:
        names += numbered(root, storage_options, tiers).values()
    taken = [number for name in names if (number := number_of(name)) is not None]
    known = [int(accelerator.project_configuration.iteration), *(number + 1 for number in taken)]
    return max(known if loaded is None else [*known, loaded + 1])
