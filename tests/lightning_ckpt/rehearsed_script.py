"""A user's training script with one defect, or none, for ``ckpt rehearse`` to find: ``rehearsed_script.py CASE``.

The script knows nothing about rehearsals.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import DataLoader, Dataset

from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint

SEEN: list[int] = []


class Samples(Dataset):
    def __init__(self, transform: Any = None) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        x = torch.full((4,), float(index)) + torch.rand(4)
        return x if self.transform is None else self.transform(x)


class ByTheClock:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + time.time() % 1 + os.urandom(1)[0]


class WithHistory(Samples):
    def __getitem__(self, index: int) -> torch.Tensor:
        SEEN.append(index)
        return super().__getitem__(index) * (1 + len(SEEN) % 7)


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch).pow(2).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val", self.net(batch).mean())

    def on_train_end(self) -> None:
        raise AssertionError("a rehearsal ends before")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class Timed(Model):
    """Has an attribute that differs between processes, and on which nothing depends."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.began = time.time()
        return super().training_step(batch, batch_idx)


class Annealed(Model):
    factor = 1.0

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.factor *= 0.9
        return super().training_step(batch, batch_idx) * self.factor


class WritesAtTheEnd(pl.Callback):
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        raise AssertionError("a rehearsal ends before")


def lose_generators() -> None:
    """Break the engine: generators are not restored."""
    from ckpt_core.state import rng

    rng.RngState.restore = lambda self: None  # type: ignore[method-assign]


def lose_moments() -> None:
    """Break the engine: the first moments of AdamW are zero after a load."""
    load = torch.optim.AdamW.load_state_dict

    def load_state_dict(self: Any, state: Any) -> None:
        load(self, state)
        for values in self.state.values():
            values["exp_avg"].zero_()

    torch.optim.AdamW.load_state_dict = load_state_dict  # type: ignore[method-assign]


def shift_rest(samples: int) -> None:
    """Break the engine: the rest of an epoch that another number of ranks continues begins ``samples`` later."""
    from ckpt_core.state.elastic import EpochShare

    rest = EpochShare._indices

    def shifted(self: Any) -> Any:
        return rest(dataclasses.replace(self, consumed=self.consumed + samples))

    EpochShare._indices = shifted  # type: ignore[method-assign]


def main(case: str) -> None:
    pl.seed_everything(1, verbose=False)
    mutations = {"generators": lose_generators, "moments": lose_moments}
    mutations |= {"loses": lambda: shift_rest(4), "repeats": lambda: shift_rest(-4)}
    mutations.get(case, lambda: None)()
    data = {"history": WithHistory, "clock": lambda: Samples(ByTheClock())}.get(case, Samples)()
    model = {"annealed": Annealed, "timed": Timed}.get(case, Model)()
    trainer = pl.Trainer(
        max_epochs=1 if case == "short" else 9,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=2 if case == "exact" else 1,
        plugins=[AsyncCheckpointIO(report="mine/report.html")] if case != "early" else [],
        callbacks=[EarlyStopping("loss_epoch", patience=99, check_on_train_epoch_end=True), WritesAtTheEnd()],
    )
    # after the Trainer was made, which in the case ``early`` has nothing of ours until then
    trainer.callbacks.append(ResumableCheckpoint(dirpath="mine", every_n_train_steps=3, save_top_k=0, save_last=True))
    loaders = DataLoader(data, batch_size=4, shuffle=True), DataLoader(Samples(), batch_size=12)
    trainer.fit(model, *loaders[: 1 if case == "alone" else 2], ckpt_path="last")


if __name__ == "__main__":
    main(sys.argv[1])
