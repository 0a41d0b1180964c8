"""The Lightning training that the campaign kills: some seconds long, with random state that a resume must restore."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

from train_gpt import StepLog

from ckpt_core.storage import uploads
from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint, ShardedCheckpointIO, SyncCheckpointIO
from tests.chaos.training import EVERY_N_STEPS, KEPT, common_arguments, network, samples, sha256

NAME = "lightning"
SMALLEST_PART_OF_S3 = 5 * 2**20
PLUGINS = {"sync": SyncCheckpointIO, "async": AsyncCheckpointIO, "sharded": ShardedCheckpointIO}


class Model(L.LightningModule):
    """The network, with noise on its inputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = network(width)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.layers(inputs + 0.01 * torch.randn_like(inputs)), targets)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)}


def train(options: argparse.Namespace) -> None:
    """Train, or continue training, and write the result to ``result.json``."""
    # Parts of the usual size would need states so large that a thousand kills would take a day.
    uploads.PART_BYTES = SMALLEST_PART_OF_S3
    L.seed_everything(7, verbose=False)
    by_loss = options.keep == "best"
    callback = ResumableCheckpoint(
        dirpath=f"{options.root}/checkpoints",
        filename="{step}",
        monitor="loss" if by_loss else "step",
        mode="min" if by_loss else "max",
        save_top_k=KEPT,
        save_last=True,
        every_n_train_steps=EVERY_N_STEPS,
    )
    plugin = PLUGINS[options.io](
        event_log=str(options.output / "events.jsonl"), storage_options=options.storage_options
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy="ddp" if options.devices > 1 else "auto",
        max_steps=options.steps,
        accumulate_grad_batches=options.accumulate,
        callbacks=[StepLog(options.output), callback],
        plugins=[plugin],
        default_root_dir=options.output,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model(options.width)
    loader = DataLoader(samples(), batch_size=8, shuffle=True)
    trainer.fit(model, loader, ckpt_path="last" if options.resume else None)
    if trainer.is_global_zero:
        result = {
            "steps": trainer.global_step,
            "weights": sha256(model.state_dict()),
            "optimizer": sha256(trainer.optimizers[0].state_dict()),
        }
        (options.output / "result.json").write_text(json.dumps(result))


def main(arguments: Sequence[str]) -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    common_arguments(parser)
    parser.add_argument("--io", choices=sorted(PLUGINS), default="async")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--keep", choices=["newest", "best"], default="newest")
    parser.add_argument("--storage-options", type=json.loads, default=None)
    train(parser.parse_args(arguments))
