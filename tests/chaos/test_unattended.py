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
