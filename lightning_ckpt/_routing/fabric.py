"""Routes ``Fabric.save`` and ``Fabric.load`` to :class:`~lightning_ckpt.ShardedCheckpointIO` on all ranks.

Fabric's DDP calls a plugin on rank 0 only, and its sharded strategies refuse one. As with the Trainer, the methods of
the strategy are replaced on the instance.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from ckpt_core import Kind, Part, RankGroup
from ckpt_core.errors import CheckpointError, CheckpointFormatError, CheckpointNotFoundError, StateMismatchError
from ckpt_core.interchange import check_dcp, is_stock_distributed
from ckpt_core.state.kinds import buffers_by_name, frozen_parameters
from ckpt_core.state.trainer_parts import is_of_trainer
from lightning_ckpt._private.loops import given_to
from lightning_ckpt._routing.trainer import (
    is_routed,
    is_sharded,
    raise_on_all_ranks,
    refuse_strategy,
    route_methods,
)

_REST = "fabric"


def route_fabric(fabric: Any) -> None:
    """Make a Fabric save and load through its :class:`~lightning_ckpt.ShardedCheckpointIO` on all ranks, if it has one.

    The plugin is among Fabric's ``plugins``, or among ``callbacks`` if the strategy refuses plugins. Called on all
    ranks together, before a save or a load. Does nothing if called again.
    """
    strategy = fabric.strategy
    plugin = _plugin_of(fabric)
    if plugin is None or is_routed(strategy, plugin):
        return
    refuse_strategy(strategy)
    plugin.connect(RankGroup.connect(fabric.global_rank, fabric.world_size, strategy.broadcast))
    route_methods(
        strategy,
        plugin,
        save_checkpoint=functools.partial(_save, fabric, plugin),
        load_checkpoint=functools.partial(_load, fabric, plugin, strategy.load_checkpoint),
    )


def _plugin_of(fabric: Any) -> Any:
    return next((candidate for candidate in given_to(fabric) if getattr(candidate, "saves_together", False)), None)


def _model_of(state: Mapping[str, Any]) -> nn.Module:
    models = [value for value in state.values() if isinstance(value, nn.Module)]
    if len(models) != 1:
        raise CheckpointError(
            f"a sharded optimizer belongs to a model, but the state has {len(models)} of them",
            remedy="save and load one model with its optimizers at a time",
        )
    return models[0]


def _state_of(strategy: Any, state: Mapping[str, Any], value: Any) -> Any:
    if isinstance(value, nn.Module):
        return get_model_state_dict(value) if is_sharded(strategy) else strategy.get_module_state_dict(value)
    if isinstance(value, Optimizer):
        if is_sharded(strategy):
            return get_optimizer_state_dict(_model_of(state), value)
        return strategy.get_optimizer_state(value)
    return value.state_dict() if hasattr(value, "state_dict") else value


def _save(
    fabric: Any,
    plugin: Any,
    path: Any,
    state: Mapping[str, Any],
    storage_options: Any | None = None,
    filter: Mapping[str, Callable[[str, Any], bool]] | None = None,
) -> None:
    if storage_options is not None:
        raise TypeError("give storage_options to ShardedCheckpointIO: they hold for every save there")
    target = fabric.strategy.broadcast(str(path))

    def save() -> None:
        try:
            parts = _parts_of(fabric, state, filter or {})
        except Exception as error:  # possibly on this rank only: the others must not wait for its part
            plugin.checkpointer.refuse(target, error)
            raise
        plugin.checkpointer.save(parts, target)
        plugin.checkpointer.wait_when_touched(target)

    raise_on_all_ranks(save, world_size=fabric.world_size)


def _parts_of(fabric: Any, state: Mapping[str, Any], filter: Mapping[str, Callable[[str, Any], bool]]) -> list[Part]:
    parts, rest, buffers = [], {}, {}
    for name, value in state.items():
        found = _state_of(fabric.strategy, state, value)
        if name in filter:
            found = {key: item for key, item in found.items() if filter[name](key, item)}
        if not isinstance(value, (nn.Module, Optimizer)):
            rest[name] = found
            continue
        if not re.fullmatch(r"\w+", name) or name == _REST:
            raise CheckpointError(f"{name!r} cannot be used as a file name", remedy="give it another name")
        own = _buffers(value, found)
        rest[name] = own
        if own and is_sharded(fabric.strategy):  # each rank resumes with its own statistics
            buffers[name] = own
        frozen = frozen_parameters(value) if isinstance(value, nn.Module) else ()
        weights = {key: item for key, item in found.items() if key not in own}
        parts.append(Part(name, weights, Kind.SHARDED, frozen))
    return [*parts, Part(_REST, rest if fabric.global_rank == 0 else buffers, Kind.PER_RANK)]


def _buffers(value: Any, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's buffers, which each rank updates itself; DDP resumes with rank 0's, shards with their own."""
    if not isinstance(value, nn.Module):
        return {}
    names = buffers_by_name(value)
    return {name: item for name, item in found.items() if name.removeprefix("module.") in names}


def _load(
    fabric: Any,
    plugin: Any,
    own: Callable[..., dict[str, Any]],
    path: Any,
    state: Any | None = None,
    strict: bool = True,
    weights_only: bool | None = None,
) -> dict[str, Any]:
    path = fabric.strategy.broadcast(str(path))
    try:
        checkpoint = plugin.checkpointer.load(path, weights_only=weights_only)
    except (CheckpointFormatError, CheckpointNotFoundError) as error:
        if plugin.checkpointer.exists(path) or not _is_of_others(plugin, path, error):
            raise
        how = {} if weights_only is None else {"weights_only": weights_only}
        return own(path, state, strict, **how)
    with checkpoint as opened:
        rest, parts = _rest_of(opened, state)
        if not state:
            return {**rest, **{name: {**opened.load(name), **rest[name]} for name in parts}}
        if isinstance(state, (nn.Module, Optimizer)):
            raise TypeError("a sharded checkpoint is loaded into a dictionary, such as {'model': model}")
        missing = sorted(state.keys() - rest.keys())
        if missing and strict:
            raise StateMismatchError(
                "the checkpoint does not have everything that it is loaded into", key=missing[0], path=opened.path
            )
        is_own = is_sharded(fabric.strategy) and _REST in opened.parts and not is_of_trainer(opened)
        if is_own and len(opened.ranks_with(_REST)) == fabric.world_size:
            mine = opened.load(_REST, rank=fabric.global_rank)
            rest |= {name: own for name, own in mine.items() if isinstance(state.get(name), nn.Module)}
        for name, value in list(state.items()):
            if name in rest:
                _load_one(fabric.strategy, opened, name, state, value, rest.pop(name), strict)
    return rest


def _rest_of(opened: Any, state: Any) -> tuple[dict[str, Any], list[str]]:
    """Return by name all but weights and optimizers, including models' buffers; and the names of the other parts."""
    parts = [name for name in opened.parts if name != _REST]
    if _REST in opened.parts or is_of_trainer(opened):
        return opened.load(_REST, rank=0), parts
    # A file converted by `ckpt convert`: parts that the caller has no model or optimizer for are plain data.
    given = state if isinstance(state, Mapping) else {}
    filled = [name for name in parts if isinstance(given.get(name), (nn.Module, Optimizer))]
    rest = {name: opened.load(name) for name in parts if name not in filled}
    return {**rest.pop("root", {}), **rest, **{name: {} for name in filled}}, filled


def _is_of_others(plugin: Any, path: str, error: CheckpointError) -> bool:
    """Return whether the path is a file, as for ``load_raw``, or was written by Fabric's own strategies."""
    if isinstance(error, CheckpointFormatError):
        return True
    options = plugin.storage_options
    if not is_stock_distributed(path, options):
        return False
    check_dcp(path, storage_options=options)
    return True


def _load_one(
    strategy: Any, opened: Any, name: str, state: dict[str, Any], value: Any, saved: Any, strict: bool
) -> None:
    if isinstance(value, nn.Module):
        weights = _state_of(strategy, state, value)
        into = {key: item for key, item in weights.items() if key not in saved}
        opened.load(name, into=into, strict=strict)
        whole = {**weights, **into, **saved}
        if is_sharded(strategy):
            set_model_state_dict(value, whole)
        else:
            strategy.load_module_state_dict(value, whole, strict=strict)
    elif isinstance(value, Optimizer):
        if is_sharded(strategy):
            found = opened.load(name, into=_state_of(strategy, state, value))
            set_optimizer_state_dict(_model_of(state), value, found)
        else:
            value.load_state_dict(opened.load(name))
    elif hasattr(value, "load_state_dict"):
        value.load_state_dict(saved)
    else:
        state[name] = saved
