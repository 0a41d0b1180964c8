"""Raises failures of background saves in the training loop, on every rank after the same batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ckpt_core.errors import CheckpointError
from ckpt_core.ranks import RunOutcome, connect_store, raise_together
from lightning_ckpt._private.replacing import Live, wrap
from lightning_ckpt.io import AsyncCheckpointIO, TorchFileIO
from lightning_ckpt.sharded import ShardedCheckpointIO


def raise_as_rank_0(trainer: Any, action: Callable[[], None]) -> None:
    """Run ``action``; if that raises a :class:`CheckpointError` on rank 0, raise it on every rank, as the same class.

    Called on all ranks together. Without it, the other ranks would wait for the rank that raised.
    """
    several = trainer.world_size > 1
    raise_together(action, (lambda mine: [trainer.strategy.broadcast(mine)]) if several else None)


class OutcomeWatch(Live):
    """Watches the saves of a Trainer whose processes are connected; does nothing without one of our plugins."""

    def __init__(self, trainer: Any) -> None:
        plugin = trainer.strategy.checkpoint_io
        is_ours = isinstance(plugin, (AsyncCheckpointIO, ShardedCheckpointIO))
        self._checkpointer = plugin.checkpointer if is_ours else None
        self._outcome: RunOutcome | None = None
        self._last_step = trainer.global_step
        self._unwatch: Callable[[], None] = lambda: None
        rank, world_size = trainer.global_rank, trainer.world_size
        if self._checkpointer is not None:
            store = connect_store(rank, world_size, trainer.strategy.broadcast) if world_size > 1 else None
            self._outcome = RunOutcome(self._checkpointer, store, rank, world_size)
        # ShardedCheckpointIO already raises its failures on all ranks
        self._raises_as_rank_0 = isinstance(plugin, TorchFileIO)
        if isinstance(plugin, ShardedCheckpointIO) or (self._raises_as_rank_0 and world_size > 1):
            # A callback's hooks do not suffice: a weights-only save calls none.
            self._unwatch = wrap(trainer.strategy, "save_checkpoint", functools.partial(self._save, trainer))

    def _save(self, trainer: Any, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        save = functools.partial(original, *args, **kwargs)
        if self._outcome is not None:
            self._outcome.save_begun()
        try:
            raise_as_rank_0(trainer, save) if self._raises_as_rank_0 else save()
        except CheckpointError:
            if self._outcome is not None:
                self._outcome.was_raised()
            raise

    def after_batch(self, trainer: Any) -> None:
        """Raise the failure of a background save, as the same class on every rank, if all ranks know of it by now."""
        if self._outcome is None or (trainer.world_size > 1 and trainer.global_step == self._last_step):
            return
        self._last_step = trainer.global_step
        self._outcome.at_boundary()

    def after_training(self, trainer: Any) -> None:
        """Wait for pending saves and raise, on all ranks together, a failure that no rank has raised yet."""
        if self._checkpointer is not None:
            self._checkpointer.drain()
            raise_as_rank_0(trainer, self._checkpointer.raise_failure)

    def after_exception(self) -> None:
        """Wait for pending saves; their failures were logged and must not hide the exception that is being raised."""
        self._unwatch()
        if self._checkpointer is not None:
            self._checkpointer.close(raises=False)  # Lightning calls no teardown after an exception

    def close(self) -> None:
        """Wait for pending saves, free their memory and raise a failure that was not raised yet."""
        self._unwatch()
        if self._checkpointer is not None:
            self._checkpointer.close()
