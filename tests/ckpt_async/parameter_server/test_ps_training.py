"""Training on threads of one process: sparse pushes, a worker's own state, refusals, processes of earlier starts."""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
import time
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
    CutCheckpoint,
    CutStore,
    Frame,
    ParameterClient,
    ParameterServer,
    Peer,
    PeerLostError,
    RemoteOptimizer,
    SocketTransport,
    TrainingCoordinator,
    coordinator,
)
from ckpt_async.parameter_server.model import BlockTable
from ckpt_async.parameter_server.state import ServerState, ShadowState
from ckpt_core.errors import CheckpointError, StateMismatchError
from ckpt_core.events import SaveCommitted, SaveFailed, SaveStarted
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


def test_who_ends_before_its_data_does_is_told(
    threads: Callable[..., Threads], caplog: pytest.LogCaptureFixture
) -> None:
    training = threads(workers=1)
    model = Counts()
    with training.client("worker-0", model) as client:
        train(client, model, until=5)
        client.finish()
    assert "worker-0 ends although batch 6 of stream 0 was not pushed" in caplog.text
    assert dict(training.run.result(LIMIT).vector) == {0: 5, 1: 5}


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


def test_a_shard_reads_the_optimizers_of_its_blocks_only(
    threads: Callable[..., Threads], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = threads(workers=2)
    training.finish()
    read: list[int] = []
    participant = CutCheckpoint.participant

    def note(checkpoint: CutCheckpoint, rank: int) -> dict[str, Any]:
        read.append(rank)
        return participant(checkpoint, rank)

    monkeypatch.setattr(CutCheckpoint, "participant", note)
    for rank, server in enumerate(training.servers):
        with training.coordinator.store.newest() as checkpoint:  # type: ignore[union-attr]
            assert read == []  # all participants are verified, and none is loaded
            again = ServerState(server.state.parameters, make_optimizer)
            checkpoint.load_into(again, server.table)
        assert read == [rank]
        read.clear()
        for name, value in server.state.parameters.items():
            assert torch.equal(again.parameters[name], value) and value.any()


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
    monkeypatch.undo()  # importing a URL's filesystem lists directories, too, and would wait for another thread
    with pytest.raises(CheckpointError, match="pass generation="):
        CutStore("memory://somewhere").claim_generation()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("who", ["shard-1", "worker-0"])
def test_who_cannot_begin_says_so_and_nobody_waits_for_it(tmp_path: Path, who: str) -> None:
    """Also where its process lives on, so that its connections stay open."""
    transport = SocketTransport(COORDINATOR)
    coordinator = TrainingCoordinator(
        transport, tmp_path, streams=1, shards=["shard-0", "shard-1"], workers=["worker-0"]
    )

    def begin(name: str) -> None:
        own = SocketTransport(name, connect_timeout=5.0)
        max_block_bytes = 0 if name == who else None
        parameters = Counts().named_parameters()
        if name == "worker-0":
            ParameterClient(own, transport.address, parameters, max_block_bytes=max_block_bytes).finish()
        else:
            ParameterServer(own, transport.address, parameters, make_optimizer, max_block_bytes=max_block_bytes).run()

    with ThreadPoolExecutor(4) as pool:
        running = pool.submit(coordinator.run)
        others = {name: pool.submit(begin, name) for name in ("shard-0", "shard-1", "worker-0")}
        with pytest.raises(CheckpointError, match=f"{who} could not begin: ValueError: max_block_bytes=0"):
            running.result(LIMIT)
        for name, other in others.items():
            error = other.exception(LIMIT)
            assert isinstance(error, ValueError if name == who else CheckpointError), (name, error)


# ---- snapshots that cannot be taken ----------------------------------------------------------------------------------


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_it_is_said_why_no_snapshot_begins(
    threads: Callable[..., Threads], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "_PATIENCE", 0.1)
    training = threads(workers=2)
    client = training.client("worker-0")
    wait_for(
        lambda: (
            re.search(r"no snapshot could begin for .*: stream 1 has 0 workers$", caplog.text, re.MULTILINE) is not None
        )
    )
    client.close()


def test_a_snapshot_that_is_still_being_written_is_no_obstacle(
    threads: Callable[..., Threads], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "_PATIENCE", 0.1)
    write, goes_on = CutStore.write, threading.Event()

    def wait(*where: Any, **what: Any) -> str:
        assert goes_on.wait(LIMIT)
        return write(*where, **what)

    monkeypatch.setattr(CutStore, "write", wait)
    training = threads(workers=1)
    client = training.client("worker-0")

    def is_said() -> bool:
        client.pull()
        return "because snapshot 1 is still being written" in caplog.text

    wait_for(is_said)
    goes_on.set()
    client.close()
    assert "raise every=0.05" in caplog.text and "is not finished" not in caplog.text


def test_the_last_snapshot_is_tried_again_but_not_all_the_time(
    threads: Callable[..., Threads], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "_RETRY", 0.2)
    training = threads(workers=1, every=3600.0)
    events: list[tuple[type, float]] = []
    training.coordinator._listeners = [lambda event: events.append((type(event), time.monotonic()))]
    write = CutStore.write

    def fill_up(store: CutStore, *where: int, rank: int, **what: Any) -> str:
        if rank == 2 and len(events) < 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(store, *where, rank=rank, **what)

    monkeypatch.setattr(CutStore, "write", fill_up)
    assert dict(training.finish().vector) == {0: 12, 1: 12}
    assert [kind for kind, _ in events] == [
        SaveStarted,
        SaveFailed,
        SaveStarted,
        SaveFailed,
        SaveStarted,
        SaveCommitted,
    ]
    assert events[2][1] - events[1][1] > 0.19 and events[4][1] - events[3][1] > 0.19


def test_a_storage_that_hangs_does_not_fill_the_memory_with_copies(
    threads: Callable[..., Threads], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = threads(workers=1, every=0.01, options=CutOptions(snapshot_timeout=0.2))
    failed: list[str] = []
    training.coordinator._listeners = [
        lambda event: failed.append(event.error) if isinstance(event, SaveFailed) else None
    ]
    is_back = threading.Event()
    copies: list[ServerState] = []
    write, make = CutStore.write, ShadowState.__init__

    def hang(store: CutStore, *where: int, rank: int, **what: Any) -> str:
        if rank == 0:
            assert is_back.wait(LIMIT)
        return write(store, *where, rank=rank, **what)

    def count(shadow: ShadowState, live: ServerState, make_optimizer: Any) -> None:
        copies.append(live)
        make(shadow, live, make_optimizer)

    monkeypatch.setattr(CutStore, "write", hang)
    monkeypatch.setattr(ShadowState, "__init__", count)
    client = training.client("worker-0")
    while len(failed) < 8:
        client.pull()
    assert copies.count(training.servers[0].state) == 3
    assert "2 earlier snapshots, which were given up, are still being written" in failed[-1]
    is_back.set()
    while client.committed_snapshot == 0:
        client.pull()
    client.close()
    assert_counts(training.coordinator.store)


def test_a_start_that_was_overtaken_ends(threads: Callable[..., Threads], tmp_path: Path) -> None:
    first = threads(workers=1, every=3600.0)
    client = first.client("worker-0")
    later = threads(workers=1)
    later.finish()
    (newest, *_) = later.coordinator.store.committed()
    first.coordinator.request_checkpoint()
    with pytest.raises(CheckpointError, match=re.escape(f"a later start of this training has saved {newest}")):
        while True:
            client.pull()
    with pytest.raises(CheckpointError, match="a later start") as ended:
        first.run.result(LIMIT)
    assert "a root of its own" in str(ended.value.remedy)
    assert first.coordinator.store.committed()[0] == newest
    client.close()


@pytest.mark.parametrize("listed", [["cut-000000-00000001"], OSError("the store is away")])
def test_what_is_listed_late_is_no_later_start(
    threads: Callable[..., Threads], monkeypatch: pytest.MonkeyPatch, listed: list[str] | OSError
) -> None:
    training = threads(workers=1, every=3600.0)

    def committed(store: CutStore) -> list[str]:
        if isinstance(listed, OSError):
            raise listed
        return [os.path.join(store.root, name) for name in listed]

    monkeypatch.setattr(CutStore, "committed", committed)
    monkeypatch.setattr(CutStore, "prune", lambda store, keep: None)
    assert dict(training.finish().vector) == {0: 12, 1: 12}


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
