"""``transformers.Trainer`` with our checkpoints: a tiny GPT-2 learns Python's standard library.

python transformers_trainer.py --output_dir runs/gpt2
python transformers_trainer.py --output_dir runs/gpt2    # after a crash: the same command
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import textwrap

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from accelerate_ckpt.integrations.transformers import ResumableCallback

CONTEXT = 32


class SourceText(Dataset):
    """A module of the standard library in pieces of ``CONTEXT`` bytes."""

    def __init__(self, samples: int) -> None:
        with open(textwrap.__file__, "rb") as file:
            text = torch.tensor(list(file.read()))
        self.pieces = text[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT)[:samples]

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def network() -> GPT2LMHeadModel:
    sizes = {"vocab_size": 256, "n_positions": CONTEXT, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def fingerprint(model: torch.nn.Module) -> str:
    """Return a digest of the weights, which is the same only for the same bits."""
    weights = b"".join(parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(weights).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a tiny language model.")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--strategy", default="async", choices=["sync", "async", "sharded", "stock"])
    parser.add_argument("--samples", type=int, default=160)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--save_steps", type=int, default=5)
    parser.add_argument("--accumulate", type=int, default=2)
    args = parser.parse_args()

    torch.manual_seed(1)
    data = SourceText(args.samples)
    arguments = TrainingArguments(
        args.output_dir,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=args.accumulate,
        save_steps=args.save_steps,
        save_total_limit=3,
        logging_steps=3,
        report_to=[],
        disable_tqdm=True,
        seed=1,
    )
    trainer = Trainer(network(), arguments, train_dataset=data)
    if args.strategy != "stock":
        ResumableCallback(trainer, strategy=args.strategy)
    folders = os.listdir(args.output_dir) if os.path.isdir(args.output_dir) else []
    resume = any(re.fullmatch(r"checkpoint-\d+", name) for name in folders)
    trainer.train(resume_from_checkpoint=resume)
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print("losses", *losses)
        print("weights", fingerprint(trainer.accelerator.unwrap_model(trainer.model)))


if __name__ == "__main__":
    main()
