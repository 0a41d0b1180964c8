"""Start the training script as a job of several processes, watch its log files, and kill all of it at once."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from records import pair_events, read_lines

SCRIPT = Path(__file__).resolve().parent.parent / "train_gpt.py"


class TrainingJob:
    """One start of the training script, all its ranks in a process group of their own.

    Args:
        directory: The run's directory; the output of all ranks is appended to ``console.log`` there.
        arguments: Arguments of the training script, in addition to its directory and event log.
    """

    def __init__(self, directory: Path, arguments: list[str]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.events = directory / "events.jsonl"
        self.steps = directory / "steps-rank0.jsonl"
        self.launched = time.time()
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *self._places(), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._copier = threading.Thread(target=self._copy_output, daemon=True)
        self._copier.start()
        atexit.register(self._end_with_the_driver)

    def _places(self) -> list[str]:
        places = {"output": self.directory, "event-log": self.events, "report": self.directory / "report.html"}
        return [word for name, path in places.items() for word in (f"--{name}", str(path))]

    def _end_with_the_driver(self) -> None:
        """Kill the job if it still runs: in its own session, it would outlive a driver that is interrupted."""
        if self.running():
            os.killpg(self._process.pid, signal.SIGKILL)

    def _copy_output(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output, (self.directory / "console.log").open("ab") as log:
            for line in output:
                log.write(line)
                log.flush()

    def running(self) -> bool:
        """Return whether the first rank still runs."""
        return self._process.poll() is None

    def wait_until(self, happened: Callable[[], bool], seconds: float = 180, poll_seconds: float = 0.0005) -> bool:
        """Poll until ``happened`` returns True; return False if the job ended before.

        Raises:
            TimeoutError: It neither happened nor did the job end in time.
        """
        deadline = time.monotonic() + seconds
        while not happened():
            if not self.running():
                return False
            if time.monotonic() > deadline:
                self.kill("")
                raise TimeoutError(f"{self.directory}: nothing happened for {seconds:.0f} s, see console.log there")
            time.sleep(poll_seconds)
        return True

    def kill(self, aim: str) -> None:
        """SIGKILL every process of the job and wait until all are gone.

        Args:
            aim: What the kill was meant to hit, for the record.
        """
        os.killpg(self._process.pid, signal.SIGKILL)
        killed = time.time()
        # The output ends only when the last process that has it open is dead, including those not our children.
        self._copier.join()
        self._process.wait()
        self._record(killed, aim)

    def finish(self, seconds: float = 300) -> None:
        """Wait until the job ends by itself.

        Raises:
            RuntimeError: The training failed.
        """
        self.wait_until(lambda: False, seconds, poll_seconds=0.02)
        ended = time.time()
        self._copier.join()
        if self._process.returncode != 0:
            tail = (self.directory / "console.log").read_text(errors="replace")[-3000:]
            raise RuntimeError(f"the training in {self.directory} ended with {self._process.returncode}:\n{tail}")
        self._record(ended, None)

    def _record(self, ended: float, aim: str | None) -> None:
        record = {
            "launched": self.launched,
            "ended": ended,
            "killed": aim is not None,
            "aim": aim or "",
            "during_save": self._unfinished_saves() if aim is not None else [],
        }
        with (self.directory / "jobs.jsonl").open("a") as log:
            log.write(json.dumps(record) + "\n")

    def _unfinished_saves(self) -> list[str]:
        """Return the paths of the snapshots that were being written to disk when this job died."""
        events = [event for event in read_lines(self.events) if event["time"] >= self.launched]
        return [
            save.path
            for save in pair_events(events)
            if save.freed is not None and save.committed is None and not published_since(save.path, save.started)
        ]


def published_since(path: str, moment: float) -> bool:
    """Return whether a file was published under this name after the moment, even if the event log lacks its commit."""
    return os.path.exists(path) and os.stat(path).st_mtime >= moment
