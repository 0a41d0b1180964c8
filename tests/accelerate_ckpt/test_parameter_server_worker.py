"""An Accelerate loop as a worker of real parameter servers; its optimizer is prepared as usual."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from ckpt_async.parameter_server import ParameterClient, RemoteOptimizer, Transport, UpdateSampler
from tests.chaos.cut_campaign import assert_complete, cut_off, judged, run_to_end
from tests.chaos.cut_cluster import Cluster
from tests.chaos.cut_training import CountingModel, Job, batch_of, dataset

LIMIT = 200.0


def train(job: Job, transport: Transport, coordinator: str) -> None:
    """Do the work of one worker."""
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


def test_accelerate_workers_are_killed_and_resumed(tmp_path: Path) -> None:
    job = Job(str(tmp_path / "checkpoints"), epochs=2, samples=480, every=0.2, keep=1000)
    cut_off(Cluster(job, tmp_path / "log", work=train), 2, LIMIT)
    run_to_end(Cluster(job, tmp_path / "log-2", work=train), LIMIT)
    assert judged(job) > 2
    assert_complete(job)
