"""Lightning's private parts that we use are where we expect them: a release that moves one fails here first."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch

from ckpt_core.errors import CheckpointError
from lightning_ckpt import ShardedCheckpointIO
from lightning_ckpt._private import guard, hooks, loops
from lightning_ckpt._private.pruning import weights_to_go_back_to
from lightning_ckpt.resumable import ResumableCheckpoint
from tests.lightning_ckpt.exact_cases import Model
from tests.lightning_ckpt.features import LOTTERY_GOES_BACK


@pytest.mark.parametrize("package", [pl, pytorch_lightning])
def test_nothing_has_moved(package: object) -> None:
    trainer = package.Trainer(logger=False, accelerator="cpu", devices=1)  # type: ignore[attr-defined]
    assert guard.missing_internals(trainer) == [], "this release of Lightning has moved private attributes"
    assert guard.missing_boundaries(trainer) == [], "this release of Lightning has moved private attributes"


@pytest.mark.parametrize("package", [pl, pytorch_lightning])
def test_counters_are_those_of_state_dict(package: Any) -> None:
    trainer = package.Trainer(max_steps=3, logger=False, accelerator="cpu", devices=1, enable_progress_bar=False)
    fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
    counted = {
        "epoch": fit.epoch_progress,
        "batch": epoch.batch_progress,
        "scheduler": epoch.scheduler_progress,
        "automatic": epoch.automatic_optimization.optim_progress,
        "manual": epoch.manual_optimization.optim_step_progress,
        "validation": epoch.val_loop.batch_progress,
    }
    epoch.batch_progress.increment_ready()
    epoch.automatic_optimization.optim_progress.optimizer.step.increment_ready()
    found = loops.Internals(trainer).progress()
    assert {name: found[name] for name in counted} == {name: each.state_dict() for name, each in counted.items()}
    before = epoch.batch_progress.state_dict()
    found["batch"]["current"]["ready"] += 1
    assert epoch.batch_progress.state_dict() == before  # a copy


@pytest.mark.parametrize("package", [pl, pytorch_lightning])
def test_weights_that_pruning_goes_back_to(package: Any) -> None:
    def digest(seed: int, **settings: bool) -> str:
        torch.manual_seed(seed)
        callback = package.callbacks.ModelPruning("l1_unstructured", amount=0.2, **settings)
        callback.setup(package.Trainer(logger=False, accelerator="cpu"), Model(), "fit")
        return weights_to_go_back_to([callback])

    assert digest(1) == digest(1)
    assert (digest(1) != digest(2)) if LOTTERY_GOES_BACK else (digest(1) == "")
    assert digest(1, use_lottery_ticket_hypothesis=False) == "" == weights_to_go_back_to([package.Callback()])


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_classes_behind_logged_values(package: str) -> None:
    result = pytest.importorskip(f"{package}.trainer.connectors.logger_connector.result")
    meta = result._Metadata("fx", "name", reduce_fx=torch.mean)
    meta.sync = result._Sync(fn=None, _should=False, rank_zero_only=False, _op="mean")
    metric = result._ResultMetric(meta, True)
    assert {"value", "cumulated_batch_size", "_forward_cache", "_update_count", "has_reset"} <= set(dir(metric))


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_combined_loader(package: str) -> None:
    module = pytest.importorskip(f"{package}.utilities.combined_loader")
    combined = module.CombinedLoader([[1, 2, 3], [4]], "max_size_cycle")
    loops.Internals.make_idle_iterator(combined)
    assert len(combined) == 3 and loops.Internals.iterators(combined) == []
    iter(combined)
    assert len(loops.Internals.iterators(combined)) == 2 and loops.Internals.exhausted(combined) == [False, False]
    loops.Internals.set_position(combined, 2, [False, True])
    assert next(combined)[1] == 2


@pytest.mark.parametrize("package", [pl, pytorch_lightning])
def test_model_checkpoint(package: object) -> None:
    callback = package.callbacks.ModelCheckpoint()  # type: ignore[attr-defined]
    guard.check_callback(callback)
    assert set(guard._MODEL_CHECKPOINT) <= set(dir(callback))


def test_a_moved_method_of_model_checkpoint_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (*guard._MODEL_CHECKPOINT, "_renamed_too")
    monkeypatch.setattr(guard, "_MODEL_CHECKPOINT", names)
    with pytest.raises(CheckpointError, match="its ModelCheckpoint has no _renamed_too"):
        ResumableCheckpoint()


def test_ddp_reducer() -> None:
    for name in ("_push_all_rebuilt_params", "_rebuild_buckets"):
        assert hasattr(torch._C._distributed_c10d.Reducer, name), name


def test_a_moved_attribute_is_named(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_INTERNALS", (*guard._INTERNALS, ("fit_loop", ("_renamed",))))
    trainer = pl.Trainer(
        callbacks=[ResumableCheckpoint(dirpath=str(tmp_path))], logger=False, accelerator="cpu", devices=1
    )
    with pytest.raises(CheckpointError, match=r"it has no trainer\.fit_loop\._renamed"):
        trainer.fit(Model())


@pytest.mark.parametrize("package", [pl, pytorch_lightning])
def test_model_averaging(package: object, monkeypatch: pytest.MonkeyPatch) -> None:
    state = object()
    strategy = package.strategies.DDPStrategy(ddp_comm_state=state)  # type: ignore[attr-defined]
    assert loops.model_averaging(strategy) == (None, state)
    trainer = package.Trainer(logger=False, accelerator="cpu", devices=2, strategy=strategy)  # type: ignore[attr-defined]
    assert guard.missing_internals(trainer) == []
    monkeypatch.setattr(guard, "_DDP_STRATEGY", ("_model_averager", "_renamed_as_well"))
    assert guard.missing_internals(trainer) == ["trainer.strategy._renamed_as_well"]


def test_a_release_without_the_boundaries_trains_as_ever(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(guard, "_BOUNDARIES", (("fit_loop.epoch_loop", ("on_advance_end", "_renamed")),))
    callback = ResumableCheckpoint(dirpath=str(tmp_path))
    trainer = pl.Trainer(callbacks=[callback], logger=False, accelerator="cpu", devices=1, max_epochs=1)
    trainer.fit(Model())
    assert trainer.global_step > 0
    assert "has no trainer.fit_loop.epoch_loop._renamed" in caplog.text


@pytest.mark.parametrize("package", [pl, pytorch_lightning])
def test_nothing_of_ours_is_left_on_the_trainer(package: object, tmp_path: object) -> None:
    callback = ResumableCheckpoint(dirpath=str(tmp_path), save_top_k=0)
    options = {"logger": False, "accelerator": "cpu", "devices": 1, "max_epochs": 1}
    trainer = package.Trainer(callbacks=[callback], **options)  # type: ignore[attr-defined]

    class Plain(package.LightningModule):  # type: ignore[name-defined,misc]
        def training_step(self, *_: object) -> None:
            assert "on_advance_end" in vars(trainer.fit_loop.epoch_loop)
            assert "_slurm_sigusr_handler_fn" in vars(trainer._signal_connector)

        def train_dataloader(self) -> list[int]:
            return [1, 2]

        def configure_optimizers(self) -> None:
            pass

    trainer.fit(Plain())
    for owner in (trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer._signal_connector, trainer.validate_loop):
        for name in ("on_advance_end", "on_run_end", "_slurm_sigusr_handler_fn", "teardown", "_evaluation_step"):
            assert name not in vars(owner)


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_a_moved_function_that_a_plugin_hooks_into_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = pytest.importorskip(f"{package}.trainer.call")
    assert callable(call._call_setup_hook), "this release of Lightning has moved what ShardedCheckpointIO hooks into"
    monkeypatch.delattr(call, "_call_setup_hook")
    with pytest.raises(CheckpointError, match="it has no _call_setup_hook") as caught:
        ShardedCheckpointIO()
    assert package in str(caught.value) and "use Lightning 2.5 to 2.7" in str(caught.value)


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_a_moved_way_to_open_files_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = pytest.importorskip(f"{package}.core.saving")
    assert callable(saving.pl_load), "this release of Lightning opens the files of load_from_checkpoint otherwise"
    monkeypatch.delattr(saving, "pl_load")
    with pytest.raises(CheckpointError, match="it has no pl_load"):
        ShardedCheckpointIO()


def test_what_is_called_first_is_called_once_however_many_plugins_are_made() -> None:
    called: list[str] = []

    class Owner:
        def act(self) -> str:
            return "done"

    def one(owner: Owner) -> None:
        called.append("one")

    def two(owner: Owner) -> None:
        called.append("two")

    for call in (one, two, one, two):
        hooks._call_first(Owner, "act", call, "package")
    assert Owner().act() == "done"
    assert called == ["two", "one"]
