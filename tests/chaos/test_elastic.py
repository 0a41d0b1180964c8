"""``torchrun`` with three ranks, one of which is killed, and then with the two that are left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SAMPLES, BATCH, SECONDS = 60, 2, 240.0
LIGHTNING = """
    import lightning.pytorch as pl
    from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch, index):
            note(self.global_step, batch)
            return self.layer(batch).pow(2).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

        def train_dataloader(self):
            return data

    callback = ResumableCheckpoint(folder / "checkpoints", every_n_train_steps=2, resume="auto")
    trainer = pl.Trainer(accelerator="cpu", devices=ranks, strategy="ddp", max_epochs=1, callbacks=[callback],
        plugins=[AsyncCheckpointIO()], logger=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Model())
    resumed = callback.resumed
"""
ACCELERATE = """
    from accelerate import Accelerator
    from accelerate_ckpt import attach

    accelerator = attach(Accelerator(cpu=True, project_dir=str(folder)), resume="auto")
    model = torch.nn.Linear(1, 1)
    model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01), data)
    accelerator.load_state()
    resumed = accelerator.resumed
    step = resumed.step if resumed else 0
    for batch in data:
        note(step, batch)
        accelerator.backward(model(batch).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 2 == 0:
            accelerator.save_state(folder / "checkpoints" / f"step_{step}")
    accelerator.end_training()
"""
AROUND = """
import json, os, pathlib, sys, time
import torch

folder, ranks, rank = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(os.environ["RANK"])
torch.manual_seed(1)
data = torch.utils.data.DataLoader(torch.arange({samples}.0).view(-1, 1), batch_size={batch}, shuffle=True)

def note(step, batch):
    with (folder / f"used.{{ranks}}.{{rank}}").open("a") as file:
        print(json.dumps([step, [int(value) for value in batch.flatten()]]), file=file)
    time.sleep(0.1)

(folder / f"pid.{{ranks}}.{{rank}}").write_text(str(os.getpid()))
{training}
(folder / f"end.{{ranks}}.{{rank}}").write_text(str(resumed and resumed.step))
"""


def start(folder: Path, ranks: int) -> subprocess.Popen[bytes]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--standalone"]
    command = [*launcher, "--nproc-per-node", str(ranks), str(folder / "train.py"), str(folder), str(ranks)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    with (folder / f"log.{ranks}").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)


def used(folder: Path, ranks: int) -> dict[int, list[int]]:
    """Return the samples of each step, of all ranks."""
    found: dict[int, list[int]] = {}
    for rank in range(ranks):
        path = folder / f"used.{ranks}.{rank}"
        for line in path.read_text().splitlines() if path.exists() else []:
            step, samples = json.loads(line)
            found.setdefault(step, []).extend(samples)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("training", [LIGHTNING, ACCELERATE], ids=["lightning", "accelerate"])
def test_two_ranks_finish_the_epoch_of_three(training: str, tmp_path: Path) -> None:
    code = AROUND.format(samples=SAMPLES, batch=BATCH, training="\n".join(line[4:] for line in training.splitlines()))
    (tmp_path / "train.py").write_text(code)
    with start(tmp_path, 3) as job:
        try:
            deadline = time.monotonic() + SECONDS
            while max(used(tmp_path, 3), default=0) < 6 and job.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            assert job.poll() is None, (tmp_path / "log.3").read_text()
            os.kill(int((tmp_path / "pid.3.1").read_text()), signal.SIGKILL)
            assert job.wait(SECONDS) == 1
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
    with start(tmp_path, 2) as job:
        assert job.wait(SECONDS) == 0, (tmp_path / "log.2").read_text()
    resumed = {(tmp_path / f"end.2.{rank}").read_text() for rank in range(2)}
    (step,) = map(int, resumed)
    assert step in (2, 4, 6, 8)
    before = [sample for taken, samples in used(tmp_path, 3).items() if taken < step for sample in samples]
    after = [sample for samples in used(tmp_path, 2).values() for sample in samples]
    assert sorted(before + after) == list(range(SAMPLES))  # each once, although two ranks divide what three began
