"""Surfaces failures of saves in the training loop, on every rank at the same batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from ckpt_core.errors import CheckpointError
from ckpt_core.ranks import SharedOutcome, connect_store, decode_error, encode_error
from lightning_ckpt._private.replacing import Live, replace
from lightning_ckpt.io import AsyncCheckpointIO, TorchFileIO
from lightning_ckpt.sharded import ShardedCheckpointIO

__all__ = ["OutcomeWatch", "raise_together"]


def raise_together(trainer: Any, action: Callable[[], None]) -> None:
    """Run ``action``; if that raises a :class:`CheckpointError` on rank 0, raise it on every rank.

    Called on all ranks together. Without it the other ranks would wait for one that has left.

    Raises:
        CheckpointError: The failure, as the same class on every rank.
    """
    failure = None
    try:
        action()
    except CheckpointError as error:
        failure = error
    if trainer.world_size > 1:
        encoded = trainer.strategy.broadcast(encode_error(failure) if failure is not None else None)
        failure = failure or (decode_error(encoded) if encoded is not None else None)
    if failure is not None:
        raise failure


class OutcomeWatch(Live):
    """Watches the saves of a Trainer that has one of our plugins; does nothing with any other plugin.

    Args:
        trainer: The Trainer, its processes launched and connected.
    """

    def __init__(self, trainer: Any) -> None:
        plugin = trainer.strategy.checkpoint_io
        is_ours = isinstance(plugin, (AsyncCheckpointIO, ShardedCheckpointIO))
        self._checkpointer = plugin.checkpointer if is_ours else None
        self._writes = trainer.is_global_zero
        self._last_step = trainer.global_step
        self._unwatch: Callable[[], None] = lambda: None
        self._store: Store | None = None
        if self._checkpointer is not None and trainer.world_size > 1:
            self._store = connect_store(trainer.global_rank, trainer.world_size, trainer.strategy.broadcast)
        self._world_size = trainer.world_size
        self._raised = 0
        self._outcome = self._new_outcome()
        if isinstance(plugin, TorchFileIO) and trainer.world_size > 1:
            self._watch_saves(trainer, lambda save: raise_together(trainer, save))
        elif isinstance(plugin, ShardedCheckpointIO):
            self._watch_saves(trainer, lambda save: save())  # its failures are raised on all ranks already

    def _new_outcome(self) -> SharedOutcome:
        # One name space for each failure: what was raised once is not found again.
        store = None if self._store is None else PrefixStore(f"outcome-{self._raised}", self._store)
        return SharedOutcome(store, self._world_size)

    def _after_raise(self) -> None:
        self._raised += 1
        self._outcome = self._new_outcome()
        self._outcome.save_begun()  # others may be under way

    def _watch_saves(self, trainer: Any, run: Callable[[Callable[[], None]], None]) -> None:
        # There is no hook of a callback for this: a save of bare weights calls none.
        def watched(original: Callable[..., None]) -> Callable[..., None]:
            def save_checkpoint(*args: Any, **kwargs: Any) -> None:
                self._outcome.save_begun()
                try:
                    run(lambda: original(*args, **kwargs))
                except CheckpointError:
                    self._after_raise()
                    raise

            return save_checkpoint

        self._unwatch = replace(trainer.strategy, "save_checkpoint", watched)

    def after_batch(self, trainer: Any) -> None:
        """Raise the failure of a background save, if all ranks know of it by now.

        Raises:
            CheckpointError: The failure, as the same class on every rank.
        """
        if self._checkpointer is None or (trainer.world_size > 1 and trainer.global_step == self._last_step):
            return
        self._last_step = trainer.global_step
        pending = self._checkpointer.is_busy  # before the failure is looked for: it may come in between
        # It stays where the next save finds it. Some ranks know of it sooner than others, and all must refuse that save.
        failure = self._checkpointer.failure
        try:
            self._outcome.at_boundary(writes=self._writes, pending=pending, failure=failure)
        except CheckpointError:
            self._checkpointer.take_failure()
            self._after_raise()
            raise

    def after_training(self, trainer: Any) -> None:
        """Wait for the background and raise a failure that no rank has raised yet; called on all ranks together.

        Raises:
            CheckpointError: The failure, as the same class on every rank.
        """
        if self._checkpointer is not None:
            self._checkpointer.drain()
            raise_together(trainer, self._checkpointer.raise_failure)

    def after_exception(self) -> None:
        """Wait for the background; its failures were logged and must not hide the exception that is being raised."""
        self._unwatch()
        if self._checkpointer is not None:
            self._checkpointer.close(raises=False)  # Lightning calls no teardown after an exception

    def close(self) -> None:
        """Wait for the background, free its memory and raise what was not raised yet."""
        self._unwatch()
        if self._checkpointer is not None:
            self._checkpointer.close()
