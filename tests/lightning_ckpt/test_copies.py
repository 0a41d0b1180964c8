"""A Trainer in the middle of a fit, with our callback and plugin, can be pickled and copied, as without them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint, ShardedCheckpointIO, SyncCheckpointIO
from lightning_ckpt._private.replacing import Live, replace
from tests.lightning_ckpt.exact_cases import MemoryLogger
from tests.lightning_ckpt.reliable_cases import Callback, trainer_of

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning")]

WIDTH = 300
COPIES: dict[str, Callable[[Any], Any]] = {"deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}


class Model(LightningModule):
    """A model at module level, so that it can be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.5))

    def training_step(self, batch: Any, index: int) -> Any:
        return self.net(batch).sum()

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", self.net(batch).sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())

    def train_dataloader(self) -> Any:
        return DataLoader(torch.arange(8.0 * WIDTH).view(8, WIDTH), shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(torch.ones(2, WIDTH))


class Copies(Callback):
    """Copies everything, and keeps the last copy of the Trainer and its model."""

    def __init__(self) -> None:
        self.counts: list[str] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"counts": []}

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        parts = [
            trainer,
            *trainer.callbacks,
            trainer.strategy,
            trainer.strategy.checkpoint_io,
            *trainer.loggers,
            module,
        ]
        for name, duplicate in COPIES.items():
            for part in parts:
                found = duplicate(part)
                assert type(found).__name__ == type(part).__name__
                self.counts.append(name)
            if trainer.global_step == 2:
                self.last = duplicate(trainer), duplicate(module), torch.get_rng_state()

    on_validation_end = on_train_batch_end


class Uploads(MemoryLogger):
    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Observe saves, as loggers do that upload checkpoints."""


PLUGINS: dict[str, Any] = {
    "none": list,
    "sync": lambda: [SyncCheckpointIO()],
    "async": lambda: [AsyncCheckpointIO()],
    "sharded": lambda: [ShardedCheckpointIO()],
}


@pytest.mark.extended
@pytest.mark.parametrize("plugin", ["none", "async", "sharded", pytest.param("sync", marks=pytest.mark.slow)])
def test_everything_in_a_fit_can_be_copied(tmp_path: Path, plugin: str) -> None:
    ends = []
    for kind, plugins in ((ModelCheckpoint, []), (ResumableCheckpoint, PLUGINS[plugin]())):
        torch.manual_seed(1)
        copies = Copies()
        callback = kind(tmp_path / kind.__name__, every_n_train_steps=1, save_last=True)
        options = {"limit_val_batches": 1, "num_sanity_val_steps": 1, "max_epochs": 1, "logger": Uploads()}
        trainer_of(tmp_path, [callback, copies], plugins=plugins, **options).fit(Model())
        assert len(copies.counts) > 100
        trainer, model, rng = copies.last
        torch.set_rng_state(rng)
        trainer.fit(model)
        ends.append([trainer.global_step, *(value.sum().item() for value in model.state_dict().values())])
    assert ends[0] == ends[1]


def test_a_copy_has_the_method_that_was_there_before(capsys: Any) -> None:
    callback, seen = Callback(), list[Any]()
    undo = replace(callback, "on_train_start", seen.append)
    vars(callback)["on_fit_start"] = print
    replace(callback, "on_fit_start", seen.append)
    for duplicate in COPIES.values():
        found = duplicate(duplicate(callback))
        assert found.on_train_start("trainer", "module") is None
        found.on_fit_start("before")
    assert capsys.readouterr().out == "before\n" * len(COPIES)
    callback.on_train_start("called")  # type: ignore[call-arg, arg-type]
    undo()
    assert "on_train_start" not in vars(callback)
    assert seen == ["called"]


def test_what_belongs_to_a_run_is_not_copied() -> None:
    assert copy.deepcopy([Live()]) == pickle.loads(pickle.dumps([Live()])) == [None]
