"""Runs a script in a process that answers each line of JSON on its standard input with another."""

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
        server: The server to fork it from, which has imported the modules that take long.
        script: The script that it runs, with this repository on its path.
        directory: Its working directory, with its standard error in ``log``.
    """

    def __init__(self, server: ForkServer, script: Path, directory: Path) -> None:
        search_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": search_path, "OMP_NUM_THREADS": "1"}
        environment.pop("PL_GLOBAL_SEED", None)
        self.log = (directory / "log").open("w+", encoding="utf-8")
        self._script = server.start(script, directory / "log", environment)

    def ask(self, spec: dict[str, Any]) -> Any:
        """Send a request to the script and return its answer."""
        print(json.dumps(spec), file=self._script.stdin, flush=True)
        return json.loads(self._script.stdout.readline())

    def close(self) -> None:
        """End the script, with its process group."""
        self._script.end()
        self.log.close()
