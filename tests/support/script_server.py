"""Runs a script in one process, which answers each line on its standard input with a line of JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.support.fork_server import ForkServer

ROOT = Path(__file__).resolve().parents[2]


class ScriptServer:
    """The process of a script.

    Args:
        server: What it is forked from, which has imported what takes long.
        script: What it runs; this folder's repository is on its path.
        directory: Where it works, with its standard error in ``log``.
    """

    def __init__(self, server: ForkServer, script: Path, directory: Path) -> None:
        search_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": search_path, "OMP_NUM_THREADS": "1"}
        environment.pop("PL_GLOBAL_SEED", None)
        self.log = (directory / "log").open("w+", encoding="utf-8")
        self._script = server.start(script, directory / "log", environment)

    def ask(self, spec: dict[str, Any]) -> Any:
        """Return the script's answer."""
        print(json.dumps(spec), file=self._script.stdin, flush=True)
        return json.loads(self._script.stdout.readline())

    def close(self) -> None:
        """End it, with all that it started."""
        self._script.end()
        self.log.close()
