"""The campaign of interruptions of unattended runs, in short."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["lightning", "accelerate"])
def test_interrupted_runs_end_with_the_bits_of_one_that_was_not(framework: str) -> None:
    command = [sys.executable, str(ROOT / "tools/unattended.py"), framework, "--interruptions", "10"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "'hangs': [], 'different': []" in found.stdout
    terminated = [line for line in found.stdout.splitlines() if line.startswith("SIGTERM") and "lost" in line]
    assert terminated and all(line.endswith("most 0") for line in terminated), found.stdout


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["lightning", "accelerate", "transformers"])
def test_the_loss_of_one_rank_costs_at_most_one_step(framework: str) -> None:
    # a step has two batches in all trainings
    command = [sys.executable, str(ROOT / "tools/unattended.py"), framework, "--interruptions", "10", "--just-in-time"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "'hangs': [], 'different': []" in found.stdout
    lost = [line for line in found.stdout.splitlines() if line.startswith("SIGKILL") and "lost" in line]
    assert lost and all(int(line.rsplit(" ", 1)[1]) <= 2 for line in lost), found.stdout
