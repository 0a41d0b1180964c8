"""Compare snapshots in memory, and recoveries from them, with the disk and a store (moto), in one table.

Usage: ``python benchmarks/memory.py [--sizes 100 1000] [--store]``; sizes in MB. Each recovery is a fresh process,
timed from the look-up until the state is loaded and verified; the page cache is left out of it where possible.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch

from ckpt_core import Checkpointer
from ckpt_core.tiers import MemoryTier

ROOT = Path(__file__).resolve().parents[1]
SAVES = 5

RECOVERS = """
import json, sys, time
from ckpt_core import Checkpointer
from ckpt_core.resume import newest_to_resume
from ckpt_core.tiers import MemoryTier

directory, memory, options = json.loads(sys.argv[1])
begin = time.perf_counter()
tier = MemoryTier(memory) if memory else None
point = newest_to_resume(directory, attempts=None, memory=tier, storage_options=options)
state = Checkpointer(storage_options=options).load(point.path)
assert state["step"] >= 0
print(time.perf_counter() - begin)
"""


def state_of(megabytes: int) -> dict[str, Any]:
    """Return a state of tensors of 10 MB each."""
    return {"step": 0, **{f"layer.{i}": torch.full((2_500_000,), float(i)) for i in range(megabytes // 10)}}


def saves(
    place: str, state: dict[str, Any], strategy: Literal["sync", "async"], **settings: Any
) -> tuple[float, float]:
    """Return the medians of the stall and of the time until the checkpoint is committed, in seconds."""
    stalls, commits = [], []
    memory = settings.pop("memory", None)
    options = memory.settings(strategy) if memory else {"strategy": strategy, **settings}
    with Checkpointer(**options) as checkpointer:
        for step in range(SAVES + 2):  # the first ones allocate memory
            path = memory.next_path(step, "step={}.ckpt") if memory else f"{place}/step={step % 2}.ckpt"
            begin = time.perf_counter()
            checkpointer.save({**state, "step": step}, path)
            stalls.append(time.perf_counter() - begin)
            checkpointer.wait()
            commits.append(time.perf_counter() - begin)
    return statistics.median(stalls[2:]), statistics.median(commits[2:])


def recovery(directory: str, memory: str | None = None, options: Any = None) -> float:
    """Return how long a fresh process takes to find, verify and load the newest state, in seconds."""
    arguments = json.dumps([directory, memory, options])
    done = subprocess.run(
        [sys.executable, "-c", RECOVERS, arguments], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return float(done.stdout)


@contextlib.contextmanager
def store() -> Iterator[tuple[str, dict[str, Any]]]:
    """Run a simulated S3 server."""
    import s3fs

    from tests.support.servers import start_moto

    with tempfile.TemporaryDirectory() as home, start_moto(Path(home)) as server:
        settings = dict(server.options)
        s3fs.S3FileSystem(**settings).mkdir("memory")
        yield "s3://memory/run", settings


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 1000], help="MB")
    parser.add_argument("--store", action="store_true", help="also a store, which needs moto")
    parser.add_argument("--directory", default=None, help="on the disk (default: the temporary directory)")
    options = parser.parse_args()
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
    print("| MB | where | sync: training waits | async: training waits | async: committed after | recovery |")
    print("|---|---|---|---|---|---|")
    for size in options.sizes:
        state = state_of(size)
        with tempfile.TemporaryDirectory(dir=options.directory) as directory:
            memory = MemoryTier(f"{directory}/memory-run")
            memory.begin()
            try:
                figures = [*saves("", state, "sync", memory=memory), *saves("", state, "async", memory=memory)]
                row(size, "memory", figures, recovery(f"{directory}/memory-run", f"{directory}/memory-run"))
            finally:
                memory.end()
            figures = [*saves(directory, state, "sync"), *saves(directory, state, "async")]
            row(size, "disk", figures, recovery(directory))
        if options.store:
            with store() as (url, settings):
                figures = [
                    *saves(url, state, "sync", storage_options=settings),
                    *saves(url, state, "async", storage_options=settings),
                ]
                row(size, "store (moto)", figures, recovery(url, None, settings))


def row(size: int, where: str, figures: list[float], recovered: float) -> None:
    """Print one line of the table."""
    sync, _, stall, commit = figures
    print(f"| {size} | {where} | {sync:.3f} s | {stall:.3f} s | {commit:.3f} s | {recovered:.2f} s |", flush=True)


if __name__ == "__main__":
    main()
