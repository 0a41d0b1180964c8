"""Two trainings pointed at one directory by mistake: both continue, the second warns, and checkpoints are whole."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ckpt_core import Catalog
from tests.conftest import LIGHTNING, ScriptRunner

TRAININGS = """
import json, logging, os, sys, time, torch
import lightning as L
from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint, ShardedCheckpointIO
from tests.support.job_pairs import meet, run_two

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(300, 300)
    def training_step(self, batch, _):
        time.sleep(0.01)
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

class Meeting(L.Callback):
    def __init__(self, job):
        self.job = job
    def on_train_batch_end(self, trainer, *_):
        meet(self.job, has_saved=trainer.global_step > 3, is_about_to_end=trainer.global_step == 25)

def train(job):
    L.seed_everything({"A": 1, "B": 2}[job], verbose=False)
    data = torch.utils.data.DataLoader(torch.randn(60, 300), batch_size=2)
    plugin = {"async": AsyncCheckpointIO, "sharded": ShardedCheckpointIO}[sys.argv[2]]()
    callback = ResumableCheckpoint(dirpath=sys.argv[1], filename="{step}", every_n_train_steps=3, save_top_k=2,
        monitor="step", mode="max", save_last=True)
    trainer = L.Trainer(max_steps=30, accelerator="cpu", devices=1, plugins=[plugin], callbacks=[Meeting(job), callback], logger=False,
        enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Model(), data)
    assert trainer.global_step == 30

run_two(train, lambda: os.path.isdir(sys.argv[1]) and any(not name.startswith(".") for name in os.listdir(sys.argv[1])))
"""


@pytest.mark.parametrize("plugin", ["async", pytest.param("sharded", marks=pytest.mark.slow)])
def test_two_trainings_in_one_directory(plugin: str, tmp_path: Path, fork_script: ScriptRunner) -> None:
    directory = tmp_path / "checkpoints"
    done = fork_script(TRAININGS, directory, plugin, modules=LIGHTNING)
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["A"] == []
    (message,) = told["B"]
    assert f"another job saves checkpoints into {directory}: process " in message
    found = Catalog(directory).verify()
    assert len(found) >= 3
    assert set(found.values()) == {None}
    assert sorted(os.listdir(directory)) == sorted(Path(path).name for path in found), "nothing unfinished is left"
