"""Runs scripts in processes that are forked from one that has imported what takes seconds to import.

That process does nothing but import, so it has one thread and its children begin as if they had imported it themselves.
A script whose subject is the beginning or the end of a program wants a fresh interpreter instead.
"""

from __future__ import annotations

import atexit
import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.support.forking import get_ready

GRACE_SECONDS = 10.0  # for the other processes when one has failed


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a script ended.

    Attributes:
        status: Its exit status, the first that is not 0 of several processes; negative for the signal that killed it.
        timed_out: Whether it was killed because its time was over.
        stdout: What it wrote, one process after the other.
        stderr: What it wrote there.
    """

    status: int
    timed_out: bool
    stdout: str
    stderr: str


class ForkServer:
    """The process to fork from.

    Args:
        directory: For what the scripts write.
        modules: What to import.
        environment: Of the process.
    """

    def __init__(self, directory: Path, modules: tuple[str, ...], environment: Mapping[str, str]) -> None:
        self._directory = directory
        self._count = 0
        self._process = subprocess.Popen(
            [sys.executable, __file__, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=directory,
            env=dict(environment),
            text=True,
            start_new_session=True,
        )

    def run(
        self, code: str, args: list[str], *, cwd: Path, environments: Sequence[Mapping[str, str]], timeout: float
    ) -> Outcome:
        """Run code as ``python -c`` would, in a process for each environment; all that they started is killed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._count += 1
        outputs = [
            [self._directory / f"{self._count}.{rank}.{name}" for rank in range(len(environments))]
            for name in ("stdout", "stderr")
        ]
        spec = {
            "number": self._count,
            "code": code,
            "args": args,
            "cwd": str(cwd),
            "environments": [dict(environment) for environment in environments],
            "timeout": timeout,
            "outputs": list(zip(*([str(path) for path in paths] for paths in outputs), strict=True)),
        }
        print(json.dumps(spec), file=self._process.stdin, flush=True)
        number = 0
        while number != self._count:  # a test that was interrupted has left its answer
            number, statuses, timed_out = json.loads(self._process.stdout.readline())
        status = next((status for status in statuses if status), 0)
        return Outcome(status, timed_out, *("".join(path.read_text() for path in paths) for paths in outputs))

    def close(self) -> None:
        """End the process."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def _run(code: str, args: list[str], cwd: str, environment: dict[str, str], outputs: list[str]) -> NoReturn:
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv = ["-c", *args]
    sys.path[:1] = ["", *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    status = 0
    try:
        exec(compile(code, "<script>", "exec"), vars(main))  # noqa: S102 - the test's own code
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - what an interpreter does with it
        traceback.print_exc()
        status = 1
    # What an interpreter does at its end but for freeing torch's memory, which takes seconds in a forked process.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _serve(spec: dict[str, Any]) -> tuple[int, list[int], bool]:
    children = []
    for environment, outputs in zip(spec["environments"], spec["outputs"], strict=True):
        child = os.fork()
        if child == 0:
            _run(spec["code"], spec["args"], spec["cwd"], environment, outputs)
        children.append(child)
    deadline, pause = time.monotonic() + spec["timeout"], 0.001
    left, timed_out, failed = set(children), False, False
    while left and not timed_out:
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)
        for child in list(left):
            ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                continue
            left.discard(child)
            if ended.si_status and not failed:
                failed, deadline = True, min(deadline, time.monotonic() + GRACE_SECONDS)  # as a launcher does
        timed_out = time.monotonic() > deadline
    for child in children:  # none is reaped yet, so the numbers are still their own
        try:
            os.killpg(child, signal.SIGKILL)
        except ProcessLookupError:
            os.kill(child, signal.SIGKILL)  # it has not come to leading a group
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return spec["number"], statuses, timed_out and not failed


def main() -> None:
    """Import; then run the scripts that are asked for, one a line."""
    for module in sys.argv[1:]:
        importlib.import_module(module)
    get_ready()
    for line in sys.stdin:
        print(json.dumps(_serve(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
