"""The base classes of the installed Lightning packages.

``lightning`` and ``pytorch_lightning`` are two distributions with two sets of classes. A Trainer accepts only plugins
that derive from its own, and looks for "last" and "best" only in callbacks that do. Ours derive from both where both
are installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_ckpt._private.messages import kept_logger

__all__ = ["CallbackBase", "CheckpointBase", "CheckpointIOBase", "DummyLoggerBase", "ModelCheckpointBase"]

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO as CheckpointIOBase
    from lightning.pytorch.callbacks import Callback as CallbackBase
    from lightning.pytorch.callbacks import Checkpoint as CheckpointBase
    from lightning.pytorch.callbacks import ModelCheckpoint as ModelCheckpointBase
    from lightning.pytorch.loggers.logger import DummyLogger as DummyLoggerBase
else:

    def _derived_from_installed(name: str, *modules: str) -> type[Any]:
        bases = []
        for module in modules:
            try:
                bases.append(getattr(importlib.import_module(module), name))
            except ModuleNotFoundError as error:
                if error.name is None or not module.startswith(error.name):
                    raise
        if not bases:
            raise ModuleNotFoundError(
                "lightning_ckpt needs Lightning: in a clone of ckpt-plugins, pip install '.[lightning]' or "
                "'.[pytorch-lightning]'"
            )
        return type(f"{name}Base", tuple(bases), {"__module__": __name__})

    with kept_logger():
        CheckpointIOBase = _derived_from_installed(
            "CheckpointIO", "lightning.fabric.plugins", "lightning_fabric.plugins"
        )
        CallbackBase = _derived_from_installed("Callback", "lightning.pytorch.callbacks", "pytorch_lightning.callbacks")
        CheckpointBase = _derived_from_installed(
            "Checkpoint", "lightning.pytorch.callbacks", "pytorch_lightning.callbacks"
        )
        DummyLoggerBase = _derived_from_installed(
            "DummyLogger", "lightning.pytorch.loggers.logger", "pytorch_lightning.loggers.logger"
        )
        ModelCheckpointBase = _derived_from_installed(
            "ModelCheckpoint", "lightning.pytorch.callbacks", "pytorch_lightning.callbacks"
        )
