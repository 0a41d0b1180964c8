"""Restore the dtype of optimizer state that differs from its parameter's.

``torch.optim.Optimizer.load_state_dict`` casts such state to the parameter's dtype, which rounds it or changes how
later steps round.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def states_in_order(state: Any, *, usual: Collection[torch.dtype] = ()) -> list[dict[str, torch.Tensor]]:
    """Return the floating-point tensors in an optimizer's ``state_dict`` for each of its parameters, in their order.

    If ``usual`` is one dtype, tensors of that dtype are left out.
    """
    if not isinstance(state, Mapping) or not isinstance(state.get("param_groups"), list):
        return []  # a sharded strategy's state is by name
    numbers = itertools.chain.from_iterable(group.get("params", ()) for group in state["param_groups"])
    each = [state.get("state", {}).get(number) for number in numbers]
    return [
        {key: value for key, value in values.items() if is_number(value) and set(usual) != {value.dtype}}
        if isinstance(values, Mapping)
        else {}
        for values in each
    ]


def restore_types(
    optimizer: torch.optim.Optimizer,
    saved: Sequence[Mapping[str, torch.Tensor]],
    type_of: Callable[[torch.Tensor], torch.dtype | None],
) -> None:
    """Give the state that ``load_state_dict`` has cast its saved dtype back.

    Args:
        optimizer: An optimizer that has loaded its state.
        saved: The saved state, as :func:`states_in_order` returns it.
        type_of: Returns the dtype that a parameter had in the saved run. If that has changed, its state stays as it is.
    """
    parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for parameter, values in zip(parameters, saved, strict=False):
        if not values or type_of(parameter) is not parameter.dtype:
            continue
        state = optimizer.state.get(parameter, {})
        for key, value in values.items():
            now = state.get(key)
            if not is_number(now) or now.dtype is value.dtype:
                continue
            if is_same(now, value.to(now.device, now.dtype)):
                state[key] = value.to(now.device, copy=True)


def is_number(value: Any) -> bool:
    """Return whether this is a plain dense tensor of a usual floating-point dtype."""
    plain = type(value) in (torch.Tensor, torch.nn.Parameter)
    return plain and value.layout is torch.strided and value.dtype in _TYPES


def is_same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same numbers; NaN equals NaN."""
    if tensor.shape != other.shape:
        return False
    return bool(((tensor == other) | (tensor.isnan() & other.isnan())).all())
