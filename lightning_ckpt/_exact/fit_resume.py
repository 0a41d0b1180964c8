"""Tracks the resume of one fit, as distinct from checkpoints that callbacks and hooks restore themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ckpt_core.errors import CheckpointFormatError
from lightning_ckpt._private.loops import Internals

_VERSION = "pytorch-lightning_version"  # Lightning loads no checkpoint without this key
_PROGRESS = ("epoch", "global_step", "loops")
_TRAINING_STATE = ("optimizer_states", "lr_schedulers", "native_amp_scaling_state")
_MARK = "lightning_ckpt_resumed_from"


class Resume:
    """The resume of one fit, from ``fit(ckpt_path=...)`` until training continues.

    A callback may save and restore a checkpoint in between, for itself or to search for a learning rate. Such a
    checkpoint has to hold the state that the run resumes from, because the Trainer's own counters and optimizers are
    not restored yet. Restoring it must not replace the checkpoint to resume from.
    """

    def __init__(self, internals: Internals) -> None:
        self._internals = internals
        self.path: Any = None
        self._kept: dict[str, Any] = {}
        self.is_loading = False
        self.awaits_training_state = False
        internals.around_resume(self._load)

    def _load(self, restore: Callable[[], None]) -> None:
        self.is_loading = True
        try:
            restore()
        except IsADirectoryError as error:
            raise CheckpointFormatError(
                "this checkpoint is a directory, and the Trainer has no plugin that reads one",
                path=error.filename,
                remedy="Trainer(plugins=[AsyncCheckpointIO()]), or ShardedCheckpointIO() to save directories, too; or "
                f"make one file of it: ckpt convert {error.filename} FILE --to file",
            ) from error
        except KeyError as error:
            if error.args != (_VERSION,):
                raise
            raise CheckpointFormatError(
                f"this is not a Trainer's checkpoint: it has no {_VERSION}",
                path=next((str(path) for path in getattr(restore, "args", ())), None),
                remedy="take its weights: Trainer(callbacks=[lightning_ckpt.WarmStart(path)])",
            ) from error
        finally:
            self.is_loading = False
        connector = self._internals.checkpoints
        if connector._loaded_checkpoint:
            self.path, self.awaits_training_state = connector._ckpt_path, True
            precision = type(self._internals.trainer.precision_plugin).__qualname__
            for name in (*_PROGRESS, *_TRAINING_STATE, precision):
                if name in connector._loaded_checkpoint:
                    self._kept[name] = connector._loaded_checkpoint[name]
            self._internals.finish_resume(lambda: self.awaits_training_state, self._training_state_restored)

    def _training_state_restored(self) -> None:
        self.awaits_training_state = False
        # optimizers and schedulers have loaded the rest
        self._kept = {name: value for name, value in self._kept.items() if name in _PROGRESS}

    def put_into(self, checkpoint: dict[str, Any]) -> None:
        """Put the state that the run resumes from into a checkpoint that is saved before training continues."""
        checkpoint.update(self._kept)
        checkpoint[_MARK] = str(self.path)

    def keeps(self, checkpoint: Mapping[str, Any]) -> bool:
        """Return whether a restored checkpoint is what this run resumes from, or an earlier one of its own."""
        same = self._internals.checkpoints._ckpt_path == self.path
        return same or checkpoint.get(_MARK) == str(self.path)

    def give_up(self) -> None:
        """Stop the resume, because another checkpoint was restored in place of the one to resume from."""
        self._kept, self.awaits_training_state = {}, False
