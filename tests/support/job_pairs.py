"""Runs two jobs at the same time, each with its own log file; for scripts (fixture ``fork_script``)."""

from __future__ import annotations

import json
import logging
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path

_MOST_SECONDS = 200.0


def run_two(work: Callable[[str], None], first_has_saved: Callable[[], bool]) -> None:
    """Fork job A, which calls ``work("A")``, and job B once A has saved; print what each logs about "another job"."""
    children = {}
    for job in "AB":
        child = os.fork()
        if child == 0:
            _run(job, work, first_has_saved)
        children[child] = job
    for child, job in children.items():
        _, status = os.waitpid(child, 0)
        assert status == 0, f"job {job} has ended with {status}"
    logs = {job: Path(f"{job}.log").read_text().splitlines() for job in "AB"}
    print(json.dumps({job: [line for line in lines if "another job" in line] for job, lines in logs.items()}))


def meet(job: str, *, has_saved: bool, is_about_to_end: bool) -> None:
    """Let job A, before it ends, wait until job B has begun a save; both jobs call this after each step."""
    if job == "B" and has_saved:
        Path("B.saved").touch()
    deadline = time.monotonic() + _MOST_SECONDS
    while job == "A" and is_about_to_end and not Path("B.saved").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _run(job: str, work: Callable[[str], None], first_has_saved: Callable[[], bool]) -> None:
    try:
        handler = logging.FileHandler(f"{job}.log")
        logging.getLogger("ckpt_core").addHandler(handler)
        deadline = time.monotonic() + _MOST_SECONDS
        while job == "B" and not first_has_saved():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        work(job)
        handler.close()
    except BaseException:  # noqa: BLE001 - nothing of the parent may run here
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
