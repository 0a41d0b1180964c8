"""A user's script that rehearses itself before it trains: ``rehearsing_script.py DATA REHEARSE [DEVICES]``."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import lightning.pytorch as pl
from rehearsed_script import Model, Samples, WithHistory
from torch.utils.data import DataLoader

from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint


class Trained(Model):
    def on_train_end(self) -> None:
        weights = b"".join(parameter.detach().numpy().tobytes() for parameter in self.parameters())
        print(f"trained {self.trainer.global_step} steps to {hashlib.sha256(weights).hexdigest()}")


def fit(callback: ResumableCheckpoint | None, data: Samples, devices: int) -> None:
    pl.seed_everything(1, verbose=False)
    trainer = pl.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=devices,
        strategy="auto" if devices == 1 else "ddp",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=callback is not None,
        plugins=[AsyncCheckpointIO()],
        callbacks=[] if callback is None else [callback],
    )
    trainer.fit(Trained(), DataLoader(data, batch_size=4, shuffle=True), ckpt_path=None if callback is None else "last")


def main(case: str, rehearse: str, devices: str = "1") -> None:
    with Path("starts.txt").open("a") as file:
        file.write(f"{os.environ.get('LOCAL_RANK', '')}\n")
    option = {"no": False, "yes": True}.get(rehearse, rehearse)
    callback = ResumableCheckpoint(dirpath="mine", save_last=True, rehearse=option)  # type: ignore[arg-type]
    if case == "second":
        fit(None, Samples(), 1)
    fit(callback, WithHistory() if case == "history" else Samples(), int(devices))


if __name__ == "__main__":
    main(*sys.argv[1:])
