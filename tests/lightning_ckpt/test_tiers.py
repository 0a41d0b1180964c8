"""Real trainings whose checkpoints are committed on a local disk and uploaded from there."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonargparse
import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ckpt_core import Catalog, StorageError, verify
from ckpt_core.storage import Fault, FaultyStorage, LocalStorage, Operation
from ckpt_core.tiers import Tiers
from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint, ShardedCheckpointIO, SyncCheckpointIO
from tests.conftest import LIGHTNING, ScriptRunner
from tests.lightning_ckpt.reliable_cases import BATCHES, model_of, trainer_of, wait_until
from tests.support.server_fixtures import server_of, servers
from tests.support.servers import Server

__all__ = ["server_of", "servers"]  # fixtures

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
]

STEPS = 12
KILLED_AT = 7
LOSSES = (5.0, 3.0, 1.0, 2.0, 4.0, 6.0)  # the third is the best
PLUGINS = [SyncCheckpointIO, AsyncCheckpointIO, ShardedCheckpointIO]


class Model(pl.LightningModule):
    """A model with dropout and a shuffled loader: any other random number changes the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 300), torch.nn.Dropout(0.5), torch.nn.Linear(300, 300))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return self.layers(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        data = torch.arange(8 * 40, dtype=torch.float32).reshape(40, 8) / 320
        return DataLoader(TensorDataset(data), batch_size=4, shuffle=True)


def train(folder: Path, plugin: Any, *, steps: int = STEPS, ckpt_path: str | None = None) -> Model:
    """Train from one seed, with a checkpoint after every step in ``folder/local``."""
    pl.seed_everything(5, verbose=False)
    callback = ResumableCheckpoint(folder / "local", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    trainer = trainer_of(folder, [callback], plugins=[plugin], max_epochs=9, max_steps=steps)
    model = Model()
    trainer.fit(model, ckpt_path=ckpt_path)
    return model


def plugin_in(folder: Path, kind: Any, **settings: Any) -> Any:
    return kind(local_dir=str(folder / "local"), upload_to=str(folder / "remote"), **settings)


def train_until_killed(folder: Path, kind: Any) -> None:
    """Train until this process is killed in the middle of the fourth upload, while three more checkpoints wait."""

    def is_fourth(operation: Operation) -> bool:
        if operation.name != "write_at" or "step=4" not in operation.path:
            return False
        wait_until(lambda: f"step={KILLED_AT}.ckpt" in names(folder / "local"))
        os.kill(os.getpid(), signal.SIGKILL)
        return True

    store = FaultyStorage(LocalStorage(), [Fault(is_fourth)])
    Tiers.storage = lambda *_: store  # type: ignore[method-assign]
    train(folder, plugin_in(folder, kind), steps=KILLED_AT)


def train_with_a_store_that_is_down(folder: Path, kind: Any) -> None:
    """Train on two ranks, save once, and write down what is raised when the upload fails some steps later."""
    rank = int(os.environ["LOCAL_RANK"])
    failing = Fault("create", number=None, delay=1.0, error=OSError(5, "it is down"))
    store = FaultyStorage(LocalStorage(), [failing])
    Tiers.storage = lambda *_: store  # type: ignore[method-assign]
    plugin = plugin_in(folder, kind)

    class Waits(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 8 and rank == 0:  # no save is near
                wait_until(lambda: plugin.checkpointer.failures)

    callback = ResumableCheckpoint(folder / "local", every_n_train_steps=5, save_top_k=-1)
    trainer = trainer_of(
        folder, [Waits(), callback], plugins=[plugin], devices=2, strategy="ddp", max_epochs=9, max_steps=14
    )
    raised = None
    try:
        trainer.fit(Model())
    except StorageError as error:
        raised = error.message
    (folder / f"rank-{rank}.json").write_text(json.dumps([raised, trainer.global_step]))


def names(directory: Path) -> list[str]:
    return sorted(os.path.basename(info.path) for info in Catalog(directory).checkpoints())


def assert_same_bits(model: Model, other: Model) -> None:
    state = other.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name


@pytest.mark.extended_cells("AsyncCheckpointIO")
@pytest.mark.parametrize("kind", [AsyncCheckpointIO, ShardedCheckpointIO])
def test_killed_during_an_upload_it_goes_on_from_either_tier(
    kind: Any, fork_script: ScriptRunner, tmp_path: Path
) -> None:
    whole = train(tmp_path / "whole", kind())
    folder = tmp_path / "run"
    script = (
        "import sys, pathlib, lightning_ckpt; from tests.lightning_ckpt.test_tiers import train_until_killed; "
        "train_until_killed(pathlib.Path(sys.argv[1]), getattr(lightning_ckpt, sys.argv[2]))"
    )
    killed = fork_script(script, folder, kind.__name__, modules=LIGHTNING, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert names(folder / "remote") == ["step=1.ckpt", "step=2.ckpt", "step=3.ckpt"]

    # On another machine, which has only what was uploaded.
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(folder / "remote", elsewhere / "remote")
    resumed = train(elsewhere, plugin_in(elsewhere, kind), ckpt_path="last")
    assert_same_bits(resumed, whole)
    assert "step=3.ckpt" not in names(elsewhere / "local"), "it began there"
    assert "step=4.ckpt" in names(elsewhere / "local")

    resumed = train(folder, plugin_in(folder, kind), ckpt_path="last")
    assert_same_bits(resumed, whole)
    every = sorted(f"step={step}.ckpt" for step in range(1, STEPS + 1))
    assert names(folder / "remote") == every, "those that were left behind, too"
    assert [verify(folder / "remote" / name) for name in every] == [True] * STEPS


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [AsyncCheckpointIO, ShardedCheckpointIO])
def test_a_failed_upload_ends_training_on_all_ranks_at_the_same_step(
    kind: Any, fork_script: ScriptRunner, tmp_path: Path
) -> None:
    script = (
        "import sys, pathlib, lightning_ckpt; from tests.lightning_ckpt.test_tiers import train_with_a_store_that_is_down; "
        "train_with_a_store_that_is_down(pathlib.Path(sys.argv[1]), getattr(lightning_ckpt, sys.argv[2]))"
    )
    fork_script(script, tmp_path, kind.__name__, modules=LIGHTNING, ranks=2)
    results = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert "it is down" in results[0][0]
    assert results[0] == results[1]
    assert results[0][1] < 14
    assert len(names(tmp_path / "local")) >= 1


Bucket = tuple[str, dict[str, Any]]


@pytest.fixture
def bucket(server_of: Callable[[str], Server], monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """Return a directory on S3, and the options that are needed to reach it."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    server = server_of("moto")
    return f"{server.new_bucket()}/runs", dict(server.options)


def fit(bucket: Bucket, folder: Path, kind: Any, **settings: Any) -> Any:
    plugin = kind(
        local_dir=str(folder / "local"),
        upload_to=bucket[0],
        storage_options=bucket[1],
        keep_local=settings.pop("keep_local", None),
    )
    resume, steps = settings.pop("ckpt_path", None), settings.pop("max_steps", -1)
    directory = settings.pop("dirpath", folder / "local" / "run")
    callback = ResumableCheckpoint(
        directory, **{"every_n_train_steps": 1, "save_top_k": -1, "filename": "{step}", **settings}
    )
    trainer = trainer_of(folder, [callback], plugins=[plugin], max_epochs=1, max_steps=steps)
    trainer.fit(model_of(metrics=LOSSES), ckpt_path=resume)
    return trainer


def names_in(bucket: Bucket) -> list[str]:
    infos = Catalog(f"{bucket[0]}/run", storage_options=bucket[1]).checkpoints()
    return sorted(info.path.rpartition("/")[2] for info in infos)


@pytest.mark.extended_cells("ShardedCheckpointIO")
@pytest.mark.parametrize(
    "kind", [AsyncCheckpointIO, ShardedCheckpointIO, pytest.param(SyncCheckpointIO, marks=pytest.mark.slow)]
)
def test_last_and_best_on_an_empty_disk(kind: Any, bucket: Bucket, tmp_path: Path) -> None:
    first = fit(bucket, tmp_path, kind, max_steps=4, ckpt_path="last", save_last=True, monitor="loss", save_top_k=2)
    assert first.global_step == 4
    assert names_in(bucket) == ["last.ckpt", "step=3.ckpt", "step=4.ckpt"], "retention is of both tiers"
    assert names(tmp_path / "local" / "run") == names_in(bucket)
    shutil.rmtree(tmp_path / "local")
    second = fit(bucket, tmp_path, kind, ckpt_path="last", save_last=True, monitor="loss", save_top_k=2)
    assert second.global_step == BATCHES
    assert second.model.batches == BATCHES - 4
    assert names_in(bucket) == ["last.ckpt", "step=3.ckpt", "step=4.ckpt"]
    assert second.checkpoint_callback.best_model_path == str(tmp_path / "local/run/step=3.ckpt")
    shutil.rmtree(tmp_path / "local")
    (result,) = second.test(ckpt_path="best", verbose=False)
    assert result["test_loss"] == pytest.approx(3.0)


@pytest.mark.extended
@pytest.mark.parametrize("kind", [SyncCheckpointIO, ShardedCheckpointIO])
def test_little_room_on_the_local_disk(kind: Any, bucket: Bucket, tmp_path: Path) -> None:
    fit(bucket, tmp_path, kind, keep_local=1)
    every = [f"step={step}.ckpt" for step in range(1, BATCHES + 1)]
    assert names_in(bucket) == every
    assert names(tmp_path / "local" / "run") == every[-1:]
    trainer = fit(bucket, tmp_path, kind, ckpt_path=str(tmp_path / "local/run/step=2.ckpt"), keep_local=1)
    assert trainer.model.batches == BATCHES - 2
    again = [name.replace(".ckpt", "-v1.ckpt") for name in every[2:]]
    assert names_in(bucket) == sorted([*every, *again]), "names that only the store has are taken too"


def test_a_directory_of_the_store(bucket: Bucket, tmp_path: Path) -> None:
    fit(bucket, tmp_path, AsyncCheckpointIO, dirpath=f"{bucket[0]}/run", max_steps=2)
    assert names_in(bucket) == names(tmp_path / "local" / "run") == ["step=1.ckpt", "step=2.ckpt"]
    trainer = fit(bucket, tmp_path, AsyncCheckpointIO, dirpath=f"{bucket[0]}/run", ckpt_path="last")
    assert trainer.model.batches == BATCHES - 2


def test_a_store_that_is_down_costs_no_training_unless_told_so(bucket: Bucket, tmp_path: Path) -> None:
    options = {**bucket[1], "endpoint_url": "http://127.0.0.1:1"}
    settings = {"upload_to": bucket[0], "storage_options": options, "local_dir": str(tmp_path)}
    for on_error in ("warn", "raise"):
        plugin: Any = AsyncCheckpointIO(on_error=on_error, **settings)  # type: ignore[arg-type]
        remote = FaultyStorage(LocalStorage(), [Fault("create", number=None, error=OSError(5, "it is down"))])
        plugin.checkpointer._to_read(str(tmp_path)).remote = remote
        callback = ResumableCheckpoint(tmp_path / on_error, every_n_train_steps=1, save_top_k=-1, filename="{step}")
        trainer = trainer_of(tmp_path, [callback], plugins=[plugin], max_epochs=1)
        if on_error == "raise":
            with pytest.raises(StorageError, match="it is down"):
                trainer.fit(model_of())
        else:
            trainer.fit(model_of())
            assert trainer.global_step == BATCHES
            assert plugin.checkpointer.failures >= 1
            assert len(names(tmp_path / on_error)) == BATCHES


@pytest.mark.parametrize("kind", PLUGINS)
def test_options_of_a_configuration(kind: Any, tmp_path: Path) -> None:
    parser = jsonargparse.ArgumentParser()
    parser.add_subclass_arguments(kind, "plugin")
    given = {"local_dir": str(tmp_path), "upload_to": "s3://bucket/run", "keep_local": 2}
    config = {"class_path": f"lightning_ckpt.{kind.__name__}", "init_args": given}
    plugin = parser.instantiate_classes(parser.parse_args([f"--plugin={json.dumps(config)}"])).plugin
    assert plugin.tiers == Tiers(local_dir=str(tmp_path), upload_to="s3://bucket/run", keep_local=2)
    with pytest.raises(ValueError, match="upload_to needs local_dir"):
        kind(upload_to="s3://bucket/run")
