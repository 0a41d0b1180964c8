"""The same training, in a script that attaches our checkpoints itself and resumes from the newest one.

accelerate launch train_attached.py --project_dir runs/attached
accelerate launch train_attached.py --project_dir runs/attached    # after a crash: the same command
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from digits import dataset, fingerprint, network
from torch.utils.data import DataLoader

from accelerate_ckpt import attach


class Progress:
    """Counts epochs and batches, and is saved with the rest, so what to skip need not be read from file names."""

    def __init__(self) -> None:
        self.epoch = 0
        self.batch = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.batch = state["epoch"], state["batch"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on digits.")
    parser.add_argument("--project_dir", required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--every_n_batches", type=int, default=20)
    args = parser.parse_args()

    project = ProjectConfiguration(args.project_dir, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = attach(Accelerator(project_config=project), strategy="async")
    set_seed(1)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(dataset(), batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)

    if os.path.isdir(os.path.join(args.project_dir, "checkpoints")):
        accelerator.load_state()
        accelerator.print(f"resumed in epoch {progress.epoch}, batch {progress.batch}")

    model.train()
    while progress.epoch < args.epochs:
        for inputs, labels in accelerator.skip_first_batches(loader, progress.batch) if progress.batch else loader:
            loss = F.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            progress.batch += 1
            if progress.batch % args.every_n_batches == 0:
                accelerator.save_state()
        accelerator.print(f"epoch {progress.epoch}: loss {loss.item():.4f}")
        progress.epoch, progress.batch = progress.epoch + 1, 0

    accelerator.print("weights", fingerprint(accelerator.unwrap_model(model)))
    accelerator.end_training()


if __name__ == "__main__":
    main()
