"""``save_last`` and retention: the same files as with stock Lightning, and each state is written once."""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO

import ckpt_core.checkpointer as checkpointer_module
from ckpt_core import StorageError, verify
from ckpt_core.storage import FileWriter, LocalStorage
from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint, SyncCheckpointIO
from tests.lightning_ckpt.reliable_cases import BATCHES, NUMBERS, Callback, model_of, names, trainer_of

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
]

PLUGINS = {"sync": SyncCheckpointIO, "async": AsyncCheckpointIO}
LOSSES = (5.0, 3.0, 4.0, 1.0, 2.0, 6.0)

SETTINGS: dict[str, dict[str, Any]] = {
    "the last": {"every_n_train_steps": 1},
    "the last, save_last": {"every_n_train_steps": 1, "save_last": True},
    "save_last alone": {"every_n_train_steps": 2, "save_last": True, "save_top_k": 0},
    "all": {"every_n_train_steps": 2, "save_last": True, "save_top_k": -1},
    "best": {"every_n_train_steps": 1, "monitor": "loss", "save_last": True},
    "best 2": {"every_n_train_steps": 1, "monitor": "loss", "save_top_k": 2},
    "best 3, save_last": {"every_n_train_steps": 1, "monitor": "loss", "save_top_k": 3, "save_last": True},
    "worst 2": {"every_n_train_steps": 1, "monitor": "loss", "mode": "max", "save_top_k": 2, "save_last": True},
    "all, monitored": {"every_n_train_steps": 3, "monitor": "loss", "save_top_k": -1, "save_last": True},
    "none, monitored": {"every_n_train_steps": 3, "monitor": "loss", "save_top_k": 0, "save_last": True},
    "link": {"every_n_train_steps": 2, "save_last": "link"},
    "link, best 2": {"every_n_train_steps": 1, "monitor": "loss", "save_top_k": 2, "save_last": "link"},
    "link alone": {"every_n_train_steps": 2, "save_last": "link", "save_top_k": 0},
    "epochs": {"save_last": True, "save_top_k": -1},
    "second epochs": {"every_n_epochs": 2, "save_last": True},
    "after validation": {"save_on_train_epoch_end": False, "save_last": True, "monitor": "val_loss", "mode": "max"},
    "seldom": {"every_n_train_steps": 9, "save_last": True},
    "one name": {"every_n_train_steps": 2, "filename": "model", "save_last": True},
    "one name, best 2": {"every_n_train_steps": 1, "filename": "m", "monitor": "loss", "save_top_k": 2},
    "no counter": {"every_n_train_steps": 2, "filename": "m", "enable_version_counter": False, "save_last": True},
    "always": {"train_time_interval": datetime.timedelta(0), "save_last": True},
    "weights": {"every_n_train_steps": 2, "save_weights_only": True, "save_last": True},
    "last with numbers": {"every_n_train_steps": 2, "save_last": True, "last_name": "last-{step}"},
}


class SlowStorage(LocalStorage):
    """A storage that is slower than training."""

    def create(self, path: str, expected_size: int) -> FileWriter:
        time.sleep(0.005)
        return super().create(path, expected_size)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointer_module, "storage_for", lambda *_: SlowStorage())


def callback_of(kind: type[Any], directory: Path, settings: dict[str, Any]) -> Any:
    settings = {"filename": "{step}", **settings}
    last_name = settings.pop("last_name", "last")
    callback = kind(dirpath=directory, **settings)
    callback.CHECKPOINT_NAME_LAST = last_name
    return callback


def run(kind: type[Any], plugin: Any, folder: Path, settings: dict[str, Any], **options: Any) -> Any:
    resume = options.pop("ckpt_path", None)
    callback = callback_of(kind, folder, settings)
    validates = {"limit_val_batches": 1} if settings.get("monitor") == "val_loss" else {}
    trainer = trainer_of(folder.parent, [callback], plugins=[plugin()], **validates, **options)
    trainer.fit(model_of(metrics=LOSSES), ckpt_path=resume)
    return trainer


def contents(folder: Path) -> dict[str, int]:
    """Return the step of each file."""
    return {name: torch.load(folder / name, map_location="meta")["global_step"] for name in names(folder)}


Scenario = Callable[[type[Any], Any, Path, dict[str, Any]], list[dict[str, int]]]


def two_runs(kind: type[Any], plugin: Any, folder: Path, settings: dict[str, Any]) -> list[dict[str, int]]:
    run(kind, plugin, folder, settings)
    first = contents(folder)
    run(kind, plugin, folder, settings, max_epochs=1)
    return [first, contents(folder)]


def one_trainer_twice(kind: type[Any], plugin: Any, folder: Path, settings: dict[str, Any]) -> list[dict[str, int]]:
    trainer = run(kind, plugin, folder, settings, max_epochs=1)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(trainer.model)
    return [contents(folder)]


def resumed(kind: type[Any], plugin: Any, folder: Path, settings: dict[str, Any]) -> list[dict[str, int]]:
    # Ends in the middle of an epoch: at its end, Lightning would save again what it was resumed from.
    run(kind, plugin, folder, settings, max_steps=BATCHES + 4)
    last = max(name for name in names(folder) if name.startswith("last"))
    run(kind, plugin, folder, settings, max_epochs=3, ckpt_path=folder / last)
    return [contents(folder)]


def assert_same_files(scenario: Scenario, settings: dict[str, Any], tmp_path: Path) -> None:
    expected = scenario(ModelCheckpoint, TorchCheckpointIO, tmp_path / "stock" / "saved", settings)
    assert all(expected)
    for name, plugin in PLUGINS.items():
        folder = tmp_path / name / "saved"
        assert scenario(ResumableCheckpoint, plugin, folder, settings) == expected, name
        for path in folder.iterdir():
            assert verify(path)
            assert not path.is_symlink(), "it would lead nowhere until an asynchronous save is durable"


@pytest.mark.sampled(1)
@pytest.mark.extended_cells(
    "always",
    "best 2",
    "one name, best 2",
    "after validation",
    "no counter",
    "the last",
    "save_last alone",
    "all",
    "best",
    "worst 2",
    "all, monitored",
    "none, monitored",
    "link alone",
    "second epochs",
    "seldom",
    "one name",
    "weights",
)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_two_runs_leave_the_files_that_lightning_would_leave(
    slow_disk: None, settings: dict[str, Any], tmp_path: Path
) -> None:
    assert_same_files(two_runs, settings, tmp_path)


AGAIN = ["the last, save_last", "best 2", "worst 2", "link, best 2", "one name", "epochs"]


@pytest.mark.sampled(1)
@pytest.mark.extended_cells("the last, save_last", "worst 2", "epochs")
@pytest.mark.parametrize("name", AGAIN)
def test_the_same_trainer_leaves_the_files_that_lightning_would_leave(
    slow_disk: None, name: str, tmp_path: Path
) -> None:
    assert_same_files(one_trainer_twice, SETTINGS[name], tmp_path)


# After a resume, Lightning does not know what it saved last: it writes a separate file in place of the link, and one
# more at the end of a training that has saved nothing since.
FORGOTTEN = ("link", "link, best 2", "link alone", "second epochs")
RESUMED = {
    name: chosen
    for name, chosen in SETTINGS.items()
    if "save_last" in chosen and "save_weights_only" not in chosen and name not in FORGOTTEN
}


@pytest.mark.sampled(2)
@pytest.mark.extended_cells(
    "the last, save_last",
    "best 3, save_last",
    "after validation",
    "no counter",
    "always",
    "epochs",
    "one name",
)
@pytest.mark.parametrize("settings", RESUMED.values(), ids=RESUMED.keys())
def test_a_resumed_run_leaves_the_files_that_lightning_would_leave(
    slow_disk: None, settings: dict[str, Any], tmp_path: Path
) -> None:
    assert_same_files(resumed, settings, tmp_path)


@pytest.mark.parametrize("plugin", PLUGINS.values(), ids=PLUGINS.keys())
def test_a_resumed_run_keeps_its_link(slow_disk: None, plugin: Any, tmp_path: Path) -> None:
    settings = SETTINGS["link, best 2"]
    stock = run(ModelCheckpoint, TorchCheckpointIO, tmp_path / "stock", settings, max_epochs=3)
    assert stock.global_step == 3 * BATCHES
    assert resumed(ResumableCheckpoint, plugin, tmp_path / "ours", settings) == [contents(tmp_path / "stock")]


@pytest.mark.parametrize("plugin", PLUGINS.values(), ids=PLUGINS.keys())
def test_a_link_replaces_no_directory(plugin: Any, tmp_path: Path) -> None:
    own = tmp_path / "c" / "last.ckpt" / "own"
    own.parent.mkdir(parents=True)
    own.write_text("mine")
    with pytest.raises(StorageError) as raised:
        run(ResumableCheckpoint, plugin, tmp_path / "c", {**SETTINGS["link"], "enable_version_counter": False})
    assert raised.value.path == str(own.parent)
    assert own.read_text() == "mine"


@pytest.mark.parametrize("plugin", PLUGINS.values(), ids=PLUGINS.keys())
def test_with_nothing_to_link_to_the_last_one_is_saved_each_time(plugin: Any, tmp_path: Path) -> None:
    settings = {"every_n_train_steps": 1000, "save_top_k": -1, "save_last": "link"}
    run(ResumableCheckpoint, plugin, tmp_path / "c", settings, max_epochs=3)
    assert contents(tmp_path / "c") == {"last.ckpt": 3 * BATCHES}


@pytest.mark.parametrize("plugin", PLUGINS.values(), ids=PLUGINS.keys())
def test_what_was_deleted_by_hand_is_saved_again_instead_of_linked_to(plugin: Any, tmp_path: Path) -> None:
    settings = {"every_n_train_steps": 4, "save_top_k": -1, "save_last": "link"}
    run(ResumableCheckpoint, plugin, tmp_path / "c", settings, max_steps=5)
    (tmp_path / "c" / "step=4.ckpt").unlink()
    run(
        ResumableCheckpoint,
        plugin,
        tmp_path / "c",
        settings,
        max_steps=BATCHES + 1,
        ckpt_path=tmp_path / "c" / "last.ckpt",
    )
    assert contents(tmp_path / "c") == {"last.ckpt": BATCHES + 1}


@pytest.mark.parametrize("plugin", PLUGINS.values(), ids=PLUGINS.keys())
def test_a_link_leads_to_nothing_in_another_directory(slow_disk: None, plugin: Any, tmp_path: Path) -> None:
    settings = {"every_n_train_steps": 4, "save_top_k": -1, "save_last": "link"}
    old, new = tmp_path / "old", tmp_path / "new"
    run(ResumableCheckpoint, plugin, old, settings, max_steps=5)
    before = contents(old)
    # The epoch ends, and a link to the last checkpoint is due, before anything is saved in the new directory.
    run(ResumableCheckpoint, plugin, new, settings, max_steps=BATCHES + 1, ckpt_path=old / "step=4.ckpt")
    assert contents(old) == before
    assert contents(new) == {"last.ckpt": BATCHES + 1}
    assert not (new / "last.ckpt").is_symlink()


@pytest.mark.each_value
@pytest.mark.parametrize("plugin", PLUGINS.values(), ids=PLUGINS.keys())
@pytest.mark.parametrize("save_top_k", [0, 1, -1])
def test_each_trigger_writes_once(plugin: Any, save_top_k: int, tmp_path: Path) -> None:
    same: list[bool] = []

    class Compares(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            trainer.strategy.checkpoint_io.checkpointer.drain()
            if trainer.global_step:
                numbered = saved / f"step={trainer.global_step}.ckpt"
                same.append(os.path.samefile(numbered, saved / "last.ckpt"))

    saved, log = tmp_path / "saved", tmp_path / "events.jsonl"
    callback = ResumableCheckpoint(
        saved, every_n_train_steps=1, filename="{step}", save_last=True, save_top_k=save_top_k
    )
    trainer_of(
        tmp_path, [callback, *([Compares()] if save_top_k else [])], plugins=[plugin(event_log=str(log))], max_epochs=1
    ).fit(model_of())
    events = [json.loads(line) for line in log.read_text().splitlines()]
    states = [event for event in events if event["event"] == "SnapshotTaken" and not is_copy(event, save_top_k)]
    assert [event["bytes"] > 4 * NUMBERS for event in states] == [True] * BATCHES
    commits = [event["path"] for event in events if event["event"] == "SaveCommitted"]
    expected = [f"step={step}.ckpt" for step in range(1, BATCHES + 1)] if save_top_k else []
    assert sorted(Path(path).name for path in commits) == sorted([*expected, *["last.ckpt"] * BATCHES])
    assert same == ([True] * (BATCHES - 1) if save_top_k else [])
    assert torch.load(saved / "last.ckpt")["global_step"] == BATCHES
    if save_top_k:
        stat = (saved / "last.ckpt").stat()
        assert (stat.st_nlink, stat.st_ino) == (2, (saved / f"step={BATCHES}.ckpt").stat().st_ino)


def is_copy(event: dict[str, Any], save_top_k: int) -> bool:
    return bool(save_top_k) and Path(event["path"]).name == "last.ckpt"


@pytest.mark.parametrize("plugin", PLUGINS.values(), ids=PLUGINS.keys())
def test_a_copy_outlives_its_original(plugin: Any, tmp_path: Path) -> None:
    callback = ResumableCheckpoint(tmp_path / "saved", every_n_train_steps=3, filename="{step}", save_last=True)
    trainer_of(tmp_path, [callback], plugins=[plugin()], max_epochs=1).fit(model_of())
    (tmp_path / "saved" / "step=6.ckpt").unlink()
    assert verify(tmp_path / "saved" / "last.ckpt")
    state = torch.load(tmp_path / "saved" / "last.ckpt")["state_dict"]
    assert torch.equal(state["weight"], torch.full((NUMBERS,), 6.0))


def test_loggers_are_told_of_both_names(tmp_path: Path) -> None:
    from tests.lightning_ckpt.exact_cases import MemoryLogger

    class Remembers(MemoryLogger):
        def __init__(self) -> None:
            super().__init__()
            self.told: list[str] = []

        def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
            self.told.append(Path(checkpoint_callback._last_checkpoint_saved).name)

    callback = ResumableCheckpoint(tmp_path / "saved", every_n_train_steps=3, filename="{step}", save_last=True)
    logger = Remembers()
    trainer_of(tmp_path, [callback], plugins=[AsyncCheckpointIO()], max_epochs=1, logger=logger).fit(model_of())
    assert logger.told == ["step=3.ckpt", "last.ckpt", "step=6.ckpt", "last.ckpt"]
