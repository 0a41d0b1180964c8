"""A fit on an accelerator resumes bit for bit like a fit that was not interrupted."""

from __future__ import annotations

import functools
from collections.abc import Callable
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


@pytest.mark.sampled(3)
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


class Logging(Model):
    """Logs values on the device, which a checkpoint holds."""

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", loss.detach() * 2, reduce_fx="max")
        return loss


class SavesInWindow(pl.Callback):
    """Saves after the third batch, in an open window of two, and records how often the host waited for the device."""

    def __init__(self, path: Path, host_waits: Callable[[], int]) -> None:
        self._path, self._host_waits = path, host_waits
        self.waits: list[int] = []

    def on_train_batch_end(self, *arguments: Any) -> None:
        trainer = arguments[0]
        del arguments  # a save looks at variables of running functions, and would read these from the device
        if trainer.fit_loop.total_batch_idx == 2:
            self.waits.append(self._host_waits())
            trainer.save_checkpoint(self._path)


class Counting(AsyncCheckpointIO):
    """Records the same number when it is given a checkpoint, before it begins to copy it."""

    callback: SavesInWindow

    def save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        self.callback.waits.append(self.callback._host_waits())
        super().save_checkpoint(*arguments, **options)


def test_logged_values_and_gradients_are_taken_without_waiting_for_the_device(
    tmp_path: Path, accelerator: Accelerator
) -> None:
    def fit(path: Path, ckpt_path: Path | None = None) -> tuple[Model, SavesInWindow]:
        pl.seed_everything(1, verbose=False)
        accelerator.module.manual_seed_all(1)
        where: dict[str, Any] = {"accelerator": "gpu", "devices": 1}
        if accelerator.type != "cuda":
            from tests.support.lightning_device import simulated_strategy

            where = {"strategy": simulated_strategy()}
        callback, model = SavesInWindow(path, getattr(accelerator.module, "host_waits", int)), Logging()
        plugin = Counting(overlap=True)
        plugin.callback = callback
        trainer = pl.Trainer(
            **where,
            max_steps=4,
            max_epochs=-1,
            accumulate_grad_batches=2,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            plugins=[plugin],
            callbacks=[ResumableCheckpoint(dirpath=tmp_path / "unused", every_n_train_steps=100), callback],
        )
        trainer.fit(model, ckpt_path=ckpt_path)
        return model, callback

    whole, saves = fit(tmp_path / "third.ckpt")
    before, after = saves.waits
    assert before == after
    resumed, _ = fit(tmp_path / "never.ckpt", tmp_path / "third.ckpt")
    assert resumed.losses == whole.losses[3:]
    states = [{name: value.cpu() for name, value in model.state_dict().items()} for model in (resumed, whole)]
    assert_same_state(*states)
