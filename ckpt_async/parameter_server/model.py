"""What of a model is no parameter of its own: buffers, of which each worker has its own, and further names of tied parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

__all__ = ["Model", "aliases_of", "buffers_of", "mean_of", "parameters_of"]

Model = torch.nn.Module | Iterable[tuple[str, torch.Tensor]]


def parameters_of(model: Model) -> dict[str, torch.Tensor]:
    """Each parameter once, by its first name."""
    return dict(model.named_parameters() if isinstance(model, torch.nn.Module) else model)


def buffers_of(model: Model) -> dict[str, torch.Tensor]:
    """The buffers that a state dict of the model has; none unless the model itself is given."""
    if not isinstance(model, torch.nn.Module):
        return {}
    saved = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name in saved}


def aliases_of(model: Model) -> dict[str, str]:
    """The first name of each parameter that has several, by each of the others; none unless the model itself is given."""
    if not isinstance(model, torch.nn.Module):
        return {}
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in named if first[id(parameter)] != name}


def mean_of(buffers: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """The means over several workers; of what has none (counts, flags), the first worker's."""
    found: dict[str, torch.Tensor] = {}
    for name, value in (buffers[0] if buffers else {}).items():
        values = [own[name] for own in buffers if name in own and own[name].shape == value.shape]
        has_mean = value.is_floating_point() or value.is_complex()
        found[name] = torch.stack(values).mean(dim=0) if has_mean else value
    return found
