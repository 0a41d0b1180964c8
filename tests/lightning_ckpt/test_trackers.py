"""What the real W&B and MLflow loggers of Lightning upload: each checkpoint when it is whole, with its own score.

The packages are large and not among those of the tests; ``make test-all`` installs them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import MLFlowLogger, WandbLogger

from ckpt_core import checkpointer as checkpointer_module
from ckpt_core import small_states
from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint
from tests.lightning_ckpt.test_observers import SlowStorage

STEPS = (2, 4, 6)


@pytest.fixture(autouse=True)
def _in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_states, "SMALL_STATE_BYTES", 0)
    monkeypatch.setattr(checkpointer_module, "storage_for", lambda *_: SlowStorage())


class Model(BoringModel):
    """Logs its step as the score: each checkpoint is the best, and the one before it is deleted."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("score", float(self.global_step + 1))
        return super().training_step(batch, batch_idx)


def train(folder: Path, logger: Any) -> None:
    callback = ResumableCheckpoint(folder / "checkpoints", monitor="score", mode="max", every_n_train_steps=2)
    trainer = Trainer(
        max_steps=STEPS[-1],
        logger=logger,
        callbacks=[callback],
        plugins=[AsyncCheckpointIO()],
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    trainer.fit(Model())


def step_in(path: str | Path) -> int:
    return int(torch.load(path, weights_only=True)["global_step"])


def test_wandb_gets_each_checkpoint_with_its_own_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    logger = WandbLogger(project="test", log_model="all", save_dir=str(tmp_path))
    uploaded: list[tuple[int, float]] = []
    log_artifact = logger.experiment.log_artifact

    def upload(artifact: Any, **options: Any) -> Any:
        (entry,) = artifact.manifest.entries.values()
        uploaded.append((step_in(entry.local_path), artifact.metadata["score"]))
        return log_artifact(artifact, **options)

    monkeypatch.setattr(logger.experiment, "log_artifact", upload)
    try:
        train(tmp_path, logger)
    finally:
        logger.experiment.finish()
    assert uploaded == [(step, float(step)) for step in STEPS]


def test_mlflow_gets_each_checkpoint_with_its_own_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logger = MLFlowLogger(tracking_uri=f"file:{tmp_path / 'mlruns'}", log_model="all")
    train(tmp_path, logger)
    uploaded = {}
    for metadata in (tmp_path / "mlruns").rglob("artifacts/*/metadata.yaml"):
        (file,) = metadata.parent.glob("*.ckpt")
        uploaded[step_in(file)] = f"score: {float(step_in(file))}\n" in metadata.read_text()
    assert uploaded == dict.fromkeys(STEPS, True)
