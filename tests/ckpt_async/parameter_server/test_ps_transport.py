"""Who may connect, what strangers and broken frames can do (nothing), and how a silent process is noticed."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from ckpt_async.consistent_cut import COORDINATOR, CutOptions
from ckpt_async.parameter_server import (
    CutStore,
    Frame,
    ParameterServer,
    Peer,
    PeerLostError,
    SocketTransport,
    TrainingCoordinator,
    Transport,
    participant,
    sockets,
)
from ckpt_async.parameter_server import transport as transports
from ckpt_async.parameter_server.frames import encode_frame
from ckpt_async.parameter_server.secret import find_secret
from ckpt_async.parameter_server.sockets import dial, split_address
from ckpt_core.errors import CheckpointError
from tests.chaos.cut_campaign import wait_for_checkpoints
from tests.chaos.cut_cluster import Cluster
from tests.chaos.cut_training import Job
from tests.ckpt_async.parameter_server.training_threads import Counts, Threads, assert_counts, train

LIMIT = 200.0
SECRET, OTHER = "a secret of the training", "a secret of somebody else"
SILENCE = 6.0  # seconds, the shortest that is allowed
ENVELOPE = {"from": "worker-0", "instance": "", "number": None, "body": {"kind": "exit", "reason": None}}


@pytest.fixture
def start() -> Iterator[Callable[..., SocketTransport]]:
    """Make transports that answer each question with its words and tensors; close them at the end."""
    opened = []

    def start(name: str = "one", *arguments: str, **options: object) -> SocketTransport:
        transport = SocketTransport(name, *arguments, **{"secret": SECRET, **options})  # type: ignore[arg-type]
        opened.append(transport)
        transport.start(lambda peer, frame: Frame({"said": frame.content}, frame.tensors), lambda peer: None)
        return transport

    yield start
    for transport in opened:
        transport.close()


def ask(one: SocketTransport, other: SocketTransport, frame: Frame | None = None) -> Frame:
    one.connect(other.name, other.address)
    return one.request(other.name, frame or Frame({})).result(LIMIT)


def call(address: str) -> socket.socket:
    connection = socket.create_connection(split_address(address))
    connection.settimeout(LIMIT)
    return connection


def is_hung_up(connection: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        while connection.recv(4096):
            pass
    return True


def framed(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def a_frame(content: object, tensors: dict[str, torch.Tensor] | None = None) -> bytes:
    return framed(bytes(encode_frame(Frame(content, tensors or {}))))  # type: ignore[arg-type]


def a_frame_of_depth(depth: int) -> bytes:
    text = json.dumps({"content": 0, "tensors": [], "sparse": {}})
    head = text.replace('"content": 0', f'"content": {"[" * depth}{"]" * depth}').encode()
    return framed(struct.pack("<Q", len(head)) + head)


STRANGERS = {
    "nothing": b"",
    "web": b"GET / HTTP/1.0\r\n\r\n",
    "ssh": b"SSH-2.0-x\r\n",
    "tls": bytes.fromhex("160301020001000100"),
    "dns": bytes.fromhex("000C0000100000000000000000"),
    "long": struct.pack("<Q", 2**40),
    "frame": a_frame(ENVELOPE),
    "push": a_frame({**ENVELOPE, "body": {"kind": "push", "header": {}}}, {"rows.weight[0:4]": torch.ones(4, 2)}),
    "hello": b"ckpt-ps2" + bytes(64),
    "hello and frame": b"ckpt-ps2" + bytes(64) + a_frame(ENVELOPE),
    "half a hello": b"ckpt",
}


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop strangers sooner."""
    monkeypatch.setattr(sockets, "_PATIENCE", 2.0)


@pytest.mark.usefixtures("_impatient")
def test_strangers_change_nothing(threads: Callable[..., Threads]) -> None:
    training = threads(workers=1)
    client = training.client("worker-0")
    addresses = [
        training.address,
        *(server._transport.address for server in training.servers),
        client._transport.address,
    ]
    open_connections = []
    for address in addresses:
        for said in STRANGERS.values():
            for is_patient in (False, True):
                connection = call(address)
                with contextlib.suppress(ConnectionError):
                    connection.sendall(said)
                if is_patient:
                    open_connections.append(connection)
                else:
                    connection.close()
    model = Counts()
    client.parameters = dict(model.named_parameters())
    train(client, model)
    client.finish()
    assert dict(training.run.result(LIMIT).vector) == {0: 12, 1: 12}
    assert assert_counts(training.coordinator.store) >= 1
    for connection in open_connections:
        assert is_hung_up(connection)
        connection.close()


@pytest.mark.usefixtures("_impatient")
def test_who_stays_silent_costs_no_thread_and_is_dropped(
    start: Callable[..., SocketTransport], caplog: pytest.LogCaptureFixture
) -> None:
    one = start("one")
    before = threading.active_count()
    strangers = [call(one.address) for _ in range(200)]
    assert ask(start("two"), one).content == {"said": {}}, "there is room for who knows the secret"
    assert threading.active_count() < before + 10
    assert len(one._listener._strangers) <= 64
    assert all(map(is_hung_up, strangers))
    for stranger in strangers:
        stranger.close()
    assert one._listener.rejected == 200
    assert "128 connections to" in caplog.text
    assert len(caplog.records) == 8, "a stranger cannot fill the log"


def test_what_was_overheard_is_of_no_use(start: Callable[..., SocketTransport]) -> None:
    one, two = start("one"), start("two")
    listening = socket.create_server(("127.0.0.1", 0))
    heard = b""

    def overhear() -> None:
        """Relay one handshake between the two, and record it."""
        nonlocal heard
        near, _ = listening.accept()
        with near, call(one.address) as far:
            near.sendall(far.recv(40, socket.MSG_WAITALL))
            heard = near.recv(72, socket.MSG_WAITALL)
            far.sendall(heard)
            near.sendall(far.recv(32, socket.MSG_WAITALL))
            far.shutdown(socket.SHUT_RDWR)

    thread = threading.Thread(target=overhear)
    thread.start()
    two.connect("one", f"127.0.0.1:{listening.getsockname()[1]}")
    with pytest.raises(PeerLostError):
        two.request("one", Frame({})).result(LIMIT)
    thread.join()
    listening.close()
    for said in (heard, heard[:40] + heard[40:][::-1]):
        with call(one.address) as connection:
            connection.sendall(said)
            assert connection.recv(40, socket.MSG_WAITALL).startswith(b"ckpt-ps2")
            assert connection.recv(32, socket.MSG_WAITALL) == bytes(32)
            assert is_hung_up(connection)


def test_another_secret_is_refused_at_once_and_explained(start: Callable[..., SocketTransport]) -> None:
    one, two = start("one"), start("two", secret=OTHER)
    with pytest.raises(PeerLostError, match="has another secret than that in secret=") as caught:
        ask(two, one)
    assert "CKPT_SECRET_FILE" in str(caught.value)


def test_who_asks_after_a_refusal_hears_the_reason_too(start: Callable[..., SocketTransport]) -> None:
    one, two = start("one"), start("two", secret=OTHER)
    two.connect(one.name, one.address)
    connection = two._to(one.name)
    ends = time.monotonic() + LIMIT
    while not connection.lost and time.monotonic() < ends:
        time.sleep(0.01)
    with pytest.raises(PeerLostError, match="has another secret than that in secret=") as caught:
        connection.put(bytearray())
    assert "CKPT_SECRET_FILE" in str(caught.value)


def test_nothing_is_said_to_an_impostor(start: Callable[..., SocketTransport]) -> None:
    one = start("one")
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        one.connect("two", f"127.0.0.1:{impostor.getsockname()[1]}")
        answer = one.request("two", Frame({"private": "gradients"}))
        connection, _ = impostor.accept()
        with connection:
            connection.settimeout(LIMIT)
            connection.sendall(b"ckpt-ps2" + bytes(32))
            assert len(connection.recv(72, socket.MSG_WAITALL)) == 72
            connection.sendall(b"\1" * 32)
            assert connection.recv(1) == b"", "no frame follows"
    with pytest.raises(PeerLostError, match="has another secret"):
        answer.result(LIMIT)


def test_a_secret_is_needed_where_others_can_connect(
    start: Callable[..., SocketTransport], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CKPT_SECRET")
    with pytest.raises(CheckpointError, match="no secret that keeps strangers out") as caught:
        SocketTransport("one", "0.0.0.0:0", advertise="localhost")
    assert "token_hex" in str(caught.value)
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    monkeypatch.setenv("CKPT_SECRET_FILE", str(tmp_path / "secret"))
    one = start("one", "0.0.0.0:0", advertise="localhost", secret=None)
    assert ask(start("two", secret=tmp_path / "secret"), one).content == {"said": {}}
    monkeypatch.setenv("CKPT_SECRET", SECRET)
    assert ask(start("three", secret=None), one).content == {"said": {}}
    for given in ("short", tmp_path / "no such file"):
        with pytest.raises(CheckpointError, match=r"16 are the least|cannot be read"):
            SocketTransport("one", secret=given)


def _find(_: int) -> bytes:
    return find_secret(None, address="", is_loopback=True).proof(b"", b"", b"")


def test_processes_of_one_user_share_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CKPT_SECRET")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with multiprocessing.get_context("fork").Pool(8) as pool:
        assert len(set(pool.map(_find, range(16)))) == 1
    file = tmp_path / "state" / "ckpt" / "parameter_server_secret"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert os.listdir(file.parent) == [file.name]


def test_a_file_that_others_can_read_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CKPT_SECRET")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    first = _find(0)
    file = tmp_path / "state" / "ckpt" / "parameter_server_secret"
    file.chmod(0o644)
    assert _find(0) != first
    other = tmp_path / "tmp" / f"ckpt-{os.getuid()}"
    assert stat.S_IMODE(other.stat().st_mode) == 0o700
    other.chmod(0o777)
    with pytest.raises(CheckpointError, match="closed to others"):
        _find(0)


# ---- frames ----------------------------------------------------------------------------------------------------------


def test_memory_is_bounded_by_what_was_received(start: Callable[..., SocketTransport]) -> None:
    one = start("one")
    connection = dial(one.address, one._listener.secret, LIMIT, threading.Event())

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    connection.sendall(struct.pack("<Q", 2**30) + bytes(100_000))
    assert ask(start("two"), one).content == {"said": {}}
    time.sleep(0.2)
    assert resident() - before < 100 * 2**20
    connection.close()


@pytest.mark.parametrize(
    "said",
    [
        a_frame_of_depth(100_000),
        a_frame([]),
        a_frame({"from": "x"}),
        a_frame({**ENVELOPE, "body": None}),
        framed(b"\xff" * 100),
        struct.pack("<Q", 2**63),
    ],
)
def test_a_broken_frame_ends_its_connection_and_nothing_else(
    start: Callable[..., SocketTransport], monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    uncaught: list[object] = []
    monkeypatch.setattr(threading, "excepthook", uncaught.append)

    def handle(peer: object, frame: Frame) -> Frame:
        return Frame({"number": frame.content["number"] + 1})

    one = SocketTransport("one", secret=SECRET)
    one.start(handle, lambda peer: None)
    connection = dial(one.address, one._listener.secret, LIMIT, threading.Event())
    connection.sendall(said)
    connection.shutdown(socket.SHUT_WR)
    assert is_hung_up(connection)
    connection.close()
    assert ask(start("two"), one, Frame({"number": 1})).content == {"number": 2}
    one.close()
    assert uncaught == []


def test_an_answer_that_cannot_be_read_is_an_error_for_who_waits(start: Callable[..., SocketTransport]) -> None:
    one = start("one")
    with pytest.raises(ValueError, match="is no address"):
        one.connect("two", "127.0.0.1")
    one._encode = lambda frame, number: bytearray(b"rubbish")  # type: ignore[method-assign]
    with pytest.raises(PeerLostError, match="not a frame"):
        ask(start("two"), one)


def test_large_frames_come_through(start: Callable[..., SocketTransport]) -> None:
    tensor = torch.arange(8_000_000)
    answer = ask(start("one"), start("two"), Frame({}, {"large": tensor, "empty": torch.empty(0)}))
    assert torch.equal(answer.tensors["large"], tensor)


# ---- addresses -------------------------------------------------------------------------------------------------------


def test_what_is_advertised_can_be_reached(start: Callable[..., SocketTransport]) -> None:
    with pytest.raises(ValueError, match="pass advertise="):
        SocketTransport("one", "0.0.0.0:0", secret=SECRET)
    one = start("one", "0.0.0.0:0", advertise="localhost")
    port = split_address(one.address)[1]
    assert one.address == f"localhost:{port}"
    assert ask(start("two"), one).content == {"said": {}}
    assert start("three", advertise="gateway:7000").address == "gateway:7000"


def test_ipv6(start: Callable[..., SocketTransport], unavailable: Callable[[str], NoReturn]) -> None:
    try:
        one = start("one", "[::1]:0")
    except OSError as error:
        unavailable(f"no IPv6: {error}")
    assert one.address.startswith("[::1]:")
    assert ask(start("two"), one).content == {"said": {}}


def test_a_name_that_is_not_known_yet_is_waited_for(
    start: Callable[..., SocketTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = start("one", advertise="a-machine-of-the-training")
    look_up, asked = socket.getaddrinfo, []

    def answer_the_third_time(host: object, *arguments: object, **options: object) -> object:
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return look_up("127.0.0.1", *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", answer_the_third_time)
    assert ask(start("two"), one).content == {"said": {}}
    assert asked == ["a-machine-of-the-training"] * 3


# ---- what goes wrong on the way --------------------------------------------------------------------------------------


def test_a_moment_without_a_descriptor_is_survived(fork_script: Callable[..., object]) -> None:
    fork_script("""
        import logging, os, resource, socket, sys, time
        from ckpt_async.parameter_server import Frame, SocketTransport

        logging.basicConfig(stream=sys.stdout)
        one, two = SocketTransport("one"), SocketTransport("two")
        for transport in (one, two):
            transport.start(lambda peer, frame: Frame({"said": frame.content}), lambda peer: None)
        host, port = one.address.rsplit(":", 1)
        waiting = socket.socket()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
        taken = []
        try:
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            waiting.connect((host, int(port)))
        while not one._listener._has_complained:
            time.sleep(0.01)
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        two.connect("one", one.address)
        assert two.request("one", Frame({"a": 1})).result(200).content == {"said": {"a": 1}}
        one.close()
        two.close()
        """)


class ImpatientCluster(Cluster):
    """A cluster whose processes take each other for lost after the shortest silence that is allowed."""

    def _transport(self, name: str) -> Transport:
        return SocketTransport(name, silence_timeout=SILENCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shard-1", COORDINATOR])
def test_a_frozen_server_ends_the_training_and_is_named(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transports, "_BEAT_SECONDS", 0.5)
    monkeypatch.setattr(transports, "_LINGER", 2.0)
    monkeypatch.setattr(participant, "_WATCH_SECONDS", 0.5)
    options = CutOptions(on_worker_failure="rollback", snapshot_timeout=3600.0)
    job = Job(str(tmp_path / "checkpoints"), epochs=500, options=options)
    cluster = ImpatientCluster(job, tmp_path / "log")
    frozen = cluster.processes[name]
    try:
        assert wait_for_checkpoints(CutStore(job.root), 1, LIMIT), cluster.logs()
        os.kill(frozen.pid, signal.SIGSTOP)  # type: ignore[arg-type]
        for process in cluster.processes.values():
            if process is not frozen:
                process.join(LIMIT)
        codes = {other: process.exitcode for other, process in cluster.processes.items()}
        os.kill(frozen.pid, signal.SIGCONT)  # type: ignore[arg-type]
        frozen.join(LIMIT)  # the process that was taken for dead stops as well
        assert frozen.exitcode == 1, cluster.logs()
    finally:
        cluster.kill()
    assert codes == {**dict.fromkeys(codes, 1), name: None}, cluster.logs()
    log = (cluster.log / ("shard-0.log" if name == COORDINATOR else f"{COORDINATOR}.log")).read_text()
    assert f"lost {name}" in log or f"{name} was lost" in log
    assert f"has lost {name} at" in cluster.logs()
    assert "nothing was heard from it for 6 s" in cluster.logs()


def test_a_long_answer_is_waited_for(start: Callable[..., SocketTransport], monkeypatch: pytest.MonkeyPatch) -> None:
    may_answer = threading.Event()
    monkeypatch.setattr(transports, "_BEAT_SECONDS", 0.5)
    slow = SocketTransport("slow", secret=SECRET)
    slow.start(lambda peer, frame: Frame({"done": may_answer.wait(LIMIT)}), lambda peer: None)
    one = start("one", silence_timeout=SILENCE)
    one.connect("slow", slow.address)
    answer = one.request("slow", Frame({}))
    time.sleep(SILENCE + 2)
    assert not answer.done()
    may_answer.set()
    assert answer.result(LIMIT).content == {"done": True}
    slow.close()


def test_a_coordinator_that_reads_a_checkpoint_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, transport = threading.Event(), SocketTransport(COORDINATOR)

    def take_long(_: CutStore) -> None:
        assert asked.wait(LIMIT), "nobody could connect while the checkpoint was read"

    monkeypatch.setattr(CutStore, "newest", take_long)
    receive = TrainingCoordinator._receive

    def notice(self: TrainingCoordinator, peer: Peer, frame: Frame) -> Frame | None:
        asked.set()
        return receive(self, peer, frame)

    monkeypatch.setattr(TrainingCoordinator, "_receive", notice)
    with ThreadPoolExecutor(1) as pool:
        model, sgd = Counts(), lambda parameters: torch.optim.SGD(parameters, lr=1.0)
        shard = SocketTransport("s0", connect_timeout=LIMIT)
        server = pool.submit(ParameterServer, shard, transport.address, model, sgd)
        coordinator = TrainingCoordinator(transport, tmp_path, streams=1, shards=["s0"], workers=["w0"])
        assert server.result(LIMIT).training.generation == 1
        server.result().close()
        coordinator._fail("the test is over")
        with pytest.raises(CheckpointError, match=r"the test is over|s0 was lost"):
            coordinator.run()


def test_the_least_silence_is_said() -> None:
    with pytest.raises(ValueError, match="at least 6"):
        SocketTransport("one", silence_timeout=1.0)
