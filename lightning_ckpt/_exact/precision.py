"""Restores the exact bits of tensors that Lightning's restore has rounded.

Lightning restores weights before it converts the module to ``precision="64-true"``, so they pass through ``float32``.
For optimizers, see :mod:`ckpt_core.state.optimizer_types`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ckpt_core.state.optimizer_types import is_number, is_same, restore_types, states_in_order


class Precision:
    """The tensors of a checkpoint that a restore may round.

    ``checkpoint`` was restored into ``module``, which may not have its final types yet.
    """

    def __init__(self, checkpoint: Mapping[str, Any], module: torch.nn.Module) -> None:
        # with weight averaging, the second one has the weights that are trained
        states = [checkpoint.get(key) for key in ("state_dict", "current_model_state")]
        weights = [
            {name: value for name, value in state.items() if is_number(value)}
            for state in states
            if isinstance(state, Mapping)
        ]
        self._types = {name: value.dtype for named in weights for name, value in named.items()}
        self._loaded_as = {name: tensor.dtype for name, tensor in _tensors(module)}
        self._weights = [
            {name: v for name, v in named.items() if self._loaded_as.get(name, v.dtype) is not v.dtype}
            for named in weights
        ]
        usual = set(self._types.values())
        self._optimizers = [states_in_order(state, usual=usual) for state in checkpoint.get("optimizer_states", ())]

    def restore_weights(self, module: torch.nn.Module) -> None:
        """Copy the saved values into tensors of the module that were rounded and have the saved type again."""
        for name, tensor in _tensors(module):
            for saved in (named[name] for named in self._weights if name in named):
                if _is_rounded(tensor, saved, self._loaded_as[name]):
                    with torch.no_grad():
                        tensor.copy_(saved)

    def restore_optimizers(self, optimizers: Sequence[torch.optim.Optimizer], module: torch.nn.Module) -> None:
        """Give optimizer state that was rounded its saved type and values again."""
        names = {id(parameter): name for name, parameter in module.named_parameters()}

        def type_of(parameter: torch.Tensor) -> torch.dtype | None:
            return self._types.get(names.get(id(parameter), ""))

        for optimizer, saved in zip(optimizers, self._optimizers, strict=False):
            restore_types(optimizer, saved, type_of)


def _is_rounded(tensor: torch.Tensor, saved: torch.Tensor, through: torch.dtype) -> bool:
    if tensor.dtype is not saved.dtype or tensor.shape != saved.shape:
        return False
    return is_same(tensor, saved.to(tensor.device, through).to(tensor.dtype))


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    named = itertools.chain(module.named_parameters(), module.named_buffers())
    return ((name, tensor) for name, tensor in named if is_number(tensor))


def as_python_numbers(settings: Any) -> Any:
    """Return settings of optimizers and schedules with NumPy's numbers replaced by equal Python numbers.

    ``torch.load`` refuses NumPy's, which come from code such as ``group["lr"] = np.interp(...)``.
    """
    if type(settings) is dict:
        return {name: one if name in ("params", "state") else as_python_numbers(one) for name, one in settings.items()}
    if type(settings) in (list, tuple):
        return type(settings)(map(as_python_numbers, settings))
    return settings.item() if isinstance(settings, (np.float64, np.integer, np.bool_)) else settings
