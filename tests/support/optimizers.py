"""Optimizers as users write them."""

from __future__ import annotations

from typing import Any

import torch


class MomentumOfAnotherType(torch.optim.Optimizer):
    """SGD whose buffers are ``bfloat16`` for even parameters and ``float32`` for odd ones."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for number, parameter in enumerate(self.param_groups[0]["params"]):
                state, kind = self.state[parameter], (torch.bfloat16, torch.float32)[number % 2]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter, dtype=kind)
                state["momentum"].mul_(0.9).add_(parameter.grad.to(kind) * (1 / 3))
                parameter.sub_((self.param_groups[0]["lr"] * state["momentum"]).to(parameter.dtype))
        return loss
