"""Memory served to other machines: to which, and what. Whole runs: in ``tests/accelerate_ckpt/test_memory_tier.py``."""

from __future__ import annotations

import os
import resource
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_core import StorageError
from ckpt_core.errors import CheckpointNotFoundError
from ckpt_core.tiers.machines import Machine, MachinesStorage, MemoryServer, address_towards

KEY = b"k" * 32
HOST = "127.0.0.1"


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """The port of a server, as of another machine, with the memory in ``there``."""
    (tmp_path / "there" / "snapshots").mkdir(parents=True)
    server = MemoryServer(str(tmp_path / "there"), KEY, HOST, is_here=True)
    yield server.machine.port
    server.close()


def storage_of(tmp_path: Path, port: int, key: bytes = KEY) -> MachinesStorage:
    """Return a storage of the memories of this machine, which holds nothing, and of the other one."""
    return MachinesStorage(str(tmp_path), [Machine(HOST, 1), Machine(HOST, port)], 0, key)


def is_pausing() -> bool:
    """Return whether a server waits because it could not accept a connection."""
    for frame in sys._current_frames().values():
        calls = [called.f_code.co_name for called, _ in traceback.walk_stack(frame)]
        if calls[:3] == ["wait", "wait", "_accept"]:  # of the condition, and of the event that holds it
            return True
    return False


def test_what_is_not_here_is_read_from_another_machine(tmp_path: Path, port: int) -> None:
    storage, file = storage_of(tmp_path, port), tmp_path / "there" / "snapshots" / "file"
    file.write_bytes(os.urandom(40 * 2**20))
    client = storage._clients[1]
    assert client.ask("size", str(file)) == 40 * 2**20
    assert client.read(str(file), 2**24 - 1, 2**20) == file.read_bytes()[2**24 - 1 : 2**24 - 1 + 2**20]
    assert [info["path"] for info in client.ask("list", str(file.parent))] == [str(file)]
    assert storage.exists(f"{file}-other") is False
    with pytest.raises(CheckpointNotFoundError):
        storage.open(f"{file}-other")


def test_a_machine_that_had_no_descriptor_left_for_a_while_serves_again(tmp_path: Path, port: int) -> None:
    file = tmp_path / "there" / "snapshots" / "file"
    file.write_bytes(b"x")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as first, socket.socket() as second:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            # The first may be accepted with the descriptor that a waiting accept holds; there is none for the second.
            first.connect((HOST, port))
            second.connect((HOST, port))
            while not is_pausing():
                time.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert storage_of(tmp_path, port)._clients[1].ask("size", str(file)) == 1


def test_strangers_and_other_files_are_refused(tmp_path: Path, port: int) -> None:
    (tmp_path / "secret").write_text("x")
    (tmp_path / "there" / "snapshots" / "file").write_text("x")
    with pytest.raises(StorageError, match="does not serve its snapshots"):
        storage_of(tmp_path, port, b"x" * 32)._clients[1].ask("size", str(tmp_path / "there" / "snapshots" / "file"))
    for path in (tmp_path / "secret", tmp_path / "there", f"{tmp_path}/there/../secret"):
        with pytest.raises(StorageError, match="is not a snapshot in memory"):
            storage_of(tmp_path, port)._clients[1].ask("read", str(path), offset=0, size=1)


def test_a_machine_that_is_gone_is_named(tmp_path: Path) -> None:
    storage = MachinesStorage(str(tmp_path), [Machine(HOST, 1), Machine(HOST, 2)], 0, KEY)
    with pytest.raises(StorageError, match=r"the machine at 127\.0\.0\.1:2 does not serve its snapshots"):
        storage.open(f"{tmp_path}/file")


def test_a_name_that_nobody_knows_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot serve its snapshots to the others"):
        MemoryServer(str(tmp_path), KEY, "nobody.invalid", is_here=False)


def test_the_address_is_that_of_the_network_in_which_the_other_one_is() -> None:
    assert address_towards("localhost") in ("127.0.0.1", "::1")
    assert address_towards("127.0.0.1") == HOST
