"""Routes saves and loads of a Trainer to :class:`~lightning_ckpt.ShardedCheckpointIO` on all ranks.

Lightning calls a plugin on rank 0 only, and sharded strategies bypass it. No hook gets the path and the
collected checkpoint, so methods of the strategy are replaced on the instance when its processes are connected.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ckpt_core import RankGroup
from ckpt_core.errors import CheckpointError
from ckpt_core.interchange import check_dcp, is_stock_distributed
from ckpt_core.ranks import raise_together
from ckpt_core.state.kinds import buffers_by_name, frozen_parameters
from lightning_ckpt._preemption import watch_boundaries
from lightning_ckpt._private.loops import gathers_on_one_rank
from lightning_ckpt._private.replacing import Live, replace, wrap
from lightning_ckpt._routing.post_local_sgd import refuse_unequal_ranks

_ROUTED = "_ckpt_routed_plugin"


class _Route(Live):
    def __init__(self, plugin: Any) -> None:
        self.plugin = plugin


def is_routed(strategy: Any, plugin: Any = None) -> bool:
    """Return whether the strategy saves on all ranks through ``plugin``; by default, through any plugin of ours."""
    route = vars(strategy).get(_ROUTED)
    return route is not None and plugin in (None, route.plugin)


def route_methods(strategy: Any, plugin: Any, **methods: Callable[..., Any]) -> None:
    """Replace methods of a strategy with ``methods``, which call the plugin, and tear it down with the strategy."""

    def teardown(original: Callable[[], None]) -> None:
        original()
        # Sharded strategies do not call it. The other methods stay replaced, for saves after the fit.
        plugin.teardown()

    wrap(strategy, "teardown", teardown)
    for name, method in methods.items():
        replace(strategy, name, method)
    vars(strategy)[_ROUTED] = _Route(plugin)


def raise_on_all_ranks(action: Callable[[], None], *, world_size: int) -> None:
    """Run ``action``; if it raises a :class:`CheckpointError` on any rank, raise the first of them on every rank.

    Called on all ranks together. Without it, the other ranks would wait for the rank that raised.
    """

    def gather(mine: Any) -> list[Any]:
        found: list[Any] = [None] * world_size
        torch.distributed.all_gather_object(found, mine)
        return found

    raise_together(action, gather if world_size > 1 else None)


def refuse_strategy(strategy: Any) -> None:
    """Refuse a strategy whose saves cannot be replaced."""
    bases = {cls.__name__ for cls in type(strategy).__mro__}
    if "DeepSpeedStrategy" in bases or "XLAStrategy" in bases or "XLAFSDPStrategy" in bases:
        raise CheckpointError(
            f"ShardedCheckpointIO does not work with {type(strategy).__name__}, which writes its own checkpoints",
            remedy="leave the plugin out, or train with FSDPStrategy, ModelParallelStrategy or DDP",
        )
    if gathers_on_one_rank(strategy):
        raise CheckpointError(
            f"{type(strategy).__name__} gathers the whole state on one rank, but ShardedCheckpointIO exists so "
            "that no rank has to",
            remedy="FSDPStrategy(state_dict_type='sharded') or ModelParallelStrategy(save_distributed_checkpoint=True)",
        )


def route(trainer: Any) -> None:
    """Make a Trainer save and load through its :class:`~lightning_ckpt.ShardedCheckpointIO` on all ranks, if any.

    Called on all ranks together, once its processes are connected and before anything is loaded.
    """
    strategy, plugin = trainer.strategy, trainer.strategy.checkpoint_io
    if not getattr(plugin, "saves_together", False):
        return
    if not is_routed(strategy, plugin):
        _replace_methods(trainer, strategy, plugin)
    watch_boundaries(trainer)  # after the plugin has connected, which gives it the checkpointer that is watched


def _replace_methods(trainer: Any, strategy: Any, plugin: Any) -> None:
    refuse_strategy(strategy)
    refuse_unequal_ranks(trainer)
    ranks = RankGroup.connect(trainer.global_rank, trainer.world_size, strategy.broadcast)
    plugin.connect(
        ranks,
        lambda: buffers_by_name(trainer.lightning_module),
        lambda: frozen_parameters(trainer.lightning_module),
    )
    load = functools.partial(_load, trainer, plugin)
    if is_sharded(strategy):
        load = functools.partial(_load_into, trainer, plugin, strategy.load_checkpoint)
    save = functools.partial(_save, trainer, plugin)
    route_methods(strategy, plugin, save_checkpoint=save, load_checkpoint=load)


def is_sharded(strategy: Any) -> bool:
    """Return whether the ranks of a strategy, of a Trainer or Fabric, hold shards of the model."""
    return any(cls.__name__ in ("FSDPStrategy", "ModelParallelStrategy") for cls in type(strategy).__mro__)


def keeps_whole_gradients(strategy: Any) -> bool:
    """Return whether each rank holds gradients of all parameters while it accumulates (FSDP1)."""
    return any(cls.__name__ == "FSDPStrategy" for cls in type(strategy).__mro__)


def _save(
    trainer: Any, plugin: Any, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
) -> None:
    path = trainer.strategy.broadcast(str(filepath))
    raise_on_all_ranks(
        lambda: plugin.save_together(checkpoint, path, storage_options=storage_options), world_size=trainer.world_size
    )


def _load(trainer: Any, plugin: Any, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
    return plugin.load_checkpoint(trainer.strategy.broadcast(str(checkpoint_path)), weights_only=weights_only)


def _load_into(
    trainer: Any, plugin: Any, own: Callable[..., Any], checkpoint_path: Any, weights_only: bool | None = None
) -> Any:
    strategy = trainer.strategy
    path = strategy.broadcast(str(checkpoint_path))
    if _is_of_strategy(trainer, path):
        return own(path) if weights_only is None else own(path, weights_only=weights_only)
    strict = trainer.lightning_module.strict_loading
    options = StateDictOptions(strict=strict)
    model = get_model_state_dict(strategy.model, options=options)
    optimizers = strategy.optimizers if trainer.state.fn == "fit" else []
    # For optimizers that have not stepped yet, torch creates the states here, so that they can be filled.
    states = [get_optimizer_state_dict(strategy.model, optimizer, options=options) for optimizer in optimizers]
    rest, states = plugin.load_into(path, model, states, strict=strict, weights_only=weights_only)
    set_model_state_dict(strategy.model, model, options=options)
    for optimizer, state in zip(optimizers, states, strict=True):
        set_optimizer_state_dict(strategy.model, optimizer, state, options=options)
    return rest


def _is_of_strategy(trainer: Any, path: str) -> bool:
    """Return whether a directory was saved by Lightning's own strategy, which then loads it; decided by rank 0.

    Raises on all ranks if loading it would run code from it, or if it is damaged.
    """
    options = trainer.strategy.checkpoint_io.storage_options
    found: list[bool] = []

    def look() -> None:
        found.append(trainer.global_rank == 0 and is_stock_distributed(path, options))
        if found[0]:
            check_dcp(path, storage_options=options)

    raise_on_all_ranks(look, world_size=trainer.world_size)
    return bool(trainer.strategy.broadcast(found[0]))
