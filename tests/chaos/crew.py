"""Runs several campaigns at a time, each in a process of its own, and adds up their reports."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.chaos.campaign import Campaign, Report
from tests.chaos.cells import S3, Setting
from tests.support.servers import STARTERS

_campaigns: list[Campaign] = []  # one at most: that of this process


def run_all(
    work: Sequence[tuple[Setting, int]],
    directory: Path,
    seed: int,
    say: Callable[[str], None],
    *,
    jobs: int = 2,
    server: str = "rclone",
) -> Report:
    """Kill the trainings of each setting so many times; return the sum of the reports.

    Args:
        work: Settings, each with its number of kills.
        directory: Where the runs live; those with a violation stay there.
        seed: Seed of the random choices.
        say: Called with each line of progress.
        jobs: Number of trainings at a time.
        server: The S3 server to start (:data:`tests.support.servers.STARTERS`), if a setting needs one.
    """
    began = time.monotonic()
    whole = Report(seed)
    try:
        with contextlib.ExitStack() as stack:
            store = None
            if any(setting.store == S3 for setting, _ in work):
                home = directory / "server"
                home.mkdir(parents=True)
                running = stack.enter_context(STARTERS[server](home))
                store = running.new_bucket(), dict(running.options)
            # If an exception is raised, the pool ends its processes; their nurseries end once no training is left.
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(jobs, _leave_stopping_to_the_parent))
            run = functools.partial(_run, directory=directory / "runs", seed=seed, store=store)
            for report, lines in pool.imap_unordered(run, work):
                whole.add(report)
                for line in [*lines, f"  so far: {whole.kills} kills, {len(whole.violations)} violations"]:
                    say(line)
    except KeyboardInterrupt:
        whole.violations.append("the campaign was stopped before its end")
        say(whole.violations[-1])
    whole.seconds = time.monotonic() - began
    return whole


def _leave_stopping_to_the_parent() -> None:
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C reaches all processes; SIG_IGN would be inherited


def _run(
    work: tuple[Setting, int], *, directory: Path, seed: int, store: tuple[str, Mapping[str, Any]] | None
) -> tuple[Report, list[str]]:
    lines: list[str] = []
    if not _campaigns:
        _campaigns.append(Campaign(directory, seed, lines.append, store=store))
    _campaigns[0].say = lines.append
    try:
        return _campaigns[0].run(*work), lines
    except Exception:  # noqa: BLE001 - the other settings continue
        failed = Report(seed, violations=[f"{work[0]}: the campaign itself failed"])
        return failed, [*lines, f"{work[0]}: the campaign itself failed:\n{traceback.format_exc()}"]
