"""Runs a script in one clean process, which answers each line on its standard input with a line of JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class ScriptServer:
    """The process of a script.

    Args:
        script: What it runs; this folder's repository is on its path.
        directory: Where it works, with its standard error in ``log``.
    """

    def __init__(self, script: Path, directory: Path) -> None:
        search_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": search_path, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
        environment.pop("PL_GLOBAL_SEED", None)
        self.log = (directory / "log").open("w+", encoding="utf-8")
        self._process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            cwd=directory,
            env=environment,
            text=True,
            start_new_session=True,
        )

    def ask(self, spec: dict[str, Any]) -> Any:
        """Return the script's answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(spec), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End it, with all that it started."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self.log.close()
