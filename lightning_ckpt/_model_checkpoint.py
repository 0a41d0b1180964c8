"""A ``ModelCheckpoint`` that knows our plugins: background failures, copies instead of second saves, verified look-ups."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any
from weakref import proxy

from ckpt_core import Catalog, verify
from ckpt_core.errors import CheckpointError, CheckpointNotFoundError
from ckpt_core.reader import peek
from lightning_ckpt._outcomes import OutcomeWatch
from lightning_ckpt._private import ModelCheckpointBase, checkpoint_directory
from lightning_ckpt.io import TorchFileIO

__all__ = ["ReliableModelCheckpoint"]

logger = logging.getLogger(__name__)


class ReliableModelCheckpoint(ModelCheckpointBase):
    """What :class:`~lightning_ckpt.ResumableCheckpoint` adds to ``ModelCheckpoint`` besides the exact state."""

    def __init__(self, **settings: Any) -> None:
        self._best_model_path = ""
        self._looks_up_best = False
        super().__init__(**settings)
        self._looks_up_best = True
        self._watch: OutcomeWatch | None = None
        self._saved_by_this_trigger: str | None = None
        self._copy_of: str | None = None

    # ---- background saves --------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._looks_up_best = False
            # One watch per Trainer: several callbacks would announce a failure several times.
            others = [cb for cb in trainer.callbacks if isinstance(cb, ReliableModelCheckpoint)]
            if others[0] is self:
                self._watch = OutcomeWatch(trainer)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if self._watch is not None:
            self._watch.save_begun()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._watch is not None:
            self._watch.after_batch(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_end(trainer, pl_module)
        if self._watch is not None:
            self._watch.after_training(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        if self._watch is not None:
            self._watch.after_exception()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()  # some strategies never tear their plugin down

    def file_exists(self, filepath: Any, trainer: Any) -> bool:
        plugin = trainer.strategy.checkpoint_io
        under_way = isinstance(plugin, TorchFileIO) and plugin.checkpointer.is_pending(filepath)
        found: bool = trainer.strategy.reduce_boolean_decision(under_way, all=False)
        return found or super().file_exists(filepath, trainer)

    # ---- save_last: the same state under a second name ---------------------------------------------------------------

    def _monitor_candidates(self, trainer: Any) -> Any:
        self._saved_by_this_trigger = None  # called at the beginning of each trigger
        return super()._monitor_candidates(trainer)

    def _save_last_checkpoint(self, trainer: Any, monitor_candidates: Any) -> None:
        self._copy_of = self._saved_by_this_trigger if _saves_through_plugin(trainer.strategy) else None
        try:
            super()._save_last_checkpoint(trainer, monitor_candidates)
        finally:
            self._copy_of = None

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        plugin = trainer.strategy.checkpoint_io
        source = self._copy_of
        if source is None or source == filepath or not isinstance(plugin, TorchFileIO):
            super()._save_checkpoint(trainer, filepath)
            self._saved_by_this_trigger = filepath
            return
        if trainer.is_global_zero:
            plugin.checkpointer.copy(source, filepath)
        trainer.strategy.barrier("ResumableCheckpoint.save_last")
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = filepath
        if trainer.is_global_zero:
            for logger_ in trainer.loggers:
                logger_.after_save_checkpoint(proxy(self))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        # A copy holds the state of its original, which was saved before the name of the copy was known.
        resumed = trainer.ckpt_path
        if resumed and os.path.basename(resumed).startswith(self.CHECKPOINT_NAME_LAST) and self._is_in_dirpath(resumed):
            self.last_model_path = os.fspath(resumed)

    def _should_remove_checkpoint(self, trainer: Any, previous: str, current: str) -> bool:
        # Lightning keeps the checkpoint that the run was resumed from, but not on remote filesystems.
        resumed = trainer.ckpt_path
        if resumed and "://" in previous and (previous == os.fspath(resumed) or not self._is_in_dirpath(previous)):
            return False
        decision: bool = super()._should_remove_checkpoint(trainer, previous, current)
        return decision

    def _is_in_dirpath(self, path: Any) -> bool:
        directory = os.path.dirname(os.fspath(path))
        if self.dirpath is None or directory == os.fspath(self.dirpath):
            return self.dirpath is not None
        return "://" not in directory and os.path.abspath(directory) == os.path.abspath(self.dirpath)

    # ---- ckpt_path="last" and "best" ---------------------------------------------------------------------------------

    def _find_last_checkpoints(self, trainer: Any) -> set[str]:
        """Return the newest checkpoint of the directory that verifies, whatever its name.

        Raises:
            CheckpointNotFoundError: There are checkpoints, but none of them verifies.
        """
        found = self._newest_verified(checkpoint_directory(self, trainer), trainer)
        return {found} if found is not None else super()._find_last_checkpoints(trainer)

    def _newest_verified(self, directory: Any, trainer: Any = None) -> str | None:
        plugin = trainer.strategy.checkpoint_io if trainer is not None else None
        options = plugin.storage_options if isinstance(plugin, TorchFileIO) else None
        catalog = Catalog(directory, suffix=self.FILE_EXTENSION, storage_options=options)
        newest = catalog.newest_verified(_is_training_state)
        if newest is not None:
            return newest.path
        checkpoints = catalog.checkpoints()
        if checkpoints and not any(error is None for error in catalog.verify().values()):
            raise CheckpointNotFoundError(
                f"none of the {len(checkpoints)} checkpoints in the directory verifies",
                path=os.fspath(directory),
                remedy="move them away to start from scratch, or give the path of another checkpoint",
            )
        return None

    @property
    def best_model_path(self) -> str:
        """Path of the best checkpoint; in a process that has not trained, what the newest checkpoint says it is."""
        if not self._best_model_path and self._looks_up_best and self.dirpath is not None:
            self._best_model_path = self._best_of_earlier_run(self.dirpath)
        return self._best_model_path

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:
        self._best_model_path = path

    def _best_of_earlier_run(self, directory: Any) -> str:
        newest = self._newest_verified(directory)
        if newest is None:
            return ""
        saved = peek(newest).get("callbacks", {}).get(self.state_key, {}).get("best_model_path")
        if not saved:
            return newest
        # The directory may have been moved since.
        candidates = dict.fromkeys([saved, f"{os.fspath(directory).rstrip('/')}/{os.path.basename(saved)}"])
        for path in candidates:
            try:
                verify(path)
            except CheckpointError as error:
                logger.warning("passed over the best checkpoint %s: %s", path, error.message)
            else:
                return str(path)
        return newest


def _is_training_state(state: Any) -> bool:
    return isinstance(state, Mapping) and "optimizer_states" in state


def _saves_through_plugin(strategy: Any) -> bool:
    # Sharded strategies write by themselves and leave the plugin out.
    base: Any = next(cls for cls in type(strategy).__mro__ if cls.__name__ == "Strategy")
    return type(strategy).save_checkpoint is base.save_checkpoint
