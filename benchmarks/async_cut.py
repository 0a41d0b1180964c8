"""What checkpoints cost an asynchronous training: updates per second without any, unaligned, aligned, and stopping the world."""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from ckpt_core.consistent_cut import CutOptions
from ckpt_core.parameter_server import CutStore, ParameterClient, ParameterServer, Transport
from tests.chaos.cut_cluster import Cluster
from tests.chaos.cut_training import CountingModel, Job, compute_gradients, make_optimizer

__all__ = ["table"]

_LIMIT = 120.0
_STORE_SECONDS = 0.3  # what a write takes, beside the disk's own time: that of a shared filesystem or an object store
_BALLAST = 250_000  # parameters beside the model's
_NEVER = 10_000.0
_WAYS: dict[str, tuple[float, CutOptions, bool]] = {
    "no checkpoints": (_NEVER, CutOptions(), False),
    "unaligned": (1.0, CutOptions(), False),
    "aligned": (1.0, CutOptions(alignment="aligned"), False),
    "stop the world": (1.0, CutOptions(), True),
}


def table(options: argparse.Namespace, directory: Path) -> dict[str, float]:
    """Print the updates per second of each way, and its part of the first; return the updates per second."""
    rates: dict[str, list[float]] = {way: [] for way in _WAYS}
    checkpoints: dict[str, list[int]] = {way: [] for way in _WAYS}
    for number in range(options.repeats):
        for way in _WAYS:
            rate, count = _one_run(directory / f"{way} {number}".replace(" ", "-"), way)
            rates[way].append(rate)
            checkpoints[way].append(count)
    medians = {way: statistics.median(found) for way, found in rates.items()}
    print(f"2 servers, 3 workers, a checkpoint each second, {_STORE_SECONDS} s for a write")
    print(f"median of {options.repeats} interleaved runs (lowest to highest)\n")
    for way, found in rates.items():
        share = medians[way] / medians["no checkpoints"]
        print(
            f"{way:16s} {medians[way]:7.1f} updates/s ({min(found):.1f} to {max(found):.1f})  {share:5.0%}"
            f"  {statistics.median(checkpoints[way]):4.0f} checkpoints"
        )
    return medians


def _one_run(root: Path, way: str) -> tuple[float, int]:
    every, cut_options, is_stopping = _WAYS[way]
    job = Job(str(root / "checkpoints"), epochs=4, every=every, compute=0.01, keep=1000, options=cut_options)
    times = root / "times"
    times.mkdir(parents=True)
    cluster = Cluster(
        job, root / "log", serve=_serve, work=functools.partial(_work, times=times, is_stopping=is_stopping)
    )
    try:
        if not cluster.wait(_LIMIT):
            raise RuntimeError(cluster.logs())
    finally:
        cluster.kill()
    found = [json.loads(file.read_text()) for file in times.iterdir()]
    seconds = max(end for _, end in found) - min(begin for begin, _ in found)
    return job.batches * job.streams / seconds, len(CutStore(job.root).committed())


class _Heavy(CountingModel):
    def __init__(self, job: Job) -> None:
        super().__init__(job.samples)
        # In the servers' optimizers and in every snapshot.
        self.ballast = nn.ParameterList(nn.Parameter(self.bias.new_zeros(_BALLAST)) for _ in range(job.shards))


def _slow(write: Callable[..., str]) -> Callable[..., str]:
    def slow_write(*arguments: Any, **options: Any) -> str:
        time.sleep(_STORE_SECONDS)
        return write(*arguments, **options)

    return slow_write


def _serve(job: Job, transport: Transport, coordinator: str) -> None:
    server = ParameterServer(transport, coordinator, _Heavy(job).named_parameters(), make_optimizer)
    server.store.write = _slow(server.store.write)  # type: ignore[method-assign]
    server.run()


def _work(job: Job, transport: Transport, coordinator: str, *, times: Path, is_stopping: bool) -> None:
    model = _Heavy(job)
    client = ParameterClient(transport, coordinator, model.named_parameters(), batches=job.batches)
    client.store.write = _slow(client.store.write)  # type: ignore[method-assign]
    begin = None
    for update in client.updates():
        client.pull()
        while is_stopping and client.committed_snapshot < client.snapshot:
            time.sleep(0.002)
        begin = begin or time.monotonic()
        compute_gradients(job, model, update)
        for ballast in model.ballast:
            ballast.grad = ballast.detach() + 1.0
        time.sleep(job.compute)
        client.push()
    (times / f"{transport.name}.json").write_text(json.dumps([begin, time.monotonic()]))
    client.finish()
