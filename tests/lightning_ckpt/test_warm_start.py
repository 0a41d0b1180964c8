"""A fit that starts from another model's checkpoint."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ckpt_core import load_into
from ckpt_core.cli import main
from ckpt_core.errors import StateMismatchError
from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint, ShardedCheckpointIO, WarmStart
from tests.support.states import assert_same_state


class Model(pl.LightningModule):
    def __init__(self, classes: int = 2, **layers: Any) -> None:
        super().__init__()
        self.net = torch.nn.ModuleDict({"body": torch.nn.Linear(2, 2), **layers})
        self.head = torch.nn.Linear(2, classes)
        self.seen: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append(self.net["body"].weight.detach().clone())
        return self.head(self.net["body"](batch[0])).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.arange(16.0).view(8, 2) / 16), batch_size=2)


def fit(model: Model, directory: Path, plugin: Any, *callbacks: Any, steps: int = 2, **arguments: Any) -> Model:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, max_steps=steps, logger=False, enable_progress_bar=False,
            enable_model_summary=False, plugins=[plugin],
            callbacks=[ResumableCheckpoint(directory, filename="{step}", every_n_train_steps=1), *callbacks],
        )  # fmt: skip
        trainer.fit(model, **arguments)
    return model


@pytest.mark.sampled(1)
@pytest.mark.parametrize("plugin", [AsyncCheckpointIO, ShardedCheckpointIO])
def test_what_fits_is_taken_with_its_moments_and_a_resume_is_left_alone(tmp_path: Path, plugin: Any) -> None:
    old = fit(Model(), tmp_path / "old", plugin())
    start = WarmStart(tmp_path / "old" / "step=2.ckpt", optimizers=True)
    model = Model(classes=5, more=torch.nn.Linear(1, 1))
    new = fit(model, tmp_path / "new", plugin(), start)
    assert start.report is not None
    assert start.report.taken == ("net.body.weight", "net.body.bias")
    assert start.report.optimizer_taken == ("net.body.weight", "net.body.bias")
    assert set(start.report.new) == {"net.more.weight", "net.more.bias", "head.weight", "head.bias"}
    assert torch.equal(new.seen[0], old.net["body"].weight)
    moments = new.trainer.optimizers[0].state
    assert moments[new.net["body"].weight]["step"] == 4 and moments[new.head.weight]["step"] == 2

    last = new.net["body"].weight.detach().clone()
    again = fit(
        Model(classes=5, more=torch.nn.Linear(1, 1)), tmp_path / "new", plugin(), start, steps=3, ckpt_path="last"
    )
    assert start.report is None and torch.equal(again.seen[0], last)


def test_what_was_to_fit_and_does_not_is_refused(tmp_path: Path) -> None:
    fit(Model(), tmp_path, AsyncCheckpointIO())
    with pytest.raises(StateMismatchError, match=r"head\.weight"):
        fit(Model(5), tmp_path / "new", AsyncCheckpointIO(), WarmStart(tmp_path / "step=2.ckpt", partial=False))


class Adapted(Model):
    """Trains adapters of a frozen model, and saves only them."""

    def __init__(self) -> None:
        torch.manual_seed(0)  # the frozen weights are in no checkpoint
        super().__init__()
        peft = pytest.importorskip("peft")
        self.net = peft.get_peft_model(torch.nn.ModuleDict({"body": torch.nn.Linear(2, 2)}), peft.LoraConfig(target_modules=["body"], r=1))  # fmt: skip
        self.head.requires_grad_(False)
        self.strict_loading = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.head(self.net.base_model.model["body"](batch[0])).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam((p for p in self.parameters() if p.requires_grad), lr=0.01)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if "lora_" in k}


@pytest.mark.parametrize("plugin", [AsyncCheckpointIO, ShardedCheckpointIO])
def test_a_run_that_saves_adapters_alone_resumes_and_starts_others(tmp_path: Path, plugin: Any) -> None:
    pl.seed_everything(3, verbose=False)
    whole = fit(Adapted(), tmp_path / "whole", plugin(), steps=3)
    assert main(["inspect", str(tmp_path / "whole" / "step=3.ckpt"), "--json"]) == 0
    pl.seed_everything(3, verbose=False)
    fit(Adapted(), tmp_path / "run", plugin(), steps=2)
    resumed = fit(Adapted(), tmp_path / "run", plugin(), steps=3, ckpt_path="last")
    assert_same_state(resumed.net.state_dict(), whole.net.state_dict())
    report = load_into(tmp_path / "whole" / "step=3.ckpt", Adapted(), strict=False)
    assert len(report.taken) == 2 and all("lora_" in name for name in report.taken)
