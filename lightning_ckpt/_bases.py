"""The ``CheckpointIO`` base classes of the installed Lightning packages.

``lightning`` and ``pytorch_lightning`` are two distributions with two sets of classes; a Trainer accepts only plugins
that derive from its own. Ours derive from both where both are installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["CheckpointIOBase"]

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO as CheckpointIOBase
else:

    def _installed_bases() -> tuple[type[Any], ...]:
        bases = []
        for package in ("lightning.fabric.plugins", "lightning_fabric.plugins"):
            try:
                bases.append(importlib.import_module(package).CheckpointIO)
            except ModuleNotFoundError as error:
                if error.name is None or not package.startswith(error.name):
                    raise
        if not bases:
            raise ModuleNotFoundError(
                "lightning_ckpt needs Lightning: install ckpt-plugins[lightning] or ckpt-plugins[pytorch-lightning]"
            )
        return tuple(bases)

    CheckpointIOBase = type("CheckpointIOBase", _installed_bases(), {"__module__": __name__})
