"""Ranged reads of S3 into memory that is there already."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest

from ckpt_core.storage.remote import remote_storage
from ckpt_core.storage.s3_reading import read_range
from tests.support.server_fixtures import server_of, servers
from tests.support.servers import Server

__all__ = ["server_of", "servers"]

CONTENT = os.urandom(3 * 2**20 + 17)


class ServerWithoutRanges:
    """As a filesystem of s3fs whose server sends the whole object, whatever it is asked for."""

    req_kw: dict[str, str] = {}  # noqa: RUF012 - as in s3fs

    def __init__(self) -> None:
        self.sent = 0
        self.is_closed = False

    def split_path(self, path: str) -> tuple[str, str, None]:
        bucket, _, key = path.removeprefix("s3://").partition("/")
        return bucket, key, None

    async def _call_s3(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {"Body": self}

    async def read(self, count: int) -> bytes:
        found = CONTENT[self.sent : self.sent + count]
        self.sent += len(found)
        return found

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("server", ["moto", "ceph", "rclone"])
def test_what_is_asked_for_comes(server: str, server_of: Callable[[str], Server]) -> None:
    started = server_of(server)
    bucket = started.new_bucket()
    storage = remote_storage(bucket, dict(started.options))
    storage.put(f"{bucket}/a", CONTENT)  # type: ignore[attr-defined]
    with storage.open(f"{bucket}/a") as reader:
        for begin, end in ((0, len(CONTENT)), (1, 2), (2**20 - 1, 2**21 + 1), (len(CONTENT) - 1, len(CONTENT))):
            target = bytearray(end - begin)
            reader.read_into(begin, memoryview(target))
            assert target == CONTENT[begin:end], (begin, end)


def test_a_server_that_knows_no_ranges_is_found_out() -> None:
    server = ServerWithoutRanges()
    memory = bytearray(2**21)
    count = asyncio.run(read_range(server, "s3://bucket/a", 5, memoryview(memory)[: 2**20]))
    assert count > 2**20
    assert server.sent < len(CONTENT), "no more is taken than that is known"
    assert memory[2**20 :] == bytes(2**20), "nothing is written behind the end"
    assert server.is_closed
