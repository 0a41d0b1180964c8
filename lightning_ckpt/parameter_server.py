"""``ParameterServerWorker``: makes a stock Trainer a worker of asynchronous training with parameter servers."""

from __future__ import annotations

import warnings
from typing import Any

from ckpt_async.parameter_server import ParameterClient, RemoteOptimizer
from ckpt_core.errors import StateMismatchError
from lightning_ckpt._bases import CallbackBase

__all__ = ["ParameterServerWorker"]


class ParameterServerWorker(CallbackBase):
    """Seeds the generators for each batch, refuses settings that cannot work, and waits for the end of the training.

    The rest is done by :class:`~ckpt_async.parameter_server.RemoteOptimizer`, which ``configure_optimizers`` returns.
    Each worker is a separate Trainer on one device. The coordinator saves the checkpoints; those of the Trainer contain
    no state of the servers.

    Args:
        client: The worker's connection, made from the parameters of the same module.

    Example:
        In a worker's process::

            client = ParameterClient(transport, coordinator, module, batches=100)
            loader = DataLoader(dataset, batch_sampler=UpdateSampler(client, samples_of))
            module.configure_optimizers = lambda: RemoteOptimizer(client)
            Trainer(max_epochs=1, callbacks=[ParameterServerWorker(client)], enable_checkpointing=False).fit(module,
            loader)
    """

    def __init__(self, client: ParameterClient) -> None:
        self._client = client

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for what, is_wrong, remedy in (
            ("several processes in one worker", trainer.world_size > 1, "use devices=1, and more workers"),
            (
                "accumulated gradients",
                trainer.accumulate_grad_batches != 1,
                "use accumulate_grad_batches=1 and larger batches: a batch is counted when its gradients are pushed",
            ),
            (
                "a gradient scaler, which leaves out steps",
                getattr(trainer.precision_plugin, "scaler", None) is not None,
                "use precision='bf16-mixed' or '32-true'",
            ),
            (
                "another optimizer",
                not all(isinstance(optimizer, RemoteOptimizer) for optimizer in trainer.optimizers),
                "return RemoteOptimizer(client) from configure_optimizers",
            ),
            (
                "parameters that are not the client's",
                {id(parameter) for parameter in pl_module.parameters()}
                != {id(parameter) for parameter in self._client.parameters.values()},
                "make the client from the module that is trained",
            ),
        ):
            if is_wrong:
                raise StateMismatchError(f"a worker of a parameter server cannot train with {what}", remedy=remedy)
        self._warn_of_what_is_not_saved(pl_module)

    def _warn_of_what_is_not_saved(self, pl_module: Any) -> None:
        client = self._client
        known = {id(tensor) for tensor in (*client.parameters.values(), *client.buffers.values())}
        unknown = [name for name, value in pl_module.state_dict(keep_vars=True).items() if id(value) not in known]
        names = [name for name, _ in pl_module.named_parameters(remove_duplicate=False)]
        is_tied = len(names) > len(client.parameters) + len(client.aliases)
        if unknown or is_tied:
            what = f"{', '.join(unknown[:5])}{', ...' if unknown[5:] else ''}" or "the further names of tied parameters"
            warnings.warn(
                f"the checkpoints of this training will not have {what}: give ParameterClient the module itself, "
                "and not its named_parameters()",
                stacklevel=2,
            )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        # Validation and the loader may have used the generator since the parameters were pulled.
        self._client.reseed()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._client.finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._client.close()
