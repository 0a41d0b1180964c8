"""The callback itself: both packages, the command line, ``ckpt_path="last"`` and ``"best"``."""

from __future__ import annotations

import inspect
import logging
import os
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_ckpt.io import SyncCheckpointIO
from lightning_ckpt.resumable import ResumableCheckpoint
from tests.lightning_ckpt.exact_cases import MemoryLogger, Model, digest
from tests.lightning_ckpt.features import HAS_SAVE_ON_EXCEPTION
from tests.support.data_sets import Samples

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning:lightning")]


def fit(callback: ResumableCheckpoint, directory: Path, **kwargs: Any) -> tuple[Model, Any]:
    path = kwargs.pop("ckpt_path", None)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "devices": 1}
    trainer = pl.Trainer(
        callbacks=[callback], logger=MemoryLogger(), default_root_dir=directory, **quiet, **{"max_epochs": 2, **kwargs}
    )
    pl.seed_everything(1, verbose=False)
    model = Model({"val": True})
    trainer.fit(model, ckpt_path=path)
    return model, trainer


def make(directory: Path, **kwargs: Any) -> ResumableCheckpoint:
    return ResumableCheckpoint(directory / "saved", **{"every_n_train_steps": 4, "save_top_k": -1, **kwargs})


class TestedModel(Model):
    """A model that can be tested without having been trained."""

    __test__ = False

    def test_dataloader(self) -> Any:
        return DataLoader(Samples(4), batch_size=2)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)


def test_arguments_of_model_checkpoint_come_first() -> None:
    stock = inspect.signature(ModelCheckpoint.__init__).parameters
    ours = dict(inspect.signature(ResumableCheckpoint.__init__).parameters)
    if not HAS_SAVE_ON_EXCEPTION:
        del ours["save_on_exception"]  # only newer versions have it
    assert list(ours)[: len(stock)] == list(stock)
    assert {name: p.default for name, p in ours.items() if name in stock} == {n: p.default for n, p in stock.items()}
    assert all(p.kind is p.KEYWORD_ONLY for name, p in ours.items() if name not in stock)


def test_every_argument_is_documented() -> None:
    documentation = inspect.getdoc(ResumableCheckpoint) or ""
    for name in inspect.signature(ResumableCheckpoint).parameters:
        assert f"    {name}: " in documentation, name


def test_wrong_data_resume_is_refused() -> None:
    with pytest.raises(ValueError, match="data_resume"):
        ResumableCheckpoint(data_resume="sometimes")  # type: ignore[arg-type]


@pytest.mark.parametrize("package", [pl, pytorch_lightning])
def test_both_packages_take_it_as_their_checkpoint_callback(package: Any, tmp_path: Path) -> None:
    callback = make(tmp_path)
    trainer = package.Trainer(callbacks=[callback], logger=False, accelerator="cpu", devices=1)
    assert trainer.checkpoint_callbacks == [callback]


def test_runs_and_resumes_in_pytorch_lightning(tmp_path: Path) -> None:
    class Small(pytorch_lightning.LightningModule):
        train_dataloader = Model.train_dataloader

        def __init__(self) -> None:
            super().__init__()
            self.options: dict[str, Any] = {}
            self.net = Model().net

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[1]).square().mean()

        def configure_optimizers(self) -> Any:
            import torch

            return torch.optim.SGD(self.parameters(), lr=0.1)

    def run(seed: int, path: Path | None) -> str:
        pytorch_lightning.seed_everything(seed, verbose=False)
        trainer = pytorch_lightning.Trainer(
            callbacks=[make(tmp_path, every_n_train_steps=5, enable_version_counter=False)],
            logger=False,
            accelerator="cpu",
            devices=1,
            max_epochs=2,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        model = Small()
        trainer.fit(model, ckpt_path=path)
        return digest(model.state_dict())

    assert run(1, None) == run(77, tmp_path / "saved" / "epoch=0-step=5.ckpt")


class Manual(pl.LightningModule):
    """Keeps its weights from before each step, as one of Lightning's warnings asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layer = torch.nn.Linear(4, 1)
        self.saved_models: dict[int, Any] = {}
        self.after: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.saved_models[batch_idx] = {name: value.clone() for name, value in self.layer.state_dict().items()}
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.layer(batch[1]).sum())
        optimizer.step()
        self.after.append(self.layer.weight.tolist())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(Samples(12), batch_size=4)


@pytest.mark.parametrize("when", [{"train_time_interval": timedelta(0)}, {"every_n_train_steps": 1}], ids=" ".join)
def test_manual_optimization_is_saved_as_it_is_after_each_step(when: dict[str, Any], tmp_path: Path) -> None:
    callback = ResumableCheckpoint(tmp_path, save_top_k=-1, filename="{step}", **when)
    trainer = pl.Trainer(callbacks=[callback], max_epochs=1, logger=False, accelerator="cpu", enable_progress_bar=False)
    model = Manual()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*pre-optimization")
        trainer.fit(model)
    saved = [torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)["state_dict"] for step in (1, 2, 3)]
    assert [state["layer.weight"].tolist() for state in saved] == model.after


def test_last_in_a_fresh_object(tmp_path: Path) -> None:
    _first, _ = fit(make(tmp_path), tmp_path, max_steps=11)
    model, trainer = fit(make(tmp_path), tmp_path, ckpt_path="last")
    assert trainer.global_step == 16
    assert next(row for row in model.seen if row[0] == 1)[:2] == [1, 0]
    assert len([row for row in model.seen if row[0] != "val"]) == 16 - 8


def test_last_falls_back_to_the_newest_that_verifies(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(make(tmp_path), tmp_path)
    newest = tmp_path / "saved" / "epoch=1-step=16.ckpt"
    newest.write_bytes(newest.read_bytes()[:-200])
    with caplog.at_level(logging.WARNING):
        model, _trainer = fit(make(tmp_path), tmp_path, ckpt_path="last")
    assert "epoch=1-step=16.ckpt" in caplog.text
    assert len([row for row in model.seen if row[0] != "val"]) == 4


def test_last_with_nothing_starts_afresh(tmp_path: Path) -> None:
    _, trainer = fit(make(tmp_path), tmp_path, ckpt_path="last")
    assert trainer.global_step == 16


def test_best_in_a_fresh_object(tmp_path: Path) -> None:
    kwargs = {"monitor": "val_loss", "save_top_k": 1, "every_n_train_steps": None, "filename": "best-{step}"}
    callback = make(tmp_path, **kwargs)
    fit(callback, tmp_path)
    best = callback.best_model_path
    fresh = make(tmp_path, **kwargs)
    assert os.path.samefile(fresh.best_model_path, best)
    trainer = pl.Trainer(callbacks=[fresh], logger=False, accelerator="cpu", devices=1, enable_progress_bar=False)
    trainer.validate(Model({"val": True}), ckpt_path="best", verbose=False)
    assert trainer.ckpt_path == fresh.best_model_path


def test_new_run_in_an_old_directory_begins_without_a_best(tmp_path: Path) -> None:
    fit(make(tmp_path), tmp_path)
    callback = make(tmp_path, save_top_k=0)
    fit(callback, tmp_path)
    assert callback.best_model_path == ""


@pytest.mark.parametrize(
    ("exact", "how"), [(True, "outside of a fit"), (False, r"by ResumableCheckpoint\(exact=False\)")]
)
def test_the_lack_of_exact_state_is_not_put_down_to_a_missing_callback(exact: bool, how: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "enable_progress_bar": False, "logger": False}
    callback = make(tmp_path, exact=exact)
    trainer = pl.Trainer(callbacks=[callback], plugins=[SyncCheckpointIO()], enable_model_summary=False, **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.test(TestedModel(), verbose=False)
        trainer.save_checkpoint(tmp_path / "early.ckpt")
    assert not [w for w in caught if "exact resume" in str(w.message)]
    with pytest.warns(UserWarning, match=f"it was saved {how}, so it holds no exact state"):
        fit(make(tmp_path), tmp_path, max_epochs=1, ckpt_path=tmp_path / "early.ckpt")
