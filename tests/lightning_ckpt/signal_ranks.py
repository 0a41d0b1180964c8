"""Ranks that get signals (``signal_script.py``), for the tests of what is done about them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import free_port

SCRIPT = Path(__file__).with_name("signal_script.py")
ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 90.0
START = "on_train_batch_start"


class Job:
    """Runs ranks, each a fresh process (see ``signal_script.py``)."""

    def __init__(self, directory: Path) -> None:
        self.log = (directory / "job.log").open("w")
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )

    def run(self, directory: Path, name: str, **spec: Any) -> list[dict[str, Any]]:
        """Train; what each rank wrote."""
        port = free_port()
        # What SLURM is asked for, and which checkpoints are there by then.
        scontrol = directory / "scontrol"
        scontrol.write_text(f'#!/bin/sh\ncd {directory}\necho "$@" $(ls -d hpc_ckpt_*) >> requeued\n')
        scontrol.chmod(0o755)
        spec = {"directory": str(directory), "name": name, "ranks": 2, "port": port, "io": "AsyncCheckpointIO", **spec}
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps({**spec, "limit_seconds": LIMIT_SECONDS}), file=self.process.stdin, flush=True)
        outcome = json.loads(self.process.stdout.readline())
        logs = "\n".join(path.read_text() for path in sorted(directory.glob(f"{name}.*.log")))
        left = [rank for rank in range(spec["ranks"]) if rank not in spec.get("killed", [])]
        results = [directory / f"{name}.{rank}.json" for rank in left]
        assert outcome == "ended", f"{outcome}\n{logs}"
        assert all(path.exists() for path in results), logs
        return [json.loads(path.read_text()) for path in results]

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        self.log.close()


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    started = Job(tmp_path_factory.mktemp("job"))
    yield started
    started.close()
