"""When a rank dies under DDP, one of the others saves what all of them held (:mod:`ckpt_core.survivors`)."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from typing import Any

from ckpt_core import Checkpointer
from ckpt_core.paths import is_remote
from ckpt_core.state.kinds import join_ranks
from ckpt_core.survivors import NO_PLACE, BufferCopies, Rescue, Survivors, ignoring_signals, why_not_replicas
from lightning_ckpt._exact.state import ExactState
from lightning_ckpt._private.boundaries import NO_EXCEPTIONS, forks_or_spawns
from lightning_ckpt._private.loops import model_averaging, whole_checkpoint
from lightning_ckpt.sharded import ShardedCheckpointIO

log = logging.getLogger(__name__)


class JustInTime:
    """Notes what this rank alone has, and saves when another one dies.

    Made on all ranks together, when the model is set up. Survivors wait ``wait_seconds`` for each other.
    """

    def __init__(
        self, trainer: Any, state: ExactState, directory: str, storage_options: Any, wait_seconds: float
    ) -> None:
        self._trainer, self._state = trainer, state
        self._directory, self._storage_options = directory, storage_options
        session = trainer.strategy.broadcast(uuid.uuid4().hex)
        self._survivors = Survivors(directory, trainer.global_rank, trainer.world_size, session, wait_seconds)
        self._buffers = BufferCopies([trainer.lightning_module])
        self._versions = 0
        self._versions_at_start: int | None = self._parameter_versions()
        state.at_moment = self._note
        plugin = trainer.strategy.checkpoint_io
        if isinstance(plugin, ShardedCheckpointIO):
            plugin.checkpointer.wait_for_no_dead(self._survivors.find_dead)

    @staticmethod
    def problem_of(trainer: Any) -> str | None:
        """Return why nothing can be saved when a rank of this Trainer dies, in words; None if it can."""
        strategy = trainer.strategy
        if forks_or_spawns(strategy):
            return NO_EXCEPTIONS
        averager, hook_state = model_averaging(strategy)
        if averager is not None or hook_state:
            return "with a state in the communication hook of DDP, each rank has weights or errors of its own"
        bases = {cls.__name__ for cls in type(strategy).__mro__}
        are_replicas = "DDPStrategy" in bases and not bases & {"DeepSpeedStrategy", "XLAStrategy"}
        modules = [trainer.lightning_module]
        return why_not_replicas(type(strategy).__name__, modules, trainer.optimizers, are_replicas=are_replicas)

    def problem_of_place(self) -> str | None:
        """Return why survivors could not meet, in words; called on all ranks together."""
        strategy = self._trainer.strategy
        if not is_remote(self._directory):
            return None
        strategy.barrier("lightning_ckpt.just_in_time")  # each has made its file
        return None if strategy.reduce_boolean_decision(self._survivors.sees_all, all=True) else NO_PLACE

    @property
    def is_rank_gone(self) -> bool:
        """Whether another rank is dead or has left, so that this one need not wait for it."""
        return self._survivors.is_rank_gone()

    def close(self) -> None:
        """Training came to its end, or is given up."""
        self._state.at_moment = None
        self._survivors.close(remove=self._trainer.state.status != "interrupted")

    # ---- while training ----------------------------------------------------------------------------------------------

    def _note(self) -> None:
        if self._versions_at_start is not None:
            if self._parameter_versions() == self._versions_at_start:  # what it was resumed from is saved already
                own = self._state.capture_alone(is_start=True)
                if own is not None:
                    self._survivors.note_start(own)
                return
            self._versions_at_start = None
        own = self._state.capture_alone()
        if own is not None:
            self._survivors.note(own)
            self._versions = self._parameter_versions()
            self._buffers.take()

    def backward_begins(self) -> None:
        """The gradients will be exchanged: note what the step has drawn and logged."""
        if self._trainer.strategy.model.require_backward_grad_sync:
            self._survivors.note_exchange(*self._state.capture_step())

    def _parameter_versions(self) -> int:
        return sum(parameter._version for parameter in self._trainer.lightning_module.parameters())

    # ---- when something has failed -----------------------------------------------------------------------------------

    def rescue(self, error: BaseException, path_of: Callable[[int], str]) -> str | None:
        """Save if an exception comes of the loss of another rank, and this is the one to do it; return where, or None.

        ``path_of`` returns where to save, for a number of optimizer steps.
        """
        with ignoring_signals():
            if not self._survivors.is_loss(error):
                self._survivors.leave()
                return None
            path = path_of(self._trainer.global_step)
            saved = self._survivors.rescue(self._held(), lambda rescue: self._save(rescue, path))
            return path if saved else None

    def _held(self) -> int | None:
        """Return the number of the noted step whose weights are still there.

        Between two steps, callbacks may have counted what they must not count again: that is a state of its own.
        """
        noted = self._survivors.last
        is_unchanged = noted > 0 and self._parameter_versions() == self._versions
        if not self._state.is_in_progress:
            self._note()
            if self._survivors.last > noted:
                return self._survivors.last
        return noted if is_unchanged and self._buffers.put_back() else None

    def _save(self, rescue: Rescue, path: str) -> None:
        trainer = self._trainer
        notes = {note for rank in rescue.ranks for note in rank["notes"]}
        notes |= set(rescue.notes(trainer.global_rank, "per_rank"))
        if trainer.global_rank and self._buffers.have_changed:
            notes.add(f"rank 0 was lost, and all ranks continue with the buffers of rank {trainer.global_rank}")
        mine = rescue.ranks[trainer.global_rank]["replicated"]
        for rank, own in enumerate(rescue.ranks):
            if any(own["replicated"][name] != mine[name] for name in ("phase", "progress")):
                notes.add(f"rank {rank} was lost at another point of the step than rank {trainer.global_rank}")
        common = {"world_size": trainer.world_size, "notes": sorted(notes), "post_local_sgd": {}}
        replicated = {**mine, **common}
        self._state.joined = join_ranks(
            replicated, [rescue.own_of(rank, "per_rank") for rank in range(trainer.world_size)]
        )
        checkpointer = Checkpointer(strategy="sync", storage_options=self._storage_options)
        try:
            checkpointer.save(whole_checkpoint(trainer), path)
        finally:
            checkpointer.close()
            self._state.joined = None
        log.warning("a rank was lost: rank %d saved step %d in %s", trainer.global_rank, trainer.global_step, path)
