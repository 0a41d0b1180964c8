"""A fit on a GPU goes on with the bits of one that was not interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint, ShardedCheckpointIO, SyncCheckpointIO
from tests.support.states import assert_same_state

ACCELERATOR = "gpu"

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*does not have many workers")]


class Model(pl.LightningModule):
    """Draws on the device (dropout and noise), and has statistics that the forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 1)
        )
        self.losses: list[float] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        (x,) = batch
        loss = self.net(x + torch.randn_like(x)).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.arange(256.0).reshape(32, 8) / 256), batch_size=4, shuffle=True)


def fit(directory: Path, plugin: Any, seed: int, steps: int, precision: Any, ckpt_path: str | None = None) -> Model:
    pl.seed_everything(seed, verbose=False)
    model = Model()
    trainer = pl.Trainer(
        accelerator=ACCELERATOR,
        devices=1,
        max_steps=steps,
        max_epochs=-1,
        precision=precision,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[plugin()],
        callbacks=[ResumableCheckpoint(dirpath=directory, every_n_train_steps=5, save_top_k=-1, save_last=True)],
    )
    trainer.fit(model, ckpt_path=ckpt_path)
    return model


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("plugin", [SyncCheckpointIO, AsyncCheckpointIO, ShardedCheckpointIO])
def test_resumed_fit_has_the_bits_of_the_whole_one(tmp_path: Path, plugin: Any, precision: str) -> None:
    whole = fit(tmp_path / "whole", plugin, 1, 15, precision)
    first = fit(tmp_path / "parts", plugin, 1, 5, precision)
    second = fit(tmp_path / "parts", plugin, 2, 15, precision, ckpt_path="last")
    assert first.losses + second.losses == whole.losses
    states = [{name: value.cpu() for name, value in model.state_dict().items()} for model in (second, whole)]
    assert_same_state(*states)
