"""Just-in-time saves: if a rank dies under DDP or HSDP, others save its state, too (:mod:`ckpt_core.survivors`)."""

from __future__ import annotations

import functools
import logging
import uuid
from collections.abc import Callable
from typing import Any

from ckpt_core import Checkpointer
from ckpt_core.paths import is_remote
from ckpt_core.separate import RescueSave
from ckpt_core.state.kinds import buffers_by_name, frozen_parameters, join_ranks
from ckpt_core.state.trainer_parts import metadata_of, parts_of
from ckpt_core.survivors import (
    NO_PLACE,
    LiveWeights,
    Rescue,
    Survivors,
    ignoring_signals,
    shards_of,
    why_not_replicas,
)
from lightning_ckpt._exact.state import ExactState
from lightning_ckpt._private.boundaries import NO_EXCEPTIONS, forks_or_spawns
from lightning_ckpt._private.loops import model_averaging, whole_checkpoint
from lightning_ckpt._routing.trainer import is_routed
from lightning_ckpt.sharded import ShardedCheckpointIO

log = logging.getLogger(__name__)


class JustInTime:
    """Notes this rank's own state during training, and saves a checkpoint when another rank dies.

    Created on all ranks together, when the model is set up. Survivors wait ``wait_seconds`` for each other.
    """

    def __init__(
        self, trainer: Any, state: ExactState, directory: str, storage_options: Any, wait_seconds: float
    ) -> None:
        self._trainer, self._state = trainer, state
        self._directory, self._storage_options = directory, storage_options
        self._session = trainer.strategy.broadcast(uuid.uuid4().hex)
        ranks, self._shards = (trainer.global_rank, trainer.world_size), _shards_of(trainer)
        self._survivors = Survivors(directory, *ranks, self._session, wait_seconds, self._shards)
        self._weights = LiveWeights([trainer.lightning_module])
        self._versions_at_start: int | None = self._weights.versions
        self._metadata: dict[str, Any] = {}
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
        if "ModelParallelStrategy" in bases and _shards_of(trainer) is not None:
            is_possible = is_routed(strategy, strategy.checkpoint_io)
            return None if is_possible else f"with {type(strategy).__name__}, it needs ShardedCheckpointIO"
        are_replicas = "DDPStrategy" in bases and not bases & {"DeepSpeedStrategy", "XLAStrategy"}
        modules = [trainer.lightning_module]
        return why_not_replicas(type(strategy).__name__, modules, trainer.optimizers, are_replicas=are_replicas)

    def problem_of_place(self) -> str | None:
        """Return why survivors could not meet, in words; None if they can. Called on all ranks together."""
        strategy = self._trainer.strategy
        if not is_remote(self._directory):
            return None
        strategy.barrier("lightning_ckpt.just_in_time")  # after it, each rank has created its file
        return None if strategy.reduce_boolean_decision(self._survivors.sees_all, all=True) else NO_PLACE

    @property
    def is_rank_gone(self) -> bool:
        """Whether another rank is dead or has left, so that this one need not wait for it."""
        return self._survivors.is_rank_gone()

    def close(self) -> None:
        """Stop noting and watching: training has ended or is abandoned."""
        self._state.at_moment = None
        self._survivors.close(remove=self._trainer.state.status != "interrupted")

    # ---- while training ----------------------------------------------------------------------------------------------

    def _note(self) -> None:
        if self._versions_at_start is not None:
            if self._weights.versions == self._versions_at_start:  # no new weights, so nothing to save yet
                own = self._state.capture_alone(is_start=True)
                if own is not None:
                    self._survivors.note_start(own)
                return
            self._versions_at_start = None
        own = self._state.capture_alone()
        if own is not None:
            self._weights.note(self._survivors.last + 1)
            own["per_rank"]["buffers"] = self._own_buffers()
            self._survivors.note(own)

    def backward_begins(self) -> None:
        """Note what this step has drawn from generators and logged, before gradients are exchanged."""
        if getattr(self._trainer.strategy.model, "require_backward_grad_sync", True):
            first, *others = self._state.capture_step()
            first["per_rank"]["buffers"] = self._own_buffers()
            self._survivors.note_exchange(first, *others)

    def _own_buffers(self) -> dict[str, Any]:
        """Return the buffers that training changes, if each rank has its own (HSDP); otherwise nothing."""
        if self._shards is None:
            return {}
        changed = {id(buffer) for buffer in self._weights.buffers}
        own = buffers_by_name(self._trainer.lightning_module)
        return {name: each for name, each in own.items() if id(each) in changed}

    # ---- when something has failed -----------------------------------------------------------------------------------

    def rescue(self, error: BaseException, path_of: Callable[[int], str]) -> str | None:
        """Save if ``error`` is due to the loss of another rank; return the path, or None if this rank saved nothing.

        ``path_of`` returns the path of the checkpoint for a number of optimizer steps.
        """
        with ignoring_signals():
            if not self._survivors.is_loss(error):
                self._survivors.leave()
                return None
            path = path_of(self._trainer.global_step)
            save = functools.partial(self._save, path=path)
            write = functools.partial(self._write, path=path) if self._shards is not None else None
            saved = self._survivors.rescue(self._held(), save, write, self._weights.since)
            return path if saved else None

    def _held(self) -> int | None:
        """Return the number of the noted step whose weights this rank still holds; None if there is none.

        Between two steps, callbacks may have counted what they must not count twice, so that point is noted separately.
        """
        noted = self._survivors.last
        are_unchanged = self._weights.are_noted
        if not self._state.is_in_progress:
            self._note()
            if self._survivors.last > noted:
                return self._survivors.last
        return noted if are_unchanged and self._weights.put_back() else None

    def _checkpoint(self, rescue: Rescue) -> dict[str, Any]:
        trainer = self._trainer
        rank_of_rest = rescue.writers[0]
        notes = {note for rank in rescue.ranks for note in rank["notes"]}
        notes |= set(rescue.notes(trainer.global_rank, "per_rank"))
        if rank_of_rest and self._weights.buffers and self._shards is None:
            notes.add(f"rank 0 was lost, and all ranks continue with the buffers of rank {rank_of_rest}")
        mine = rescue.ranks[trainer.global_rank]["replicated"]
        for rank, own in enumerate(rescue.ranks):
            if any(own["replicated"][name] != mine[name] for name in ("phase", "progress")):
                notes.add(f"rank {rank} was lost at another point of the step than rank {trainer.global_rank}")
        if rescue.number < self._survivors.last:  # this rank's callbacks have counted since
            notes.add(f"rank {trainer.global_rank} had come further than the point that is saved")
        common = {"world_size": trainer.world_size, "notes": sorted(notes), "post_local_sgd": {}}
        self._state.joined = join_ranks(
            {**mine, **common}, [rescue.per_rank_state_of(rank, "per_rank") for rank in range(trainer.world_size)]
        )
        try:
            return whole_checkpoint(trainer)
        finally:
            self._state.joined = None

    def _together(self, rescue: Rescue, path: str) -> RescueSave:
        options = {"session": self._session, "storage_options": self._storage_options}
        return RescueSave(rescue, path, rank=self._trainer.global_rank, **options)

    def _write(self, rescue: Rescue, path: str) -> dict[str, Any]:
        """Write the files of the ranks on whose behalf this rank writes."""
        checkpoint, module = self._checkpoint(rescue), self._trainer.lightning_module
        self._metadata = metadata_of(checkpoint)
        about = {"buffers": buffers_by_name(module), "frozen": frozen_parameters(module)}
        return self._together(rescue, path).write(lambda rank: parts_of(checkpoint, rank=rank, **about))

    def _save(self, rescue: Rescue, path: str) -> None:
        trainer = self._trainer
        if self._shards is not None:
            self._together(rescue, path).commit(metadata=self._metadata, step=trainer.global_step)
        else:
            with Checkpointer(strategy="sync", storage_options=self._storage_options) as checkpointer:
                checkpointer.save(self._checkpoint(rescue), path)
        log.warning("a rank was lost: rank %d saved step %d in %s", trainer.global_rank, trainer.global_step, path)


def _shards_of(trainer: Any) -> list[int] | None:
    """Return which shard each rank holds if other ranks hold copies of it (HSDP); None otherwise."""
    return shards_of([trainer.lightning_module], trainer.world_size)
