"""Start runs of ``signal_script.py``, whose ranks get signals, and read their results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fork_server import LIGHTNING, ForkServers
from tests.support.ports import free_port
from tests.support.script_server import ScriptServer

SCRIPT = Path(__file__).with_name("signal_script.py")
ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 200.0
START = "on_train_batch_start"


class Job(ScriptServer):
    """Runs ranks, each a fresh process (see ``signal_script.py``)."""

    def run(self, directory: Path, name: str, **spec: Any) -> list[dict[str, Any]]:
        """Train, and return the results of the ranks that were not killed."""
        port = free_port()
        # A fake scontrol that records its arguments and the checkpoints that exist when it is called.
        scontrol = directory / "scontrol"
        scontrol.write_text(f'#!/bin/sh\ncd {directory}\necho "$@" $(ls -d hpc_ckpt_*) >> requeued\n')
        scontrol.chmod(0o755)
        spec = {"directory": str(directory), "name": name, "ranks": 2, "port": port, "io": "AsyncCheckpointIO", **spec}
        outcome = self.ask({**spec, "limit_seconds": LIMIT_SECONDS})
        logs = "\n".join(path.read_text() for path in sorted(directory.glob(f"{name}.*.log")))
        left = [rank for rank in range(spec["ranks"]) if rank not in spec.get("killed", [])]
        results = [directory / f"{name}.{rank}.json" for rank in left]
        assert outcome == "ended", f"{outcome}\n{logs}"
        assert all(path.exists() for path in results), logs
        return [json.loads(path.read_text()) for path in results]


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory, fork_servers: ForkServers) -> Iterator[Job]:
    started = Job(fork_servers(LIGHTNING), SCRIPT, tmp_path_factory.mktemp("job"))
    yield started
    started.close()
