"""Disks that fail: what the error says, and that nothing already saved is touched and nothing is left behind."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import (
    Catalog,
    Checkpointer,
    CheckpointNotFoundError,
    DirectoryCheckpointer,
    Kind,
    Part,
    StorageError,
    verify,
)
from ckpt_core.events import Event, SaveCommitted, SaveFailed
from ckpt_core.storage import local
from tests.support.open_files import open_files
from tests.support.states import assert_same_state, tensor_of

MIB = 2**20
STRATEGIES = ["sync", "async"]


def state_of(mib: int, seed: int = 0) -> dict[str, Any]:
    return {"w": tensor_of(torch.uint8, mib * MIB, seed=seed), "seed": seed}


def save(checkpointer: Checkpointer, state: Any, path: Path) -> None:
    checkpointer.save(state, path)
    checkpointer.wait()


def fails(strategy: str, state: Any, path: Path) -> StorageError:
    checkpointer = Checkpointer(strategy=strategy)
    with pytest.raises(StorageError) as caught:
        save(checkpointer, state, path)
    checkpointer.close()
    assert caught.value.path == str(path)
    return caught.value


@pytest.fixture(params=["reserves", "cannot reserve"])
def reserving(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the filesystem can reserve space; if it cannot, the disk fills up in the middle of the write."""
    if request.param == "cannot reserve":

        class NoFallocate:
            def __init__(self, *_: Any, **__: Any) -> None:
                """Stand for a C library without ``fallocate``."""

        monkeypatch.setattr(ctypes, "CDLL", NoFallocate)
    return str(request.param)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_full_disk(strategy: str, reserving: str, small_filesystem: Path) -> None:
    path = small_filesystem / "last.ckpt"
    old = state_of(3)
    with Checkpointer(strategy="sync") as checkpointer:
        checkpointer.save(old, path)
    before = path.read_bytes()

    error = fails(strategy, state_of(6, seed=1), path)
    assert error.errno == errno.ENOSPC
    needed, free = map(int, re.findall(r"(\d+) bytes needed, (\d+) free", str(error))[0])
    assert 6 * MIB <= needed < 6 * MIB + 100_000
    assert free < 6 * MIB
    if reserving == "reserves":
        assert free > 4 * MIB
    assert "free some space" in str(error)
    assert path.read_bytes() == before
    assert verify(path)
    assert os.listdir(small_filesystem) == ["last.ckpt"]

    error = fails(strategy, state_of(6, seed=1), small_filesystem / "new.ckpt")
    assert os.listdir(small_filesystem) == ["last.ckpt"]

    with Checkpointer(strategy=strategy) as checkpointer:
        save(checkpointer, state_of(4, seed=2), small_filesystem / "new.ckpt")
        assert_same_state(checkpointer.load(small_filesystem / "new.ckpt"), state_of(4, seed=2))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_disk_runs_full_at_the_last_bytes(strategy: str, small_filesystem: Path) -> None:
    blocker = small_filesystem / "blocker"
    codes = []
    for spare in range(0, 40_960, 4096):
        target = state_of(4)
        room = os.statvfs(small_filesystem).f_bavail * 4096
        blocker.write_bytes(bytes(room - 4 * MIB - spare))
        path = small_filesystem / "a.ckpt"
        checkpointer = Checkpointer(strategy=strategy)
        try:
            save(checkpointer, target, path)
        except StorageError as error:
            codes.append(error.errno)
            assert os.listdir(small_filesystem) == ["blocker"]
        else:
            assert verify(path)
            path.unlink()
        checkpointer.close()
        blocker.unlink()
    assert 1 <= len(codes) < 10
    assert set(codes) == {errno.ENOSPC}


def test_a_directory_that_cannot_be_made_on_a_full_disk(small_filesystem: Path) -> None:
    subprocess.run(["mount", "-o", "remount,nr_inodes=2", small_filesystem], check=False, capture_output=True)
    (small_filesystem / "file").touch()
    if os.statvfs(small_filesystem).f_favail:
        pytest.skip("this filesystem cannot be limited to a number of files")
    error = fails("sync", {"a": 1}, small_filesystem / "new" / "deep" / "a.ckpt")
    assert error.errno == errno.ENOSPC


def test_an_async_failure_is_raised_once_at_the_next_call(small_filesystem: Path) -> None:
    path = small_filesystem / "a.ckpt"
    for ask in ("save", "wait", "close", "raise_failure"):
        checkpointer = Checkpointer(strategy="async")
        checkpointer.save(state_of(9), path)  # does not raise: the failure is not known yet
        checkpointer.drain()
        call: Callable[[], Any] = {
            "save": lambda c=checkpointer: c.save({"a": 1}, small_filesystem / "next.ckpt"),
            "wait": checkpointer.wait,
            "close": checkpointer.close,
            "raise_failure": checkpointer.raise_failure,
        }[ask]
        with pytest.raises(StorageError, match="No space left"):
            call()
        assert os.listdir(small_filesystem) == []
        checkpointer.wait()
        checkpointer.raise_failure()
        checkpointer.save({"a": 1}, small_filesystem / "next.ckpt")
        checkpointer.close()
        assert checkpointer.failures == 1
        assert os.listdir(small_filesystem) == ["next.ckpt"]
        (small_filesystem / "next.ckpt").unlink()


def test_an_async_failure_with_warn_is_logged_counted_and_survived(
    small_filesystem: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[Event] = []
    path, blocker = small_filesystem / "a.ckpt", small_filesystem / "blocker"
    with Checkpointer(strategy="async", on_error="warn", listeners=[events.append]) as checkpointer:
        save(checkpointer, state_of(1), path)
        blocker.write_bytes(bytes(5 * MIB))
        for _ in range(2):
            save(checkpointer, state_of(4, seed=1), path)
        assert checkpointer.failures == 2
        assert_same_state(checkpointer.load(path), state_of(1))
        blocker.unlink()
        save(checkpointer, state_of(4, seed=2), path)
        assert_same_state(checkpointer.load(path), state_of(4, seed=2))
        assert checkpointer.failures == 2
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert all("No space left" in record.getMessage() and str(path) in record.getMessage() for record in warnings)
    assert [type(event) for event in events if isinstance(event, (SaveCommitted, SaveFailed))] == [
        *(SaveCommitted, SaveFailed, SaveFailed, SaveCommitted)
    ]


@pytest.fixture
def read_only(small_filesystem: Path) -> Iterator[Path]:
    """A filesystem mounted read-only that holds one checkpoint."""
    with Checkpointer(strategy="sync") as checkpointer:
        checkpointer.save(state_of(1), small_filesystem / "old.ckpt")
    subprocess.run(["mount", "-o", "remount,ro", small_filesystem], check=True, capture_output=True)
    yield small_filesystem
    subprocess.run(["mount", "-o", "remount,rw", small_filesystem], check=True, capture_output=True)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_read_only_disk(strategy: str, read_only: Path, caplog: pytest.LogCaptureFixture) -> None:
    for path in (read_only / "old.ckpt", read_only / "new.ckpt", read_only / "folder" / "new.ckpt"):
        error = fails(strategy, state_of(1), path)
        assert error.errno == errno.EROFS
        assert "read-only" in str(error)
    checkpointer = Checkpointer(strategy=strategy)
    caplog.clear()
    if strategy == "sync":
        with pytest.raises(StorageError, match="cannot remove"):
            checkpointer.remove(read_only / "old.ckpt")
    else:  # a file that stays loses nothing
        checkpointer.remove(read_only / "old.ckpt")
        checkpointer.wait()
        assert "could not remove" in caplog.text
        assert checkpointer.failures == 1
    assert Catalog(read_only).prune() == []
    assert_same_state(checkpointer.load(read_only / "old.ckpt"), state_of(1))


@pytest.mark.parametrize(
    ("limit", "least", "remedy"),
    [(resource.RLIMIT_FSIZE, MIB, "ulimit -f"), (resource.RLIMIT_NOFILE, 0, "ulimit -n")],
    ids=["size of files", "open files"],
)
def test_a_limit_of_the_process(limit: int, least: int, remedy: str, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (least, hard))
    try:
        error = fails("sync", state_of(2), tmp_path / "new.ckpt")
    finally:
        resource.setrlimit(limit, (soft, hard))
    assert remedy in str(error)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_permission(strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "old.ckpt").write_bytes(b"secret")
    if os.geteuid() == 0:  # root may do anything: make the system call fail
        real_open = os.open

        def refuse(path: Any, *args: Any, **options: Any) -> int:
            if str(path).startswith(str(folder)):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            return real_open(path, *args, **options)

        monkeypatch.setattr(local.os, "open", refuse)
    else:
        folder.chmod(0o500)
        (folder / "old.ckpt").chmod(0)
    error = fails(strategy, {"a": 1}, folder / "new.ckpt")
    assert error.errno == errno.EACCES
    assert "permissions" in str(error)
    with pytest.raises(StorageError, match="Permission denied"):
        Checkpointer().load(folder / "old.ckpt")
    monkeypatch.undo()
    folder.chmod(0o700)
    assert os.listdir(folder) == ["old.ckpt"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_path_that_is_a_directory(strategy: str, tmp_path: Path) -> None:
    folder = tmp_path / "a.ckpt"
    folder.mkdir()
    (folder / "inside").write_text("precious")
    error = fails(strategy, {"a": 1}, folder)
    assert error.errno == errno.EISDIR
    assert "directory" in str(error)
    with pytest.raises(StorageError, match="is a directory"):
        Checkpointer().load(folder)
    with pytest.raises(StorageError, match="is a directory"):
        verify(folder)
    assert os.listdir(tmp_path) == ["a.ckpt"]
    assert (folder / "inside").read_text() == "precious"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_path_below_a_file(strategy: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    for path in (tmp_path / "file" / "a.ckpt", tmp_path / "file" / "deep" / "a.ckpt"):
        assert "part of the path is a file" in str(fails(strategy, {"a": 1}, path))
        with pytest.raises(StorageError, match="part of the path is a file"):
            Checkpointer().load(path)
    assert (tmp_path / "file").read_text() == "precious"


def test_a_named_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.ckpt")
    with pytest.raises(StorageError, match="not a regular file"):
        Checkpointer().load(tmp_path / "a.ckpt")


def test_a_missing_file_is_also_a_file_not_found_error(tmp_path: Path) -> None:
    for action in (verify, Checkpointer().load):
        with pytest.raises(CheckpointNotFoundError) as caught:
            action(tmp_path / "a.ckpt")
        assert isinstance(caught.value, FileNotFoundError)
        assert str(tmp_path / "a.ckpt") in str(caught.value)


def test_an_orphan_that_cannot_be_deleted_does_not_stop_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".other.ckpt.0123456789ab.ckpt-part").write_bytes(b"somebody else's")
    real_unlink = os.unlink

    def refuse(path: Any, **options: Any) -> None:
        if "other.ckpt" in str(path):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)
        real_unlink(path, **options)

    monkeypatch.setattr(local.os, "unlink", refuse)
    with Checkpointer(strategy="sync") as checkpointer:
        checkpointer.save({"a": 1}, tmp_path / "a.ckpt")
    assert verify(tmp_path / "a.ckpt")


def test_a_directory_that_cannot_be_synced_is_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(directory: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), directory)

    with Checkpointer(strategy="sync") as checkpointer:
        checkpointer.save({"a": 1}, tmp_path / "first.ckpt")  # this save claims the directory
        monkeypatch.setattr(local, "sync_directory", fail)
        before = open_files(tmp_path)
        with pytest.raises(StorageError, match="Input/output error") as caught:
            checkpointer.save({"a": 1}, tmp_path / "a.ckpt")
        assert caught.value.errno == errno.EIO
        assert open_files(tmp_path) == before


def test_no_descriptor_leaks_from_failed_saves(small_filesystem: Path) -> None:
    for _ in range(5):
        fails("sync", state_of(9), small_filesystem / "a.ckpt")
    assert open_files(small_filesystem) == []


@pytest.mark.parametrize("deleted", ["removed", "replaced"])
def test_a_directory_that_could_not_be_deleted_is_deleted_by_a_later_save(
    deleted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [Part("model", {"w": torch.ones(1000)}, Kind.REPLICATED)]
    with DirectoryCheckpointer(strategy="sync") as checkpointer:
        checkpointer.save(parts, tmp_path / "step=1")
        real, failures = os.unlink, iter([errno.EIO] * 9)  # as of a disk: no test can have a failing one

        def fail(path: Any, *args: Any, **options: Any) -> None:
            if ".ckpt-part" in str(path) and (code := next(failures, None)) is not None:
                raise OSError(code, os.strerror(code), path)
            real(path, *args, **options)

        monkeypatch.setattr(os, "unlink", fail)
        if deleted == "removed":
            with pytest.raises(StorageError, match="cannot remove"):
                checkpointer.remove(tmp_path / "step=1")
        else:
            checkpointer.save(parts, tmp_path / "step=1")
        monkeypatch.undo()
        assert any(name.endswith(".ckpt-part") for name in os.listdir(tmp_path))
        checkpointer.save(parts, tmp_path / "step=2")
    assert sorted(os.listdir(tmp_path)) == (["step=2"] if deleted == "removed" else ["step=1", "step=2"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_filesystem_without_inodes_is_named_as_such(strategy: str, small_filesystem: Path) -> None:
    remount = ["mount", "-o", "remount,nr_inodes=20", str(small_filesystem)]
    subprocess.run(remount, check=False, capture_output=True, timeout=280)  # a tmpfs can have millions of inodes
    for index in range(os.statvfs(small_filesystem).f_favail):
        (small_filesystem / str(index)).touch()
    error = fails(strategy, {"a": 1}, small_filesystem / "new.ckpt")
    assert "inodes are used" in str(error) and "bytes needed" not in str(error)
    assert error.remedy == "delete files, of whatever size"
    (small_filesystem / "0").unlink()
    save(Checkpointer(strategy=strategy), {"a": 1}, small_filesystem / "new.ckpt")
