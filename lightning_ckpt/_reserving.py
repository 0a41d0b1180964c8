"""Memory for the copy of a Trainer's state, allocated beside the first batches instead of in the first save."""

from __future__ import annotations

from typing import Any

from ckpt_core import Checkpointer
from lightning_ckpt._plugin_base import ReliableCheckpointIO


def reserve_memory(trainer: Any) -> None:
    """Let the plugin of a Trainer allocate memory for its asynchronous saves, when its optimizers have their state."""
    strategy, plugin = trainer.strategy, trainer.strategy.checkpoint_io
    callbacks = trainer.checkpoint_callbacks
    if not isinstance(plugin, ReliableCheckpointIO) or plugin.options.strategy == "sync" or not callbacks:
        return
    if isinstance(plugin.checkpointer, Checkpointer) and (
        not trainer.is_global_zero or strategy.restore_checkpoint_after_setup
    ):
        return  # one rank writes the file; what it gathers of sharded strategies is not known here
    weights_only = all(getattr(callback, "save_weights_only", False) for callback in callbacks)
    plugin.checkpointer.reserve([trainer.lightning_module], [] if weights_only else trainer.optimizers)
