"""Starts the examples of workers that step for themselves, and kills all of their processes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from ckpt_core import Catalog

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LIMIT = 250.0


def start(name: str, output: Path, *arguments: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    command = [sys.executable, str(EXAMPLES / name), "--output", str(output), *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def finish(name: str, output: Path, *arguments: object) -> str:
    """Run an example to its end; what it printed."""
    process = start(name, output, *arguments)
    try:
        printed, _ = process.communicate(timeout=LIMIT)
    finally:
        _kill(process)
    assert process.returncode == 0, printed
    return printed


def kill_after(checkpoints: int, dice: random.Random, name: str, output: Path, *arguments: object) -> None:
    """Run an example, and kill all of its processes some time after it has so many checkpoints more."""
    before = len(Catalog(output).checkpoints())
    process = start(name, output, *arguments)
    deadline = time.monotonic() + LIMIT
    while len(Catalog(output).checkpoints()) < before + checkpoints:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(dice.uniform(0, 0.2))
    _kill(process)
    process.communicate()


def _kill(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
