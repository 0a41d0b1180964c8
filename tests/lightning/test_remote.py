"""A ``dirpath`` on an object store: last, best, retention, walking back and exact resume, on real servers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Catalog, Checkpointer, CheckpointNotFoundError, StorageError
from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint, SyncCheckpointIO
from tests.lightning.reliable_cases import BATCHES, model_of, trainer_of
from tests.support.server_fixtures import server_of, servers
from tests.support.servers import Server
from tests.support.stores import storage_at

__all__ = ["server_of", "servers"]  # fixtures

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
]

LOSSES = (5.0, 3.0, 1.0, 2.0, 4.0, 6.0)  # the third is the best
PLUGINS = [SyncCheckpointIO, AsyncCheckpointIO]
Bucket = tuple[str, dict[str, Any]]


@pytest.fixture(params=["moto", "ceph"])
def bucket(
    request: pytest.FixtureRequest, server_of: Callable[[str], Server], monkeypatch: pytest.MonkeyPatch
) -> Bucket:
    """A directory, and options without which nobody gets there."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    server = server_of(request.param)
    return f"{server.new_bucket()}/runs", dict(server.options)


def fit(bucket: Bucket, folder: Path, plugin: Any = AsyncCheckpointIO, **settings: Any) -> Any:
    directory, options = bucket
    resume = settings.pop("ckpt_path", None)
    steps = settings.pop("max_steps", -1)
    callback = ResumableCheckpoint(
        directory, **{"every_n_train_steps": 1, "save_top_k": -1, "filename": "{step}", **settings}
    )
    trainer = trainer_of(folder, [callback], plugins=[plugin(storage_options=options)], max_epochs=1, max_steps=steps)
    trainer.fit(model_of(metrics=LOSSES), ckpt_path=resume)
    return trainer


def names_in(bucket: Bucket) -> list[str]:
    return sorted(info.path.rpartition("/")[2] for info in Catalog(bucket[0], storage_options=bucket[1]).checkpoints())


def step_of(bucket: Bucket, name: str) -> int:
    return int(Checkpointer(storage_options=bucket[1]).load(f"{bucket[0]}/{name}")["global_step"])


def damage(bucket: Bucket, name: str) -> None:
    storage: Any = storage_at(bucket)
    path = f"{bucket[0]}/{name}"
    content = bytearray(storage.get(path))
    content[len(content) // 2] ^= 1
    storage.put(path, bytes(content))


@pytest.mark.parametrize("plugin", PLUGINS)
def test_last_goes_on_where_the_run_before_ended(plugin: Any, bucket: Bucket, tmp_path: Path) -> None:
    first = fit(bucket, tmp_path, plugin, max_steps=3, ckpt_path="last", save_last=True)
    assert first.global_step == 3, "there was nothing to resume from"
    assert names_in(bucket) == ["last.ckpt", "step=1.ckpt", "step=2.ckpt", "step=3.ckpt"]
    second = fit(bucket, tmp_path, plugin, ckpt_path="last", save_last=True)
    assert second.global_step == BATCHES
    assert second.model.batches == BATCHES - 3, "the first three were not repeated"
    assert torch.equal(second.model.weight, torch.full_like(second.model.weight, float(BATCHES)))
    assert step_of(bucket, "last.ckpt") == BATCHES


@pytest.mark.parametrize("plugin", PLUGINS)
def test_retention_deletes_on_the_store(plugin: Any, bucket: Bucket, tmp_path: Path) -> None:
    fit(bucket, tmp_path, plugin, save_top_k=2, monitor="loss", save_last=True)
    assert names_in(bucket) == ["last.ckpt", "step=3.ckpt", "step=4.ckpt"]
    assert step_of(bucket, "last.ckpt") == BATCHES


def test_the_newest_only(bucket: Bucket, tmp_path: Path) -> None:
    fit(bucket, tmp_path, max_steps=3, save_top_k=1)
    assert names_in(bucket) == ["step=3.ckpt"]
    second = fit(bucket, tmp_path, save_top_k=1, ckpt_path="last")
    assert second.model.batches == BATCHES - 3
    assert names_in(bucket) == ["step=3.ckpt", f"step={BATCHES}.ckpt"], "what it resumed from is kept, as on a disk"


def test_a_damaged_checkpoint_is_passed_over(bucket: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(bucket, tmp_path, max_steps=1)
    fit(bucket, tmp_path, max_steps=2, ckpt_path="last")
    damage(bucket, "step=2.ckpt")
    with caplog.at_level(logging.WARNING, "ckpt_core"):
        trainer = fit(bucket, tmp_path, max_steps=3, ckpt_path="last")
    assert trainer.model.batches == 2
    assert len([record for record in caplog.records if "step=2.ckpt" in record.getMessage()]) == 1
    for path, error in Catalog(bucket[0], storage_options=bucket[1]).verify().items():
        if error is None:
            damage(bucket, path.rpartition("/")[2])
    with pytest.raises(CheckpointNotFoundError, match="none of the checkpoints"):
        fit(bucket, tmp_path, ckpt_path="last")


def test_a_path_on_the_store(bucket: Bucket, tmp_path: Path) -> None:
    fit(bucket, tmp_path, max_steps=3)
    trainer = fit(bucket, tmp_path, ckpt_path=f"{bucket[0]}/step=2.ckpt")
    assert trainer.model.batches == BATCHES - 2


def test_a_name_that_is_taken_gets_a_version(bucket: Bucket, tmp_path: Path) -> None:
    for _ in range(2):
        fit(bucket, tmp_path, max_steps=1, filename="model")
    assert names_in(bucket) == ["model-v1.ckpt", "model.ckpt"]


def test_best_in_the_same_process(bucket: Bucket, tmp_path: Path) -> None:
    trainer = fit(bucket, tmp_path, monitor="loss", save_top_k=2)
    assert trainer.checkpoint_callback.best_model_path.endswith("/runs/step=3.ckpt")
    (result,) = trainer.test(ckpt_path="best", verbose=False)
    assert result["test_loss"] == pytest.approx(3.0)


def test_a_store_that_refuses_is_no_fresh_start(bucket: Bucket, tmp_path: Path) -> None:
    fit(bucket, tmp_path, max_steps=1)
    options = {**bucket[1], "endpoint_url": "http://127.0.0.1:1"}
    with pytest.raises(StorageError):
        fit((bucket[0], options), tmp_path, ckpt_path="last")
