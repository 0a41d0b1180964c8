"""``ShardedCheckpointIO``: a ``CheckpointIO`` plugin with which every rank writes its part of a directory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from ckpt_core import Checkpointer, DirectoryCheckpointer
from ckpt_core.errors import CheckpointError, CheckpointFormatError, CheckpointNotFoundError
from ckpt_core.events import CheckpointLoaded, Listener
from ckpt_core.options import CheckpointerOptions
from ckpt_core.paths import StrPath
from ckpt_core.ranks import RankGroup
from ckpt_core.state.kinds import indexed
from ckpt_core.state.trainer_parts import (
    GRADIENTS_KEY,
    gradients_of,
    metadata_of,
    parts_of,
    rest_of,
    whole,
)
from ckpt_core.tiers import MemoryTier
from lightning_ckpt._plugin_base import ReliableCheckpointIO
from lightning_ckpt._private.hooks import before_saves_of_fabric, before_setup
from lightning_ckpt._routing.fabric import route_fabric
from lightning_ckpt._routing.trainer import route
from lightning_ckpt.io import may_save_in_background
from lightning_ckpt.loading import read_directories


class ShardedCheckpointIO(ReliableCheckpointIO):
    """Saves a directory to which every rank writes its part; any number of ranks can load it.

    Under FSDP and ``ModelParallelStrategy``, each rank writes its shards. Under DDP, where all ranks hold the same
    state, each writes a slice. Saves are asynchronous by default, and no rank holds more than its own part. The
    directory holds safetensors files and appears under its name when all parts are durable.

    With Fabric, pass it to ``plugins``; for FSDP and ``ModelParallelStrategy``, which refuse plugins, to
    ``callbacks``.

    Lightning's own strategies call a plugin on rank 0 only, or bypass it. This one replaces the save and load methods
    on the strategy of the Trainer or Fabric to which it is passed; no callback is needed.

    Args:
        mode: ``"async"``: training continues once this rank's part is copied. ``"sync"``: it waits until everything is
            durable.
        max_pending: How many saves may be pending before the next one waits (async only).
        on_error: What to do when a background save fails. ``"raise"`` ends training on every rank. ``"warn"`` logs and
            counts the failure.
        commit_timeout: How many seconds a rank whose part is durable waits for the others before the save fails.
        storage_options: Passed to fsspec for checkpoints at URLs (``s3://...``): endpoint, credentials and so on.
        local_dir: Directory on a fast local disk that all ranks see, in which checkpoints are committed first; needs
            ``upload_to``.
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

        trainer = Trainer(strategy="ddp", plugins=[ShardedCheckpointIO()], callbacks=[ResumableCheckpoint()])
    """

    saves_together = True

    def __init__(
        self,
        *,
        mode: Literal["async", "sync"] = "async",
        max_pending: int = 1,
        on_error: Literal["raise", "warn"] = "raise",
        commit_timeout: float = 600.0,
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
        super().__init__(CheckpointerOptions.of(locals(), strategy=mode))
        self._settings["commit_timeout"] = commit_timeout
        self._checkpointer: DirectoryCheckpointer | None = None
        self._ranks = RankGroup.alone()
        self._buffers: Callable[[], Collection[str]] = tuple
        self._frozen: Callable[[], Collection[str]] = tuple
        DirectoryCheckpointer(**self._settings)  # checks the options now and not at the first save
        _listen()

    def __getstate__(self) -> dict[str, Any]:
        alone = {"_checkpointer": None, "_ranks": RankGroup.alone()}  # a copy has to be connected again
        return {**self.__dict__, **alone, "_buffers": tuple, "_frozen": tuple}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _listen()  # a spawned process unpickles the plugin, and has no hooks yet

    def connect(
        self,
        ranks: RankGroup,
        buffers: Callable[[], Collection[str]] = tuple,
        frozen: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """Set the ranks that save together; call it on all of them together.

        Args:
            ranks: The ranks of the run.
            buffers: Returns the names of the model's buffers.
            frozen: Returns the names of its parameters that training does not change.
        """
        if self._checkpointer is not None:
            self._checkpointer.close()
        self._ranks, self._buffers, self._frozen = ranks, buffers, frozen
        self._checkpointer = DirectoryCheckpointer(ranks=ranks, slice_replicated=True, **self._settings)

    def checkpointer_in_memory(self, tier: MemoryTier) -> DirectoryCheckpointer:
        """Return a checkpointer for snapshots in memory; call it on all ranks together."""
        timeout = self._settings["commit_timeout"]
        settings = tier.settings(self.options.strategy)
        return DirectoryCheckpointer(ranks=self._ranks, slice_replicated=True, commit_timeout=timeout, **settings)

    @property
    def checkpointer(self) -> DirectoryCheckpointer:
        """The checkpointer of this plugin.

        Raises:
            CheckpointError: There are several processes, and :meth:`connect` was not called.
        """
        if self._checkpointer is None:
            is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
            if is_distributed and torch.distributed.get_world_size() > 1:
                raise CheckpointError(
                    "ShardedCheckpointIO saves on all ranks together, but was called on one of them, outside a "
                    "Trainer or Fabric",
                    remedy="save with trainer.save_checkpoint or fabric.save, on all ranks",
                )
            self.connect(RankGroup.alone())
        assert self._checkpointer is not None
        return self._checkpointer

    def save_checkpoint(self, checkpoint: dict[str, Any], path: StrPath, storage_options: Any | None = None) -> None:
        """Save ``checkpoint`` at ``path`` from this process alone; Lightning calls it on one rank for its own states.

        Args:
            checkpoint: Plain data and tensors.
            path: Local path or URL of the directory.
            storage_options: Not supported for a single save.

        Raises:
            CheckpointError: This save, or an earlier one in the background, failed.
            TypeError: ``storage_options`` was passed.
        """
        checkpointer = self.checkpointer  # raises if the other ranks do not save
        if self._ranks.world_size == 1:
            self.save_together(checkpoint, path, storage_options=storage_options)
            return
        self.refuse(storage_options)
        checkpointer.wait(path)
        local = path if self.tiers is None else self.tiers.local_path(os.fspath(path))
        with DirectoryCheckpointer(**{**self._settings, "strategy": "sync", "tiers": None}) as alone:
            alone.save(parts_of(checkpoint, rank=0), local, metadata=metadata_of(checkpoint))
        checkpointer.upload(local)

    def save_together(self, checkpoint: dict[str, Any], path: StrPath, storage_options: Any | None = None) -> None:
        """Save ``checkpoint`` at ``path``. Call it on all ranks together.

        Args:
            checkpoint: What the Trainer collected, its tensors whole or distributed.
            path: Local path or URL of the directory, the same on all ranks.
            storage_options: Not supported for a single save.

        Raises:
            CheckpointError: This save, or an earlier one in the background, failed.
            TypeError: ``storage_options`` was passed.
        """
        self.refuse(storage_options)
        checkpointer = self.checkpointer
        in_memory = self.memory is not None and self.memory.covers(path)
        try:
            if not in_memory:
                self.before_change(path, removes=False)
            parts = parts_of(checkpoint, rank=self._ranks.rank, buffers=self._buffers(), frozen=self._frozen())
            # The step, so that a save by ranks at different steps raises instead of mixing their states.
            about: dict[str, Any] = {"metadata": metadata_of(checkpoint), "step": checkpoint.get("global_step")}
        except Exception as error:  # possibly on this rank only: the others must not wait for its part
            self.reader_of(path).refuse(path, error)
            raise
        if in_memory:
            self.memory.save(lambda saver: saver.save(parts, path, **about))
            return
        checkpointer.save(parts, path, **about)
        if not may_save_in_background(checkpoint, path):
            checkpointer.wait(path)
        checkpointer.wait_when_touched(path)

    def load_checkpoint(
        self, path: StrPath, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a complete checkpoint, waiting for a pending save of it, and verify every byte.

        It also reads files of the other plugins and directories of Lightning's own sharded strategies.

        Args:
            path: Local path or URL.
            map_location: Device of the tensors; by default the CPU.
            weights_only: As for ``torch.load``.

        Raises:
            CheckpointError: It is missing, damaged, not a checkpoint, or of a newer format.
        """
        started = time.perf_counter()
        try:
            opened = self.reader_of(path).load(path, weights_only=weights_only)
        except (CheckpointFormatError, CheckpointNotFoundError) as error:
            return self.load_other_layout(path, error, map_location=map_location, weights_only=weights_only)
        with opened:
            state = whole(opened, self._ranks_of_gradients(opened), map_location=map_location)
            self._tell_of_load(path, opened, started)
        return state

    def load_into(
        self,
        path: StrPath,
        model: Mapping[str, Any],
        optimizers: Sequence[Mapping[str, Any]],
        *,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> tuple[dict[str, Any], list[Any]]:
        """Load a checkpoint into distributed tensors, reading only the bytes that this rank holds.

        Args:
            path: Local path or URL.
            model: The model's state, filled in place.
            optimizers: The optimizers' states, whose tensors are filled in place; none to leave them out.
            strict: Whether the model must have the same tensors.
            weights_only: As for ``torch.load``.

        Returns:
            Everything but weights and optimizers; the optimizers' states.
        """
        self._refuse_file(path)
        started = time.perf_counter()
        with self.reader_of(path).load(path, weights_only=weights_only) as opened:
            rest, buffers, _ = rest_of(opened)
            gradients = gradients_of(opened, self._ranks_of_gradients(opened))
            rest.update({GRADIENTS_KEY: gradients} if any(gradients.values()) else {})
            weights = {name: value for name, value in model.items() if name not in buffers}
            opened.load("model", into=weights, strict=strict)
            with torch.no_grad():
                for name in model.keys() & buffers.keys():
                    model[name].copy_(buffers[name])
            states = [opened.load(indexed("optimizer", i), into=state) for i, state in enumerate(optimizers)]
            self._tell_of_load(path, opened, started)
        return rest, states

    def _tell_of_load(self, path: StrPath, opened: Any, started: float) -> None:
        seconds = time.perf_counter() - started
        loaded = CheckpointLoaded(path=os.fspath(path), bytes=opened.size, seconds=seconds, verified=True)
        self.checkpointer.notify(loaded)

    def _refuse_file(self, path: StrPath) -> None:
        if self.checkpointer.exists(path) or os.path.isdir(path):
            return
        if Checkpointer(strategy="sync", storage_options=self.storage_options, tiers=self.tiers).exists(path):
            raise CheckpointFormatError(
                "this is one file, in which optimizers number their parameters; a sharded model is resumed from a "
                "directory, of which each rank reads its part",
                path=os.fspath(path),
                remedy="begin a new run with its weights, and the optimizer state that fits: leave ckpt_path out and "
                "add WarmStart(path, optimizers=True) to the callbacks; ckpt convert is for other programs",
            )

    def _ranks_of_gradients(self, opened: Any) -> Sequence[int]:
        same = opened.world_size == self._ranks.world_size
        return [self._ranks.rank] if same else range(opened.world_size)

    def teardown(self) -> None:
        """Wait for pending saves, free their memory, and raise a failure that has not been raised yet."""
        if self._checkpointer is not None:
            self._checkpointer.close()


def _listen() -> None:
    before_setup(route)
    before_saves_of_fabric(route_fabric)
    read_directories()
