"""Runs Accelerate on several real processes for a test and collects what each rank reports.

A process that has imported torch and Accelerate forks one child per rank for every case; all ranks run the same code
over gloo. The code reports values with ``tell(name=value)``; an exception that it raises is reported, too. Exit
statuses are not judged: gloo now and then aborts a process that has done all its work.
"""

from __future__ import annotations

import atexit
import dataclasses
import faulthandler
import json
import os
import signal
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fork_server import ACCELERATE, ForkServers
from tests.support.ports import free_port
from tests.support.script_server import ScriptServer

ROOT = Path(__file__).resolve().parents[2]
#: Accelerate's command line as a script for a forked process; the ranks that it launches start as usual.
LAUNCHER = "from accelerate.commands.accelerate_cli import main; main()"


@dataclasses.dataclass
class RankResult:
    """The outcome of one rank.

    Attributes:
        told: Everything that it reported, by name.
        error: Name of the class of the exception that ended it, or None.
        message: Text of that exception.
        ended: Whether its process ended before the timeout.
    """

    told: dict[str, Any]
    error: str | None
    message: str
    ended: bool


class Ranks(ScriptServer):
    """Runs cases one after the other, each on ranks that are forked for it."""

    def run(
        self, body: str, world_size: int, *, timeout: float = 280.0, real_exit: bool = False, **names: Any
    ) -> list[RankResult]:
        """Run ``body`` on ``world_size`` ranks, each a process of its own, and return the outcome of each.

        Args:
            body: Code that may use ``Accelerator``, ``attach``, ``torch``, ``nn``, ``Path``, ``tell`` and ``rank``.
            world_size: Number of ranks; with 1 there is no process group.
            timeout: Seconds after which ranks that have not ended are killed.
            real_exit: Whether the ranks' interpreters exit as usual, instead of by ``os._exit``.
            **names: More names that ``body`` may use; plain data.
        """
        begin = self.log.seek(0, os.SEEK_END)
        spec = {
            "body": textwrap.dedent(body),
            "world_size": world_size,
            "timeout": timeout,
            "real_exit": real_exit,
            "names": names,
        }
        answer = self.ask(spec)
        self.log.seek(begin)
        print(self.log.read()[-8000:])  # pytest shows it if the test fails
        return [RankResult(**result) for result in answer]


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory, fork_servers: ForkServers) -> Iterator[Ranks]:
    """Return the runner of real ranks; tests import this fixture."""
    found = Ranks(fork_servers(ACCELERATE), Path(__file__), tmp_path_factory.mktemp("ranks"))
    yield found
    found.close()


def _run_rank(spec: dict[str, Any], rank: int, port: int, output: str) -> None:
    world_size = spec["world_size"]
    os.environ["ACCELERATE_USE_CPU"] = "true"
    if world_size > 1:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
    import torch
    from accelerate import Accelerator
    from torch import nn

    from accelerate_ckpt import attach

    torch.set_num_threads(1)
    result = RankResult({}, None, "", ended=False)

    def write() -> None:
        temporary = f"{output}.new"
        Path(temporary).write_text(json.dumps(dataclasses.asdict(result)))
        os.replace(temporary, output)

    def tell(**values: Any) -> None:
        result.told.update(values)
        write()

    write()
    scope = {
        "Accelerator": Accelerator,
        "Path": Path,
        "attach": attach,
        "nn": nn,
        "rank": rank,
        "tell": tell,
        "torch": torch,
        **spec["names"],
    }
    try:
        exec(compile(spec["body"], "<body>", "exec"), scope)  # noqa: S102 - the test's own code
    except BaseException as error:  # noqa: BLE001 - told to the test
        result.error, result.message = type(error).__name__, str(error)
        traceback.print_exc()
        if isinstance(error, Exception):
            sys.last_value = error  # as the interpreter does for an uncaught exception
    result.ended = True
    write()


def _run_case(spec: dict[str, Any], directory: str) -> list[dict[str, Any]]:
    if "from transformers" in spec["body"]:  # once for all ranks, and before the timeout begins
        import transformers.trainer  # noqa: F401
    port = free_port()
    outputs = [os.path.join(directory, f"{time.monotonic_ns()}-{rank}.json") for rank in range(spec["world_size"])]
    children = []
    for rank, output in enumerate(outputs):
        child = os.fork()
        if child == 0:
            os.dup2(2, 1)  # the parent writes its answers to stdout; a rank prints to the log
            faulthandler.enable()  # prints the stacks at SIGABRT
            _run_rank(spec, rank, port, output)
            if spec["real_exit"]:
                sys.exit(0)
            # What an interpreter does at exit, except freeing torch's memory, which takes seconds in a fork.
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stderr.flush()
            os._exit(0)
        children.append(child)
    left = _left_after(spec["timeout"], set(children))
    for child in left:
        os.kill(child, signal.SIGABRT)
    for child in _left_after(10.0, left):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    results = [json.loads(Path(output).read_text()) for output in outputs]
    return [{**result, "ended": child not in left} for result, child in zip(results, children, strict=True)]


def _left_after(seconds: float, children: set[int]) -> set[int]:
    """Wait at most so many seconds; return which of this process's children have not ended."""
    deadline = time.monotonic() + seconds
    left = set(children)
    while left and time.monotonic() < deadline:
        for child in list(left):
            if os.waitpid(child, os.WNOHANG)[0]:
                left.discard(child)
        time.sleep(0.01)
    return left


def main() -> None:
    """Run each case read from standard input, one JSON object a line; print its results as JSON."""
    for line in sys.stdin:
        print(json.dumps(_run_case(json.loads(line), os.getcwd())), flush=True)


if __name__ == "__main__":
    main()
