"""Training on threads of one process, with a model that counts its samples."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckpt_async.consistent_cut import COORDINATOR, ConsistentCut, CutOptions, UpdateId
from ckpt_async.parameter_server import CutStore, ParameterClient, ParameterServer, SocketTransport, TrainingCoordinator
from ckpt_core.errors import CheckpointError

SAMPLES = 24
LIMIT = 200.0


class Counts(nn.Module):
    """A model with one row for each sample; an update adds one to the rows of its batch, and touches no other."""

    def __init__(self, samples: int = SAMPLES) -> None:
        super().__init__()
        self.rows = nn.Embedding(samples, 2, sparse=True)
        nn.init.zeros_(self.rows.weight)


def make_optimizer(parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def batch_of(update: UpdateId) -> list[int]:
    return [(update.stream + 2 * (update.seq - 1)) % SAMPLES]


def train(client: ParameterClient, model: Counts, until: int | None = None) -> None:
    for update in client.updates():
        if until is not None and update.seq > until:
            break
        client.pull()
        model.zero_grad()
        (-model.rows(torch.tensor(batch_of(update)))).sum().backward()
        client.push()


class Threads:
    """A coordinator and two shards on threads; the test runs the workers."""

    def __init__(self, root: Path, *, workers: int = 2, every: float = 0.05, options: CutOptions | None = None) -> None:
        self.workers = [f"worker-{number}" for number in range(workers)]
        shards = ["shard-0", "shard-1"]
        transport = SocketTransport(COORDINATOR)
        self.address = transport.address
        self.coordinator = TrainingCoordinator(
            transport, root, streams=2, shards=shards, workers=self.workers, every=every, keep=100, options=options
        )
        self._pool = ThreadPoolExecutor(8)
        self.run = self._pool.submit(self.coordinator.run)
        self.servers = list(self._pool.map(self._server, shards))
        self.serving = [self._pool.submit(server.run) for server in self.servers]

    def _server(self, name: str) -> ParameterServer:
        parameters = Counts().named_parameters()
        return ParameterServer(SocketTransport(name), self.address, parameters, make_optimizer, max_block_bytes=32)

    def client(self, name: str, model: nn.Module | None = None, **options: Any) -> ParameterClient:
        model = Counts() if model is None else model
        options = {"batches": 12, "max_block_bytes": 32, **options}
        return ParameterClient(SocketTransport(name), self.address, model.named_parameters(), **options)

    def work(self, name: str) -> None:
        model = Counts()
        with self.client(name, model) as client:
            train(client, model)
            client.finish()

    def finish(self) -> ConsistentCut:
        """Let all workers train to the end."""
        list(self._pool.map(self.work, self.workers))
        return self.run.result(LIMIT)

    def close(self) -> None:
        self.coordinator._fail("the test is over")
        with contextlib.suppress(CheckpointError):
            self.run.result(LIMIT)
        for server in self.serving:
            with contextlib.suppress(CheckpointError):
                server.result(LIMIT)
        self._pool.shutdown()


def assert_counts(store: CutStore) -> int:
    """Check every checkpoint by the rows of its model; return how many there are."""
    paths = store.committed()
    for path in paths:
        with store.open(path) as checkpoint:
            checkpoint.verify()
            expected = torch.zeros(SAMPLES, 2)
            for update in checkpoint.cut.vector.updates():
                expected[batch_of(update)] += 1
            assert torch.equal(checkpoint.model()["rows.weight"], expected), path
    return len(paths)
