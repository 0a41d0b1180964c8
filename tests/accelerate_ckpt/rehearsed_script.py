"""A user's script with its own training loop and one defect, or none: ``rehearsed_script.py CASE [CHECKPOINT]``.

The script knows nothing about rehearsals. Without a checkpoint it trains from scratch, except in the case ``auto``,
where it always calls ``load_state``.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from accelerate_ckpt import attach
from ckpt_core.state import elastic


class Items(Dataset):
    def __init__(self, transform: Any = None) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        x = torch.full((4,), index / 24) + 0.1 * torch.randn(4)
        return x if self.transform is None else self.transform(x)


class ByTheClock:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + time.time() % 1 + os.urandom(1)[0]


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(torch.arange(96).view(24, 4) / 96)


def shift_rest(samples: int) -> None:
    """Break the engine: the rest of an epoch that another number of ranks continues begins ``samples`` later."""
    begin = elastic.RemainingBatches.__init__

    def shifted(self: Any, inner: Any, consumed: int) -> None:
        begin(self, inner, consumed + samples)

    elastic.RemainingBatches.__init__ = shifted  # type: ignore[method-assign]


class Count:
    """A registered object that does not restore a part of its state."""

    batches = kept = 0

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches, "kept": self.kept}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]


def main(case: str, checkpoint: str | None) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2 if case == "accumulates" else 1)
    of_run: dict[str, Any] = {"event_log": "mine.jsonl", "memory_every_n_steps": 2, "memory_dir": "memory"}
    of_run["just_in_time"] = True
    attach(accelerator, "async", resume="auto" if case == "auto" else None, **of_run)
    set_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    {"loses": lambda: shift_rest(2), "repeats": lambda: shift_rest(-2)}.get(case, lambda: None)()
    items = Stream() if case == "stream" else Items(ByTheClock() if case == "clock" else None)
    sampler = RandomSampler(items, replacement=True) if case == "replaces" else None
    loader = DataLoader(items, batch_size=2, shuffle=sampler is None and case != "stream", sampler=sampler)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    count = Count()
    accelerator.register_for_checkpointing(count)
    accelerator.init_trackers("never started")
    if checkpoint is not None or case == "auto":
        accelerator.load_state(checkpoint)
    difficulty = 0
    for _ in range(count.batches // 12, 9):
        for batch in loader:
            difficulty += 1
            count.batches += 1
            count.kept += case == "forgets"
            if case == "freezes" and count.batches == 5:
                accelerator.unwrap_model(model)[0].bias.requires_grad_(False)
            with accelerator.accumulate(model):
                scaled = batch * (1 + difficulty % 5) if case == "curriculum" else batch
                loss = (model(scaled) - batch).pow(2).mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            accelerator.log({"loss": loss.item()})
            if count.batches % 7 == 0 and case != "auto":
                accelerator.save_state(f"mine/at_{count.batches}")
    raise AssertionError("a rehearsal ends before")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
