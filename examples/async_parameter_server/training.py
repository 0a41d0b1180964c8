"""What each of two parameter servers and three workers does while they train on Data-1 to Data-9.

Worker 1 has Data-1, 4 and 7, worker 2 has Data-2, 5 and 8, worker 3 has Data-3, 6 and 9: a *stream* of three batches
each. In addition to its weights, the model has two tallies, one on each server: an update adds one for the data it was
computed from, just as it changes the weights. So the model's state shows which data it was trained on.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from ckpt_async.consistent_cut import UpdateId
from ckpt_async.parameter_server import ParameterClient, ParameterServer, TrainingCoordinator, Transport

SERVERS = ("server-1", "server-2")
WORKERS = ("worker-1", "worker-2", "worker-3")
ROUNDS = 3  # batches of each worker
DATA = len(WORKERS) * ROUNDS
SECONDS_PER_BATCH = {"worker-1": 0.25, "worker-2": 0.4, "worker-3": 0.6}
NAIVE_PERIOD = 0.5  # seconds between two saves of a process that saves for itself
NAIVE_PHASE = {"server-1": 0.1, "server-2": 0.35, "worker-1": 0.2, "worker-2": 0.45, "worker-3": 0.3}


class TallyModel(nn.Module):
    """A linear model with a tally for each server."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 1))
        self.tally = nn.ParameterList(nn.Parameter(torch.zeros(DATA)) for _ in SERVERS)


def make_optimizer(parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """SGD with momentum for the weights; plain steps of one for the tallies."""
    tallies = [parameter for name, parameter in parameters if name.startswith("tally")]
    weights = [parameter for name, parameter in parameters if not name.startswith("tally")]
    groups = [{"params": tallies, "lr": 1.0, "momentum": 0.0}, {"params": weights}]
    return torch.optim.SGD([group for group in groups if group["params"]], lr=0.05, momentum=0.9)


def data_number(update: UpdateId) -> int:
    """Return the number of a batch's data: 0 for Data-1."""
    return (update.seq - 1) * len(WORKERS) + update.stream


def compute_gradients(model: TallyModel, number: int) -> None:
    """Leave the gradients of the loss on one batch in the model; in the tallies, that of the batch is minus one."""
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(8, 4, generator=generator)
    model.zero_grad()
    (inputs @ model.weight - inputs.sum(dim=1, keepdim=True)).pow(2).mean().backward()
    for tally in model.tally:
        tally.grad = torch.zeros(DATA)
        tally.grad[number] = -1.0


def coordinate(directory: Path, transport: Transport, started: Callable[[str], None], due: threading.Event) -> None:
    """Run the coordinator: take a checkpoint when it is requested, and one at the end."""
    coordinator = TrainingCoordinator(
        transport, directory / "checkpoints", streams=len(WORKERS), shards=SERVERS, workers=WORKERS, every=3600.0
    )
    started(transport.address)

    def request() -> None:
        due.wait()
        coordinator.request_checkpoint()

    threading.Thread(target=request, daemon=True).start()
    coordinator.run()


def serve(directory: Path, transport: Transport, coordinator: str) -> None:
    """Run a server, which also saves now and then on its own, in the naive way."""
    server = ParameterServer(transport, coordinator, TallyModel(), make_optimizer)

    def tallies() -> list[float]:
        with server.lock:
            found = [values for name, values in server.state.parameters.items() if name.startswith("tally")]
            return [] if not found else found[0].tolist()

    save_naively(directory, transport.name, tallies)
    server.run()


def work(directory: Path, transport: Transport, coordinator: str, pushed: Callable[[], None]) -> None:
    """Run a worker, which also saves now and then on its own, in the naive way."""
    model = TallyModel()
    client = ParameterClient(transport, coordinator, model, batches=ROUNDS)
    save_naively(directory, transport.name, lambda: list(client.position.values()))
    for update in client.updates():
        client.pull()
        compute_gradients(model, data_number(update))
        time.sleep(SECONDS_PER_BATCH[transport.name])
        client.push()
        pushed()
    client.finish()


def save_naively(directory: Path, name: str, state: Callable[[], object]) -> None:
    """Save in the naive way: each process saves what it has, by its own clock."""
    path = directory / "naive" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        time.sleep(NAIVE_PHASE[name])
        while True:
            unfinished = path.with_suffix(".part")
            unfinished.write_text(json.dumps({"time": time.monotonic(), "state": state()}))
            os.replace(unfinished, path)
            time.sleep(NAIVE_PERIOD)

    threading.Thread(target=save, daemon=True).start()
