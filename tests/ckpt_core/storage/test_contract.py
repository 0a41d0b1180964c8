"""Every storage keeps the same contract, on every server that can run on one machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckpt_core import StorageError
from ckpt_core.buffers import StagingBuffer
from ckpt_core.process.threads import run_parallel
from ckpt_core.storage import Storage, storage_for
from tests.ckpt_core.storage.test_storage import StorageContract
from tests.support.servers import Server
from tests.support.states import tensor_of
from tests.support.stores import Place, storage_at, unfinished_uploads

MIB = 2**20
WINDOW = 16 * MIB
ServerOf = Callable[[str], Server]

PLACES = ("local", "memory", "moto", "azurite", "gcs", "moto fsspec")
MORE_SERVERS = ("ceph", "rclone", "ceph fsspec", "azurite fsspec")


@pytest.fixture(
    params=[
        *PLACES,
        *(pytest.param(name, marks=pytest.mark.extended) for name in MORE_SERVERS),
        pytest.param("rclone fsspec", marks=pytest.mark.slow),  # a third S3 server with that client
    ]
)
def place_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def place(place_name: str, server_of: ServerOf, tmp_path: Path) -> Place:
    """A fresh directory and the options to reach it."""
    if place_name == "local":
        return str(tmp_path), None
    if place_name == "memory":
        return f"memory://{uuid.uuid4().hex}", None
    kind, _, backend = place_name.partition(" ")
    server = server_of(kind)
    return f"{server.new_bucket()}/runs", {**server.options, **({"backend": backend} if backend else {})}


class TestContract(StorageContract):
    @pytest.fixture
    def storage(self, place: Place) -> Storage:
        return storage_at(place)

    @pytest.mark.each_value
    @pytest.mark.parametrize("size", [0, 1, 4097, 6 * MIB + 17])
    def test_what_is_written_is_read(self, size: int, storage: Storage, root: str) -> None:
        super().test_what_is_written_is_read(size, storage, root)

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("size", [3 * WINDOW, 3 * WINDOW + 5 * MIB + 4711], ids=["whole parts", "and a rest"])
    def test_a_large_file_from_several_threads(self, size: int, storage: Storage, root: str) -> None:
        path = f"{root}/large.ckpt"
        # As the engine writes: windows, the last one shorter, then a tail at any offset, padded to blocks.
        tail = 3 * 4096
        region = (size - tail) // 4096 * 4096
        buffer = StagingBuffer(region + tail + 8192)
        buffer.tensor.copy_(tensor_of(torch.uint8, buffer.nbytes))
        pieces = [(begin, min(region, begin + WINDOW)) for begin in range(0, region, WINDOW)]
        pieces.append((region, -(-size // 4096) * 4096))
        writer = storage.create(path, size)
        if writer.parallel:
            order = [pieces[index] for index in (2, 0, len(pieces) - 1, 1, *range(3, len(pieces) - 1))]
            run_parallel(lambda piece: writer.write_at(piece[0], buffer.memory[slice(*piece)]), order, threads=3)
        else:
            for begin, end in pieces:
                writer.write_at(begin, buffer.memory[begin : min(end, size)])
        assert not storage.exists(path)
        writer.commit(size)
        with storage.open(path) as reader:
            assert reader.size == size
            target = torch.empty(size, dtype=torch.uint8)
            view = memoryview(target.numpy())

            def read(begin: int) -> None:
                reader.read_into(begin, view[begin : begin + WINDOW])

            reader.read_into(0, view[: WINDOW + 1])
            run_parallel(read, range(WINDOW + 1, size, WINDOW), threads=3)
        assert torch.equal(target, buffer.tensor[:size])
        buffer.close()

    def test_abort_leaves_no_part_of_a_large_file(self, storage: Storage, root: str, place_name: str) -> None:
        path = f"{root}/large.ckpt"
        writer = storage.create(path, 3 * WINDOW)
        piece = WINDOW if place_name != "gcs" else 4 * MIB  # the emulator cannot cancel an upload that has begun
        for begin in range(0, 3 * piece, piece):
            writer.write_at(begin, memoryview(bytearray(piece)))
        writer.abort()
        writer.abort()
        assert not storage.exists(path)
        assert storage.list(root) == []
        assert unfinished_uploads(root, storage) == []

    @pytest.mark.sampled(3)
    def test_names_are_not_patterns(self, storage: Storage, root: str, place_name: str) -> None:
        names = ["a=1.ckpt", "a[=]1.ckpt", "b c+ü.ckpt", "d%20e.ckpt", "f#g.ckpt"]
        if place_name == "gcs":
            names = names[:3]  # the emulator does not decode the others
        for name in names:
            self.write(storage, f"{root}/{name}", name.encode())
        for name in names:
            assert self.read(storage, f"{root}/{name}") == name.encode()
            assert storage.copy(f"{root}/{name}", f"{root}/copy/{name}") == len(name.encode())
            assert self.read(storage, f"{root}/copy/{name}") == name.encode()
        assert {file.path for file in storage.list(root)} == {f"{root}/{name}" for name in names}
        storage.remove(f"{root}/a[=]1.ckpt")
        assert {file.path for file in storage.list(root)} == {f"{root}/{name}" for name in names} - {
            f"{root}/a[=]1.ckpt"
        }

    def test_directories(self, storage: Storage, root: str) -> None:
        assert list(storage.subdirectories(root)) == []
        for name in ("one/a", "one/b", "two/deep/c", "d"):
            self.write(storage, f"{root}/{name}", b"x")
        assert sorted(storage.subdirectories(root)) == [f"{root}/one", f"{root}/two"]
        storage.remove(f"{root}/two")
        assert not storage.exists(f"{root}/two")
        assert sorted(storage.subdirectories(root)) == [f"{root}/one"]
        assert storage.exists(f"{root}/one")
        assert storage.list(f"{root}/d") == []

    @pytest.mark.sampled(3)
    def test_a_killed_process_leaves_nothing_visible(
        self, place: Place, storage: Storage, root: str, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        if root.startswith("memory://"):
            return  # memory dies with its process
        path = f"{root}/a.ckpt"
        self.write(storage, path, b"old")
        script = """
            import sys
            from tests.support.stores import storage_at
            WINDOW = 16 * 2**20
            storage = storage_at(eval(sys.argv[1]))
            for name in ("a.ckpt", "b.ckpt"):
                writer = storage.create(f"{sys.argv[2]}/{name}", 4 * WINDOW)
                for begin in range(0, 4 * WINDOW, WINDOW):
                    writer.write_at(begin, memoryview(bytearray(WINDOW)))
                globals()[name[0]] = writer
            print("written", flush=True)
            sys.stdin.read()
        """
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), repr(place), root],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        )
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            assert process.stdout.readline() == "written\n"
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
            process.stdout.close()
            process.stdin.close()
        assert self.read(storage, path) == b"old"
        assert [file.path for file in storage.list(root)] == [path]
        self.write(storage, path, b"new")
        assert self.read(storage, path) == b"new"


def test_a_bucket_that_is_not_there(server_of: ServerOf) -> None:
    server = server_of("moto")
    storage = storage_for("s3://no-such-bucket", dict(server.options))
    writer = storage.create("s3://no-such-bucket/a.ckpt", 3)
    writer.write_at(0, memoryview(b"abc"))
    with pytest.raises(StorageError, match="bucket"):
        writer.commit(3)
    with contextlib.suppress(StorageError):
        writer.abort()
    assert storage.list("s3://no-such-bucket") == []
