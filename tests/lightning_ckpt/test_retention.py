"""A retention policy alongside ``save_top_k``."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.utils.data import DataLoader, TensorDataset

from ckpt_core.cli import main
from ckpt_core.policies import AnyOf, KeepBest, KeepEverySteps, KeepLatest
from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint, ShardedCheckpointIO, SyncCheckpointIO


class Model(pl.LightningModule):
    """Logs a score that falls until step 4 and then rises."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("score", abs(float(self.trainer.global_step) - 3.0))
        return self.net(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(64, 2)), batch_size=2)


def fit(
    directory: Path | str,
    plugin: Any,
    steps: int,
    ckpt_path: str | None = None,
    *,
    model: Any = None,
    ends: Any = None,
    val_check_interval: int | None = None,
    **settings: Any,
) -> Any:
    defaults = {"every_n_train_steps": 1, "filename": "{step}", "save_top_k": -1}
    callback = ResumableCheckpoint(directory, **{**defaults, **settings})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=steps,
            callbacks=[callback, *([] if ends is None else [ends])],
            val_check_interval=val_check_interval,
            num_sanity_val_steps=0,
            plugins=[plugin],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Model() if model is None else model, ckpt_path=ckpt_path)
    return callback


def steps_in(directory: Path) -> list[int]:
    return sorted(int(path.stem.partition("=")[2]) for path in directory.glob("step=*.ckpt"))


POLICY = AnyOf([KeepLatest(2), KeepBest("score"), KeepEverySteps(5)])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("plugin", [SyncCheckpointIO, AsyncCheckpointIO, ShardedCheckpointIO])
def test_policy_says_what_stays(tmp_path: Path, plugin: Any) -> None:
    # callback metrics are those of the step before the save
    fit(tmp_path, plugin(), 9, retention=POLICY, save_last=True)
    assert steps_in(tmp_path) == [4, 5, 8, 9]
    assert (tmp_path / "last.ckpt").exists()


@pytest.mark.parametrize("plugin", [AsyncCheckpointIO, ShardedCheckpointIO])
def test_resumed_run_knows_what_was_kept(tmp_path: Path, plugin: Any) -> None:
    fit(tmp_path, plugin(), 6, retention=POLICY)
    assert steps_in(tmp_path) == [4, 5, 6]
    fit(tmp_path, plugin(), 8, retention=POLICY, ckpt_path="last")
    assert steps_in(tmp_path) == [4, 5, 6, 7, 8], "what the run was resumed from stays"
    fit(tmp_path, plugin(), 11, retention=POLICY, ckpt_path=str(tmp_path / "step=8.ckpt"))
    assert steps_in(tmp_path) == [4, 5, 8, 10, 11]


@pytest.mark.parametrize("moves", [False, True])
def test_resumed_run_knows_what_was_kept_under_names_with_slashes(tmp_path: Path, moves: bool) -> None:
    saved = tmp_path / "saved"
    fit(saved, AsyncCheckpointIO(), 6, retention=KeepLatest(2), filename="at/{step}", save_last=True)
    if moves:
        saved = saved.rename(tmp_path / "moved")
    assert steps_in(saved / "at") == [5, 6]
    fit(saved, AsyncCheckpointIO(), 8, retention=KeepLatest(2), filename="at/{step}", ckpt_path="last")
    assert steps_in(saved / "at") == [7, 8]


RANKED = {"monitor": "score", "save_top_k": 2, "save_last": True}


@pytest.mark.each_value
@pytest.mark.parametrize("plugin", [AsyncCheckpointIO, ShardedCheckpointIO])
@pytest.mark.parametrize("filename", ["{step}", "at/{step}"])
def test_the_best_ones_of_a_run_move_with_its_directory(tmp_path: Path, plugin: Any, filename: str) -> None:
    fit(tmp_path / "saved", plugin(), 3, **RANKED, filename=filename)
    saved = (tmp_path / "saved").rename(tmp_path / "moved")
    inside = (saved / filename).parent
    assert steps_in(inside) == [2, 3]
    callback = fit(saved, plugin(), 5, **RANKED, filename=filename, ckpt_path=os.path.relpath(saved / "last.ckpt"))
    assert steps_in(inside) == [3, 4]
    callback = fit(saved, plugin(), 9, **RANKED, filename=filename, ckpt_path="last")
    assert steps_in(inside) == [3, 4]
    assert callback.best_model_path == f"{inside}/step=4.ckpt"


def test_best_ones_that_were_not_copied_along_do_not_count(tmp_path: Path) -> None:
    fit(tmp_path / "saved", AsyncCheckpointIO(), 4, **RANKED)
    (tmp_path / "copied").mkdir()
    shutil.copy(tmp_path / "saved" / "last.ckpt", tmp_path / "copied")
    callback = fit(tmp_path / "copied", AsyncCheckpointIO(), 7, **RANKED, ckpt_path="last")
    assert steps_in(tmp_path / "copied") == [5, 6]
    assert callback.best_model_path == str(tmp_path / "copied" / "step=5.ckpt")


def test_a_smaller_top_k_holds_from_the_resume_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Stock Lightning compares the number of files with ``save_top_k`` for equality, and would never delete again."""
    settings = {"monitor": "score", "mode": "max"}
    fit(tmp_path, AsyncCheckpointIO(), 7, save_top_k=3, **settings)
    assert steps_in(tmp_path) == [1, 6, 7]
    fit(tmp_path, AsyncCheckpointIO(), 9, save_top_k=1, ckpt_path="last", **settings)
    assert steps_in(tmp_path) == [6, 7, 9]
    assert "save_top_k is 1 now" in caplog.text and "step=7.ckpt, step=6.ckpt" in caplog.text


class Validated(Model):
    """Logs its score in a validation, after every second of four batches."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", abs(float(self.trainer.global_step) - 4.0))

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(2, 2)))


class Ends(pl.Callback):
    """Saves when the validation of a step begins, and ends the run, as a signal does."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            raise KeyboardInterrupt


@pytest.mark.parametrize("step", [4, 6])
def test_a_save_that_waits_for_a_validation_is_made_after_the_resume(tmp_path: Path, step: int) -> None:
    """After an epoch's last batch, which is step 4, a save waits for the values of its validation."""
    settings = {"monitor": "score", "save_top_k": 2, "model": Validated(), "val_check_interval": 2}
    fit(tmp_path / "whole", AsyncCheckpointIO(), 8, every_n_train_steps=2, **settings)
    assert steps_in(tmp_path / "whole") == [4, 6]
    ended = tmp_path / "ended.ckpt"
    with pytest.raises(SystemExit):
        fit(tmp_path / "resumed", AsyncCheckpointIO(), 8, every_n_train_steps=2, ends=Ends(step, ended), **settings)
    fit(tmp_path / "resumed", AsyncCheckpointIO(), 8, every_n_train_steps=2, ckpt_path=str(ended), **settings)
    assert steps_in(tmp_path / "resumed") == [4, 6]


def test_both_policy_and_top_k_keep(tmp_path: Path) -> None:
    settings = {"monitor": "score", "mode": "min", "save_top_k": 2}
    fit(tmp_path, AsyncCheckpointIO(), 9, retention=KeepEverySteps(2), **settings)
    # 3 and 4 are the best two; 2 was among them earlier, and the policy keeps it
    assert steps_in(tmp_path) == [2, 3, 4]


def test_without_a_policy_nothing_changes(tmp_path: Path) -> None:
    callback = fit(tmp_path, AsyncCheckpointIO(), 4, save_top_k=1)
    assert steps_in(tmp_path) == [4]
    assert "retention" not in callback.state_dict()


def test_another_directory_is_left_alone(tmp_path: Path) -> None:
    fit(tmp_path / "first", SyncCheckpointIO(), 3, retention=KeepLatest(3))
    start = str(tmp_path / "first" / "step=3.ckpt")
    fit(tmp_path / "second", SyncCheckpointIO(), 6, retention=KeepLatest(1), ckpt_path=start)
    assert steps_in(tmp_path / "first") == [1, 2, 3]
    assert steps_in(tmp_path / "second") == [6]


@pytest.mark.each_value
@pytest.mark.parametrize("plugin", [AsyncCheckpointIO, ShardedCheckpointIO, TorchCheckpointIO])
@pytest.mark.parametrize("settings", [{"retention": "latest=2"}, {"save_top_k": 2, "monitor": "score"}])
def test_what_is_pinned_stays(tmp_path: Path, plugin: Any, settings: dict[str, Any]) -> None:
    (tmp_path / ".step=1.ckpt.keep").write_text("{}")
    fit(tmp_path, plugin(), 5, **settings)
    found = steps_in(tmp_path)
    assert len(found) == 3 and found[0] == 1 and 2 not in found


@pytest.mark.parametrize("plugin", [AsyncCheckpointIO, ShardedCheckpointIO])
def test_checkpoints_tell_the_monitored_metric(tmp_path: Path, plugin: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, plugin(), 4, monitor="score")
    capsys.readouterr()
    assert main(["ls", str(tmp_path), "--json"]) == 0
    listed = {entry["step"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert {step: entry["metrics"] for step, entry in listed.items()} == {
        step: {"score": abs(step - 1 - 3.0)} for step in (1, 2, 3, 4)
    }
    assert listed[4]["kept_because"] == ["newest", "best"]
    assert main(["prune", str(tmp_path), "--keep", "best=score:max", "--yes"]) == 0
    assert steps_in(tmp_path) == [1, 4]


def test_policy_comes_from_a_configuration() -> None:
    parser = LightningArgumentParser()
    parser.add_argument("--callback", type=ResumableCheckpoint)
    policy = "ckpt_core.policies"
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
    found = instantiate(
        parser.parse_object(
            {
                "callback": {
                    "class_path": "lightning_ckpt.ResumableCheckpoint",
                    "init_args": {
                        "retention": {
                            "class_path": f"{policy}.AnyOf",
                            "init_args": {
                                "policies": [
                                    {"class_path": f"{policy}.KeepLatest", "init_args": {"count": 2}},
                                    {"class_path": f"{policy}.KeepBest", "init_args": {"metric": "score"}},
                                ]
                            },
                        }
                    },
                }
            }
        )
    )
    assert found.callback._retention.policy == AnyOf([KeepLatest(2), KeepBest("score")])


def test_what_is_no_policy_is_refused() -> None:
    assert ResumableCheckpoint(retention="latest=2")._retention.policy == KeepLatest(2)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="has no rule 'newest'"):
        ResumableCheckpoint(retention="newest=2")
    with pytest.raises(TypeError, match="retention must be a policy"):
        ResumableCheckpoint(retention=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="retention must be a policy"):
        ResumableCheckpoint(retention=KeepLatest)  # type: ignore[arg-type]
