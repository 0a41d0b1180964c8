"""Captures and restores post-localSGD, in which each rank has its own weights, averaged every few steps.

``DDPStrategy(model_averaging_period=..., ddp_comm_state=PostLocalSGDState(...))`` averages gradients over all ranks up
to ``start_localSGD_iter``, and from then on weights, every ``period`` steps. Lightning saves the weights and moments of
rank 0, and neither of the two counters. This module saves those of each rank, and the counters. As the model and
optimizers of the checkpoint, it saves the means over all ranks: the weights that the next averaging would produce.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

from ckpt_core.errors import CheckpointError
from lightning_ckpt._private.loops import model_averaging
from lightning_ckpt._private.replacing import replace
from lightning_ckpt._routing.gathering import Gathering

_WRAPPED = ("lightning_module_state_dict", "optimizer_state")


def refuse_unequal_ranks(trainer: Any) -> None:
    """Raise if ranks whose weights will differ are to write one model, and no exact callback saves their mean."""
    _, hook = model_averaging(trainer.strategy)
    if isinstance(hook, PostLocalSGDState) and not any(
        getattr(callback, "exact", False) for callback in trainer.callbacks
    ):
        raise CheckpointError(
            "under post-localSGD, each rank has its own weights, and ShardedCheckpointIO would mix them in one model",
            remedy="add lightning_ckpt.ResumableCheckpoint to the callbacks",
        )


class PostLocalSgd:
    """What post-localSGD adds to the exact state of one Trainer; nothing if post-localSGD is not used."""

    def __init__(self, trainer: Any, gathering: Gathering) -> None:
        self._trainer = trainer
        self._gathering = gathering
        self._is_wrapped = False

    @property
    def _hook(self) -> PostLocalSGDState | None:
        _, hook = model_averaging(self._trainer.strategy)
        return hook if isinstance(hook, PostLocalSGDState) else None

    @property
    def ranks_differ(self) -> bool:
        """Whether the ranks' weights and moments differ now."""
        hook = self._hook
        return self._trainer.world_size > 1 and hook is not None and hook.iter >= hook.start_localSGD_iter

    @property
    def _saves_means(self) -> bool:
        """Whether a save now stores the mean over all ranks as the model; evaluated on all ranks together."""
        return self._is_wrapped and self.ranks_differ and self._gathering.all_are_here()

    def fit_started(self) -> None:
        """From now on, save means over all ranks as the model and its optimizers, where ranks differ."""
        averager, _ = model_averaging(self._trainer.strategy)
        if averager is None or self._is_wrapped:
            return
        strategy = self._trainer.strategy
        state_of_module, state_of_optimizer = (getattr(strategy, name) for name in _WRAPPED)

        def lightning_module_state_dict() -> dict[str, Any]:
            state = dict(state_of_module())
            names = [name for name, _ in self._trainer.lightning_module.named_parameters(remove_duplicate=False)]
            # buffers stay those of rank 0, as under DDP
            return {**state, **self._means({name: state[name] for name in names if name in state})}

        def optimizer_state(optimizer: Any) -> dict[str, Any]:
            state = state_of_optimizer(optimizer)
            moments = {key: self._means(values) for key, values in state["state"].items()}
            return {**state, "state": moments}

        for function in (lightning_module_state_dict, optimizer_state):
            replace(strategy, function.__name__, function)
        self._is_wrapped = True

    def _means(self, state: Mapping[str, Any]) -> dict[str, Any]:
        if not self._saves_means:
            return dict(state)
        found: dict[Any, torch.Tensor] = {}
        means: dict[str, Any] = {}
        for name, value in state.items():
            # numbers such as Adam's step count are the same on all ranks, and must not be averaged
            if not (isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim()):
                means[name] = value
                continue
            place = (value.data_ptr(), value.shape, value.stride())
            if place not in found:  # tied weights stay tied
                found[place] = self._gathering.mean(value)
            means[name] = found[place]
        return means

    def release(self) -> None:
        """Leave the strategy as it was."""
        for name in _WRAPPED if self._is_wrapped else ():
            vars(self._trainer.strategy).pop(name, None)
        self._is_wrapped = False

    # ---- capture and restore -----------------------------------------------------------------------------------------

    def counters(self) -> dict[str, Any]:
        """Return the state that is equal on all ranks; empty if post-localSGD is not used."""
        averager, hook = model_averaging(self._trainer.strategy)[0], self._hook
        if averager is None or hook is None:
            return {}
        return {
            "averager": averager.step,
            "hook": hook.iter,
            "differ": self.ranks_differ,
            "saves_means": self._saves_means,
        }

    def capture(self) -> dict[str, Any]:
        """Return this rank's own weights and moments; empty while all ranks have the same."""
        if not self.ranks_differ:
            return {}
        return {
            "weights": dict(self._trainer.lightning_module.state_dict()),
            "optimizers": [optimizer.state_dict() for optimizer in self._trainer.optimizers],
        }

    def restore(self, counters: Mapping[str, Any], own: Mapping[str, Any], *, resharded: bool) -> list[str]:
        """Restore :meth:`counters` and :meth:`capture` after Lightning's own load; return why it is not exact.

        ``counters`` is empty if it was saved without post-localSGD. If another number of ranks saved it
        (``resharded``), all ranks continue with what Lightning has loaded.
        """
        if not counters:
            return []
        averager, hook = model_averaging(self._trainer.strategy)[0], self._hook
        if averager is None or hook is None:
            return ["it was saved under post-localSGD, and this run averages no weights"]
        averager.step, hook.iter = counters["averager"], counters["hook"]
        if not counters["differ"]:
            return []
        if resharded:
            whose = "their means" if counters["saves_means"] else "those of rank 0"
            return [f"each rank had its own weights and moments (post-localSGD): all continue with {whose}"]
        module = self._trainer.lightning_module.state_dict()
        with torch.no_grad():
            for name, value in own["weights"].items():
                if isinstance(value, torch.Tensor):
                    module[name].copy_(value)
        for optimizer, state in zip(self._trainer.optimizers, own["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        return []
