"""Fine-tuning over a frozen backbone with sharded checkpoints: the backbone is written once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Fabric, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from ckpt_core import DirectoryCheckpointer
from lightning_ckpt import ResumableCheckpoint, ShardedCheckpointIO

WIDTH = 256
STEPS = 8


class FineTuned(LightningModule):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(4)]
        self.backbone = nn.Sequential(*blocks).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 16)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.head(self.backbone(batch)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.head.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        return DataLoader(
            torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1)), batch_size=4, shuffle=True
        )


def fit(directory: Path, steps: int, mode: Any, *, seed: int = 0, ckpt_path: str | None = None) -> FineTuned:
    torch.manual_seed(seed)
    model = FineTuned(seed)
    callback = ResumableCheckpoint(dirpath=directory, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    trainer = Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[ShardedCheckpointIO(mode=mode)],
        callbacks=[callback],
    )
    trainer.fit(model, ckpt_path=ckpt_path)
    return model


def backbone_of(path: Path) -> tuple[int, int]:
    (file,) = path.glob("model*unchanged*")
    return file.stat().st_ino, file.stat().st_nlink


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_frozen_backbone_is_linked_and_each_checkpoint_resumes_alone(mode: str, tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", STEPS, mode)
    path = tmp_path / "cut"
    fit(path, STEPS - 3, mode)
    assert backbone_of(path / "step=5.ckpt")[1] == 5
    for older in path.glob("step=[1-4].ckpt"):
        shutil.rmtree(older)
    assert backbone_of(path / "step=5.ckpt")[1] == 1
    resumed = fit(path, STEPS, mode, seed=7, ckpt_path="last")
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert len({backbone_of(path / f"step={step}.ckpt") for step in (5, 6, 7, 8)}) == 1, "the resumed run links too"
    frozen = sum(value.nbytes for value in whole.backbone.state_dict().values())
    for file in (path / "step=8.ckpt").iterdir():
        assert file.stat().st_nlink == 4 or file.stat().st_size < frozen / 10
    for step in (6, 7):
        shutil.rmtree(path / f"step={step}.ckpt")
    for step in (5, 8):
        with DirectoryCheckpointer().load(path / f"step={step}.ckpt") as checkpoint:
            checkpoint.verify()


def test_fabric_links_what_is_frozen(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[ShardedCheckpointIO(mode="sync")])
    model = FineTuned()
    optimizer = model.configure_optimizers()
    model, optimizer = fabric.setup(model, optimizer)
    for number in range(3):
        fabric.save(tmp_path / str(number), {"model": model, "optimizer": optimizer})
    assert backbone_of(tmp_path / "2")[1] == 3
