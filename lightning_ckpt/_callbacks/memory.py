"""``memory_every_n_steps``: the last snapshots of a fit in host memory, which survive a crash of its processes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from ckpt_core import Catalog, CheckpointInfo, RankGroup
from ckpt_core.errors import CheckpointError
from ckpt_core.ranks import Agreement
from ckpt_core.tiers import MemoryTier
from lightning_ckpt._private.replacing import Live
from lightning_ckpt._report import announce

logger = logging.getLogger(__name__)

_MEET_SECONDS = 600.0  # as long as ranks wait for each other's part of a save


class MemorySnapshots(Live):
    """Saves snapshots to memory during one fit, on all ranks together; ``name`` has a placeholder for the step."""

    def __init__(self, tier: MemoryTier, trainer: Any, checkpointer: Any, name: str) -> None:
        self.tier = tier
        self.checkpointer = checkpointer
        self._trainer = trainer
        self._name = name

    @classmethod
    def begin(cls, tier: MemoryTier, trainer: Any, problem: str | None, name: str) -> MemorySnapshots | None:
        """Start to save snapshots; return None, with a warning, if that is impossible. Called on all ranks together.

        ``problem`` is a reason against it that the caller knows; ``name`` has a placeholder for the step.
        """
        strategy, token = trainer.strategy, ""
        if problem is None:
            try:
                token = tier.begin() if trainer.is_global_zero else ""
            except CheckpointError as error:
                problem = str(error)
            token, problem = strategy.broadcast((token, problem))
        if problem is None and not strategy.reduce_boolean_decision(tier.is_seen(token), all=True):
            ranks = RankGroup.connect(trainer.global_rank, trainer.world_size, strategy.broadcast)
            agreement = Agreement(ranks.rank, ranks.world_size, ranks.store, _MEET_SECONDS)
            name = name.replace("{}", f"{{}}-{ranks.session}")  # a machine may return with an old snapshot of that step
            try:
                tier.join_machines(agreement, ranks)
            except CheckpointError as error:
                problem = str(error)
                tier.end()
        if problem is not None:
            if trainer.is_global_zero:
                tier.fail(problem)
            return None
        plugin = strategy.checkpoint_io
        snapshots = cls(tier, trainer, plugin.checkpointer_in_memory(tier), name)
        plugin.memory = snapshots
        return snapshots

    def covers(self, path: Any) -> bool:
        return self.tier.covers(path)

    def save(self, save: Callable[[Any], Any]) -> None:
        """Call ``save`` with the checkpointer; a failure ends the snapshots, not the training."""
        try:
            save(self.checkpointer)
        except CheckpointError as error:
            self.tier.fail(error)

    def newest(self, suffix: str, accept: Callable[[Any], bool]) -> CheckpointInfo | None:
        """Return the newest snapshot in the memory of several machines, now that they are connected; on all ranks."""
        if self.tier.machines == 1:
            return None  # ResumableCheckpoint.newest has looked already
        found: CheckpointInfo | None = None
        if self._trainer.is_global_zero:
            try:
                catalog = Catalog(self.tier.directory, suffix=suffix, storage=self.tier.storage)
                found = catalog.newest_verified(accept)
            except CheckpointError as error:
                logger.warning("could not look for snapshots in memory: %s", error)
        theirs: CheckpointInfo | None = self._trainer.strategy.broadcast(found)
        return theirs

    def after_batch(self) -> None:
        """Take a snapshot if one is due, on all ranks together; rank 0 decides whether there is room and time."""
        trainer = self._trainer
        if not self.tier.due(trainer.global_step):
            return
        path = None
        if trainer.is_global_zero:
            path = self.tier.next_path(trainer.global_step, self._name, is_busy=self.checkpointer.is_busy)
        path = trainer.strategy.broadcast(path)
        if path is not None and self.tier.machines > 1:
            self.tier.make_room(path)
        if path is not None:
            begin = time.monotonic()
            trainer.save_checkpoint(path, weights_only=False)
            self.tier.took(time.monotonic() - begin)

    def close(self, *, keep: bool) -> None:
        """Wait for the last snapshot; delete all unless ``keep``, which leaves them for the next start."""
        plugin = self._trainer.strategy.checkpoint_io
        if getattr(plugin, "memory", None) is self:
            plugin.memory = None
        self.checkpointer.close(raises=False)
        if self._trainer.is_global_zero and (words := self.tier.in_words()):
            announce(self._trainer, words)
        if keep:
            self.tier.leave()
        else:
            self.tier.end()
