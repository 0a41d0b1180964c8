"""A script with the Trainer of transformers and one defect, or none: ``rehearsed_trainer.py CASE``.

The script knows nothing about rehearsals, and never names the checkpoint to resume from.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from accelerate_ckpt.integrations.transformers import ResumableCallback


class Items(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": torch.full((4,), index / 24) + 0.1 * torch.randn(4)}


class Network(torch.nn.Module):
    factor = 1.0

    def __init__(self, case: str) -> None:
        super().__init__()
        self.anneals = case == "anneals"
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.anneals and self.training:
            self.factor *= 0.9
        return {"loss": self.factor * (self.layers(inputs) - 1).square().mean()}


class WritesAtTheEnd(TrainerCallback):
    def on_train_end(self, *_: Any, **__: Any) -> None:
        raise AssertionError("a rehearsal ends before")


def main(case: str) -> None:
    arguments = TrainingArguments(
        "mine",
        num_train_epochs=1 if case == "short" else 5,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2 if case == "accumulates" else 1,
        save_strategy="no" if case == "saves nothing" else "steps",
        save_steps=7,
        eval_strategy="epoch",
        logging_steps=3,
        prediction_loss_only=True,
        disable_tqdm=True,
        report_to=["tensorboard"],
        use_cpu=True,
        remove_unused_columns=False,
    )
    callbacks = [WritesAtTheEnd(), ResumableCallback(resume="auto")]
    torch.manual_seed(1)
    trainer = Trainer(Network(case), arguments, train_dataset=Items(), eval_dataset=Items(), callbacks=callbacks)
    trainer.train()
    raise AssertionError("a rehearsal ends before")


if __name__ == "__main__":
    main(sys.argv[1])
