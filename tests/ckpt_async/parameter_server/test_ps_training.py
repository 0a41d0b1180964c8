"""Trainings on threads of one process: sparse pushes, a worker's own state, refusals, and other lives."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_async.consistent_cut import COORDINATOR, CutOptions, InconsistentCutError, UpdateId
from ckpt_async.consistent_cut.messages import PushHeader, encode_message
from ckpt_async.consistent_cut.types import MessageTag
from ckpt_async.parameter_server import (
    CutStore,
    Frame,
    Peer,
    PeerLostError,
    RemoteOptimizer,
    SocketTransport,
    TrainingCoordinator,
)
from ckpt_async.parameter_server.model import BlockTable
from ckpt_async.parameter_server.state import ServerState
from ckpt_core.errors import CheckpointError, StateMismatchError
from tests.ckpt_async.parameter_server.training_threads import (
    LIMIT,
    Counts,
    Threads,
    assert_counts,
    batch_of,
    make_optimizer,
    train,
)


@pytest.mark.parametrize("alignment", ["unaligned", "aligned"])
def test_sparse_pushes_go_to_the_shards_they_touch(threads: Callable[..., Threads], alignment: Any) -> None:
    training = threads(options=CutOptions(alignment=alignment))
    cut = training.finish()
    assert dict(cut.vector) == {0: 12, 1: 12}
    assert assert_counts(training.coordinator.store) >= 1
    assert sum(server.version for server in training.servers) == 24, "one piece for each update"
    assert all(server.version for server in training.servers)


def test_it_goes_on_from_the_cut(threads: Callable[..., Threads], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    first = threads(workers=1, every=3600.0)
    model = Counts()
    client = first.client("worker-0", model)
    train(client, model, until=5)
    first.coordinator.request_checkpoint()
    while client.committed_snapshot == 0:
        client.pull()
    first.close()
    client.close()
    second = threads(workers=2)
    assert "stream 0 resumes at batch 6, stream 1 resumes at batch 6" in caplog.text
    second.finish()
    assert assert_counts(second.coordinator.store) >= 2


class Remembering:
    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def test_a_workers_own_state_is_that_of_the_cut(threads: Callable[..., Threads]) -> None:
    first = threads(workers=1, every=3600.0)
    model = Counts()
    client = first.client("worker-0", model, seed=None)
    mine = Remembering()
    client.register("mine", mine)
    with pytest.raises(StateMismatchError, match="registered already"):
        client.register("mine", mine)
    train(client, model, until=2)
    first.coordinator.request_checkpoint()
    while client.snapshot == 0:
        mine.value += 1
        torch.manual_seed(mine.value)
        expected = torch.random.get_rng_state()
        client.pull()
    at_cut = mine.value
    mine.value = -1
    torch.manual_seed(0)
    while client.committed_snapshot == 0:
        client.pull()
    first.close()
    client.close()

    second = threads(workers=1)
    again = second.client("worker-0", model, seed=None)
    assert torch.equal(torch.random.get_rng_state(), expected)
    loaded = Remembering()
    again.register("mine", loaded)
    assert loaded.value == at_cut > 0
    again.close()


def test_an_updates_randomness_does_not_depend_on_the_worker(threads: Callable[..., Threads]) -> None:
    training = threads(workers=1)
    model = Counts()
    client = training.client("worker-0", model)
    client.pull()
    drawn = torch.rand(1)
    torch.rand(5)
    client.reseed()
    assert torch.equal(torch.rand(1), drawn)
    client.close()


def test_the_remote_optimizer_takes_a_closure(threads: Callable[..., Threads]) -> None:
    training = threads(workers=1)
    model = Counts()
    client = training.client("worker-0", model, batches=2)
    optimizer = RemoteOptimizer(client)

    def closure() -> torch.Tensor:
        update = client.upcoming
        assert update is not None
        optimizer.zero_grad()
        loss = (-model.rows(torch.tensor(batch_of(update)))).sum()
        loss.backward()
        return loss

    for _ in client.updates():
        assert isinstance(optimizer.step(closure), torch.Tensor)
    client.finish()
    assert dict(training.run.result(LIMIT).vector) == {0: 2, 1: 2}
    assert_counts(training.coordinator.store)
    with pytest.raises(KeyError):
        torch.optim.lr_scheduler.StepLR(optimizer, 1)


def test_misuse_is_explained(threads: Callable[..., Threads]) -> None:
    training = threads(workers=1)
    client = training.client("worker-0", batches=1)
    with pytest.raises(CheckpointError, match="nothing was pulled"):
        client.push()
    updates = client.updates()
    next(updates)
    with pytest.raises(CheckpointError, match="was not pushed"):
        next(updates)
    for _ in range(2):
        client.pull()
        client.push({})
    with pytest.raises(CheckpointError, match="no batch left"):
        client.pull()
    client.close()


def test_who_does_not_belong_here_is_refused(threads: Callable[..., Threads]) -> None:
    training = threads(workers=1)
    with pytest.raises(CheckpointError, match="no worker of that name"):
        training.client("worker-7")
    client = training.client("worker-0")
    with pytest.raises(CheckpointError, match="was here before"):
        training.client("worker-0")
    client.close()


def test_another_division_into_blocks_is_refused(threads: Callable[..., Threads]) -> None:
    first = threads(workers=1)
    first.finish()
    checkpoint = first.coordinator.store.newest()
    assert checkpoint is not None
    parameters = dict(Counts().named_parameters())
    with checkpoint, pytest.raises(StateMismatchError, match="max_block_bytes"):
        checkpoint.load_into(ServerState(parameters, make_optimizer), BlockTable(parameters.items()))


def test_another_number_of_streams_is_refused(threads: Callable[..., Threads], tmp_path: Path) -> None:
    threads(workers=1).finish()
    transport = SocketTransport(COORDINATOR)
    with pytest.raises(InconsistentCutError, match="is of 2 streams, and the training has 3"):
        TrainingCoordinator(transport, tmp_path, streams=3, shards=["shard-0"], workers=["worker-0"])
    transport.close()


def test_a_process_of_an_earlier_life_changes_nothing(threads: Callable[..., Threads]) -> None:
    training = threads(workers=1)
    server = training.servers[0]
    zombie = SocketTransport("worker-0")
    zombie.start(lambda peer, frame: None, lambda peer: None)
    zombie.connect("shard-0", server._transport.address)
    before = {name: tensor.detach().clone() for name, tensor in server.state.parameters.items()}
    name = next(iter(before))
    header = PushHeader(MessageTag(0, 99), UpdateId(0, 1), 1)
    push = Frame({"kind": "push", "header": encode_message(header)}, {name: torch.ones_like(before[name])})
    answer = zombie.request("shard-0", push).result(LIMIT)
    assert answer.content["kind"] == "stale"
    pull = zombie.request("shard-0", Frame({"kind": "pull", "tag": [0, 99]})).result(LIMIT)
    assert pull.content["kind"] == "stale"
    assert not pull.tensors
    assert all(torch.equal(tensor, before[name]) for name, tensor in server.state.parameters.items())
    assert server.version == 0
    zombie.close()


def test_a_shard_of_an_earlier_life_stops(threads: Callable[..., Threads]) -> None:
    training = threads(workers=1)
    ahead = SocketTransport("worker-0")
    ahead.start(lambda peer, frame: None, lambda peer: None)
    ahead.connect("shard-1", training.servers[1]._transport.address)
    ahead.send("shard-1", Frame({"kind": "pull", "tag": [10**6, 1]}))
    with pytest.raises(CheckpointError, match="generation"):
        training.serving[1].result(LIMIT)
    ahead.close()


def test_no_two_starts_have_the_same_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CutStore(tmp_path)
    both_have_looked = threading.Barrier(2)
    have_looked: set[int] = set()
    listdir = os.listdir

    def look(directory: str) -> list[str]:
        found = listdir(directory)
        if threading.get_ident() not in have_looked:
            have_looked.add(threading.get_ident())
            both_have_looked.wait(LIMIT)
        return found

    monkeypatch.setattr(os, "listdir", look)
    with ThreadPoolExecutor(2) as pool:
        claimed = list(pool.map(lambda _: store.claim_generation(), range(2)))
    assert sorted(claimed) == [1, 2]
    monkeypatch.undo()  # loading what serves a URL lists directories, too, and would wait for somebody else
    with pytest.raises(CheckpointError, match="pass generation="):
        CutStore("memory://somewhere").claim_generation()


# ---- the transport ---------------------------------------------------------------------------------------------------


def test_requests_are_answered_and_a_lost_peer_is_reported() -> None:
    lost = threading.Event()
    one, other = SocketTransport("one"), SocketTransport("other")
    one.start(lambda peer, frame: None, lambda peer: lost.set() if peer.name == "other" else None)
    other.start(lambda peer, frame: Frame({"to": peer.name}, frame.tensors), lambda peer: None)
    one.connect("other", other.address)
    answers = [one.request("other", Frame({}, {"a": torch.full((2,), float(n))})) for n in range(20)]
    assert [answer.result(LIMIT).tensors["a"][0].item() for answer in answers] == [float(n) for n in range(20)]
    assert answers[0].result().content == {"to": "one"}
    other.close()
    assert lost.wait(LIMIT)
    with pytest.raises(PeerLostError):
        one.request("nobody", Frame({}))
    one.close()


def test_what_was_sent_leaves_before_the_end() -> None:
    received: list[int] = []
    done = threading.Event()
    one, other = SocketTransport("one"), SocketTransport("other")

    def take(peer: Peer, frame: Frame) -> None:
        received.append(frame.content["number"])

    one.start(lambda peer, frame: None, lambda peer: None)
    other.start(take, lambda peer: done.set())
    one.connect("other", other.address)
    for number in range(50):
        one.send("other", Frame({"number": number}, {"ballast": torch.zeros(200_000)}))
    one.close()
    assert done.wait(LIMIT)
    assert received == list(range(50))
    other.close()
