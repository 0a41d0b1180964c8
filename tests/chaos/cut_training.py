"""A small asynchronous training whose model counts its samples, and the judge of its checkpoints.

The model has ledgers: parameters with one number per sample, to which each update adds one for each sample of its
batch, by way of gradient and optimizer like everything else. There are more ledgers than shards, so every shard holds
at least one.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import time
from collections.abc import Mapping

import torch
from torch import nn

from ckpt_async.consistent_cut import CutOptions, UpdateId
from ckpt_async.parameter_server import CutCheckpoint, ParameterClient, ParameterServer, TrainingCoordinator, Transport
from ckpt_async.parameter_server.model import BlockTable
from ckpt_async.parameter_server.state import ServerState

FEATURES, HIDDEN = 16, 40
LEDGERS = 4
NOISE = 0.1


@dataclasses.dataclass(frozen=True)
class Job:
    """A training: its data, its processes and its checkpoints.

    Attributes:
        root: Directory of the checkpoints.
        workers: Number of workers.
        shards: Number of shards.
        streams: Number of streams.
        samples: Number of samples; each stream has its share.
        batch_size: Samples in a batch.
        epochs: How often each sample is used.
        every: Seconds between two snapshots.
        compute: Seconds that an update takes.
        straggler: How many times slower the last worker is.
        reorder: Whether messages are delayed at random, so that they arrive in any order, and some of them twice.
        keep: How many checkpoints are kept.
        options: Options of the cuts.
    """

    root: str
    workers: int = 3
    shards: int = 2
    streams: int = 6
    samples: int = 960
    batch_size: int = 4
    epochs: int = 3
    every: float = 0.15
    compute: float = 0.004
    straggler: float = 1.0
    reorder: bool = False
    keep: int = 4
    options: CutOptions = CutOptions()  # noqa: RUF009 - frozen

    @property
    def batches(self) -> int:
        """Batches in each stream."""
        return self.samples // self.streams // self.batch_size * self.epochs

    @property
    def worker_names(self) -> list[str]:
        return [f"worker-{number}" for number in range(self.workers)]

    @property
    def shard_names(self) -> list[str]:
        return [f"shard-{number}" for number in range(self.shards)]


class CountingModel(nn.Module):
    """A regression model that also has ledgers."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Parameter(torch.randn(FEATURES, HIDDEN, generator=generator) / 4)
        self.bias = nn.Parameter(torch.zeros(HIDDEN))
        self.second = nn.Parameter(torch.randn(HIDDEN, 1, generator=generator) / 6)
        self.ledger = nn.ParameterList(nn.Parameter(torch.zeros(samples)) for _ in range(LEDGERS))

    def loss(self, data: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(data @ self.first + self.bias) @ self.second - target).pow(2).mean()


@functools.lru_cache(maxsize=1)
def dataset(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(samples, FEATURES, generator=generator)
    return data, torch.sin(data @ torch.randn(FEATURES, 1, generator=generator))


def batch_of(job: Job, update: UpdateId) -> list[int]:
    """Return the samples of a batch."""
    per_epoch = job.batches // job.epochs
    epoch, number = divmod(update.seq - 1, per_epoch)
    own = list(range(update.stream, job.samples, job.streams))
    random.Random(f"{update.stream}/{epoch}").shuffle(own)
    return own[number * job.batch_size : (number + 1) * job.batch_size]


def compute_gradients(job: Job, model: CountingModel, update: UpdateId) -> None:
    """Leave the gradients of a batch in the parameters; noise comes from torch's default generator."""
    data, target = dataset(job.samples)
    batch = batch_of(job, update)
    model.zero_grad()
    noise = NOISE * torch.randn(len(batch), FEATURES)
    model.loss(data[batch] + noise, target[batch]).backward()
    for ledger in model.ledger:
        ledger.grad = torch.zeros_like(ledger)
        ledger.grad[batch] = -1.0


def make_optimizer(parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return Adam; for the ledgers without any memory, so that each step adds exactly one."""
    ledgers = [parameter for name, parameter in parameters if name.startswith("ledger")]
    others = [parameter for name, parameter in parameters if not name.startswith("ledger")]
    groups = [
        {"params": ledgers, "lr": 1.0, "betas": (0.0, 0.0), "eps": 1e-30},
        {"params": others},
    ]
    return torch.optim.Adam([group for group in groups if group["params"]], lr=1e-3)


# ---- the three roles -------------------------------------------------------------------------------------------------


def coordinate(job: Job, transport: Transport) -> TrainingCoordinator:
    return TrainingCoordinator(
        transport,
        job.root,
        streams=job.streams,
        shards=job.shard_names,
        workers=job.worker_names,
        every=job.every,
        keep=job.keep,
        options=job.options,
    )


def serve(job: Job, transport: Transport, coordinator: str) -> None:
    model = CountingModel(job.samples)
    ParameterServer(transport, coordinator, model.named_parameters(), make_optimizer).run()


def work(job: Job, transport: Transport, coordinator: str) -> None:
    model = CountingModel(job.samples)
    client = ParameterClient(transport, coordinator, model.named_parameters(), batches=job.batches)
    pace = random.Random()
    slowness = job.straggler if transport.name == job.worker_names[-1] else 1.0
    for update in client.updates():
        client.pull()
        compute_gradients(job, model, update)
        time.sleep(job.compute * slowness * pace.uniform(0.5, 1.5))
        client.push()
    client.finish()


# ---- the judge -------------------------------------------------------------------------------------------------------


def ledger_of(job: Job, vector: Mapping[int, int]) -> torch.Tensor:
    """Return how often each sample must be counted when these updates are applied."""
    counts = torch.zeros(job.samples)
    for stream, count in vector.items():
        for seq in range(1, count + 1):
            counts[batch_of(job, UpdateId(stream, seq))] += 1.0
    return counts


def violations(job: Job, checkpoint: CutCheckpoint) -> list[str]:
    """Return what is wrong with a checkpoint, judged by the model's ledgers and the optimizers' step counts."""
    found = []
    expected = ledger_of(job, checkpoint.cut.vector)
    parameters = dict(CountingModel(job.samples).named_parameters())
    state = ServerState(parameters, make_optimizer)
    checkpoint.load_into(state, BlockTable(parameters.items()))
    for number in range(LEDGERS):
        counts = state.parameters[f"ledger.{number}"].detach()
        if not torch.equal(counts, expected):
            wrong = int((counts != expected).sum())
            found.append(f"{checkpoint.path}: ledger {number} is wrong for {wrong} samples")
    total = sum(checkpoint.cut.vector.values())
    for name in parameters:
        steps = int(state.optimizer_state(name).get("step", 0))
        if steps != total:
            found.append(f"{checkpoint.path}: {name} has been stepped {steps} times, not {total}")
    return found
