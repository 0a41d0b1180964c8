"""Uploads to S3 in parts: what is sent again is sent whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import stamina

from ckpt_core.storage.remote import remote_storage
from tests.support.fault_proxy import HttpFault, start_proxy
from tests.support.server_fixtures import server_of, servers
from tests.support.servers import Server

__all__ = ["server_of", "servers"]

CONTENT = os.urandom(11 * 2**20)  # three parts of the smallest size that S3 takes


@pytest.fixture(autouse=True)
def _small_parts_and_no_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("ckpt_core.storage.parts.PART_BYTES", 5 * 2**20)
    stamina.set_testing(True, attempts=4, cap=True)
    yield
    stamina.set_testing(False)


@pytest.mark.parametrize("size", [len(CONTENT), 3 * 2**20], ids=["parts", "one request"])
def test_what_is_sent_again_is_sent_whole(size: int, server_of: Callable[[str], Server]) -> None:
    server = server_of("moto")
    path = f"{server.new_bucket()}/a"
    direct = remote_storage(path, dict(server.options))
    with start_proxy(server.endpoint) as proxy:
        faulty = remote_storage(path, {**server.options, "endpoint_url": proxy.endpoint})

        def upload() -> list[str]:
            writer = faulty.create(path, size)
            writer.write_at(0, memoryview(bytearray(CONTENT[:size])))
            writer.commit(size)
            return [request for request in proxy.requests if request.startswith("PUT")]

        upload()  # the first takes more requests
        proxy.plan(None)
        sent = upload()
        requests = list(proxy.requests)
        assert len(sent) == (3 if size > 5 * 2**20 else 1)
        for kind in ("503", "lost reply"):
            for number, request in enumerate(requests, 1):
                if request.startswith("PUT"):
                    proxy.plan(HttpFault(kind, number))
                    assert len(upload()) > len(sent)
                    with direct.open(path) as reader:
                        found = bytearray(reader.size)
                        reader.read_into(0, memoryview(found))
                    assert found == CONTENT[:size], (kind, request)
