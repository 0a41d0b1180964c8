"""Transfers past the event loop of s3fs: they take place, and whatever stands in their way the event loop takes over."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import stamina
import torch

from ckpt_core import Checkpointer
from ckpt_core.errors import StorageError
from ckpt_core.storage import s3_direct
from ckpt_core.storage.fsspec_storage import FsspecStorage
from ckpt_core.storage.remote import remote_storage
from ckpt_core.storage.s3_parts import S3Upload
from tests.ckpt_core.storage.test_s3_tls import certificate
from tests.support.fault_proxy import HttpFault, start_proxy
from tests.support.server_fixtures import server_of, servers
from tests.support.servers import Server, start_rclone

__all__ = ["server_of", "servers"]

ServerOf = Callable[[str], Server]
CONTENT = os.urandom(3 * 2**20 + 17)


@pytest.fixture(autouse=True)
def _no_pauses() -> Iterator[None]:
    stamina.set_testing(True, attempts=4, cap=True)
    yield
    stamina.set_testing(False)


class Taken:
    """Counts what the event loop takes over: reads of ranges and parts sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads = self.parts = 0
        ordinary, call = s3_direct_free_read(), S3Upload._call

        async def read_range(*arguments: Any) -> int:
            self.reads += 1
            return await ordinary(*arguments)

        async def call_counted(upload: S3Upload, action: str, method: str, *arguments: Any, **named: Any) -> Any:
            self.parts += method == "upload_part"
            return await call(upload, action, method, *arguments, **named)

        monkeypatch.setattr("ckpt_core.storage.fsspec_storage.read_range", read_range)
        monkeypatch.setattr(S3Upload, "_call", call_counted)


def s3_direct_free_read() -> Any:
    from ckpt_core.storage.s3_reading import read_range

    return read_range


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Taken:
    return Taken(monkeypatch)


def read(storage: FsspecStorage, path: str, begin: int = 0, end: int = len(CONTENT)) -> bytes:
    target = bytearray(end - begin)
    with storage.open(path) as reader:
        reader.read_into(begin, memoryview(target))
    return bytes(target)


def connections_of(storage: FsspecStorage) -> int:
    return sum(map(len, storage._direct._connections._idle.values()))


@pytest.mark.parametrize("kind", ["moto", "ceph", "rclone"])
def test_the_event_loop_takes_no_part_in_it(kind: str, server_of: ServerOf, taken: Taken) -> None:
    server = server_of(kind)
    path = f"{server.new_bucket()}/a.ckpt"
    state = {"w": torch.randn(10 * 2**20), "b": torch.randn(1000)}  # three parts
    with Checkpointer(strategy="sync", storage_options=dict(server.options)) as checkpointer:
        checkpointer.save(state, path)
        found = checkpointer.load(path)
        storage = checkpointer._storage_for(path)
    assert torch.equal(found["w"], state["w"])
    assert torch.equal(found["b"], state["b"])
    assert (taken.reads, taken.parts) == (0, 0)
    assert isinstance(storage, FsspecStorage)
    # They are used again, but with moto, which hangs up after each answer.
    assert connections_of(storage) in ([0] if kind == "moto" else range(1, 17))


def test_a_name_that_must_be_encoded(server_of: ServerOf, taken: Taken) -> None:
    server = server_of("moto")
    path = f"{server.new_bucket()}/ä b+c%20=&?'(é).ckpt"
    state = {"w": torch.randn(9 * 2**20)}
    with Checkpointer(strategy="sync", storage_options=dict(server.options)) as checkpointer:
        checkpointer.save(state, path)
        assert torch.equal(checkpointer.load(path)["w"], state["w"])
    assert (taken.reads, taken.parts) == (0, 0)


def test_after_failures_the_event_loop_takes_over_for_a_while(server_of: ServerOf, taken: Taken) -> None:
    server = server_of("moto")
    path = f"{server.new_bucket()}/a"
    remote_storage(path, dict(server.options)).put(path, CONTENT)  # type: ignore[attr-defined]
    with start_proxy(server.endpoint) as proxy:
        options = {**server.options, "endpoint_url": proxy.endpoint, "config_kwargs": {"read_timeout": 1.0}}
        storage = remote_storage(path, options)
        assert isinstance(storage, FsspecStorage)

        def taken_of(reads: int) -> int:
            before = taken.reads
            for number in range(reads):
                assert read(storage, path, number, number + 1000) == CONTENT[number : number + 1000]
            return taken.reads - before

        assert taken_of(3) == 0
        for kind in ("reset", "lost reply"):
            proxy.plan(HttpFault(kind, 2))  # after the one that asks for the size
            assert taken_of(3) == 0, "a connection that was open before may have been closed by the server"
        for kind in ("503", "cut reply"):
            proxy.plan(HttpFault(kind, 2))
            assert taken_of(1) == 1, kind
            assert taken_of(2) == 2, "the next two are not tried"
            assert taken_of(3) == 0, "then it goes on"
        storage._direct._skipped = 0
        for _ in range(2):  # one that is silent for a second is not tried on another connection
            proxy.plan(HttpFault("hang", 2))
            assert taken_of(1) == 1
            storage._direct._skipped = 0
        assert taken_of(1) == 0
        for expected in (2, 4, 8):
            proxy.plan(HttpFault("503", 2))
            before = taken.reads
            read(storage, path)
            proxy.plan(None)
            assert taken.reads == before + 1
            for _ in range(expected):
                read(storage, path)
            assert taken.reads == before + 1 + expected, "twice as long after each failure in a row"
        assert taken_of(1) == 0


def test_a_part_that_fails_is_sent_by_the_event_loop(
    server_of: ServerOf, taken: Taken, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_core.storage.parts.PART_BYTES", 5 * 2**20)
    server = server_of("moto")
    path = f"{server.new_bucket()}/a"
    content = os.urandom(11 * 2**20)
    with start_proxy(server.endpoint) as proxy:
        storage = remote_storage(path, {**server.options, "endpoint_url": proxy.endpoint})
        assert isinstance(storage, FsspecStorage)

        def upload() -> int:
            before = taken.parts
            writer = storage.create(path, len(content))
            writer.write_at(0, memoryview(bytearray(content)))
            writer.commit(len(content))
            return taken.parts - before

        assert upload() == 0
        proxy.plan(None)
        upload()
        first = next(n for n, request in enumerate(proxy.requests, 1) if request.startswith("PUT"))
        proxy.plan(HttpFault("503", first))
        assert 1 <= upload() <= 3, "it, and those that are begun later, which are not tried"
        assert read(storage, path, 0, len(content)) == content
        storage._direct._skipped = 0
        assert upload() == 0
        for kind in ("reset", "lost reply"):
            proxy.plan(HttpFault(kind, first))
            assert upload() == 0, "a connection that was open before may have been closed by the server"
            assert len(proxy.requests) > first
            assert read(storage, path, 0, len(content)) == content


class Whole(BaseHTTPRequestHandler):
    """A server that knows no ranges, and hangs up after each answer without saying so."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.server.content)))  # type: ignore[attr-defined]
        self.end_headers()
        if self.command == "GET":
            self.server.received.append(self.headers.get("Range"))  # type: ignore[attr-defined]
            with contextlib.suppress(OSError):  # the client has seen enough
                self.wfile.write(self.server.content)  # type: ignore[attr-defined]
        self.close_connection = True

    do_HEAD = do_GET  # noqa: N815 - the base class looks for it

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextlib.contextmanager
def whole_object_server(content: bytes) -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Whole)
    server.content, server.received = content, []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def anonymous(server: ThreadingHTTPServer) -> FsspecStorage:
    options = {"anon": True, "endpoint_url": f"http://127.0.0.1:{server.server_address[1]}"}
    storage = remote_storage("s3://bucket/a", options)
    assert isinstance(storage, FsspecStorage)
    return storage


def test_a_server_that_knows_no_ranges(taken: Taken) -> None:
    with whole_object_server(CONTENT) as server:
        storage = anonymous(server)
        memory = bytearray(3000)
        with storage.open("s3://bucket/a") as reader:
            reader.read_into(7, memoryview(memory)[:1000])
        assert memory[:1000] == CONTENT[7:1007]
        assert memory[1000:] == bytes(2000), "nothing is written behind the end"
        assert taken.reads == 1
        assert connections_of(storage) == 0, "one in which the rest of the object is under way is not used again"


def test_a_connection_that_the_server_has_closed_is_replaced(taken: Taken) -> None:
    with whole_object_server(CONTENT) as server:
        storage = anonymous(server)
        for _ in range(3):
            assert read(storage, "s3://bucket/a") == CONTENT
            assert connections_of(storage) == 1
        assert server.received == [f"bytes=0-{len(CONTENT) - 1}"] * 3  # type: ignore[attr-defined]
    assert taken.reads == 0


def test_connections_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch, server_of: ServerOf, taken: Taken) -> None:
    server = server_of("rclone")
    path = f"{server.new_bucket()}/a"
    storage = remote_storage(path, dict(server.options))
    assert isinstance(storage, FsspecStorage)
    storage.put(path, CONTENT)
    read(storage, path)
    (idle,) = storage._direct._connections._idle.values()
    kept = idle[-1].connection
    read(storage, path)
    assert idle[-1].connection is kept
    monkeypatch.setattr(s3_direct, "_IDLE_SECONDS", 0.0)
    assert read(storage, path) == CONTENT
    assert [entry.connection is kept for entry in idle] == [False]
    assert kept.sock is None, "closed"
    assert taken.reads == 0


def test_through_a_proxy_of_the_environment_only_the_event_loop_goes(
    server_of: ServerOf, taken: Taken, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = server_of("moto")
    path = f"{server.new_bucket()}/a"
    storage = remote_storage(path, dict(server.options))
    assert isinstance(storage, FsspecStorage)
    storage.put(path, CONTENT)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # the client has looked already
    monkeypatch.setenv("NO_PROXY", "example.org")
    assert read(storage, path) == CONTENT
    assert taken.reads == 1
    assert connections_of(storage) == 0


def test_certificates(tmp_path: Path, taken: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    trusted = certificate(tmp_path / "certificate.pem")
    (tmp_path / "server").mkdir()
    with start_rclone(tmp_path / "server", trusted) as server:
        bucket = server.new_bucket()
        path = f"{bucket}/a"
        open_options = {name: value for name, value in server.options.items() if name != "client_kwargs"}

        def storage_with(**options: Any) -> FsspecStorage:
            storage = remote_storage(path, {**open_options, **options})
            assert isinstance(storage, FsspecStorage)
            return storage

        storage_with(client_kwargs={"verify": str(trusted)}).put(path, CONTENT)
        for number, settings in enumerate([{"verify": str(trusted)}, {"verify": False}]):
            storage = storage_with(client_kwargs=settings, default_block_size=2**20 + number)
            assert read(storage, path) == CONTENT
            assert connections_of(storage) == 1
        with monkeypatch.context() as environment:
            environment.setenv("AWS_CA_BUNDLE", str(trusted))
            storage = storage_with(default_block_size=2**21)
            assert read(storage, path) == CONTENT
            assert connections_of(storage) == 1
        assert taken.reads == 0

        storage = storage_with()
        assert not storage._direct.read_range(storage._filesystem, path, 0, [memoryview(bytearray(10))])
        assert connections_of(storage) == 0
        with pytest.raises(StorageError):
            storage.open(path)
