"""Hogwild, killed and gone on with by other numbers of workers: each batch is in the model once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from ckpt_core import Catalog, DirectoryCheckpointer
from tests.examples.local_updates import finish, kill_after, start


@pytest.mark.slow
def test_every_batch_is_used_once_whoever_goes_on(tmp_path: Path) -> None:
    output, dice = tmp_path / "saved", random.Random(3)
    for workers, method in ((3, "fork"), (3, "spawn"), (2, "fork")):
        kill_after(2, dice, "hogwild.py", output, "--workers", workers, "--every", 0.1, "--start-method", method)
    printed = finish("hogwild.py", output, "--workers", 4, "--every", 0.3, "--start-method", "fork")
    assert "resumes from" in printed
    checkpoints = Catalog(output).checkpoints()
    assert f"{len(checkpoints)} checkpoints, 0 violations" in printed
    with DirectoryCheckpointer().load(checkpoints[0].path) as opened:
        assert opened.load("model")["used"].tolist() == [1.0] * 3000
        assert len(opened.load("workers")) == 4


@pytest.mark.slow
def test_one_worker_goes_on_bit_for_bit(tmp_path: Path) -> None:
    arguments = ("--workers", 1, "--batches", 40, "--every", 0.05, "--start-method", "fork")
    finish("hogwild.py", tmp_path / "whole", *arguments)
    kill_after(2, random.Random(5), "hogwild.py", tmp_path / "killed", *arguments)
    assert "resumes from" in finish("hogwild.py", tmp_path / "killed", *arguments)
    ends = []
    for name in ("whole", "killed"):
        with DirectoryCheckpointer().load(Catalog(tmp_path / name).checkpoints()[0].path) as opened:
            ends.append((opened.load("model"), opened.load("workers")[0]))
    (model, worker), (other_model, other_worker) = ends
    assert {name: value.tolist() for name, value in model.items()} == {
        name: value.tolist() for name, value in other_model.items()
    }
    assert worker["cursor"] == other_worker["cursor"]
    assert torch.equal(worker["rng"]["torch"], other_worker["rng"]["torch"])
    for index, moments in worker["objects"]["adam"]["state"].items():
        assert torch.equal(moments["exp_avg"], other_worker["objects"]["adam"]["state"][index]["exp_avg"])


def test_a_killed_worker_ends_the_run_with_its_name(tmp_path: Path) -> None:
    arguments = ("--workers", 2, "--batches", 100_000, "--every", 0.1, "--start-method", "fork")
    process = start("hogwild.py", tmp_path, *arguments)
    try:
        while len(Catalog(tmp_path).checkpoints()) < 2:
            assert process.poll() is None
            time.sleep(0.02)
        children = subprocess.check_output(["ps", "--ppid", str(process.pid), "-o", "pid="], text=True).split()
        os.kill(int(children[-1]), signal.SIGKILL)
        printed, _ = process.communicate()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 1
    assert "WorkerLostError: worker" in printed and "newest checkpoint" in printed
