"""The Accelerate training that the campaign kills: a script that does not mention accelerate_ckpt, its launcher."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).resolve().parents[2]))

from tests.chaos.training import EVERY_N_STEPS, KEPT, common_arguments, network, samples, sha256


class Progress:
    """How far the training is: optimizer steps and batches."""

    def __init__(self) -> None:
        self.steps = self.batches = 0

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


class Training:
    """The script's objects.

    Args:
        options: Options of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        set_seed(7)
        self.options = options
        project = ProjectConfiguration(
            project_dir=options.root, automatic_checkpoint_naming=not options.same_name, total_limit=KEPT
        )
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=options.accumulate, project_config=project)
        model = network(options.width)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30, 0.9)
        loader = DataLoader(samples(), batch_size=8, shuffle=True)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        self.progress = Progress()
        self.accelerator.register_for_checkpointing(self.progress)
        self.latest = f"{options.root}/checkpoints/latest" if options.same_name else None
        self.log = options.output / f"steps-rank{self.accelerator.process_index}.jsonl"

    def resume(self) -> None:
        try:
            self.accelerator.load_state(self.latest)
        except FileNotFoundError:
            self.accelerator.print("there is no checkpoint yet")

    def run(self) -> None:
        while self.progress.steps < self.options.steps:
            for batch in self.loader:
                self.step(batch)
                if self.progress.steps == self.options.steps:
                    break

    def step(self, batch: list[torch.Tensor]) -> None:
        start, progress = time.time(), self.progress
        inputs, targets = batch
        with self.accelerator.accumulate(self.model):
            loss = nn.functional.mse_loss(self.model(inputs + 0.01 * torch.randn_like(inputs)), targets)
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        progress.batches += 1
        progress.steps += int(self.accelerator.sync_gradients)
        record: dict[str, Any] = {
            # Counted at the end of an epoch, it would be one behind after a resume from the epoch's last batch.
            "epoch": (progress.batches - 1) // len(self.loader),
            "batch": progress.batches,
            "step": progress.steps,
            "loss": loss.item(),
            "start": start,
            "end": time.time(),
        }
        with self.log.open("a") as log:
            log.write(json.dumps(record) + "\n")
        # With accumulation, this is sometimes in the middle of an accumulation window.
        if progress.batches % (EVERY_N_STEPS * self.options.accumulate + (self.options.accumulate > 1)) == 0:
            self.accelerator.save_state(self.latest)

    def finish(self) -> None:
        self.accelerator.end_training()
        if self.accelerator.is_main_process:
            result = {
                "steps": self.progress.steps,
                "weights": sha256(self.accelerator.unwrap_model(self.model).state_dict()),
                "optimizer": sha256(self.optimizer.state_dict()),
            }
            (self.options.output / "result.json").write_text(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    common_arguments(parser)
    parser.add_argument("--same-name", action="store_true", help="save to one name again and again")
    options = parser.parse_args()
    training = Training(options)
    if options.resume:
        training.resume()
    training.run()
    training.finish()


if __name__ == "__main__":
    main()
