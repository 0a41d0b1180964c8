"""Surfaces failures of background saves in the training loop, on every rank at the same batch."""

from __future__ import annotations

from typing import Any

from ckpt_core.commit import SharedOutcome, connect_store, decode_error, encode_error
from lightning_ckpt.io import AsyncCheckpointIO

__all__ = ["OutcomeWatch"]


class OutcomeWatch:
    """Watches the Trainer's :class:`~lightning_ckpt.AsyncCheckpointIO`; does nothing with any other plugin.

    Args:
        trainer: The Trainer, its processes launched and connected.
    """

    def __init__(self, trainer: Any) -> None:
        plugin = trainer.strategy.checkpoint_io
        self._checkpointer = plugin.checkpointer if isinstance(plugin, AsyncCheckpointIO) else None
        self._writes = trainer.is_global_zero
        self._last_step = trainer.global_step
        store = None
        if self._checkpointer is not None and trainer.world_size > 1:
            store = connect_store(trainer.global_rank, trainer.world_size, trainer.strategy.broadcast)
            # Raised inside the next save, a failure would end this rank alone and leave the others waiting.
            self._checkpointer.raises_on_save = False
        self._outcome = SharedOutcome(store)

    def save_begun(self) -> None:
        """Note a save; called on every rank."""
        self._outcome.save_begun()

    def after_batch(self, trainer: Any) -> None:
        """Raise the failure of a background save, if all ranks know of it by now.

        Raises:
            CheckpointError: The failure, as the same class on every rank.
        """
        if self._checkpointer is None or (trainer.world_size > 1 and trainer.global_step == self._last_step):
            return
        self._last_step = trainer.global_step
        pending = bool(self._checkpointer.pending)  # before the failure is taken: it may come in between
        self._outcome.at_boundary(writes=self._writes, pending=pending, failure=self._checkpointer.take_failure())

    def after_training(self, trainer: Any) -> None:
        """Wait for the background and raise a failure that no rank has raised yet; called on all ranks together.

        Raises:
            CheckpointError: The failure, as the same class on every rank.
        """
        if self._checkpointer is None:
            return
        self._checkpointer.drain()
        failure = self._outcome.unraised or self._checkpointer.take_failure()
        if trainer.world_size > 1:
            encoded = trainer.strategy.broadcast(encode_error(failure) if failure is not None else None)
            failure = failure or (decode_error(encoded) if encoded is not None else None)
        if failure is not None:
            raise failure

    def after_exception(self) -> None:
        """Wait for the background; its failures were logged and must not hide the exception that is being raised."""
        if self._checkpointer is not None:
            self._checkpointer.drain()
            self._checkpointer.take_failure()

    def close(self) -> None:
        """Wait for the background, free its memory and raise what was not raised yet."""
        if self._checkpointer is not None:
            self._checkpointer.raises_on_save = True
            self._checkpointer.close()
