"""Starts the runs of ``sharded_script.py`` and reads what they wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import DirectoryCheckpointer
from tests.support.ports import free_port

SCRIPT = Path(__file__).with_name("sharded_script.py")
ROOT = Path(__file__).resolve().parents[2]


class Runs:
    """A clean process that forks the ranks of each run.

    Args:
        directory: For its log.
        script: What it runs.
    """

    def __init__(self, directory: Path, script: Path = SCRIPT) -> None:
        search_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": search_path, "OMP_NUM_THREADS": "1"}
        environment.pop("PL_GLOBAL_SEED", None)
        self._log = (directory / "runs.log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def run(self, directory: Path, name: str, *, ranks: int = 2, fails: bool = False, **spec: Any) -> list[Any]:
        """Train; what each rank wrote, None for one that was killed.

        Args:
            directory: Of the checkpoints; those of the run that is resumed, too.
            name: Of the results.
            ranks: How many.
            fails: Whether it may raise or be killed.
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
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(whole), file=self._process.stdin, flush=True)
        statuses = json.loads(self._process.stdout.readline())
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

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._log.close()


def parts_at(path: Path) -> dict[str, Any]:
    """Weights and optimizer of a checkpoint, whole."""
    with DirectoryCheckpointer().load(path) as opened:
        return {part: opened.load(part) for part in ("model", "optimizer")}


def assert_same_tensors(left: Any, right: Any, where: str = "") -> None:
    """Both have the same keys and the same bits."""
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
