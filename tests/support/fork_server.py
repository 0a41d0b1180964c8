"""Runs scripts in processes forked from one that has already imported modules that take seconds to import.

That process only imports, so it has one thread, and its children start as if they had imported the modules themselves.
A test of how a program starts or exits needs a fresh interpreter instead.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import gc
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from tests.support.forking import get_ready

#: Modules that scripts of the core and of the plugins import.
CORE = ("torch._dynamo", "ckpt_core.checkpointer", "ckpt_core.directory", "ckpt_core.listeners", "ckpt_core.catalog")
LIGHTNING = ("lightning.pytorch.cli", "ckpt_core", "lightning_ckpt")
ACCELERATE = ("torch._dynamo", "torchdata.stateful_dataloader", "accelerate", "accelerate_ckpt._attach")
GRACE_SECONDS = 10.0  # after one process has failed, before the others are killed
RUN_FILE = "import runpy, sys; sys.argv[0] = {0!r}; runpy.run_path({0!r}, run_name='__main__')"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a script ended.

    Attributes:
        status: Exit status; of several processes, the first that is not 0; negative: the signal that killed it.
        timed_out: Whether it was killed at its timeout.
        stdout: Its standard output; of several processes, one after the other.
        stderr: Its standard error, likewise.
    """

    status: int
    timed_out: bool
    stdout: str
    stderr: str


@dataclasses.dataclass(frozen=True)
class Started:
    """A running script that answers requests.

    Attributes:
        process: Its process id, also the id of its process group.
        stdin: The pipe to its standard input.
        stdout: The pipe from its standard output.
    """

    process: int
    stdin: IO[str]
    stdout: IO[str]

    def end(self) -> None:
        """Kill its process group."""
        os.killpg(self.process, signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError):  # it died before it had read everything
            self.stdin.close()
        self.stdout.close()


class ForkServer:
    """A process that has imported some modules, from which scripts are forked.

    Args:
        directory: Where the output of the scripts goes.
        modules: The modules to import.
        environment: The environment of the process.
        parent: The server to fork this process from, which has imported some of the modules; None: a new interpreter.
    """

    def __init__(
        self,
        directory: Path,
        modules: tuple[str, ...],
        environment: Mapping[str, str],
        parent: ForkServer | None = None,
    ) -> None:
        self._directory = directory
        self._count = 0
        self._process: subprocess.Popen[str] | None = None
        if parent is not None:
            self._server = parent.start(Path(__file__), directory / "log", environment, modules)
            return
        self._process = process = subprocess.Popen(
            [sys.executable, __file__, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=directory,
            env=dict(environment),
            text=True,
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None
        self._server = Started(process.pid, process.stdin, process.stdout)

    def run(
        self, code: str, args: list[str], *, cwd: Path, environments: Sequence[Mapping[str, str]], timeout: float
    ) -> Outcome:
        """Run code as ``python -c`` would, in a process for each environment; finally, kill their process groups."""
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
        statuses, timed_out = self._ask(spec)
        status = next((status for status in statuses if status), 0)
        return Outcome(status, timed_out, *("".join(path.read_text() for path in paths) for paths in outputs))

    def start(self, script: Path, log: Path, environment: Mapping[str, str], args: Sequence[str] = ()) -> Started:
        """Start a script, in the folder of its log, that answers on standard output to what it reads.

        The caller ends it, with its process group (:meth:`Started.end`).
        """
        self._count += 1
        pipes = [self._directory / f"{self._count}.{name}" for name in ("stdin", "stdout")]
        for pipe in pipes:
            os.mkfifo(pipe)
        # Both ends of the pipes are held open: opening them must not wait for the script, which may be dead by then.
        held = [os.open(pipe, os.O_RDWR) for pipe in pipes]
        spec = {
            "number": self._count,
            "script": str(script),
            "args": list(args),
            "environment": dict(environment),
            "files": [str(path) for path in (*pipes, log)],
        }
        (process,) = self._ask(spec)
        started = Started(process, pipes[0].open("w", encoding="utf-8"), pipes[1].open(encoding="utf-8"))
        for descriptor in held:
            os.close(descriptor)
        return started

    def _ask(self, spec: dict[str, Any]) -> list[Any]:
        print(json.dumps(spec), file=self._server.stdin, flush=True)
        number = 0
        while number != self._count:  # skips the answer to a test that was interrupted
            number, *answer = json.loads(self._server.stdout.readline())
        return answer

    def close(self) -> None:
        """End the process."""
        self._server.end()
        if self._process is not None:
            self._process.wait()


ForkServers = Callable[[tuple[str, ...]], ForkServer]


def _become(args: list[str], cwd: str, environment: dict[str, str], files: list[str | int]) -> dict[str, Any]:
    """Make this process a script's, with files or descriptors as standard streams; return ``vars(__main__)``."""
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, file in enumerate(files):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC if descriptor else os.O_RDONLY
        opened = os.open(file, flags) if isinstance(file, str) else file
        os.dup2(opened, descriptor)
        os.close(opened)
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv = ["-c", *args]
    sys.path[:1] = ["", *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    return vars(main)


def _run(code: str, args: list[str], cwd: str, environment: dict[str, str], outputs: list[str]) -> NoReturn:
    names = _become(args, cwd, environment, [os.devnull, *outputs])
    status = 0
    try:
        exec(compile(code, "<script>", "exec"), names)  # noqa: S102 - the test's own code
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001 - what an interpreter does with it
        traceback.print_exc()
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    # What an interpreter does at exit, except freeing torch's memory, which takes seconds in a forked process.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
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
                failed, deadline = True, min(deadline, time.monotonic() + GRACE_SECONDS)  # as under a launcher
        timed_out = time.monotonic() > deadline
    for child in children:  # none is reaped yet, so no process id has been reused
        try:
            os.killpg(child, signal.SIGKILL)
        except ProcessLookupError:
            os.kill(child, signal.SIGKILL)  # it has not reached setsid() yet
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return spec["number"], statuses, timed_out and not failed


def _start(spec: dict[str, Any]) -> tuple[int, int]:
    *pipes, log = spec["files"]
    ends = [os.open(pipe, flags) for pipe, flags in zip(pipes, (os.O_RDONLY, os.O_WRONLY), strict=True)]
    child = os.fork()
    if child == 0:
        names = _become(spec["args"], os.path.dirname(log), spec["environment"], [*ends, log])
        exec(RUN_FILE.format(spec["script"]), names)  # noqa: S102 - forked ranks may end as interpreters do
        os._exit(0)
    for end in ends:
        os.close(end)
    return spec["number"], child


def main() -> None:
    """Import the modules; then run or start scripts, one request (JSON) a line."""
    gc.disable()  # imports leave next to no garbage
    for module in sys.argv[1:]:
        importlib.import_module(module)
    get_ready()
    gc.enable()
    for line in sys.stdin:
        spec = json.loads(line)
        print(json.dumps(_start(spec) if "script" in spec else _serve(spec)), flush=True)


if __name__ == "__main__":
    main()
