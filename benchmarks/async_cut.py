"""Measures what checkpoints cost an asynchronous training: updates per second without any, and with three kinds.

Their runs take turns, beginning with another kind each time, so that changes of the machine's speed affect all of them.
The spread of the runs without checkpoints is the noise, printed with the differences. CPU time per update depends less
on the machine: it shows how much work checkpoints cause in the processes.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from ckpt_async.consistent_cut import CutOptions
from ckpt_async.parameter_server import CutStore, ParameterClient, ParameterServer, Transport
from tests.chaos.cut_cluster import Cluster
from tests.chaos.cut_training import CountingModel, Job, compute_gradients, make_optimizer

_LIMIT = 240.0
_STORE_SECONDS = 0.3  # added to each write, in addition to the disk's time: as of a shared filesystem or object store
_BALLAST = 250_000  # parameters for each shard, in addition to the model's
_EVERY = 1.0  # seconds between two checkpoints: a hundred times as often as in practice
_NEVER = 10_000.0
_NONE = "no checkpoints"
_WAYS: dict[str, tuple[float, CutOptions, bool]] = {
    _NONE: (_NEVER, CutOptions(), False),
    "unaligned": (_EVERY, CutOptions(), False),
    "aligned": (_EVERY, CutOptions(alignment="aligned"), False),
    "stop the world": (_EVERY, CutOptions(), True),
}


class _Run(NamedTuple):
    """Updates per second, milliseconds of CPU time of all processes for an update, number of checkpoints."""

    rate: float
    cpu: float
    checkpoints: int


def table(options: argparse.Namespace, directory: Path) -> dict[str, float]:
    """Print the updates per second of each kind, and the noise; return the medians."""
    runs: dict[str, list[_Run]] = {way: [] for way in _WAYS}
    for number in range(options.repeats):
        ways = list(_WAYS)
        ways = ways[number % len(ways) :] + ways[: number % len(ways)]
        for way in ways:
            runs[way].append(_one_run(directory / f"{way} {number}".replace(" ", "-"), way))
    without = [run.rate for run in runs[_NONE]]
    medians = {way: statistics.median(run.rate for run in found) for way, found in runs.items()}
    noise = (max(without) - min(without)) / medians[_NONE]
    print(f"2 servers, 3 workers, a checkpoint each {_EVERY:g} s, {_STORE_SECONDS} s for a write")
    print(f"median of {options.repeats} interleaved runs (lowest to highest)\n")
    for way, found in runs.items():
        difference = medians[way] / medians[_NONE] - 1
        rates = [run.rate for run in found]
        print(
            f"{way:16s} {medians[way]:7.1f} updates/s ({min(rates):.1f} to {max(rates):.1f})  {difference:+6.1%}"
            f"  {statistics.median(run.cpu for run in found):6.2f} ms of CPU per update"
            f"  {statistics.median(run.checkpoints for run in found):4.0f} checkpoints"
        )
    print(f"\nnoise: the runs without checkpoints differ by {noise:.1%}")
    return medians


def _one_run(root: Path, way: str) -> _Run:
    every, cut_options, is_stopping = _WAYS[way]
    job = Job(str(root / "checkpoints"), epochs=4, every=every, compute=0.01, keep=1000, options=cut_options)
    times = root / "times"
    times.mkdir(parents=True)
    cluster = Cluster(
        job,
        root / "log",
        serve=functools.partial(_serve, times=times),
        work=functools.partial(_work, times=times, is_stopping=is_stopping),
    )
    try:
        if not cluster.wait(_LIMIT):
            raise RuntimeError(cluster.logs())
    finally:
        cluster.kill()
    workers = [json.loads(file.read_text()) for file in times.glob("worker-*")]
    servers = [json.loads(file.read_text()) for file in times.glob("shard-*")]
    seconds = max(end for _, end, _ in workers) - min(begin for begin, _, _ in workers)
    updates = job.batches * job.streams
    cpu = sum(spent for *_, spent in workers + servers)
    return _Run(updates / seconds, 1e3 * cpu / updates, len(CutStore(job.root).committed()))


class _Heavy(CountingModel):
    def __init__(self, job: Job) -> None:
        super().__init__(job.samples)
        # Makes the servers' optimizers and every snapshot larger.
        self.ballast = nn.ParameterList(nn.Parameter(self.bias.new_zeros(_BALLAST)) for _ in range(job.shards))


def _slow(write: Callable[..., str]) -> Callable[..., str]:
    def slow_write(*arguments: Any, **options: Any) -> str:
        time.sleep(_STORE_SECONDS)
        return write(*arguments, **options)

    return slow_write


def _serve(job: Job, transport: Transport, coordinator: str, *, times: Path) -> None:
    server = ParameterServer(transport, coordinator, _Heavy(job).named_parameters(), make_optimizer)
    server.store.write = _slow(server.store.write)  # type: ignore[method-assign]
    begin = time.process_time()
    server.run()
    (times / f"{transport.name}.json").write_text(json.dumps([time.process_time() - begin]))


def _work(job: Job, transport: Transport, coordinator: str, *, times: Path, is_stopping: bool) -> None:
    model = _Heavy(job)
    client = ParameterClient(transport, coordinator, model.named_parameters(), batches=job.batches)
    client.store.write = _slow(client.store.write)  # type: ignore[method-assign]
    begin = cpu = 0.0
    for update in client.updates():
        client.pull()
        while is_stopping and client.committed_snapshot < client.snapshot:
            time.sleep(0.002)
        if not begin:
            begin, cpu = time.monotonic(), time.process_time()
        compute_gradients(job, model, update)
        for ballast in model.ballast:
            ballast.grad = ballast.detach() + 1.0
        time.sleep(job.compute)
        client.push()
    spent = time.process_time() - cpu
    (times / f"{transport.name}.json").write_text(json.dumps([begin, time.monotonic(), spent]))
    client.finish()
