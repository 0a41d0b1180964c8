"""How many requests the load of a file takes: each takes its time, however few bytes it is about."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from ckpt_core import CheckpointCorruptedError, Checkpointer, StorageError
from ckpt_core._pipeline.loading import verify
from ckpt_core.storage import storage_for
from tests.support.fault_proxy import FaultProxy, start_proxy
from tests.support.server_fixtures import server_of, servers
from tests.support.servers import Server
from tests.support.states import assert_same_state, tensor_of

__all__ = ["server_of", "servers"]

MIB = 2**20


def state_of(tensors: int, nbytes: int) -> dict[str, Any]:
    return {
        "state_dict": {
            f"layer.{i}.{name}": tensor_of(torch.uint8, size)
            for i in range(tensors)
            for name, size in (("empty", 0), ("weight", nbytes))
        },
        "step": 7,
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("tensors", "nbytes", "expected"),
    [
        (0, 0, 2),  # for its size and its end
        (1, 40 * MIB, 2 + 3),  # in windows of 16 MiB
        (100, 200_000, 2 + 3),  # in reads of 8 MiB at the most
        (12, 3 * MIB, 2 + 6),
        (1500, 10, 3 + 2),  # its end is longer than the first read
    ],
)
@pytest.mark.parametrize("backend", ["fsspec", "obstore"])
def test_a_load(backend: str, tensors: int, nbytes: int, expected: int, server_of: Callable[[str], Server]) -> None:
    server = server_of("moto")
    path = f"{server.new_bucket()}/a.ckpt"
    state = state_of(tensors, nbytes)
    with Checkpointer(strategy="sync", storage_options=dict(server.options)) as checkpointer:
        checkpointer.save(state, path)
    with start_proxy(server.endpoint) as proxy:
        options: dict[str, Any] = {**server.options, "endpoint_url": proxy.endpoint, "backend": backend}
        checkpointer = Checkpointer(strategy="sync", storage_options=options)
        for action in (lambda: checkpointer.load(path), lambda: verify(path, storage_options=options)):
            action()
            proxy.plan(None)
            result = action()
            assert len(asked(proxy)) == expected, asked(proxy)
            if result is not True:
                assert_same_state(result, state)


def asked(proxy: FaultProxy) -> list[str]:
    return [request for request in proxy.requests if request.startswith(("GET", "HEAD"))]


@pytest.mark.parametrize("at", ["a header", "padding", "a tensor"])
def test_damage_in_what_is_read_together(at: str, server_of: Callable[[str], Server]) -> None:
    server = server_of("moto")
    path = f"{server.new_bucket()}/a.ckpt"
    options = dict(server.options)
    state = state_of(30, 100_000)  # one request reads all of them
    with Checkpointer(strategy="sync", storage_options=options) as checkpointer:
        checkpointer.save(state, path)
    storage: Any = storage_for(path, options)
    data = bytearray(storage.get(path))
    first = data.index(bytes(state["state_dict"]["layer.9.weight"][:64].numpy()))
    header = data.rindex(b"PK\3\4", 0, first)
    position = {"a header": header + 5, "padding": first - 1, "a tensor": first + 50_000}[at]
    assert header + 30 < first - 1
    data[position] ^= 4
    storage.put(path, bytes(data))
    for action in (lambda: checkpointer.load(path), lambda: verify(path, storage_options=options)):
        with pytest.raises(CheckpointCorruptedError) as caught:
            action()
        assert ("structure" in str(caught.value)) == (at != "a tensor")
        assert caught.value.path == path


class InChunks(BaseHTTPRequestHandler):
    """A server that does not announce how long its answer is."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(b"3\r\nabc\r\n0\r\n\r\n")

    do_HEAD = do_GET  # noqa: N815 - the base class looks for it

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def test_a_server_that_does_not_say_how_large_a_file_is() -> None:
    pytest.importorskip("aiohttp")
    with ThreadingHTTPServer(("127.0.0.1", 0), InChunks) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        with pytest.raises(StorageError, match="does not report the size of the file"):
            Checkpointer().load(f"http://127.0.0.1:{server.server_address[1]}/a.ckpt")
        server.shutdown()
        thread.join(10)
