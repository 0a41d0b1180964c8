"""Start runs of ``sharded_script.py`` and read their results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import DirectoryCheckpointer
from tests.support.fork_server import LIGHTNING, ForkServers
from tests.support.ports import free_port
from tests.support.script_server import ScriptServer

SCRIPT = Path(__file__).with_name("sharded_script.py")
ROOT = Path(__file__).resolve().parents[2]


class Runs(ScriptServer):
    """A clean process that forks the ranks of each run."""

    def run(self, directory: Path, name: str, *, ranks: int = 2, fails: bool = False, **spec: Any) -> list[Any]:
        """Train, and return the result of each rank; None for a rank that was killed.

        Args:
            directory: Directory of the checkpoints, also of those of a run to resume.
            name: Name of the results.
            ranks: Number of ranks.
            fails: Whether the run may raise or be killed.
            spec: The rest of the specification.
        """
        port = free_port()
        directory.mkdir(parents=True, exist_ok=True)
        results = directory.parent / "results"
        results.mkdir(exist_ok=True)
        prefix = results / f"{directory.name}-{name}"
        whole = {
            "ranks": ranks,
            "kind": "ddp",
            "directory": str(directory),
            "result": str(prefix),
            "port": port,
            **spec,
        }
        statuses = self.ask(whole)
        found = []
        for rank, status in enumerate(statuses):
            log = Path(f"{prefix}.{rank}.log").read_text()
            if status > 0 or (status < 0 and not fails):
                pytest.fail(f"{name}: rank {rank} of {ranks} ended with {status}\n{log}")
            written = Path(f"{prefix}.{rank}.json")
            result = json.loads(written.read_text()) if written.exists() else None
            if result is not None and result["raised"] and not fails:
                pytest.fail(f"{name}: rank {rank} of {ranks}: {result['raised']}\n{log}")
            found.append(result)
        return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, fork_servers: ForkServers) -> Iterator[Runs]:
    started = Runs(fork_servers(LIGHTNING), SCRIPT, tmp_path_factory.mktemp("runs"))
    yield started
    started.close()


def parts_at(path: Path) -> dict[str, Any]:
    """Return the weights and the optimizer's state of a checkpoint, with whole tensors."""
    with DirectoryCheckpointer().load(path) as opened:
        return {part: opened.load(part) for part in ("model", "optimizer")}


def assert_same_tensors(left: Any, right: Any, where: str = "") -> None:
    """Check that two nested states have the same keys and the same bits."""
    if isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for key in left:
            assert_same_tensors(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, torch.Tensor):
        assert torch.equal(left, right), where
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), where
        for number, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_same_tensors(one, other, f"{where}[{number}]")
    else:
        assert left == right, where
