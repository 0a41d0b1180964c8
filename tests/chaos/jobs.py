"""Start trainings, watch what they log, and kill all of their processes, or one."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "crash_demo"))

from records import LogTail

from tests.support.descendants import kill_all, members, new_mark

ROOT = Path(__file__).resolve().parents[2]
MOST_SECONDS_OF_A_JOB = 180.0


class Processes(Protocol):
    """The processes of a training."""

    def statuses_within(self, seconds: float) -> list[int] | None:
        """Wait at most so many seconds; return the exit statuses if all processes are gone, otherwise None."""

    def kill(self, rank: int | None) -> None:
        """Send SIGKILL to a rank, or to all processes."""


class Nursery:
    """A process that has imported everything and forks the trainings (``nursery.py``), one training at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            cwd=ROOT,
            env=_environment(),
        )
        assert self._line() == "ready"

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, run: Path, framework: str, ranks: int, arguments: list[str]) -> Job:
        """Start a training whose logs and console go to the directory ``run``."""
        assert self._process.stdin is not None
        tail = LogTail(run / "events.jsonl", from_end=True)
        order = {"framework": framework, "run": str(run), "ranks": ranks, "arguments": arguments}
        launched = time.time()
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        return Job(_Forked(json.loads(self._line()), self._statuses_within), tail, run, launched)

    def _statuses_within(self, seconds: float) -> list[int] | None:
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        return list(json.loads(self._line())) if ready else None

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode().strip()
        if not line:
            raise RuntimeError("the process that forks the trainings is dead")
        return line


class _Forked:
    """Ranks that a nursery has forked: one process group."""

    def __init__(self, ranks: list[int], statuses_within: Callable[[float], list[int] | None]) -> None:
        self._ranks = ranks
        self.statuses_within = statuses_within

    def kill(self, rank: int | None) -> None:
        with contextlib.suppress(ProcessLookupError):  # it ended by itself just now
            if rank is None:
                os.killpg(self._ranks[0], signal.SIGKILL)
            else:
                os.kill(self._ranks[rank], signal.SIGKILL)


class Launched:
    """``accelerate launch`` and its ranks, which it puts into sessions of their own.

    Args:
        run: Directory for the log of the console.
        ranks: Number of ranks.
        arguments: What comes after ``-m accelerate_ckpt``.
    """

    def __init__(self, run: Path, ranks: int, arguments: list[str]) -> None:
        self._mark = new_mark()
        accelerate = Path(sysconfig.get_path("scripts")) / "accelerate"
        # With ACCELERATE_USE_CPU, Accelerate's launcher for GPUs starts gloo processes on the CPU.
        command = [sys.executable, str(accelerate), "launch", "--multi_gpu", "--num_processes", str(ranks)]
        command += ["--num_machines", "1", "--main_process_port", "0", "-m", "accelerate_ckpt", *arguments]
        with (run / "console.log").open("ab") as log:
            self._launcher = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=ROOT,
                env={**_environment(), "ACCELERATE_USE_CPU": "true", **self._mark},
            )

    @classmethod
    def start(cls, run: Path, ranks: int, arguments: list[str]) -> Job:
        """Start a training whose logs and console go to the directory ``run``."""
        tail = LogTail(run / "events.jsonl", from_end=True)
        launched = time.time()
        return Job(cls(run, ranks, arguments), tail, run, launched)

    def statuses_within(self, seconds: float) -> list[int] | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(seconds)
        if self._launcher.poll() is None or self._members():
            return None
        return [self._launcher.returncode]

    def kill(self, rank: int | None) -> None:
        if rank is not None:
            for process, variables in self._members().items():
                if f"RANK={rank}" in variables:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
            return
        self._launcher.kill()  # first, because it would clean up after its ranks
        kill_all(self._mark)

    def _members(self) -> dict[int, list[str]]:
        """Return the environments of the processes with our mark, except the launcher's, by process id."""
        return {number: variables for number, variables in members(self._mark).items() if number != self._launcher.pid}


class Job:
    """A running training.

    Attributes:
        events: The lines that it has added to the event log and that were read so far.
        launched: Unix time of its start.
        lost_a_rank: Whether one of its ranks was killed before the others.
    """

    def __init__(self, processes: Processes, tail: LogTail, run: Path, launched: float) -> None:
        self.events: list[dict[str, Any]] = []
        self.launched = launched
        self.lost_a_rank = False
        self._processes = processes
        self._tail = tail
        self._statuses: list[int] | None = None
        self._run = run

    def is_over(self, within: float = 0.0) -> bool:
        """Wait at most so many seconds; return whether all processes of the job are gone."""
        if self._statuses is None:
            self._statuses = self._processes.statuses_within(within)
        return self._statuses is not None

    def new_events(self) -> list[dict[str, Any]]:
        """Return the lines added to the event log since the last call."""
        new = self._tail.new()
        self.events += new
        return new

    def wait_until(self, happened: Callable[[], bool], poll_seconds: float = 0.0005) -> bool:
        """Poll until ``happened`` returns True; return False if the job ended before.

        Raises:
            TimeoutError: Neither happened in time; the job was killed.
        """
        deadline = time.monotonic() + MOST_SECONDS_OF_A_JOB
        while not happened():
            if self.is_over():
                return False
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"the training hangs:\n{self._console()}")
            time.sleep(poll_seconds)
        return True

    def kill(self, *, first: int | None = None, seconds_later: float = 0.0) -> bool:
        """SIGKILL all ranks at once and wait until all are gone; return False if the job had ended by itself before.

        Args:
            first: A rank to kill before the others.
            seconds_later: How long the others then continue.
        """
        if self.is_over():
            return False
        if first is not None:
            self.lost_a_rank = True
            self._processes.kill(first)
            self.is_over(within=seconds_later)
        self._processes.kill(None)
        while not self.is_over(within=1.0):
            pass
        self.new_events()
        return first is not None or self._statuses != [0] * len(self._statuses or ())

    def finish(self) -> None:
        """Wait until the job ends by itself.

        Raises:
            RuntimeError: The training failed.
            TimeoutError: It hangs.
        """
        self.wait_until(lambda: False, poll_seconds=0.005)
        self.new_events()
        if any(self._statuses or ()):
            raise RuntimeError(f"the training ended with {self._statuses}:\n{self._console()}")

    def _console(self) -> str:
        return (self._run / "console.log").read_text(errors="replace")[-3000:]


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        # Without credentials, clients would wait for the metadata service of a cloud that is not there.
        "AWS_EC2_METADATA_DISABLED": "true",
    }
