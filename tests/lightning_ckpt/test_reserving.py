"""The first asynchronous save of a fit finds its memory allocated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint, ShardedCheckpointIO, SyncCheckpointIO
from tests.support.reserving import allocations, wait_until_reserved

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*ResumableCheckpoint")


class Model(BoringModel):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


class Waits(pl.Callback):
    def on_train_batch_start(self, *_: Any) -> None:
        wait_until_reserved()


@pytest.mark.parametrize(
    ("plugin", "callback", "expected"),
    [
        (AsyncCheckpointIO, ResumableCheckpoint, ["ckpt-reserve"]),
        (AsyncCheckpointIO, ModelCheckpoint, ["ckpt-reserve"]),
        (ShardedCheckpointIO, ResumableCheckpoint, ["ckpt-reserve"]),
        (SyncCheckpointIO, ResumableCheckpoint, []),
    ],
)
def test_memory_is_allocated_beside_the_first_batches(
    plugin: Any, callback: Any, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocating = allocations(monkeypatch)
    trainer = pl.Trainer(
        max_steps=3,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        plugins=[plugin()],
        callbacks=[callback(dirpath=tmp_path, every_n_train_steps=3), Waits()],
    )
    trainer.fit(Model())
    assert list(tmp_path.iterdir())
    assert allocating == expected
