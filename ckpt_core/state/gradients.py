"""The gradients of an open accumulation window: they are not in any state dict, and differ from rank to rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ckpt_core.errors import StateMismatchError

__all__ = ["capture_gradients", "restore_gradients"]


def capture_gradients(parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> dict[str, torch.Tensor]:
    """Copy the gradients that are there to host memory.

    Args:
        parameters: Names and parameters, as ``model.named_parameters()`` gives them.
    """
    return {
        name: parameter.grad.detach().to("cpu", copy=True)
        for name, parameter in parameters
        if parameter.grad is not None
    }


def restore_gradients(
    parameters: Iterable[tuple[str, torch.nn.Parameter]], gradients: Mapping[str, torch.Tensor]
) -> None:
    """Put captured gradients back, and clear those of the other parameters.

    Raises:
        StateMismatchError: A gradient belongs to no parameter, or has another shape.
    """
    left = dict(gradients)
    for name, parameter in parameters:
        gradient = left.pop(name, None)
        if gradient is None:
            parameter.grad = None
            continue
        if gradient.shape != parameter.shape:
            raise StateMismatchError(
                f"the saved gradient has shape {tuple(gradient.shape)}, the parameter {tuple(parameter.shape)}",
                key=name,
            )
        parameter.grad = gradient.to(device=parameter.device, dtype=parameter.dtype, copy=True)
    if left:
        raise StateMismatchError(
            "the checkpoint holds gradients of parameters that the model does not have", key=min(left)
        )
