"""A ``dirpath`` on an object store: last, best, retention, walking back and exact resume, on real servers."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Catalog, CheckpointCorruptedError, Checkpointer, CheckpointNotFoundError, StorageError
from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint, ShardedCheckpointIO, SyncCheckpointIO
from tests.conftest import LIGHTNING, ScriptRunner
from tests.lightning_ckpt.reliable_cases import BATCHES, Callback, model_of, trainer_of
from tests.support.fault_proxy import HttpFault, start_proxy
from tests.support.server_fixtures import server_of, servers
from tests.support.servers import Server
from tests.support.stores import storage_at

__all__ = ["server_of", "servers"]  # fixtures

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
]

LOSSES = (5.0, 3.0, 1.0, 2.0, 4.0, 6.0)  # the third is the best
BEST_AND_LAST = (5.0, 4.0, 1.0, 6.0, 3.0, 2.0)  # and the last is the second best
PLUGINS = [SyncCheckpointIO, AsyncCheckpointIO]
Bucket = tuple[str, dict[str, Any]]


@pytest.fixture(params=["moto"])
def bucket(
    request: pytest.FixtureRequest, server_of: Callable[[str], Server], monkeypatch: pytest.MonkeyPatch
) -> Bucket:
    """Return a directory on a store, and the options that are needed to reach it.

    Differences between stores are tested below the plugin, with ``ckpt_core.storage``.
    """
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


@pytest.mark.extended_cells("AsyncCheckpointIO-ceph")
@pytest.mark.parametrize(
    ("plugin", "bucket"), [(SyncCheckpointIO, "moto"), (AsyncCheckpointIO, "ceph")], indirect=["bucket"]
)
def test_last_goes_on_where_the_run_before_ended(plugin: Any, bucket: Bucket, tmp_path: Path) -> None:
    first = fit(bucket, tmp_path, plugin, max_steps=3, ckpt_path="last", save_last=True)
    assert first.global_step == 3, "there was nothing to resume from"
    assert names_in(bucket) == ["last.ckpt", "step=1.ckpt", "step=2.ckpt", "step=3.ckpt"]
    second = fit(bucket, tmp_path, plugin, ckpt_path="last", save_last=True)
    assert second.global_step == BATCHES
    assert second.model.batches == BATCHES - 3, "the first three were not repeated"
    assert torch.equal(second.model.weight, torch.full_like(second.model.weight, float(BATCHES)))
    assert step_of(bucket, "last.ckpt") == BATCHES


@pytest.mark.each_value
@pytest.mark.parametrize("resume", [None, "last"])
@pytest.mark.parametrize("tiered", [False, True])
def test_a_bucket_that_does_not_exist_is_told_before_training(
    bucket: Bucket, tmp_path: Path, tiered: bool, resume: str | None
) -> None:
    missing = bucket[0].replace("/runs", "-typo/runs")
    tiers = {"local_dir": tmp_path / "fast", "upload_to": missing} if tiered else {}
    plugin = AsyncCheckpointIO(storage_options=bucket[1], **tiers)
    callback = ResumableCheckpoint(tmp_path / "fast" if tiered else missing, every_n_train_steps=1)
    model = model_of(metrics=LOSSES)
    with pytest.raises(CheckpointNotFoundError, match="there is no such bucket"):
        trainer_of(tmp_path, [callback], plugins=[plugin], max_epochs=1).fit(model, ckpt_path=resume)
    assert model.batches == 0


@pytest.mark.extended_cells("moto-SyncCheckpointIO")
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
    with pytest.raises(CheckpointCorruptedError, match="none of the checkpoints"):
        fit(bucket, tmp_path, ckpt_path="last")


def test_a_path_on_the_store(bucket: Bucket, tmp_path: Path) -> None:
    fit(bucket, tmp_path, max_steps=3)
    trainer = fit(bucket, tmp_path, ckpt_path=f"{bucket[0]}/step=2.ckpt")
    assert trainer.model.batches == BATCHES - 2


def test_a_name_that_is_taken_gets_a_version(bucket: Bucket, tmp_path: Path) -> None:
    for _ in range(2):
        fit(bucket, tmp_path, max_steps=1, filename="model")
    assert names_in(bucket) == ["model-v1.ckpt", "model.ckpt"]


def test_a_run_that_only_warns_reaches_its_end_without_the_store(bucket: Bucket, tmp_path: Path) -> None:
    class GoesDown(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                plugin.checkpointer.drain()
                proxy.plan(HttpFault("503", 1, for_good=True))

    with start_proxy(bucket[1]["endpoint_url"]) as proxy:
        options = {**bucket[1], "endpoint_url": proxy.endpoint, "retry_config": {"max_retries": 0}}
        plugin = AsyncCheckpointIO(storage_options=options, on_error="warn")
        callback = ResumableCheckpoint(bucket[0], filename="{step}", every_n_train_steps=1, save_top_k=-1)
        trainer = trainer_of(tmp_path, [callback, GoesDown()], plugins=[plugin], max_epochs=1)
        trainer.fit(model_of())
    assert trainer.global_step == BATCHES
    assert plugin.checkpointer.failures == BATCHES - 2
    assert names_in(bucket) == ["step=1.ckpt", "step=2.ckpt"]


def test_best_in_the_same_process(bucket: Bucket, tmp_path: Path) -> None:
    trainer = fit(bucket, tmp_path, monitor="loss", save_top_k=2)
    assert trainer.checkpoint_callback.best_model_path.endswith("/runs/step=3.ckpt")
    (result,) = trainer.test(ckpt_path="best", verbose=False)
    assert result["test_loss"] == pytest.approx(3.0)


# ---- in a process that has trained nothing ---------------------------------------------------------------------------


class Place:
    """Where a run keeps its checkpoints: on a store, or on a disk from which they are uploaded to it."""

    def __init__(self, bucket: Bucket, folder: Path, kind: Any, *, tiers: bool) -> None:
        self.bucket, self.folder, self.kind = bucket, folder, kind
        self.local = folder / "local" if tiers else None

    def trainer(self, callback: Any = None) -> Any:
        tiers = {"local_dir": str(self.local), "upload_to": self.bucket[0]} if self.local else {}
        plugin = self.kind(storage_options=self.bucket[1], **tiers)
        return trainer_of(self.folder, [callback or self.callback()], plugins=[plugin], max_epochs=1)

    def callback(self) -> Any:
        directory = self.local or self.bucket[0]
        return ResumableCheckpoint(
            directory, filename="{step}", every_n_train_steps=1, save_top_k=2, monitor="loss", save_last=True
        )


def look_up(folder: Path) -> None:
    """Load the place of another process's run; write down what a test, a fit and an unpickled callback find there."""
    place: Place = pickle.loads((folder / "place").read_bytes())
    callback = pickle.loads((folder / "callback").read_bytes())  # as in a spawned process: its __init__ is not called
    if place.local is not None:
        assert callback.best_model_path == "", "nothing is on the disk, and it has not heard of the store"
    found: list[float] = []
    for name, known in (("best", callback), ("last", None), ("best", None)):
        trainer = place.trainer(known)
        (result,) = trainer.test(model_of(), ckpt_path=name, verbose=False)
        found.append(result["test_loss"])
    model = model_of(metrics=BEST_AND_LAST)
    place.trainer().fit(model, ckpt_path="best")
    found.append(model.batches)
    (folder / "found.json").write_text(json.dumps(found))


@pytest.mark.extended_cells(
    "ShardedCheckpointIO-False-moto", "ShardedCheckpointIO-True-ceph", "AsyncCheckpointIO-True-moto"
)
@pytest.mark.parametrize(
    ("kind", "tiers", "bucket"),
    [(AsyncCheckpointIO, True, "moto"), (ShardedCheckpointIO, False, "moto"), (ShardedCheckpointIO, True, "ceph")],
    indirect=["bucket"],
)
def test_best_and_last_in_a_process_that_has_trained_nothing(
    kind: Any, tiers: bool, bucket: Bucket, fork_script: ScriptRunner, tmp_path: Path
) -> None:
    place = Place(bucket, tmp_path, kind, tiers=tiers)
    (tmp_path / "callback").write_bytes(pickle.dumps(place.callback()))
    place.trainer().fit(model_of(metrics=BEST_AND_LAST))
    assert names_in(bucket) == ["last.ckpt", "step=3.ckpt", "step=6.ckpt"]
    shutil.rmtree(tmp_path / "local", ignore_errors=True)
    (tmp_path / "place").write_bytes(pickle.dumps(place))
    script = (
        "import sys, pathlib; from tests.lightning_ckpt.test_remote import look_up; look_up(pathlib.Path(sys.argv[1]))"
    )
    fork_script(script, tmp_path, modules=LIGHTNING)
    best, last, again, batches = json.loads((tmp_path / "found.json").read_text())
    assert best == again == pytest.approx(3.0), "the weights count the steps"
    assert last == pytest.approx(float(BATCHES))
    assert batches == BATCHES - 3


def test_a_damaged_best_is_passed_over(bucket: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = Place(bucket, tmp_path, AsyncCheckpointIO, tiers=False)
    place.trainer().fit(model_of(metrics=BEST_AND_LAST))
    damage(bucket, "step=3.ckpt")
    trainer = place.trainer()
    with caplog.at_level(logging.WARNING, "lightning_ckpt"):
        trainer.test(model_of(), ckpt_path="best", verbose=False)
    assert trainer.ckpt_path in (f"{bucket[0]}/last.ckpt", f"{bucket[0]}/step=6.ckpt")
    assert "instead of the best checkpoint" in caplog.text


def test_the_options_count_of_the_trainer_that_asks(bucket: Bucket, tmp_path: Path) -> None:
    callback = Place(bucket, tmp_path, AsyncCheckpointIO, tiers=False).callback()
    Place(bucket, tmp_path, AsyncCheckpointIO, tiers=False).trainer().fit(model_of(metrics=BEST_AND_LAST))
    refused = (bucket[0], {**bucket[1], "endpoint_url": "http://127.0.0.1:1"})
    with pytest.raises(StorageError):
        Place(refused, tmp_path, AsyncCheckpointIO, tiers=False).trainer(callback).test(model_of(), ckpt_path="best")
    (result,) = (
        Place(bucket, tmp_path, AsyncCheckpointIO, tiers=False)
        .trainer(callback)
        .test(model_of(), ckpt_path="best", verbose=False)
    )
    assert result["test_loss"] == pytest.approx(3.0)


def test_a_store_that_refuses_is_no_fresh_start(bucket: Bucket, tmp_path: Path) -> None:
    fit(bucket, tmp_path, max_steps=1)
    options = {**bucket[1], "endpoint_url": "http://127.0.0.1:1"}
    with pytest.raises(StorageError):
        fit((bucket[0], options), tmp_path, ckpt_path="last")
