"""``CheckpointIO`` plugins that write one durable, verified, torch-loadable file at exactly the path given."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any, Literal, Union

from ckpt_core import Checkpointer
from ckpt_core.errors import CheckpointNotFoundError
from ckpt_core.events import EventLog, Listener
from ckpt_core.tiers import Tiers
from lightning_ckpt._boundaries import watch_boundaries
from lightning_ckpt._plugin_base import ReliableCheckpointIO, SaveOutcomes
from lightning_ckpt._private.hooks import before_setup

__all__ = ["AsyncCheckpointIO", "SyncCheckpointIO", "TorchFileIO", "training_goes_on"]

_Path = Union[str, "os.PathLike[str]"]

STATE_KEY = "lightning_ckpt"
# why a checkpoint holds no exact state although the callback is there, in words
NO_STATE_KEY = "lightning_ckpt_no_exact_state"
# A state this small is durable in some milliseconds: waiting for it is cheap, and keeps the directory as those expect it who
# look there between two saves, such as ModelCheckpoint when it picks a name that is not taken.
SMALL_STATE_BYTES = 256 * 1024
_LONGEST_WAIT_FOR_SMALL_SECONDS = 1.0
_SLURM_REQUEUE_PREFIX = "hpc_ckpt"


class TorchFileIO(ReliableCheckpointIO):
    """What the plugins that write one file share: a :class:`ckpt_core.Checkpointer` in Lightning's words."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        storage_options: dict[str, Any] | None,
        tiers: Tiers | None = None,
        outcomes: SaveOutcomes | None = None,
    ) -> None:
        self._checkpointer = checkpointer
        self.storage_options = storage_options
        self.tiers = tiers
        self.outcomes = outcomes or SaveOutcomes()
        self._told_about_callback = False
        before_setup(_watch)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        before_setup(_watch)  # in a process that was spawned, too

    @property
    def checkpointer(self) -> Checkpointer:
        """What saves."""
        return self._checkpointer

    @checkpointer.setter
    def checkpointer(self, checkpointer: Checkpointer) -> None:
        self._checkpointer = checkpointer

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _Path, storage_options: Any | None = None) -> None:
        """Save ``checkpoint`` at ``path``.

        Args:
            checkpoint: What the Trainer or Fabric collected.
            path: Local path or URL.
            storage_options: Not taken for a single save.

        Raises:
            CheckpointError: The save, or an earlier one in the background, failed.
            TypeError: ``storage_options`` is given.
        """
        if storage_options is not None:
            name = type(self).__name__
            raise TypeError(  # begins as that of Lightning's own plugin, for those who look for it
                f"`Trainer.save_checkpoint(..., storage_options=...)` with `storage_options` arg is not supported for "
                f"`{name}`. Please implement your custom `CheckpointIO` to define how you'd like to use "
                f"`storage_options`, or give them to `{name}(storage_options=...)`: they hold for every save there"
            )
        self._tell_about_callback_once(checkpoint)
        self.before_change(path, removes=False)
        size = self.checkpointer.save(checkpoint, path)
        if not training_goes_on(checkpoint, path):
            self.checkpointer.wait(path)
        elif size <= SMALL_STATE_BYTES:
            self.checkpointer.drain(timeout=_LONGEST_WAIT_FOR_SMALL_SECONDS)
        self.checkpointer.wait_when_touched(path)

    def load_checkpoint(
        self, path: _Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint and verify every byte of it; one whose save is under way is waited for.

        Args:
            path: Local path or URL.
            map_location: As for ``torch.load``; the CPU, if not given, as in Lightning's own plugin.
            weights_only: As for ``torch.load``.

        Raises:
            CheckpointError: The file is missing, damaged, foreign, of a newer format, or holds objects that are not
                plain data.
        """
        location = (lambda storage, _: storage) if map_location is None else map_location
        try:
            state: dict[str, Any] = self.checkpointer.load(path, map_location=location, weights_only=weights_only)
        except CheckpointNotFoundError as error:  # in the words of Lightning's own plugin
            raise CheckpointNotFoundError(f"Checkpoint file not found: {path}", path=error.path) from error
        return state

    def remove_checkpoint(self, path: _Path) -> None:
        """Delete a checkpoint, after the saves asked for before are durable; keep it if the newest of them fails."""
        self.before_change(path, removes=True)
        self.checkpointer.remove(path)
        self.checkpointer.wait_when_touched(path)

    def teardown(self) -> None:
        """Wait for the background, free its memory and raise a failure that was not raised yet."""
        self.checkpointer.close()

    def _tell_about_callback_once(self, checkpoint: Any) -> None:
        is_training_state = isinstance(checkpoint, Mapping) and "loops" in checkpoint and "callbacks" in checkpoint
        if not is_training_state or self._told_about_callback:
            return
        if STATE_KEY not in checkpoint and NO_STATE_KEY not in checkpoint:
            self._told_about_callback = True
            warnings.warn(
                f"{type(self).__name__} stores what the Trainer gives it, which is not enough for an exact resume: random "
                "number generators, data position and open gradients are missing. Add lightning_ckpt.ResumableCheckpoint "
                "to the Trainer's callbacks to have them saved too.",
                stacklevel=2,
            )


def _watch(trainer: Any) -> None:
    if isinstance(trainer.strategy.checkpoint_io, TorchFileIO):
        watch_boundaries(trainer)


def training_goes_on(checkpoint: Any, path: _Path) -> bool:
    """Return False where waiting costs no training, and a caller may rely on the file as soon as the save returns."""
    if os.path.basename(path).startswith(_SLURM_REQUEUE_PREFIX):
        return False  # SLURM requeues the job, and with it ends this process
    try:
        epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]
        # Equal between epochs: before fit, after it, and when it ends.
        return bool(epochs["ready"] != epochs["completed"])
    except (KeyError, TypeError):
        return True  # not a Trainer's: Fabric's, or bare weights


def _listeners(event_log: str | None) -> list[Listener]:
    return [EventLog(event_log)] if event_log is not None else []


class SyncCheckpointIO(TorchFileIO):
    """Saves before training goes on: when ``save_checkpoint`` returns, the file is durable under its name.

    Needs at most 128 MiB of extra memory, whatever the size of the state.

    Args:
        storage_options: Passed to fsspec for checkpoints at URLs (``s3://...``): endpoint, credentials and so on.
        local_dir: Directory on a fast local disk, below which checkpoints are committed and training goes on; then they are
            uploaded from there in the background. Needs ``upload_to``.
        upload_to: URL or directory that takes the uploads, under the same relative names. Loads and look-ups take the nearest
            copy that is whole, under the path of either tier.
        keep_local: How many of the newest uploaded checkpoints of a directory stay in ``local_dir``; None: all.
        event_log: A local file to which every event is appended as a line of JSON (:mod:`ckpt_core.events`).

    Example::

        trainer = Trainer(plugins=[SyncCheckpointIO()], callbacks=[ResumableCheckpoint(dirpath="checkpoints")])
    """

    def __init__(
        self,
        *,
        storage_options: dict[str, Any] | None = None,
        local_dir: str | None = None,
        upload_to: str | None = None,
        keep_local: int | None = None,
        event_log: str | None = None,
    ) -> None:
        tiers = Tiers.of(local_dir, upload_to, keep_local)
        super().__init__(
            Checkpointer(
                strategy="sync", storage_options=storage_options, tiers=tiers, listeners=_listeners(event_log)
            ),
            storage_options,
            tiers,
        )


class AsyncCheckpointIO(TorchFileIO):
    """Copies the state and lets training go on while the copy is written in the background.

    The file appears under its name when it is durable. Removals wait for their successor, reads for their own writes, and
    the end of ``fit`` for everything. A save outside of a running epoch, such as ``trainer.save_checkpoint`` after ``fit``,
    returns when it is durable, and so does one of at most 256 KiB, unless the storage takes over a second. Needs ``max_pending`` times the state's size of extra host memory.

    Args:
        max_pending: How many saves may be under way before the next one waits for the oldest.
        on_error: ``"raise"`` ends training when a save failed in the background: on every rank after the next batch with
            :class:`~lightning_ckpt.ResumableCheckpoint`, otherwise at the next save or at the end of ``fit``. ``"warn"``
            logs the failure, counts it in ``checkpointer.failures`` and trains on.
        storage_options: Passed to fsspec for checkpoints at URLs (``s3://...``): endpoint, credentials and so on.
        local_dir: Directory on a fast local disk, below which checkpoints are committed and training goes on; then they are
            uploaded from there in the background. Needs ``upload_to``.
        upload_to: URL or directory that takes the uploads, under the same relative names. Loads and look-ups take the nearest
            copy that is whole, under the path of either tier.
        keep_local: How many of the newest uploaded checkpoints of a directory stay in ``local_dir``; None: all.
        event_log: A local file to which every event is appended as a line of JSON (:mod:`ckpt_core.events`).

    Example::

        trainer = Trainer(plugins=[AsyncCheckpointIO()], callbacks=[ResumableCheckpoint(dirpath="checkpoints")])
    """

    def __init__(
        self,
        *,
        max_pending: int = 1,
        on_error: Literal["raise", "warn"] = "raise",
        storage_options: dict[str, Any] | None = None,
        local_dir: str | None = None,
        upload_to: str | None = None,
        keep_local: int | None = None,
        event_log: str | None = None,
    ) -> None:
        tiers, outcomes = Tiers.of(local_dir, upload_to, keep_local), SaveOutcomes()
        super().__init__(
            Checkpointer(
                strategy="async",
                max_pending=max_pending,
                on_error=on_error,
                storage_options=storage_options,
                tiers=tiers,
                listeners=[outcomes, *_listeners(event_log)],
            ),
            storage_options,
            tiers,
            outcomes,
        )
