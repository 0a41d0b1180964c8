"""Stock Trainers as workers of real parameter servers: killed together and resumed, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import logging
import pickle
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from ckpt_async.consistent_cut import CutOptions
from ckpt_async.parameter_server import ParameterClient, RemoteOptimizer, Transport, UpdateSampler
from ckpt_async.parameter_server.model import aliases_of, buffers_of, parameters_of
from ckpt_core.errors import StateMismatchError
from lightning_ckpt.parameter_server import ParameterServerWorker
from tests.chaos.cut_campaign import assert_complete, cut_off, judged, run_to_end
from tests.chaos.cut_cluster import Cluster
from tests.chaos.cut_replay import differences
from tests.chaos.cut_training import FEATURES, NOISE, CountingModel, Job, batch_of, dataset

LIMIT = 200.0


class Samples(Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    def __init__(self, samples: int) -> None:
        self.data, self.target = dataset(samples)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return index, self.data[index], self.target[index]


class Module(pl.LightningModule):
    def __init__(self, model: CountingModel, client: ParameterClient | None = None) -> None:
        super().__init__()
        self.model = model
        self.client = client

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        indices, data, target = batch
        loss = self.model.loss(data + NOISE * torch.randn(len(data), FEATURES), target)
        return loss - sum(ledger[indices].sum() for ledger in self.model.ledger)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1) if self.client is None else RemoteOptimizer(self.client)


class Copies(pl.Callback):
    """Copies a worker in the middle of its training, and checks that copies have no connection."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step < 3:
            assert copy.deepcopy(trainer).callbacks[0]._client is None
            assert pickle.loads(pickle.dumps(trainer.callbacks[0]))._client is None
            pickle.dumps(trainer.optimizers)


def trainer_with(callback: ParameterServerWorker, callbacks: Sequence[pl.Callback] = (), **options: Any) -> pl.Trainer:
    return pl.Trainer(
        **{
            "max_epochs": 1,
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_checkpointing": False,
            **options,
        },
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback, *callbacks],
    )


def train(job: Job, transport: Transport, coordinator: str) -> None:
    """Do the work of one worker with a Trainer."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = Module(CountingModel(job.samples))
    client = ParameterClient(transport, coordinator, module.model.named_parameters(), batches=job.batches)
    module.client = client
    loader = DataLoader(Samples(job.samples), batch_sampler=UpdateSampler(client, lambda update: batch_of(job, update)))
    trainer_with(ParameterServerWorker(client), callbacks=[Copies()]).fit(module, loader)
    assert client.upcoming is None


@pytest.mark.extended
def test_trainers_are_killed_resumed_and_replayed(tmp_path: Path) -> None:
    options = CutOptions(record_order=True)
    job = Job(str(tmp_path / "checkpoints"), epochs=2, samples=480, every=0.2, keep=1000, options=options)
    store = cut_off(Cluster(job, tmp_path / "log", work=train), 2, LIMIT)
    first = store.committed()
    with store.open(first[0]) as checkpoint:
        assert differences(job, checkpoint) == [], "the noise in training_step depends on the batch alone"
    other = dataclasses.replace(job, workers=2)
    run_to_end(Cluster(other, tmp_path / "log-2", work=train), LIMIT)
    assert judged(job) > 2
    assert_complete(job)


class NoClient:
    """A stand-in for a client, for errors that are raised before a client is used."""

    def __init__(self, module: Module) -> None:
        self.parameters = dict(module.named_parameters())
        self.upcoming = None
        self.closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("options", "message"),
    [({}, "another optimizer"), ({"accumulate_grad_batches": 2}, "accumulated gradients")],
)
def test_what_would_lose_batches_is_refused(options: dict[str, Any], message: str) -> None:
    module = Module(CountingModel(48))
    client = NoClient(module)
    loader = DataLoader(Samples(48), batch_size=4)
    with pytest.raises(StateMismatchError, match=message):
        trainer_with(ParameterServerWorker(client), **options).fit(module, loader)  # type: ignore[arg-type]
    assert client.closed


def test_a_client_of_another_model_is_refused() -> None:
    module, other = Module(CountingModel(48)), Module(CountingModel(48))
    client = NoClient(other)
    module.client = client  # type: ignore[assignment]
    loader = DataLoader(Samples(48), batch_size=4)
    with pytest.raises(StateMismatchError, match="not the client's"):
        trainer_with(ParameterServerWorker(client)).fit(module, loader)  # type: ignore[arg-type]


class Normed(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(2)


class Tied(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.second.weight = self.first.weight


@pytest.mark.parametrize(("module", "missing"), [(Normed(), "norm.running_mean"), (Tied(), "the further names")])
def test_what_the_checkpoints_will_not_have_is_said(module: pl.LightningModule, missing: str) -> None:
    class Given:
        """What a client was given of a model: its parameters, buffers and aliases."""

        def __init__(self, model: Any) -> None:
            self.parameters, self.buffers, self.aliases = parameters_of(model), buffers_of(model), aliases_of(model)

    with pytest.warns(UserWarning, match=missing):
        ParameterServerWorker(Given(module.named_parameters()))._warn_of_what_is_not_saved(module)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ParameterServerWorker(Given(module))._warn_of_what_is_not_saved(module)  # type: ignore[arg-type]
