"""A checkpoint of another model or of other optimizers is refused before training, with the names that differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset

from ckpt_core import CheckpointError, StateMismatchError
from lightning_ckpt import ResumableCheckpoint, SyncCheckpointIO


class Model(pl.LightningModule):
    def __init__(self, *, width: int = 3, extra: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, width)
        if extra:
            self.extra = torch.nn.Linear(1, 1)
        self.frozen = frozen
        self.trained = 0

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.trained += 1
        loss: torch.Tensor = self.net(batch[0]).pow(2).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam([self.net.weight] if self.frozen else self.net.parameters())


def fit(model: Model, directory: Path, **settings: Any) -> None:
    trainer = pl.Trainer(
        max_steps=settings.pop("max_steps", 2),
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[SyncCheckpointIO()],
        callbacks=[ResumableCheckpoint(dirpath=directory, every_n_train_steps=1)],
    )
    trainer.fit(model, DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2), **settings)


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model", "named"),
    [
        (Model(width=5), "net.weight has shape [3, 4], the model's [5, 4]"),
        (Model(extra=True), "extra.weight is missing"),
        (Model(frozen=True), "parameter group"),
    ],
    ids=["shape", "missing", "optimizer"],
)
def test_another_model_is_refused_by_name(model: Model, named: str, tmp_path: Path) -> None:
    fit(Model(), tmp_path)
    (saved,) = tmp_path.iterdir()
    before = saved.read_bytes()
    with pytest.raises(StateMismatchError) as caught:
        fit(model, tmp_path, max_steps=4, ckpt_path=str(saved))
    assert isinstance(caught.value, CheckpointError)
    assert isinstance(caught.value, RuntimeError)
    assert named in str(caught.value)
    assert caught.value.path == str(saved)
    assert caught.value.remedy is not None
    assert model.trained == 0
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before]


@pytest.mark.filterwarnings("ignore")
def test_what_the_user_allows_is_loaded(tmp_path: Path) -> None:
    fit(Model(extra=False), tmp_path)
    (saved,) = tmp_path.iterdir()
    model = Model(extra=True)
    model.strict_loading = False
    fit(model, tmp_path, max_steps=4, ckpt_path=str(saved))
    assert model.trained == 2
    assert "load_model_state_dict" not in vars(model.trainer.strategy)


@pytest.mark.filterwarnings("ignore")
def test_pruned_parameters_are_named_with_what_helps(tmp_path: Path) -> None:
    pruned = Model()
    prune.identity(pruned.net, "weight")
    fit(pruned, tmp_path)
    (saved,) = tmp_path.iterdir()
    with pytest.raises(StateMismatchError, match=r"net\.weight is missing") as caught:
        fit(Model(), tmp_path, max_steps=4, ckpt_path=str(saved))
    assert "prune.identity(module, name) in LightningModule.setup" in str(caught.value.remedy)
    again = Model()
    prune.identity(again.net, "weight")
    fit(again, tmp_path, max_steps=4, ckpt_path=str(saved))
    assert again.trained == 2


@pytest.mark.filterwarnings("ignore")
def test_a_shape_cannot_be_left_out(tmp_path: Path) -> None:
    fit(Model(), tmp_path)
    (saved,) = tmp_path.iterdir()
    model = Model(width=5)
    with pytest.raises(StateMismatchError) as caught:
        fit(model, tmp_path, max_steps=4, ckpt_path=str(saved))
    assert "strict_loading" not in str(caught.value.remedy)
    model.strict_loading = False
    with pytest.raises(StateMismatchError, match="has shape"):
        fit(model, tmp_path, max_steps=4, ckpt_path=str(saved))
