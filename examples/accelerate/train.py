"""A plain Accelerate script: not one line of it is for this project.

pip install scikit-learn  # the data
accelerate launch train.py --output_dir runs/stock
accelerate launch -m accelerate_ckpt --strategy async train.py --output_dir runs/ours
accelerate launch -m accelerate_ckpt --strategy async train.py --output_dir runs/ours --resume_from runs/ours/step_60

Interrupt the second command and resume with the third: it ends with the weights of a run that was never interrupted.
Without ``-m accelerate_ckpt`` it does not, because what Accelerate saves is not enough for that.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from digits import dataset, fingerprint, network
from torch.utils.data import DataLoader


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on digits.")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--checkpointing_steps", type=int, default=20, help="batches between two checkpoints")
    parser.add_argument("--resume_from", help="a checkpoint: a directory step_N")
    args = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(1)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=500)
    loader = DataLoader(dataset(), batch_size=args.batch_size, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    step = 0
    if args.resume_from:
        accelerator.load_state(args.resume_from)
        step = int(os.path.basename(os.path.normpath(args.resume_from)).removeprefix("step_"))
        accelerator.print(f"resumed at step {step}")

    for epoch in range(step // len(loader), args.epochs):
        model.train()
        done = step % len(loader)
        for inputs, labels in accelerator.skip_first_batches(loader, done) if done else loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            step += 1
            if step % args.checkpointing_steps == 0:
                accelerator.save_state(os.path.join(args.output_dir, f"step_{step}"))
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")

    accelerator.print("weights", fingerprint(accelerator.unwrap_model(model)))
    accelerator.end_training()


if __name__ == "__main__":
    main()
