"""Uploads to S3 in parts: what is sent again is sent whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import stamina

from ckpt_core.errors import StorageError
from ckpt_core.storage.remote import remote_storage
from ckpt_core.storage.s3_direct import DirectTransfers
from ckpt_core.storage.s3_parts import S3Upload
from tests.support.fault_proxy import FOREIGN, HttpFault, start_proxy
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


def test_what_arrives_in_another_length_replaces_nothing(
    server_of: Callable[[str], Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = server_of("moto")
    path, source = f"{server.new_bucket()}/a", tmp_path / "a"
    storage = remote_storage(path, dict(server.options))
    source.write_bytes(CONTENT)

    def upload() -> None:
        storage.put_file(str(source), path)

    upload()
    call = S3Upload._call

    async def leave_it(*_: Any, **__: Any) -> None:
        """Send no part by a thread."""

    monkeypatch.setattr(DirectTransfers, "upload_part", leave_it)

    async def lose_half(self: S3Upload, action: str, method: str, data: Any = None, **arguments: Any) -> Any:
        if arguments.get("PartNumber") == 3:  # the last one may be of any size
            data = data[: len(data) // 2]
        return await call(self, action, method, data, **arguments)

    with monkeypatch.context() as damage:
        damage.setattr(S3Upload, "_call", lose_half)
        with pytest.raises(StorageError, match=f"has {2**19} bytes of part 3, of which {2**20} were sent") as caught:
            upload()
    assert caught.value.path == path
    with storage.open(path) as reader:
        found = bytearray(reader.size)
        reader.read_into(0, memoryview(found))
    assert found == CONTENT
    assert (
        list(storage._filesystem.call_s3("list_multipart_uploads", Bucket=path.split("/")[2]).get("Uploads", [])) == []
    )

    async def refuse(self: S3Upload, action: str, method: str, data: Any = None, **arguments: Any) -> Any:
        if method == "list_parts":
            raise StorageError("AccessDenied", path=path)
        return await call(self, action, method, data, **arguments)

    monkeypatch.setattr(S3Upload, "_call", refuse)
    upload()  # a policy that does not let one list parts is no reason not to save


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


@pytest.mark.parametrize("size", [len(CONTENT), 3 * 2**20], ids=["parts", "one request"])
def test_an_answer_in_the_place_of_the_stores_is_no_answer(size: int, server_of: Callable[[str], Server]) -> None:
    """A proxy that says 200 to everything, for a moment or for good, gets no checkpoint declared saved that is not there."""
    server = server_of("moto")
    path = f"{server.new_bucket()}/a"
    direct = remote_storage(path, dict(server.options))

    def found() -> bytes:
        with direct.open(path) as reader:
            data = bytearray(reader.size)
            reader.read_into(0, memoryview(data))
        return bytes(data)

    with start_proxy(server.endpoint) as proxy:
        faulty = remote_storage(path, {**server.options, "endpoint_url": proxy.endpoint})

        def upload(content: bytes) -> None:
            writer = faulty.create(path, len(content))
            try:
                writer.write_at(0, memoryview(bytearray(content)))
                writer.commit(len(content))
            except BaseException:
                writer.abort()
                raise

        upload(CONTENT[:size])
        proxy.plan(None)
        upload(CONTENT[:size])
        count = len(proxy.requests)
        for kind in FOREIGN:
            for number in range(1, count + 1):
                content = os.urandom(size)
                proxy.plan(HttpFault(kind, number))
                upload(content)
                assert found() == content, (kind, number)
            proxy.plan(HttpFault(kind, 1, for_good=True))
            with pytest.raises(StorageError):
                upload(os.urandom(size))
            proxy.plan(None)
            assert found() == content
