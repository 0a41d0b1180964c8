"""An Accelerate loop as a worker of real parameter servers; its optimizer is prepared as usual."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from ckpt_async.parameter_server import CutStore, ParameterClient, RemoteOptimizer, Transport, UpdateSampler
from tests.chaos.cut_campaign import wait_for_checkpoints
from tests.chaos.cut_cluster import Cluster
from tests.chaos.cut_training import CountingModel, Job, batch_of, dataset, violations

LIMIT = 120.0


def train(job: Job, transport: Transport, coordinator: str) -> None:
    """The work of a worker."""
    accelerator = Accelerator(cpu=True)
    model = CountingModel(job.samples)
    client = ParameterClient(transport, coordinator, model.named_parameters(), batches=job.batches)
    data = TensorDataset(torch.arange(job.samples), *dataset(job.samples))
    loader = DataLoader(data, batch_sampler=UpdateSampler(client, lambda update: batch_of(job, update)))
    model, optimizer, loader = accelerator.prepare(model, RemoteOptimizer(client), loader)
    for indices, inputs, target in loader:
        optimizer.zero_grad()
        loss = model.loss(inputs, target) - sum(ledger[indices].sum() for ledger in model.ledger)
        accelerator.backward(loss)
        optimizer.step()
    client.finish()


@pytest.mark.timeout(300)
def test_accelerate_workers_are_killed_and_resumed(tmp_path: Path) -> None:
    job = Job(str(tmp_path / "checkpoints"), epochs=2, samples=480, every=0.2, keep=1000)
    store = CutStore(job.root)
    cluster = Cluster(job, tmp_path / "log", work=train)
    try:
        assert wait_for_checkpoints(store, 2, LIMIT), cluster.logs()
    finally:
        cluster.kill()
    second = Cluster(job, tmp_path / "log-2", work=train)
    try:
        assert second.wait(LIMIT), second.logs()
    finally:
        second.kill()
    for path in store.committed():
        with store.open(path) as checkpoint:
            assert violations(job, checkpoint) == []
    with store.open(store.committed()[0]) as last:
        assert dict(last.cut.vector) == dict.fromkeys(range(job.streams), job.batches)
