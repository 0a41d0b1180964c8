"""Capture and restore the per-rank gradients of an open accumulation window, which no ``state_dict`` holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.distributed.tensor import DTensor

from ckpt_core.errors import StateMismatchError


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return local
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def capture_gradients(
    parameters: Iterable[tuple[str, torch.nn.Parameter]], *, copies: bool = True
) -> dict[str, torch.Tensor]:
    """Return all gradients that exist, copied to host memory; of a distributed gradient, this rank's shard.

    Without ``copies``, return the live tensors, which the next backward pass changes, for a save that copies them.
    """
    found = {name: _local(p.grad).detach() for name, p in parameters if p.grad is not None}
    return {name: gradient.to("cpu", copy=True) for name, gradient in found.items()} if copies else found


def restore_gradients(
    parameters: Iterable[tuple[str, torch.nn.Parameter]], gradients: Mapping[str, torch.Tensor]
) -> None:
    """Put captured gradients back, and set those of all other parameters to None."""
    left = dict(gradients)
    for name, parameter in parameters:
        gradient = left.pop(name, None)
        if gradient is None:
            parameter.grad = None
            continue
        local = _local(parameter)
        if gradient.shape != local.shape:
            raise StateMismatchError(
                f"the saved gradient has shape {tuple(gradient.shape)}, the parameter {tuple(local.shape)}",
                key=name,
            )
        moved = gradient.to(device=local.device, dtype=local.dtype, copy=True)
        parameter.grad = _like(parameter, moved)
    if left:
        raise StateMismatchError(
            "the checkpoint holds gradients of parameters that the model does not have", key=min(left)
        )
