"""Ray Train with Lightning: training continues after a worker or the whole job is killed, on any number of workers.

    python examples/ray/train_lightning.py --storage runs/ray --workers 2

Start it again after whatever ended it. ``FailureConfig`` restarts it by itself when a worker is lost.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import ray.train
import torch
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchConfig, TorchTrainer

from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint


class Model(pl.LightningModule):
    """A small network, and data that are the same on every worker."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        time.sleep(0.05)
        return self.layers(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.01)

    def train_dataloader(self) -> Any:
        rows = torch.randn(96, 8, generator=torch.Generator().manual_seed(5))
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=4, shuffle=True)


def train(config: dict[str, Any]) -> None:
    """Train on one worker."""
    torch.set_num_threads(1)
    pl.seed_everything(1)
    storage = Path(config["storage"])
    callbacks: list[pl.Callback] = [RayTrainReportCallback()]  # Ray's own: a checkpoint for Ray after each epoch
    if not config["from_ray"]:  # also between epochs; a job finds it in storage without knowing of the last one
        callbacks.append(ResumableCheckpoint(storage / "checkpoints", every_n_train_steps=5, resume="auto"))
    trainer = prepare_trainer(
        pl.Trainer(
            max_steps=config["steps"],
            max_epochs=-1,
            accelerator="cpu",
            devices="auto",
            strategy=RayDDPStrategy(),
            plugins=[RayLightningEnvironment(), AsyncCheckpointIO()],
            callbacks=callbacks,
            default_root_dir=storage,
            logger=False,
            enable_progress_bar=False,
        )
    )
    context = ray.train.get_context()
    (storage / f"worker{context.get_world_rank()}").write_text(str(os.getpid()))
    model, checkpoint = Model(), ray.train.get_checkpoint() if config["from_ray"] else None
    if checkpoint is None:
        trainer.fit(model)
    else:
        with checkpoint.as_directory() as directory:
            trainer.fit(model, ckpt_path=os.path.join(directory, RayTrainReportCallback.CHECKPOINT_NAME))
    if trainer.is_global_zero:
        torch.save({"step": trainer.global_step, "weights": model.state_dict()}, storage / "end.pt")


def main() -> None:
    """Train until the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", type=Path, required=True, help="a directory that all workers share")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--from-ray", action="store_true", help="resume from what Ray keeps, with ray.train.get_checkpoint"
    )
    options = parser.parse_args()
    storage = options.storage.absolute()
    storage.mkdir(parents=True, exist_ok=True)
    result = TorchTrainer(
        train,
        train_loop_config={"storage": str(storage), "steps": options.steps, "from_ray": options.from_ray},
        scaling_config=ray.train.ScalingConfig(num_workers=options.workers),
        torch_config=TorchConfig(backend="gloo"),
        run_config=ray.train.RunConfig(
            name="ray", storage_path=str(storage), failure_config=ray.train.FailureConfig(max_failures=3)
        ),
    ).fit()
    print("Ray keeps", result.checkpoint)


if __name__ == "__main__":
    main()
