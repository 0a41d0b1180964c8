"""Start trainings quickly, watch what they log, and kill all of their processes at once."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "crash_demo"))

from records import LogTail

ROOT = Path(__file__).resolve().parents[2]
MOST_SECONDS_OF_A_JOB = 180.0


class Nursery:
    """A process that has imported everything and forks the trainings (``train.py --serve``)."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "chaos" / "train.py"), "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        )
        assert self._answer() == "ready"

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def start(self, run: Path, arguments: list[str]) -> Job:
        """Start a training in the directory ``run``; one at a time."""
        assert self._process.stdin is not None
        tail = LogTail(run / "events.jsonl", from_end=True)
        order = json.dumps(["--output", str(run), *arguments])
        self._process.stdin.write(order.encode() + b"\n")
        return Job(int(self._answer()), tail, self._status_within, run)

    def _status_within(self, seconds: float) -> int | None:
        return int(self._answer()) if select.select([self._process.stdout], [], [], seconds)[0] else None

    def _answer(self) -> str:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().decode().strip()
        if not answer:
            raise RuntimeError("the process that forks the trainings is dead")
        return answer


class Job:
    """A running training: one process group."""

    def __init__(self, group: int, tail: LogTail, status_within: Callable[[float], int | None], run: Path) -> None:
        self.events: list[dict[str, Any]] = []
        self.launched = time.time()
        self._group = group
        self._tail = tail
        self._status_within = status_within
        self._status: int | None = None
        self._run = run

    def is_over(self, within: float = 0.0) -> bool:
        """Whether all of the job is gone, after waiting for that so many seconds."""
        if self._status is None:
            self._status = self._status_within(within)
        return self._status is not None

    def new_events(self) -> list[dict[str, Any]]:
        """The lines added to the event log since the last call."""
        new = self._tail.new()
        self.events += new
        return new

    def wait_until(self, happened: Callable[[], bool], poll_seconds: float = 0.0003) -> bool:
        """Poll until something happened; False when the job ended before."""
        deadline = time.monotonic() + MOST_SECONDS_OF_A_JOB
        while not happened():
            if self.is_over():
                return False
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"{self._run}: the training hangs, see console.log there")
            time.sleep(poll_seconds)
        return True

    def kill(self) -> bool:
        """SIGKILL all ranks at once and wait until all are gone; False when the job had ended by itself before."""
        if self.is_over():
            return False
        with contextlib.suppress(ProcessLookupError):  # it ended by itself just now
            os.killpg(self._group, signal.SIGKILL)
        while not self.is_over(within=1.0):
            pass
        self.new_events()
        return self._status == -signal.SIGKILL

    def finish(self) -> None:
        """Wait for the job's own end.

        Raises:
            RuntimeError: The training failed.
        """
        self.wait_until(lambda: False, poll_seconds=0.005)
        self.new_events()
        if self._status != 0:
            log = (self._run / "console.log").read_text(errors="replace")[-3000:]
            raise RuntimeError(f"the training in {self._run} ended with {self._status}:\n{log}")
