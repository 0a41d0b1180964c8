"""The training that the kill campaign kills: some seconds long, random in every way that must survive, 12 MB of state.

    python train.py --output run [--resume]
    python train.py --serve      forks one training per line of standard input, a JSON list of arguments

A process that has imported torch and Lightning and forks starts a training in a fraction of a second instead of ten.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

from train_gpt import StepLog, sha256

from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint, SyncCheckpointIO

EVERY_N_STEPS = 3
KEPT = 2


class Model(L.LightningModule):
    """A million weights, and dropout, so that the random state counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(32, 1000), nn.Dropout(0.2), nn.ReLU(), nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 1)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.layers(inputs + 0.01 * torch.randn_like(inputs)), targets)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)}


def train(options: argparse.Namespace) -> None:
    """Train, or go on training, and write what came out of it to ``result.json``."""
    options.output.mkdir(parents=True, exist_ok=True)
    L.seed_everything(7, verbose=False)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(200, 32, generator=generator)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True).sin()), batch_size=8, shuffle=True)
    plugin = {"sync": SyncCheckpointIO, "async": AsyncCheckpointIO}[options.io]
    by_loss = options.keep == "best"
    callback = ResumableCheckpoint(
        dirpath=options.output / "checkpoints",
        filename="{step}",
        monitor="loss" if by_loss else "step",
        mode="min" if by_loss else "max",
        save_top_k=KEPT,
        save_last=True,
        every_n_train_steps=EVERY_N_STEPS,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy="ddp" if options.devices > 1 else "auto",
        max_steps=options.steps,
        accumulate_grad_batches=options.accumulate,
        callbacks=[StepLog(options.output), callback],
        plugins=[plugin(event_log=str(options.output / "events.jsonl"))],
        default_root_dir=options.output,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    trainer.fit(model, loader, ckpt_path="last" if options.resume else None)
    if trainer.is_global_zero:
        result = {
            "steps": trainer.global_step,
            "weights": sha256(model.state_dict()),
            "optimizer": sha256(trainer.optimizers[0].state_dict()),
        }
        (options.output / "result.json").write_text(json.dumps(result))


def serve() -> list[str]:
    """Fork one training per order, tell its process group, and when all of the group is gone its exit status.

    Returns:
        The arguments of a training, in the process that is to do it; no arguments at the end.
    """
    for order in sys.stdin:
        arguments = json.loads(order)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            os.nice(5)  # whoever is to kill this at the right moment must not wait for a turn
            os.close(reading)
            for descriptor in (1, 2):
                os.dup2(writing, descriptor)
            os.close(writing)
            return arguments
        with contextlib.suppress(ProcessLookupError):
            os.setpgid(child, child)  # whoever is first: the group exists when it is told
        print(child, flush=True)
        os.close(writing)
        output = Path(arguments[arguments.index("--output") + 1])
        with open(reading, "rb", buffering=0) as pipe, (output / "console.log").open("ab") as log:
            # Ends when the last process that holds the other end is dead, other ranks included.
            while block := pipe.read(65536):
                log.write(block)
                log.flush()
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return []


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--io", choices=["sync", "async"], default="async")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--keep", choices=["newest", "best"], default="newest")
    parser.add_argument("--steps", type=int, default=60)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        print("ready", flush=True)
        # The launcher of other ranks repeats the arguments of this process.
        sys.argv[1:] = serve()
        if not sys.argv[1:]:
            sys.exit()
    train(parse_arguments(sys.argv[1:]))
