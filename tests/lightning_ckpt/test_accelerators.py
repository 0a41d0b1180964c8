"""A fit on an accelerator goes on with the bits of one that was not interrupted."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint, ShardedCheckpointIO, SyncCheckpointIO
from tests.support.accelerators import Accelerator, late_copies
from tests.support.states import assert_same_state

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


class Model(pl.LightningModule):
    """Draws on the device (dropout and noise), and has statistics that the forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 2048), torch.nn.BatchNorm1d(2048), torch.nn.Dropout(0.3), torch.nn.Linear(2048, 1)
        )
        self.losses: list[float] = []
        self.devices: set[str] = set()

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        (x,) = batch
        loss = self.net(x + torch.randn_like(x)).square().mean()
        self.losses.append(loss.item())
        self.devices.add(loss.device.type)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.arange(256.0).reshape(32, 8) / 256), batch_size=4, shuffle=True)


class Fits:
    """Fits of the same model on one device."""

    def __init__(self, accelerator: Accelerator, plugin: Any, precision: Any) -> None:
        self._accelerator = accelerator
        self._plugin = plugin
        self._precision = precision

    def fit(self, directory: Path, seed: int, steps: int, ckpt_path: str | None = None) -> Model:
        pl.seed_everything(seed, verbose=False)
        self._accelerator.module.manual_seed_all(seed)
        where: dict[str, Any] = {"accelerator": "gpu", "devices": 1}
        if self._accelerator.type != "cuda":
            from tests.support.lightning_device import simulated_strategy

            where = {"strategy": simulated_strategy()}
        model = Model()
        trainer = pl.Trainer(
            **where,
            max_steps=steps,
            max_epochs=-1,
            precision=self._precision,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            plugins=[self._plugin()],
            callbacks=[ResumableCheckpoint(dirpath=directory, every_n_train_steps=5, save_top_k=-1, save_last=True)],
        )
        trainer.fit(model, ckpt_path=ckpt_path)
        assert model.devices == {self._accelerator.type}
        return model


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize(
    "plugin",
    [
        SyncCheckpointIO,
        AsyncCheckpointIO,
        ShardedCheckpointIO,
        functools.partial(AsyncCheckpointIO, overlap=True),
        functools.partial(ShardedCheckpointIO, overlap=True),
    ],
    ids=["sync", "async", "sharded", "async-overlap", "sharded-overlap"],
)
def test_resumed_fit_has_the_bits_of_the_whole_one(
    tmp_path: Path,
    plugin: Any,
    precision: str,
    accelerator: Accelerator,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    copied_late = late_copies(monkeypatch)

    if precision == "16-mixed" and accelerator.type != "cuda":
        pytest.skip("half precision with a scaler is CUDA's")
    fits = Fits(accelerator, plugin, precision)
    whole = fits.fit(tmp_path / "whole", 1, 15)
    first = fits.fit(tmp_path / "parts", 1, 5)
    second = fits.fit(tmp_path / "parts", 2, 15, ckpt_path="last")
    assert copied_late() == ("overlap" in request.node.callspec.id)
    assert first.losses + second.losses == whole.losses
    states = [{name: value.cpu() for name, value in model.state_dict().items()} for model in (second, whole)]
    assert_same_state(*states)
