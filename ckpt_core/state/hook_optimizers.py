"""Optimizers, and their schedules, that step in hooks of parameters as soon as a gradient is there.

No list of a framework's has them: those of torch's and torchtune's "optimizer in backward", of LayerWise optimizers.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ckpt_core.state.object_walk import is_plain
from ckpt_core.state.optimizer_types import restore_types, states_in_order

#: What a resume says if a checkpoint has not all of their states.
UNSAVED_IN_HOOKS = "optimizers that step in hooks of parameters (%s) begin anew: their state is not in the checkpoint"

_LOOKED_INTO_ELSEWHERE = (Optimizer, LRScheduler, torch.nn.Module, torch.Tensor, type, types.ModuleType)


def in_hooks(model: torch.nn.Module, known: Collection[object] = ()) -> dict[str, Any]:
    """Return the optimizers and schedules of the parameters' hooks, but for those that are ``known``.

    They are named by the first parameter that has each, and numbered.
    """
    seen = {id(one) for one in known}
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        held = list(getattr(parameter, "_in_backward_optimizers", ()))  # of torch.distributed.optim
        for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
            with contextlib.suppress(Exception):  # of what a script's objects do, or a variable that is not set
                held += [one.get(parameter) if isinstance(one, dict) else one for one in _held_by(hook)]
        for one in held:
            if isinstance(one, (Optimizer, LRScheduler)) and id(one) not in seen:
                seen.add(id(one))
                found[f"{name} {len(found)}"] = one
    return found


def _held_by(hook: Any) -> Iterator[Any]:
    """Return what a hook can reach: its arguments and variables, and the attributes of objects among these."""
    values: list[Any] = []
    while isinstance(hook, functools.partial):
        values += [*hook.args, *hook.keywords.values()]
        hook = hook.func
    values += [getattr(hook, "__self__", None)]
    function = inspect.unwrap(getattr(hook, "__func__", hook))
    if isinstance(function, types.FunctionType):
        variables = inspect.getclosurevars(function)
        values += [*variables.nonlocals.values(), *variables.globals.values(), *(function.__defaults__ or ())]
    for value in values:
        yield value
        if hasattr(value, "__dict__") and not isinstance(value, (*_LOOKED_INTO_ELSEWHERE, types.FunctionType)):
            yield from vars(value).values()


def capture_in_hooks(found: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the states that a checkpoint can hold, and the classes of those that it cannot."""
    states = {name: one.state_dict() for name, one in found.items()}
    plain = {name: state for name, state in states.items() if is_plain(state)}
    return plain, sorted({type(found[name]).__name__ for name in states.keys() - plain.keys()})


def restore_in_hooks(found: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Load what :func:`capture_in_hooks` returned; return whether each has its state."""
    for name in found.keys() & saved.keys():
        found[name].load_state_dict(saved[name])
        if isinstance(found[name], Optimizer):
            restore_types(found[name], states_in_order(saved[name]), lambda parameter: parameter.dtype)
    return found.keys() <= saved.keys()
