"""``CheckpointIO`` plugins that write one durable, verified, torch-loadable file at exactly the given path."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ckpt_core import Checkpointer
from ckpt_core.errors import CheckpointError, CheckpointNotFoundError, StorageError
from ckpt_core.events import Listener
from ckpt_core.options import CheckpointerOptions
from ckpt_core.paths import StrPath
from ckpt_core.process.awaited_paths import wait_for_saves
from ckpt_core.small_states import wait_if_small
from ckpt_core.tiers import MemoryTier
from lightning_ckpt._plugin_base import ReliableCheckpointIO
from lightning_ckpt._preemption import watch_boundaries
from lightning_ckpt._private.hooks import before_loads_of_fabric, before_setup
from lightning_ckpt._private.loops import given_to
from lightning_ckpt._rehearsing import rehearse_if_asked

STATE_KEY = "lightning_ckpt"
# the value of this key says why a checkpoint has no exact state although the callback is on the Trainer
NO_STATE_KEY = "lightning_ckpt_no_exact_state"
_SLURM_REQUEUE_PREFIX = "hpc_ckpt"
_RAY_REPORT = "lightning_checkpoints-job_id="  # in the paths of Ray's RayTrainReportCallback


class TorchFileIO(ReliableCheckpointIO):
    """Base of the plugins that write one file: a :class:`ckpt_core.Checkpointer` behind Lightning's interface."""

    def __init__(self, options: CheckpointerOptions) -> None:
        super().__init__(options)
        self._checkpointer = Checkpointer(**self._settings)
        self._told_about_callback = False
        _listen()
        rehearse_if_asked()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _listen()  # a spawned process unpickles the plugin, and has no hooks yet

    @property
    def checkpointer(self) -> Checkpointer:
        """The checkpointer of this plugin."""
        return self._checkpointer

    @checkpointer.setter
    def checkpointer(self, checkpointer: Checkpointer) -> None:
        self._checkpointer = checkpointer

    def checkpointer_in_memory(self, tier: MemoryTier) -> Checkpointer:
        """Return a checkpointer for snapshots in memory."""
        return Checkpointer(**tier.settings(self.options.strategy))

    def save_checkpoint(self, checkpoint: dict[str, Any], path: StrPath, storage_options: Any | None = None) -> None:
        """Save ``checkpoint`` at ``path``.

        Args:
            checkpoint: The state that the Trainer or Fabric collected.
            path: Local path or URL.
            storage_options: Not supported for a single save.

        Raises:
            CheckpointError: This save, or an earlier one in the background, failed.
            TypeError: ``storage_options`` was passed.
        """
        self.refuse(storage_options)
        if self.memory is not None and self.memory.covers(path):
            self.memory.save(lambda saver: wait_if_small(saver, [saver.save(checkpoint, path)]))
            return
        self._tell_about_callback_once(checkpoint)
        self.before_change(path, removes=False)
        size = self.checkpointer.save(checkpoint, path)
        if not may_save_in_background(checkpoint, path):
            self.checkpointer.wait(path)
        else:
            wait_if_small(self.checkpointer, [size])
        self.checkpointer.wait_when_touched(path)

    def load_checkpoint(
        self, path: StrPath, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint, waiting for a pending save of it, and verify every byte.

        It also reads directories of :class:`~lightning_ckpt.ShardedCheckpointIO` and of Lightning's own sharded
        strategies.

        Args:
            path: Local path or URL.
            map_location: As for ``torch.load``; by default the CPU, as in Lightning's own plugin.
            weights_only: As for ``torch.load``.

        Raises:
            CheckpointError: The file is missing, damaged, not a checkpoint, of a newer format, or holds objects that
                are not plain data.
        """
        location = (lambda storage, _: storage) if map_location is None else map_location
        try:
            state: dict[str, Any] = self.reader_of(path).load(path, map_location=location, weights_only=weights_only)
        except (CheckpointNotFoundError, StorageError) as error:
            failure: CheckpointError = error
            if isinstance(error, CheckpointNotFoundError):  # with the message of Lightning's own plugin
                failure = CheckpointNotFoundError(f"Checkpoint file not found: {path}", path=error.path)
            return self.load_other_layout(path, failure, map_location=map_location, weights_only=weights_only)
        return state

    def teardown(self) -> None:
        """Wait for pending saves, free their memory, and raise a failure that has not been raised yet."""
        self.checkpointer.close()

    def _tell_about_callback_once(self, checkpoint: Any) -> None:
        is_training_state = isinstance(checkpoint, Mapping) and "loops" in checkpoint and "callbacks" in checkpoint
        if not is_training_state or self._told_about_callback:
            return
        if STATE_KEY not in checkpoint and NO_STATE_KEY not in checkpoint:
            self._told_about_callback = True
            warnings.warn(
                f"{type(self).__name__} stores what the Trainer gives it, which is not enough for an exact resume: "
                "random number generators, data position and open gradients are missing. Add "
                "lightning_ckpt.ResumableCheckpoint to the Trainer's callbacks to have them saved too.",
                stacklevel=2,
            )


def _listen() -> None:
    before_setup(_watch)
    before_loads_of_fabric(_wait_with_all_ranks)


def _wait_with_all_ranks(fabric: Any, path: StrPath) -> None:
    """Wait on all ranks for pending saves of ``path``: a rank that reads now may find none, or the previous one."""
    plugin = next((candidate for candidate in given_to(fabric) if isinstance(candidate, TorchFileIO)), None)
    if plugin is not None and fabric.world_size > 1:
        wait_for_saves(plugin.checkpointer.known_as(path))
        fabric.barrier()


def _watch(trainer: Any) -> None:
    if isinstance(trainer.strategy.checkpoint_io, TorchFileIO):
        watch_boundaries(trainer)


def may_save_in_background(checkpoint: Any, path: StrPath) -> bool:
    """Return False if the caller may rely on the file as soon as the save returns, and waiting delays no training."""
    if os.path.basename(path).startswith(_SLURM_REQUEUE_PREFIX):
        return False  # SLURM ends this process when it requeues the job
    if _RAY_REPORT in os.fspath(path):
        return False  # Ray copies it next, in native code that does not wait for pending saves
    try:
        epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]
        # Equal between epochs: before fit, after it, and when it ends.
        return bool(epochs["ready"] != epochs["completed"])
    except (KeyError, TypeError):
        return True  # not a Trainer's checkpoint: Fabric's, or only weights


class SyncCheckpointIO(TorchFileIO):
    """Saves while training waits: when ``save_checkpoint`` returns, the file is durable under its name.

    Needs at most 112 MiB of extra memory, whatever the size of the state.

    Args:
        storage_options: Passed to fsspec for checkpoints at URLs (``s3://...``): endpoint, credentials and so on.
        local_dir: Directory on a fast local disk in which checkpoints are committed first; needs ``upload_to``.
        upload_to: URL or directory to which they are then uploaded in the background.
        keep_local: How many of the newest uploaded checkpoints of a directory stay in ``local_dir``; None: all.
        event_log: A local file to which every event is appended as a line of JSON.
        report: A local file for a page about the run, written at its end (``.png``: a picture, too). Its event log is
            next to it, unless ``event_log`` names another.
        listeners: Called with every event (:mod:`ckpt_core.events`).

    Example::

        trainer = Trainer(plugins=[SyncCheckpointIO()], callbacks=[ResumableCheckpoint(dirpath="checkpoints")])
    """

    def __init__(
        self,
        *,
        storage_options: dict[str, Any] | None = None,
        local_dir: str | Path | None = None,
        upload_to: str | Path | None = None,
        keep_local: int | None = None,
        event_log: str | Path | None = None,
        report: str | Path | None = None,
        listeners: Sequence[Listener] = (),
    ) -> None:
        super().__init__(CheckpointerOptions.of(locals(), strategy="sync"))


class AsyncCheckpointIO(TorchFileIO):
    """Copies the state, and writes the copy in the background while training continues.

    The file appears under its name when it is durable. A removal waits for the saves before it, a load for a pending
    save of its file, and the end of ``fit`` for everything. A save outside a running epoch, such as
    ``trainer.save_checkpoint`` after ``fit``, returns when it is durable. So does a save of at most 256 KiB, unless the
    storage takes more than a second. Needs extra host memory for ``max_pending`` copies of the state.

    Args:
        max_pending: How many saves may be pending before the next one waits for the oldest.
        on_error: What to do when a background save fails. ``"raise"`` ends training: with
            :class:`~lightning_ckpt.ResumableCheckpoint`, on every rank after the next batch; otherwise at the next
            save or at the end of ``fit``. ``"warn"`` logs the failure, counts it in ``checkpointer.failures``, and
            training continues.
        storage_options: Passed to fsspec for checkpoints at URLs (``s3://...``): endpoint, credentials and so on.
        local_dir: Directory on a fast local disk in which checkpoints are committed first; needs ``upload_to``.
        upload_to: URL or directory to which they are then uploaded in the background.
        keep_local: How many of the newest uploaded checkpoints of a directory stay in ``local_dir``; None: all.
        event_log: A local file to which every event is appended as a line of JSON.
        report: A local file for a page about the run, written at its end (``.png``: a picture, too). Its event log is
            next to it, unless ``event_log`` names another.
        listeners: Called with every event (:mod:`ckpt_core.events`).
        overlap: Whether an asynchronous save of an accelerator's tensors copies parameters and optimizers' state during
            the next forward and backward pass; the device then waits before the next optimizer step. Before anything
            else changes them, call :func:`ckpt_core.wait_staged`; otherwise that save fails.
        max_host_bytes: Most host memory in bytes per process for copies of states; None: as much as they need. A larger
            state passes through in parts, and training waits until the last one is copied (async).

    Example::

        trainer = Trainer(plugins=[AsyncCheckpointIO()], callbacks=[ResumableCheckpoint(dirpath="checkpoints")])
    """

    def __init__(
        self,
        *,
        max_pending: int = 1,
        on_error: Literal["raise", "warn"] = "raise",
        storage_options: dict[str, Any] | None = None,
        local_dir: str | Path | None = None,
        upload_to: str | Path | None = None,
        keep_local: int | None = None,
        event_log: str | Path | None = None,
        report: str | Path | None = None,
        listeners: Sequence[Listener] = (),
        overlap: bool = False,
        max_host_bytes: int | None = None,
    ) -> None:
        super().__init__(CheckpointerOptions.of(locals()))
