"""An optimizer whose step is taken by the parameter servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ckpt_async.parameter_server.client import ParameterClient

__all__ = ["RemoteOptimizer"]


class RemoteOptimizer(torch.optim.Optimizer):
    """Makes a worker's training loop look like any other: :meth:`step` pushes the gradients and pulls what comes next.

    The parameters are those of the client. There is no learning rate here: the servers' optimizers have one, and a scheduler
    that is given this optimizer fails instead of being without effect.

    Args:
        client: The worker's connection. The first parameters are pulled at once.

    Example:
        In a worker's process::

            client = ParameterClient(transport, coordinator, model.named_parameters(), batches=100)
            optimizer = RemoteOptimizer(client)
            for update in client.updates():
                optimizer.zero_grad()
                loss_of(model, batch_of(update.stream, update.seq)).backward()
                optimizer.step()
            client.finish()
    """

    def __init__(self, client: ParameterClient) -> None:
        super().__init__(list(client.parameters.values()), {})
        self.client = client
        self._pull_next()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Push the gradients of this batch, and load the parameters for the next one into the model.

        Args:
            closure: Computes the gradients first, and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.client.push()
        self._pull_next()
        return loss

    def _pull_next(self) -> None:
        if self.client.upcoming is not None:
            self.client.pull()
