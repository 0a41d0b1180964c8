"""Two trainings pointed at one directory by mistake: both continue, the second warns, and checkpoints are whole."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ckpt_core import Catalog
from tests.conftest import ACCELERATE, ScriptRunner

TRAININGS = """
import os, sys, time, torch
from accelerate import Accelerator
from accelerate_ckpt import attach
from tests.support.job_pairs import meet, run_two

root = sys.argv[1]

def train(job):
    torch.manual_seed({"A": 1, "B": 2}[job])
    accelerator = Accelerator(cpu=True)
    attach(accelerator, strategy="async")
    model = torch.nn.Linear(300, 300)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    for step in range(30):
        time.sleep(0.02)
        accelerator.backward(model(torch.randn(2, 300)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 0:
            accelerator.save_state(f"{root}/step_{step % 4}")
        meet(job, has_saved=True, is_about_to_end=step == 25)
    accelerator.end_training()

run_two(train, lambda: os.path.isdir(root) and any(not name.startswith(".") for name in os.listdir(root)))
"""


def test_two_trainings_in_one_directory(tmp_path: Path, fork_script: ScriptRunner) -> None:
    root = tmp_path / "states"
    told = json.loads(fork_script(TRAININGS, root, modules=ACCELERATE).stdout.splitlines()[-1])
    assert told["A"] == []
    (message,) = told["B"]
    assert f"another job saves checkpoints into {root}: process " in message
    found = Catalog(root, suffix="").verify()
    assert len(found) == 4
    assert set(found.values()) == {None}
    assert sorted(os.listdir(root)) == sorted(Path(path).name for path in found), "nothing unfinished is left"
