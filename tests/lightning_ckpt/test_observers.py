"""Loggers and callbacks that upload checkpoints get each file together with its own score."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.utilities import _scan_checkpoints

import ckpt_core.checkpointer as checkpointer_module
from ckpt_core.storage import FileWriter, LocalStorage
from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint, ShardedCheckpointIO, SyncCheckpointIO
from tests.lightning_ckpt.exact_cases import MemoryLogger
from tests.lightning_ckpt.reliable_cases import Callback, FillsDisk, model_of, trainer_of

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning:lightning")]

LOSSES = tuple(12.0 - step for step in range(12))  # the loss of step n is 13 - n: each step is the best so far
Upload = tuple[str, int, float | None, str]


class Artifacts(MemoryLogger):
    """Uploads each checkpoint that it is notified of, as the loggers of W&B and MLflow do."""

    def __init__(self, *, at_the_end: bool = False) -> None:
        super().__init__()
        self.at_the_end = at_the_end
        self.times: dict[str, float] = {}
        self.uploads: list[Upload] = []
        self.callbacks: dict[int, Any] = {}

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        if self.at_the_end:
            self.callbacks[id(checkpoint_callback)] = checkpoint_callback
        else:
            self.upload(checkpoint_callback)

    def finalize(self, status: str) -> None:
        for callback in self.callbacks.values():
            self.upload(callback)

    def upload(self, callback: Any) -> None:
        assert isinstance(callback, ModelCheckpoint) and callback.mode == "min"
        for modified, path, score, tag in _scan_checkpoints(callback, self.times):
            self.times[path] = modified
            step = torch.load(path, weights_only=False)["global_step"]
            self.uploads.append((Path(path).name, step, None if score is None else float(score), tag))


class SlowStorage(LocalStorage):
    """Takes longer for each file than some batches, so that several saves are under way."""

    def create(self, path: str, expected_size: int) -> FileWriter:
        time.sleep(0.05)
        return super().create(path, expected_size)


def train(folder: Path, kind: type[Any], plugin: Any, logger: Any, *others: Any, **settings: Any) -> Any:
    options = {"monitor": "loss", "every_n_train_steps": 1, "save_top_k": 2, "filename": "{step}", **settings}
    callback = kind(folder / "saved", **options)
    plugins = [] if plugin is None else [plugin]
    trainer = trainer_of(folder, [*others, callback], plugins=plugins, logger=logger)
    trainer.fit(model_of(metrics=LOSSES))
    return callback


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointer_module, "storage_for", lambda *_: SlowStorage())


TOP: dict[str, Any] = {"save_top_k": 1}
LAST: dict[str, Any] = {"save_last": True, "every_n_train_steps": 2}
ONE_NAME: dict[str, Any] = {**TOP, "save_last": True, "enable_version_counter": False, "filename": "best"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "pending", "settings", "at_the_end"),
    [
        (ResumableCheckpoint, 0, ONE_NAME, False),
        (ResumableCheckpoint, 1, LAST, False),
        (ResumableCheckpoint, 3, TOP, False),
        (ResumableCheckpoint, 3, LAST, True),
        (ResumableCheckpoint, 3, ONE_NAME, False),
        (ModelCheckpoint, 1, LAST, False),
        (ModelCheckpoint, 3, TOP, False),
    ],
)
def test_loggers_are_told_what_stock_tells_them(
    slow: None, tmp_path: Path, kind: type[Any], pending: int, settings: dict[str, Any], at_the_end: bool
) -> None:
    expected, found = Artifacts(at_the_end=at_the_end), Artifacts(at_the_end=at_the_end)
    train(tmp_path / "stock", ModelCheckpoint, None, expected, **settings)
    plugin = AsyncCheckpointIO(max_pending=pending) if pending else SyncCheckpointIO()
    train(tmp_path / "ours", kind, plugin, found, **settings)
    assert expected.uploads
    for name, step, score, _ in found.uploads:
        assert score == 13.0 - step, name
    assert sorted(found.uploads) == sorted(expected.uploads)
    assert "after_save_checkpoint" not in vars(found) and "finalize" not in vars(found)


def test_loggers_are_not_told_of_a_failed_save(small_filesystem: Path, tmp_path: Path) -> None:
    logger, saved = Artifacts(), small_filesystem / "saved"
    options = {"monitor": "loss", "every_n_train_steps": 2, "save_top_k": -1, "filename": "{step}"}
    callbacks = [ResumableCheckpoint(saved, **options), FillsDisk(small_filesystem, full_at=4, free_at=8)]
    plugin = AsyncCheckpointIO(on_error="warn")
    calls: list[int] = []
    logger.after_save_checkpoint, tell = (  # type: ignore[method-assign]
        lambda callback: (calls.append(int(13 - callback.current_score)), tell(callback)),
        logger.after_save_checkpoint,
    )
    trainer_of(tmp_path, callbacks, plugins=[plugin], logger=logger).fit(model_of(metrics=LOSSES))
    assert plugin.checkpointer.failures == 2
    assert calls == [2, 8, 10, 12]
    assert [(step, score) for _, step, score, _ in logger.uploads] == [(n, 13.0 - n) for n in (2, 8, 10, 12)]


def test_loggers_are_told_before_an_exception_ends_the_run(slow: None, tmp_path: Path) -> None:
    logger = Artifacts()
    callback = ResumableCheckpoint(tmp_path, monitor="loss", every_n_train_steps=1, filename="{step}")
    finalized: list[Any] = []
    logger.finalize = lambda status: finalized.append((status, list(logger.uploads)))  # type: ignore[method-assign]

    trainer = trainer_of(tmp_path, [callback], plugins=[AsyncCheckpointIO(max_pending=3)], logger=logger)
    with pytest.raises(ValueError, match="on fire"):
        trainer.fit(model_of(metrics=LOSSES, raise_at=3))
    [(status, uploads)] = finalized
    assert status == "failed"
    assert [(step, score) for _, step, score, _ in uploads] == [(1, 12.0), (2, 11.0)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_batch_start", "on_train_end"])
def test_a_callback_that_copies_the_best_gets_the_best(slow: None, tmp_path: Path, hook: str) -> None:
    copies: list[Any] = []

    def call(trainer: Any, *_: Any) -> None:
        callback = trainer.checkpoint_callback
        for path in (callback.best_model_path, callback.last_model_path):
            if path:
                target = shutil.copy(path, tmp_path / "copy")
                copies.append((torch.load(target)["global_step"], float(callback.best_model_score)))

    copying = Callback()
    setattr(copying, hook, call)
    train(tmp_path, ResumableCheckpoint, AsyncCheckpointIO(max_pending=3), False, copying, save_last=True)
    assert len(copies) > 1
    for step, score in copies:
        assert score == 13.0 - step


def test_sharded_directories_are_named_when_they_are_durable(tmp_path: Path) -> None:
    told: list[Any] = []

    class Looks(MemoryLogger):
        def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
            path = Path(checkpoint_callback.best_model_path)
            told.append((path.name, (path / "manifest.json").exists(), float(checkpoint_callback.best_model_score)))

    train(tmp_path, ResumableCheckpoint, ShardedCheckpointIO(max_pending=3), Looks(), save_top_k=-1)
    assert told == [(f"step={step}.ckpt", True, 13.0 - step) for step in range(1, 13)]
