"""The contract of every storage; a third party's storage passes :class:`StorageContract`, too."""

from __future__ import annotations

import contextlib
import gc
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from ckpt_core import (
    Catalog,
    CheckpointCorruptedError,
    Checkpointer,
    CheckpointNotFoundError,
    StorageError,
    verify,
)
from ckpt_core.buffers import StagingBuffer
from ckpt_core.storage import FileWriter, LocalStorage, Storage, is_remote, local_path, storage_for
from ckpt_core.storage.base import ReaderIO
from tests.support.ports import free_port
from tests.support.servers import MissingServerError, start_moto
from tests.support.states import assert_same_state, tensor_of

BLOCK = 4096
S3_ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory, unavailable: Callable[[str], NoReturn]) -> Iterator[str]:
    """A real S3 server, moto, on a free port of this machine."""
    try:
        with start_moto(tmp_path_factory.mktemp("moto")) as server:
            yield server.endpoint
    except MissingServerError as missing:
        unavailable(str(missing))


@pytest.fixture(params=["local", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any] | None]:
    """A fresh directory of a storage and the options to reach it."""
    if request.param == "local":
        return str(tmp_path), None
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}", None
    options = {
        "endpoint_url": request.getfixturevalue("s3_endpoint"),
        "key": "test",
        "secret": "test",
        "client_kwargs": {"region_name": "us-east-1"},
    }
    import s3fs

    s3fs.S3FileSystem(**options).call_s3("create_bucket", Bucket=(bucket := f"b{uuid.uuid4().hex}"))
    return f"s3://{bucket}/runs", options


class StorageContract:
    """The promises of :mod:`ckpt_core.storage.base`."""

    @pytest.fixture
    def storage(self, place: tuple[str, dict[str, Any] | None]) -> Storage:
        return storage_for(*place)

    @pytest.fixture
    def root(self, place: tuple[str, dict[str, Any] | None]) -> str:
        return place[0]

    def write(self, storage: Storage, path: str, data: bytes) -> None:
        writer = storage.create(path, len(data))
        self.fill(writer, data)
        writer.commit(len(data))

    def fill(self, writer: FileWriter, data: bytes) -> None:
        whole = len(data) // (4 * BLOCK) * (4 * BLOCK)
        for begin in range(0, whole, 4 * BLOCK):
            buffer = StagingBuffer(4 * BLOCK)
            buffer.memory[:] = data[begin : begin + 4 * BLOCK]
            writer.write_at(begin, buffer.memory)
        if whole < len(data):
            writer.write_at(whole, memoryview(data[whole:]))

    def read(self, storage: Storage, path: str) -> bytes:
        with storage.open(path) as reader:
            data = bytearray(reader.size)
            if data:
                reader.read_into(0, memoryview(data))
            return bytes(data)

    @pytest.mark.each_value
    @pytest.mark.parametrize("size", [0, 1, 511, 4095, 4096, 4097, 16384, 50_001, 6 * 2**20 + 17])
    def test_what_is_written_is_read(self, size: int, storage: Storage, root: str) -> None:
        data = tensor_of(torch.uint8, size).numpy().tobytes()
        self.write(storage, f"{root}/deep/er/a.ckpt", data)
        assert self.read(storage, f"{root}/deep/er/a.ckpt") == data

    def test_parts_come_one_after_the_other(self, storage: Storage, root: str) -> None:
        data = tensor_of(torch.uint8, 3_000_000).numpy().tobytes()
        self.write(storage, f"{root}/a.ckpt", data)
        with storage.open(f"{root}/a.ckpt") as reader:
            for offset, sizes in ((7, (5, 2_000_000, 1, 70_000)), (0, (3_000_000,)), (2_999_990, (4, 6)), (5, ())):
                memory = [bytearray(size + 1) for size in sizes]
                reader.read_parts(offset, [memoryview(part)[:-1] for part in memory])
                assert b"".join(bytes(part[:-1]) for part in memory) == data[offset : offset + sum(sizes)]
                assert all(part[-1] == 0 for part in memory), "nothing is written behind the end"
            with pytest.raises(CheckpointCorruptedError, match="truncated"):
                reader.read_parts(2_999_990, [memoryview(bytearray(4)), memoryview(bytearray(7))])

    def test_nothing_is_visible_before_commit(self, storage: Storage, root: str) -> None:
        path = f"{root}/a.ckpt"
        writer = storage.create(path, 10_000)
        self.fill(writer, b"x" * 10_000)
        assert not storage.exists(path)
        assert storage.list(root) == []
        with pytest.raises(CheckpointNotFoundError):
            storage.open(path)
        writer.commit(10_000)
        assert storage.exists(path)
        assert [file.size for file in storage.list(root)] == [10_000]

    def test_abort_leaves_nothing(self, storage: Storage, root: str) -> None:
        path = f"{root}/a.ckpt"
        for data in (b"", b"x" * 100, b"x" * (6 * 2**20)):
            writer = storage.create(path, len(data))
            self.fill(writer, data)
            writer.abort()
            writer.abort()
            del writer
            assert not storage.exists(path)
            assert storage.list(root) == []

    @pytest.mark.extended_cells("s3", "memory")
    def test_a_writer_that_is_forgotten_publishes_nothing(self, storage: Storage, root: str) -> None:
        path = f"{root}/a.ckpt"
        self.write(storage, path, b"old")
        for data in (b"", b"x" * 100, b"x" * (18 * 2**20)):
            writer = storage.create(path, len(data))
            self.fill(writer, data)
            del writer
            gc.collect()
            assert self.read(storage, path) == b"old"

    def test_abort_after_commit_does_nothing(self, storage: Storage, root: str) -> None:
        path = f"{root}/a.ckpt"
        writer = storage.create(path, 5)
        writer.write_at(0, memoryview(b"hello"))
        writer.commit(5)
        writer.abort()
        assert self.read(storage, path) == b"hello"

    def test_a_new_file_replaces_the_old_one_only_by_commit(self, storage: Storage, root: str) -> None:
        path = f"{root}/a.ckpt"
        self.write(storage, path, b"old" * 3000)
        writer = storage.create(path, 5)
        self.fill(writer, b"new!!")
        assert self.read(storage, path) == b"old" * 3000
        writer.abort()
        assert self.read(storage, path) == b"old" * 3000
        self.write(storage, path, b"new!!")
        assert self.read(storage, path) == b"new!!"
        assert [file.size for file in storage.list(root)] == [5]

    def test_an_open_reader_and_ranges(self, storage: Storage, root: str) -> None:
        data = tensor_of(torch.uint8, 100_000).numpy().tobytes()
        self.write(storage, f"{root}/a.ckpt", data)
        with storage.open(f"{root}/a.ckpt") as reader:
            assert (reader.path, reader.size) == (f"{root}/a.ckpt", 100_000)
            for begin, end in ((0, 1), (99_999, 100_000), (4095, 8193), (0, 100_000)):
                target = bytearray(end - begin)
                reader.read_into(begin, memoryview(target))
                assert bytes(target) == data[begin:end]
            for begin, end in ((99_999, 100_001), (100_000, 100_001), (200_000, 200_010)):
                with pytest.raises((CheckpointCorruptedError, StorageError)):
                    reader.read_into(begin, memoryview(bytearray(end - begin)))
            file = ReaderIO(reader)
            file.seek(-5, os.SEEK_END)
            assert file.read() == data[-5:]
            assert file.read(3) == b""

    def test_lists_what_was_committed(self, storage: Storage, root: str) -> None:
        assert storage.list(f"{root}/nothing") == []
        before = time.time()
        for name, size in (("a.ckpt", 10), ("b.ckpt", 20), ("deep/c.ckpt", 30)):
            self.write(storage, f"{root}/{name}", bytes(size))
        found = {file.path.rpartition("/")[2]: file for file in storage.list(root)}
        assert {name: file.size for name, file in found.items()} == {"a.ckpt": 10, "b.ckpt": 20}
        for file in found.values():
            assert abs(file.modified - before) < 3600
            assert self.read(storage, file.path) == bytes(file.size)

    def test_remove(self, storage: Storage, root: str) -> None:
        for name in ("a.ckpt", "folder/b.ckpt", "folder/c.ckpt"):
            self.write(storage, f"{root}/{name}", b"x")
        storage.remove(f"{root}/a.ckpt")
        storage.remove(f"{root}/a.ckpt")
        assert not storage.exists(f"{root}/a.ckpt")
        assert storage.exists(f"{root}/folder/b.ckpt")
        storage.remove(f"{root}/folder")
        assert not storage.exists(f"{root}/folder/b.ckpt")

    def test_copy(self, storage: Storage, root: str) -> None:
        self.write(storage, f"{root}/a.ckpt", b"x" * 5000)
        self.write(storage, f"{root}/old.ckpt", b"old")
        for target in ("old.ckpt", "new/b.ckpt", "a.ckpt"):
            assert storage.copy(f"{root}/a.ckpt", f"{root}/{target}") == 5000
            assert self.read(storage, f"{root}/{target}") == b"x" * 5000
        storage.remove(f"{root}/a.ckpt")
        assert self.read(storage, f"{root}/old.ckpt") == b"x" * 5000
        with pytest.raises(CheckpointNotFoundError):
            storage.copy(f"{root}/missing.ckpt", f"{root}/c.ckpt")
        assert [file.path.rpartition("/")[2] for file in storage.list(root)] == ["old.ckpt"]

    def test_what_is_missing(self, storage: Storage, root: str) -> None:
        assert not storage.exists(f"{root}/a.ckpt")
        with pytest.raises(CheckpointNotFoundError) as caught:
            storage.open(f"{root}/a.ckpt")
        assert caught.value.path == f"{root}/a.ckpt"
        storage.remove(f"{root}/a.ckpt")
        assert list(storage.remove_orphans(root)) == []

    @pytest.mark.each_value
    @pytest.mark.parametrize("strategy", ["sync", "async"])
    def test_saves_loads_and_verifies(self, strategy: Any, place: tuple[str, dict[str, Any] | None]) -> None:
        root, options = place
        state = {"w": tensor_of(torch.float32, 5 * 2**20), "n": {"x": 1}, "v": tensor_of(torch.int8, 7)}
        with Checkpointer(strategy=strategy, storage_options=options) as checkpointer:
            for step in range(2):
                checkpointer.save({**state, "step": step}, f"{root}/{step}.ckpt")
            assert_same_state(checkpointer.load(f"{root}/1.ckpt"), {**state, "step": 1})
            checkpointer.remove(f"{root}/0.ckpt")
            checkpointer.wait()
            assert verify(f"{root}/1.ckpt", storage_options=options)
            catalog = Catalog(root, storage_options=options)
            newest = catalog.newest_verified()
            assert newest is not None
            assert newest.path.endswith("/1.ckpt")
            assert len(catalog.checkpoints()) == 1


class TestStorages(StorageContract):
    """The contract, for the storages of this package."""


def test_an_error_in_the_middle_of_a_save_publishes_nothing(
    place: tuple[str, dict[str, Any] | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, options = place
    path = f"{root}/a.ckpt"
    old = {"w": torch.zeros(3)}
    with Checkpointer(strategy="sync", storage_options=options) as checkpointer:
        checkpointer.save(old, path)
        writer = storage_for(root, options).create(path, 1)
        writer.abort()
        writer_class = type(writer)
        real_write = writer_class.write_at
        for fail_at in range(3):
            calls = iter(range(100))

            def write(writer: Any, offset: int, data: memoryview, calls: Any = calls, fail_at: int = fail_at) -> None:
                if next(calls) == fail_at:
                    raise StorageError("the cable was pulled", path=path)
                real_write(writer, offset, data)

            with monkeypatch.context() as patch:
                patch.setattr(writer_class, "write_at", write)
                for target in (path, f"{root}/new.ckpt"):
                    with contextlib.suppress(StorageError):
                        checkpointer.save({"w": tensor_of(torch.uint8, 18 * 2**20)}, target)
                        assert next(calls) > fail_at
        assert_same_state(checkpointer.load(path), old)


def test_an_object_replaced_by_another_process_is_read_anew(s3_endpoint: str) -> None:
    import boto3
    import s3fs

    options = {"endpoint_url": s3_endpoint, "key": "test", "secret": "test"}
    s3fs.S3FileSystem(**options).call_s3("create_bucket", Bucket="replaced")
    client = boto3.client(
        "s3",
        endpoint_url=s3_endpoint,
        aws_access_key_id="test",
        aws_secret_access_key="test",
        region_name="us-east-1",
    )
    storage = storage_for("s3://replaced/a.ckpt", options)
    for content in (b"short", b"much longer than before"):
        client.put_object(Bucket="replaced", Key="a.ckpt", Body=content)
        with storage.open("s3://replaced/a.ckpt") as reader:
            assert reader.size == len(content)
        assert len(storage.list("s3://replaced")) == 1


def test_a_store_that_cannot_be_reached_is_a_storage_error() -> None:
    pytest.importorskip("s3fs")
    options = {
        "endpoint_url": f"http://127.0.0.1:{free_port()}",
        "key": "a-key",
        "secret": "a-secret",
        "config_kwargs": {"retries": {"max_attempts": 1}, "connect_timeout": 2},
    }
    with pytest.raises(StorageError, match=r"storage_options") as caught:
        Checkpointer(strategy="sync", storage_options=options).load("s3://bucket/a.ckpt")
    assert "a-secret" not in str(caught.value)


# Paths


@pytest.mark.parametrize(
    ("path", "remote"),
    [
        ("a.ckpt", False),
        ("/a/b=1.ckpt", False),
        ("file:///a/b.ckpt", False),
        (Path("/a:b/c"), False),
        ("s3://bucket/a", True),
        ("memory://a", True),
        ("abfs+x://a", True),
        ("simplecache::s3://bucket/a", True),
    ],
)
def test_which_paths_are_urls(path: Any, remote: bool) -> None:
    assert is_remote(path) is remote


def test_local_urls_are_paths() -> None:
    assert local_path("file:///a/b.ckpt") == "/a/b.ckpt"
    assert local_path(Path("/a/b.ckpt")) == "/a/b.ckpt"
    assert isinstance(storage_for("file:///a/b.ckpt"), LocalStorage)


class OddDates(MemoryFileSystem):
    """A server whose dates Python cannot parse."""

    protocol = "odddates"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("odddates://")))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        found = super().ls(path, detail=True, **kwargs)
        return [{**info, "created": "Mon, 23 Nov 2026"} for info in found] if detail else [i["name"] for i in found]


def test_a_date_that_cannot_be_read_counts_as_none() -> None:
    fsspec.register_implementation("odddates", OddDates, clobber=True)
    Checkpointer(strategy="sync").save({"step": 1}, "odddates://run/a.ckpt")
    assert [file.modified for file in storage_for("odddates://run").list("odddates://run")] == [0.0]
    newest = Catalog("odddates://run").newest_verified()
    assert newest is not None
    assert newest.path == "odddates://run/a.ckpt"
