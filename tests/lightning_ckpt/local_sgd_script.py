"""Train with post-localSGD on several gloo ranks, each run in fresh processes (see ``sharded_script.py``)."""

from __future__ import annotations

import dataclasses
import traceback
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed.optim  # once here; otherwise the strategy imports it in every rank
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import lightning_ckpt
from lightning_ckpt import ResumableCheckpoint
from tests.lightning_ckpt import sharded_script


@dataclasses.dataclass
class Spec:
    """What to train.

    Attributes:
        ranks: Number of ranks.
        kind: Ignored.
        directory: Directory of the callback's checkpoints.
        result: Path of the results, without ``.<rank>.json``.
        port: Port of the process group.
        io: Name of the plugin's class.
        ckpt_path: Checkpoint to resume from.
        start: Steps before weights are averaged.
        period: Steps between two averagings.
        steps: Number of steps to train.
        kill_at: Step before whose batch all ranks are killed, once pending checkpoints are durable.
        callback: Arguments of :class:`ResumableCheckpoint`; None for no callback.
        after_fit: Whether to save to ``after.ckpt`` when the fit is over.
        power: Whether to compress gradients with PowerSGD instead of averaging weights.
    """

    ranks: int
    kind: str
    directory: str
    result: str
    port: int
    io: str = "AsyncCheckpointIO"
    ckpt_path: str | None = None
    start: int = 3
    period: int = 4
    steps: int = 14
    kill_at: int | None = None
    callback: dict[str, Any] | None = dataclasses.field(default_factory=dict)
    after_fit: bool = False
    power: bool = False


class OnCPU(DDPStrategy):
    """Registers communication hooks on the CPU too: Lightning does so on GPUs only, but torch calls them with gloo."""

    def _register_ddp_hooks(self) -> None:
        if self._ddp_comm_hook is not None:
            self.model.register_comm_hook(self._ddp_comm_state, self._ddp_comm_hook)


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 33), torch.nn.BatchNorm1d(33), torch.nn.Dropout(0.2), torch.nn.Linear(33, 3)
        )
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch[1]).pow(2).mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"},
        }

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(sharded_script.Samples(60), 4, shuffle=True)


def state_of(trainer: Any, module: Model) -> dict[str, Any]:
    """Return digests of the weights and moments of this rank, and its counters."""
    moments = trainer.optimizers[0].state_dict()["state"]
    return {
        "weights": {name: sharded_script.digest(value) for name, value in module.named_parameters()},
        "moments": {
            f"{index}.{key}": sharded_script.digest(value)
            for index, state in moments.items()
            for key, value in state.items()
        },
        "averager": getattr(vars(trainer.strategy).get("_model_averager"), "step", None),
        "hook": getattr(vars(trainer.strategy).get("_ddp_comm_state"), "iter", None),
    }


class Tells(Callback):
    """Records what this rank holds at the start and after each batch; kills all ranks at ``kill_at``."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.held_first: dict[str, Any] = {}
        self.held_after: dict[int, Any] = {}

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        if not self.held_first:
            self.held_first = state_of(trainer, module)
        if trainer.global_step == self.spec.kill_at:
            plugin = trainer.strategy.checkpoint_io
            plugin.checkpointer.drain()
            trainer.strategy.barrier()  # durable on all ranks
            sharded_script.os.killpg(0, sharded_script.signal.SIGKILL)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.held_after[trainer.global_step] = state_of(trainer, module)


def make_strategy(spec: Spec) -> Any:
    if spec.ranks == 1:
        return "auto"
    if spec.power:
        return OnCPU(ddp_comm_state=PowerSGDState(None, start_powerSGD_iter=2), ddp_comm_hook=powerSGD_hook)
    state = PostLocalSGDState(
        process_group=None, subgroup=None, start_localSGD_iter=spec.start, post_local_gradient_allreduce=False
    )
    return OnCPU(model_averaging_period=spec.period, ddp_comm_state=state, ddp_comm_hook=post_localSGD_hook)


def train(spec: Spec, rank: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    tells, plugin = Tells(spec), getattr(lightning_ckpt, spec.io)()
    callbacks: list[Any] = [tells]
    if spec.callback is not None:
        settings = {"every_n_train_steps": 6, "save_top_k": -1, "filename": "{step}", **spec.callback}
        callbacks.append(ResumableCheckpoint(dirpath=spec.directory, **settings))
    module = Model()
    trainer = pl.Trainer(
        max_steps=spec.steps,
        accelerator="cpu",
        devices=spec.ranks,
        strategy=make_strategy(spec),
        plugins=[plugin],
        callbacks=callbacks,
        default_root_dir=spec.directory,
        logger=False,
        enable_checkpointing=spec.callback is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    found: dict[str, Any] = {"raised": None}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, ckpt_path=spec.ckpt_path)
            if spec.after_fit:
                trainer.save_checkpoint(Path(spec.directory) / "after.ckpt")
        except Exception as error:  # noqa: BLE001 - the test says what it must be
            traceback.print_exc()
            found["raised"] = {"class": type(error).__name__, "message": str(error)}
    return {
        **found,
        "started": tells.held_first,
        "after": tells.held_after,
        "losses": module.losses,
        "wrapped": sorted({"lightning_module_state_dict", "optimizer_state"} & vars(trainer.strategy).keys()),
        "warnings": [str(warning.message) for warning in caught if "guaranteed to be exact" in str(warning.message)],
    }


if __name__ == "__main__":
    sharded_script.Spec, sharded_script.train = Spec, train  # type: ignore[misc,assignment]
    sharded_script.serve(sharded_script.run)
