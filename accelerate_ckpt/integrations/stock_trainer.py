"""Warns once that a ``transformers.Trainer`` in a launched script saves its own, stock checkpoints.

The launcher replaces Accelerate's ``save_state``, which the Trainer never calls. Its checkpoints are not replaced as
well: a subclass may save in its own way, and arguments that :class:`ResumableCallback` refuses would end a script that
works.
"""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

from transformers import TrainerCallback

log = logging.getLogger(__name__)


class StockCheckpointNotice(TrainerCallback):
    """Warns at the first checkpoint of a Trainer that has no :class:`ResumableCallback`."""

    _was_told = False

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if StockCheckpointNotice._was_told or not state.is_world_process_zero:
            return
        StockCheckpointNotice._was_told = True
        log.warning(
            "this transformers.Trainer saves its own checkpoints, which accelerate_ckpt leaves alone: they are "
            "neither durable nor verified, and training waits while they are written. To use ours: Trainer(..., "
            "callbacks=[accelerate_ckpt.integrations.transformers.ResumableCallback()])"
        )


def tell_of_trainers(module: ModuleType) -> None:
    """Add the notice to all Trainers of ``transformers.trainer`` that are created from now on."""
    callbacks = getattr(module, "DEFAULT_CALLBACKS", None)
    if isinstance(callbacks, list) and StockCheckpointNotice not in callbacks:
        callbacks.append(StockCheckpointNotice)
