"""Buffers and tied parameters of a model that is passed as a module: saved, restored, and in its plain state dict."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn

from ckpt_async.consistent_cut import COORDINATOR
from ckpt_async.parameter_server import CutStore, ParameterClient, ParameterServer, SocketTransport, TrainingCoordinator

LIMIT = 200.0


class Tied(nn.Module):
    """A model with a weight that has two names, and with statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(data)))


def train(root: Path, workers: list[str], batches: int) -> dict[str, Tied]:
    """Train to the end; return the workers' models as they are then."""
    transport = SocketTransport(COORDINATOR)
    coordinator = TrainingCoordinator(transport, root, streams=2, shards=["s0"], workers=workers, every=3600.0)
    models, begin = {name: Tied() for name in workers}, threading.Barrier(len(workers))

    def serve() -> None:
        adam = functools.partial(torch.optim.Adam, lr=0.1)
        ParameterServer(SocketTransport("s0"), transport.address, Tied(), adam).run()

    def work(name: str) -> None:
        model = models[name]
        with ParameterClient(SocketTransport(name), transport.address, model, batches=batches) as client:
            begin.wait(LIMIT)
            for update in client.updates():
                client.pull()
                model.zero_grad()
                data = torch.randn(8, 4, generator=torch.Generator().manual_seed(update.stream + 2 * update.seq))
                model(data + 10 * update.stream).pow(2).mean().backward()
                client.push()
            client.finish()

    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(coordinator.run), pool.submit(serve), *(pool.submit(work, name) for name in workers)]
        for job in jobs:
            job.result(LIMIT)
    return models


def test_the_state_dict_has_the_buffers_and_all_names(tmp_path: Path) -> None:
    models = train(tmp_path, ["w0", "w1"], 3)
    loaded = Tied()
    with CutStore(tmp_path).newest() as checkpoint:  # type: ignore[union-attr]
        state = checkpoint.model()
    loaded.load_state_dict(state)
    assert "scratch" not in state
    for name in ("norm.running_mean", "norm.running_var"):
        own = [model.state_dict()[name] for model in models.values()]
        assert not torch.equal(own[0], own[1])
        assert torch.equal(loaded.state_dict()[name], torch.stack(own).mean(dim=0))
    assert loaded.norm.num_batches_tracked == 3
    assert loaded.second.weight is loaded.first.weight


def test_each_worker_gets_its_buffers_back_and_a_new_one_their_means(tmp_path: Path) -> None:
    first = train(tmp_path, ["w0", "w1"], 3)
    means = [first[name].norm.running_mean for name in ("w0", "w1")]
    again = train(tmp_path, ["w1", "w2"], 3)  # no batch is left for them
    assert torch.equal(again["w1"].norm.running_mean, means[1])
    assert torch.equal(again["w2"].norm.running_mean, torch.stack(means).mean(dim=0))
