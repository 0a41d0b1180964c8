"""``ReliableCheckpointIO``: the base class of our ``CheckpointIO`` plugins."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from ckpt_core import Checkpointer, DirectoryCheckpointer
from ckpt_core.errors import CheckpointError, CheckpointNotFoundError, StorageError
from ckpt_core.events import RunSummary
from ckpt_core.options import CheckpointerOptions
from ckpt_core.paths import StrPath
from ckpt_core.process import awaited_paths
from ckpt_core.tiers import MemoryTier
from lightning_ckpt._bases import CheckpointIOBase

awaited_paths.own_packages.add("lightning_ckpt")


class ReliableCheckpointIO(CheckpointIOBase):
    """Base of our plugins; ``summary`` adds up what the saves of one cost."""

    memory: Any = None  # the MemorySnapshots of the running fit, if it keeps any
    saves_together = False  # whether all ranks save together

    def __init__(self, options: CheckpointerOptions) -> None:
        self.options, self.storage_options, self.tiers = options, options.storage_options, options.tiers
        self.summary = RunSummary()
        self.names_in_use: set[str] = set()  # on a store; listed once, when a fit starts, and not again at each save
        self._settings = options.settings(self.summary)

    @abstractmethod
    def checkpointer_in_memory(self, tier: MemoryTier) -> Checkpointer | DirectoryCheckpointer:
        """Return a checkpointer for snapshots in memory; call it on all ranks together."""

    def reader_of(self, path: StrPath) -> Any:
        """Return the checkpointer that reads a checkpoint."""
        return self.memory.checkpointer if self.memory is not None and self.memory.covers(path) else self.checkpointer

    @property
    @abstractmethod
    def checkpointer(self) -> Checkpointer | DirectoryCheckpointer:
        """The checkpointer of this plugin."""

    def before_change(self, path: StrPath, *, removes: bool) -> None:
        """Do nothing; called before a checkpoint is saved or deleted, and replaced while loggers wait for old ones."""

    def remove_checkpoint(self, path: StrPath) -> None:
        """Delete a checkpoint once all earlier saves are durable; keep it if the newest of those fails."""
        self.before_change(path, removes=True)
        self.checkpointer.remove(path)
        self.checkpointer.wait_when_touched(path)

    def refuse(self, storage_options: Any | None) -> None:
        """Refuse storage options of a single save."""
        if storage_options is not None:
            name = type(self).__name__
            raise TypeError(  # begins like the message of Lightning's own plugin, so that a search finds both
                f"`Trainer.save_checkpoint(..., storage_options=...)` with `storage_options` arg is not supported for "
                f"`{name}`. Please implement your custom `CheckpointIO` to define how you'd like to use "
                f"`storage_options`, or give them to `{name}(storage_options=...)`: they hold for every save there"
            )

    def load_other_layout(
        self, path: StrPath, failure: CheckpointError, *, map_location: Any | None, weights_only: bool | None
    ) -> dict[str, Any]:
        """Load a checkpoint of another layout: a file, a directory, or one of Lightning's strategies.

        If it has none of these layouts, ``failure`` is raised, which says why it does not have the plugin's own.
        """
        from ckpt_core.interchange import load_whole

        options, tiers = self.storage_options, self.tiers
        how: dict[str, Any] = {"map_location": map_location, "weights_only": weights_only, "of_trainer": True}
        try:
            found = load_whole(path, storage_options=options, tiers=tiers, **how)
        except (CheckpointNotFoundError, StorageError):
            raise failure from failure.__cause__
        if isinstance(found, dict):
            return found
        raise failure
