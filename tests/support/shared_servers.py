"""One server of each kind for all processes of a test run, started by the first that asks and stopped after the last.

Each server has a keeper: a process that starts it, writes down how to reach it, and waits for the exclusive lock of a
file that all processes using the server have locked as shared. The kernel unlocks it for them, however they end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from tests.support.servers import STARTERS, MissingServerError, Server

ROOT = Path(__file__).resolve().parents[2]


class ServerPool:
    """The servers that a process uses, until :meth:`close`.

    Args:
        directory: Directory of the test run; the same for all processes that share servers.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._servers: dict[str, Server] = {}
        self._stack = contextlib.ExitStack()
        self._keepers: list[subprocess.Popen[bytes]] = []

    def __getitem__(self, kind: str) -> Server:
        """Return the server of a kind, starting it if no process has done so.

        Raises:
            MissingServerError: It is not installed.
            RuntimeError: It did not start, here or in another process.
        """
        if kind not in self._servers:
            home = self._directory / kind
            home.mkdir(parents=True, exist_ok=True)
            with _locked(home / "start", fcntl.LOCK_EX):
                self._stack.enter_context(_locked(home / "users", fcntl.LOCK_SH))
                if not (home / "answer.json").exists():
                    self._keepers.append(_start_keeper(kind, home))
            self._servers[kind] = _server_in(home)
        return self._servers[kind]

    def close(self) -> None:
        """Release all servers; those that no other process uses are stopped."""
        self._servers.clear()
        self._stack.close()


@contextlib.contextmanager
def _locked(path: Path, how: int) -> Iterator[IO[bytes]]:
    with path.open("ab") as file:
        fcntl.flock(file, how)
        try:
            yield file
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing alone would leave it locked while a forked process lives


def _server_in(home: Path) -> Server:
    answer: dict[str, Any] = json.loads((home / "answer.json").read_text())
    if answer["missing"]:
        raise MissingServerError(answer["missing"])
    if answer["failure"]:
        raise RuntimeError(answer["failure"])
    return Server(**{**answer["server"], "home": Path(answer["server"]["home"])})


def _start_keeper(kind: str, home: Path) -> subprocess.Popen[bytes]:
    """Start a keeper and return it once it has written its answer."""
    with (home / "keeper.log").open("ab") as log:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "tests.support.shared_servers", kind, str(home)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=ROOT,
            start_new_session=True,
        )
    assert keeper.stdout is not None
    with keeper.stdout:
        keeper.stdout.read()  # returns when the keeper has answered (it closes stdout), or has died
    if not (home / "answer.json").exists():
        raise RuntimeError(f"the keeper of {kind} died:\n{(home / 'keeper.log').read_text()}")
    return keeper


def _keep(kind: str, home: Path) -> None:
    with contextlib.ExitStack() as stack:
        users = stack.enter_context((home / "users").open("ab"))
        attempts = sum(entry.is_dir() for entry in home.iterdir())
        directory = home / str(attempts)
        directory.mkdir()
        server, missing, failure = None, None, None
        try:
            server = stack.enter_context(STARTERS[kind](directory))
        except MissingServerError as error:
            missing = str(error)
        except (OSError, RuntimeError, subprocess.SubprocessError):
            failure = traceback.format_exc()
        stack.callback((home / "answer.json").unlink)  # still under the users' lock: the next process starts another
        answer = {"server": server and dataclasses.asdict(server), "missing": missing, "failure": failure}
        (home / "new.json").write_text(json.dumps(answer, default=str))
        os.replace(home / "new.json", home / "answer.json")
        os.close(sys.stdout.fileno())
        fcntl.flock(users, fcntl.LOCK_EX)


if __name__ == "__main__":
    _keep(sys.argv[1], Path(sys.argv[2]))
