"""The local filesystem: names, rights, links, direct I/O and orphans."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Catalog, Checkpointer, DirectoryCheckpointer, Kind, Part, StorageError, verify
from ckpt_core.buffers import StagingBuffer
from ckpt_core.process.threads import run_parallel
from ckpt_core.storage import Fault, FaultyStorage, LocalStorage, local_reader
from ckpt_core.storage import local as local_module
from tests.ckpt_core.storage.test_storage import StorageContract
from tests.support.closing import closed_to_this_user
from tests.support.interrupting import at_every_moment
from tests.support.states import tensor_of


def write_local(path: str | os.PathLike[str], data: bytes) -> None:
    StorageContract().write(LocalStorage(), os.fspath(path), data)


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_a_file_has_the_rights_that_the_umask_leaves(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write_local(tmp_path / "a.ckpt", b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "a.ckpt").stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_link_at_the_final_name_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"precious")
    (tmp_path / "folder").mkdir()
    for target in ("target", "folder", "missing"):
        link = tmp_path / f"{target}.ckpt"
        link.symlink_to(tmp_path / target)
        write_local(link, b"new")
        assert not link.is_symlink()
        assert link.read_bytes() == b"new"
    assert (tmp_path / "target").read_bytes() == b"precious"
    assert list((tmp_path / "folder").iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="needs users")
@pytest.mark.parametrize(
    ("closed", "mode"), [(".", 0o555), ("step=1", 0o000), ("step=1", 0o555), ("step=1/files", 0o000)]
)
def test_a_directory_of_which_not_all_may_be_deleted_stays_whole(closed: str, mode: int, anyones_path: Path) -> None:
    directory = anyones_path / "runs" / "step=1"
    part = Part("model", {"weight": torch.ones(2)}, Kind.REPLICATED)
    with DirectoryCheckpointer(strategy="sync") as checkpointer:
        checkpointer.save([part], directory)
    (directory / "files").mkdir()
    (directory / "files" / "notes.txt").write_text("mine")
    for path in (directory.parent, directory, directory / "files"):
        path.chmod(0o777)
    with (
        closed_to_this_user(directory.parent / closed, mode=mode),
        pytest.raises(StorageError, match="cannot remove the checkpoint: "),
    ):
        LocalStorage().remove(str(directory))
    assert os.listdir(directory.parent) == ["step=1"]
    assert (directory / "files" / "notes.txt").read_text() == "mine"
    assert verify(directory)


def test_the_next_save_deletes_what_ctrl_c_left_of_a_removed_directory(tmp_path: Path) -> None:
    storage, path, other = LocalStorage(), tmp_path / "step=1", str(tmp_path / "step=2")
    interrupted = 0

    def interrupt() -> None:
        raise KeyboardInterrupt

    for run in at_every_moment(("storage/local_directory.py",), interrupt, opcodes=False):
        (path / "files").mkdir(parents=True, exist_ok=True)
        (path / "files" / "a").touch()
        (path / "b").touch()
        try:
            run(lambda: storage.remove(str(path)))
        except KeyboardInterrupt:
            interrupted += 1
        storage.begin_directory(other, "token")
        storage.leave_directory(other, "token")
        left = os.listdir(tmp_path)
        assert left in ([], [path.name]), left
        if left:
            assert sorted(os.listdir(path)) == ["b", "files"], "deleted in one step, or not at all"
    assert interrupted > 20
    assert not path.exists()


def test_removing_a_link_leaves_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "inside").touch()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    LocalStorage().remove(str(tmp_path / "link"))
    assert sorted(os.listdir(tmp_path)) == ["folder"]
    assert os.listdir(tmp_path / "folder") == ["inside"]


@pytest.mark.parametrize(
    "name", ["a" * 250 + ".ckpt", "\u4e2d" * 80 + ".ckpt", "\u00e9" * 100 + "=1.ckpt", "a b\n.ckpt"]
)
def test_any_name_that_the_filesystem_takes(name: str, tmp_path: Path) -> None:
    write_local(tmp_path / name, b"x")
    assert os.listdir(tmp_path) == [name]
    with pytest.raises(StorageError, match="shorter"):
        write_local(tmp_path / ("a" * 251 + ".ckpt"), b"x")


def test_without_direct_io_the_same_bytes_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tensor_of(torch.uint8, 100_001).numpy().tobytes()
    real_open, refused = os.open, []

    def refuse(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            refused.append(path)
            raise OSError(22, "Invalid argument")
        return real_open(path, flags, *args, **options)

    monkeypatch.setattr(local_module.os, "open", refuse)
    write_local(tmp_path / "a.ckpt", data)
    assert len(refused) == 1
    assert (tmp_path / "a.ckpt").read_bytes() == data
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_a_filesystem_that_refuses_a_direct_write_is_written_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tensor_of(torch.uint8, 100_000).numpy().tobytes()
    real_write, refused = os.pwrite, []

    def refuse(descriptor: int, chunk: memoryview, offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            raise OSError(22, "Invalid argument")
        return real_write(descriptor, chunk[:5000], offset)  # it also writes less than it is asked to

    monkeypatch.setattr(local_module.os, "pwrite", refuse)
    write_local(tmp_path / "a.ckpt", data)
    assert (tmp_path / "a.ckpt").read_bytes() == data
    assert len(refused) <= 1


def test_direct_io_is_used_where_there_is_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags: list[int] = []
    real_write = os.pwrite

    def watch(descriptor: int, chunk: memoryview, offset: int) -> int:
        flags.append(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        return real_write(descriptor, chunk, offset)

    try:
        os.close(os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip("this filesystem has no direct I/O")
    monkeypatch.setattr(local_module.os, "pwrite", watch)
    for strategy in ("sync", "async"):
        flags.clear()
        with Checkpointer(strategy=strategy) as checkpointer:  # type: ignore[arg-type]
            checkpointer.save({"w": tensor_of(torch.uint8, 20 * 2**20), "x": [1]}, tmp_path / "a.ckpt")
        assert len(flags) == 3
        assert all(flags)


def test_a_file_deleted_while_the_directory_is_listed_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.ckpt").write_bytes(b"x")
    real_scandir = os.scandir

    def scan(directory: Any) -> Any:
        with real_scandir(directory) as entries:
            found = list(entries)
        (tmp_path / "b.ckpt").unlink(missing_ok=True)
        return contextlib.nullcontext(iter(found))

    monkeypatch.setattr(local_module.os, "scandir", scan)
    assert sorted(file.path[-6:] for file in LocalStorage().list(str(tmp_path))) == ["a.ckpt", "c.ckpt"]


def _hold_a_part(folder: str, ready: Any, release: Any) -> None:
    writer = LocalStorage().create(f"{folder}/live.ckpt", 5000)
    writer.write_at(0, memoryview(b"x" * 10))
    ready.set()
    release.wait(200)
    writer.commit(10)


def test_orphans_of_dead_processes_are_removed_and_live_ones_are_not(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = []
    for _ in range(2):
        ready, release = context.Event(), context.Event()
        process = context.Process(target=_hold_a_part, args=(str(tmp_path), ready, release), daemon=True)
        process.start()
        assert ready.wait(200)
        processes.append((process, release))
    (dead, _), (alive, release) = processes
    assert len(os.listdir(tmp_path)) == 2
    os.kill(dead.pid, signal.SIGKILL)
    dead.join()
    (tmp_path / "unrelated.ckpt-part").touch()
    with Checkpointer(strategy="sync") as checkpointer:
        checkpointer.save({"a": 1}, tmp_path / "a.ckpt")
    parts = [name for name in os.listdir(tmp_path) if name.startswith(".")]
    assert len(parts) == 1
    release.set()
    alive.join()
    assert alive.exitcode == 0
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "live.ckpt", "unrelated.ckpt-part"]
    assert (tmp_path / "live.ckpt").read_bytes() == b"x" * 10


def test_an_orphan_is_not_a_checkpoint(tmp_path: Path) -> None:
    write_local(tmp_path / "a.ckpt", b"x")
    (tmp_path / ".a.ckpt.0123456789ab.ckpt-part").touch()
    catalog = Catalog(tmp_path, suffix="")
    assert [Path(info.path).name for info in catalog.checkpoints()] == ["a.ckpt"]
    assert [Path(path).name for path in catalog.prune()] == [".a.ckpt.0123456789ab.ckpt-part"]
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_a_failed_copy_leaves_nothing(tmp_path: Path) -> None:
    write_local(tmp_path / "a.ckpt", b"x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StorageError):
        LocalStorage().copy(str(tmp_path / "a.ckpt"), str(tmp_path / "folder"))
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "folder"]


def test_a_file_taken_for_an_orphan_before_it_was_locked_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage()
    lock, stolen = fcntl.flock, []

    def lock_late(descriptor: int, operation: int) -> None:
        if not stolen:
            stolen.append(True)  # between the writer's open and its lock, another process looks for orphans
            monkeypatch.setattr(fcntl, "flock", lock)
            stolen.extend(storage.remove_orphans(str(tmp_path)))
            monkeypatch.setattr(fcntl, "flock", lock_late)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    writer = storage.create(str(tmp_path / "a"), 3)
    assert len(stolen) == 2
    writer.write_at(0, memoryview(b"abc"))
    writer.commit(3)
    assert (tmp_path / "a").read_bytes() == b"abc"
    assert os.listdir(tmp_path) == ["a"]


def test_a_filesystem_without_locks_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    storage = LocalStorage()
    writer = storage.create(str(tmp_path / "a"), 3)
    assert storage.remove_orphans(str(tmp_path)) == []
    writer.write_at(0, memoryview(b"abc"))
    writer.commit(3)
    assert (tmp_path / "a").read_bytes() == b"abc"


# ---- reading past the page cache -------------------------------------------------------------------------------------


def drop_from_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def is_cached(path: Path, offset: int) -> bool:
    """Ask the kernel without reading: even a read that does not wait lets the kernel read ahead."""
    found = ctypes.create_string_buffer(1)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as memory:
        begin = ctypes.c_char.from_buffer(memory, offset)
        failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(begin)), ctypes.c_size_t(4096), found)
        del begin
    assert not failed
    return bool(found.raw[0] & 1)


@pytest.fixture
def large_file(tmp_path: Path) -> tuple[Path, bytes]:
    """A file of a little more than 12 MiB that is not in the page cache."""
    data = os.urandom(12 * 2**20 + 100)
    path = tmp_path / "large"
    path.write_bytes(data)
    for _ in range(20):  # the kernel may be using some of its pages
        drop_from_cache(path)
        if not any(is_cached(path, at) for at in range(0, len(data) - 4096, 2**18)):
            return path, data
    pytest.skip("this filesystem keeps what it is told to drop")


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [
        (0, 12 * 2**20 + 100),
        (8192, 2**20),
        (8192, 2**20 + 1),
        (4096, 4096),
        (12 * 2**20, 100),
        (11 * 2**20, 2**20 + 100),
    ],
)
def test_aligned_reads_give_what_is_in_the_file(large_file: tuple[Path, bytes], offset: int, nbytes: int) -> None:
    path, data = large_file
    memory = StagingBuffer(13 * 2**20)
    with LocalStorage().open(str(path)) as reader:
        assert reader.passes_cache
        for start in (0, 4096, 64):
            memory.tensor.zero_()
            reader.read_into(offset, memory.memory[start : start + nbytes])
            assert memory.memory[start : start + nbytes] == data[offset : offset + nbytes]
            assert not memory.tensor[start + nbytes :].any() and not memory.tensor[:start].any()
    memory.close()


def test_a_large_aligned_read_leaves_nothing_in_the_page_cache(large_file: tuple[Path, bytes]) -> None:
    path, data = large_file
    memory = StagingBuffer(4 * 2**20)
    at = 5 * 2**20  # between two of the places where the reader looks for cached pages
    with LocalStorage().open(str(path)) as reader:
        reader.read_into(4 * 2**20, memory.memory)
        assert memory.memory == data[4 * 2**20 : 8 * 2**20]
        assert not is_cached(path, at)
        reader.read_into(at, memoryview(bytearray(2**20)))  # not aligned: read in the ordinary way
        assert is_cached(path, at)
    memory.close()


def test_a_file_in_the_page_cache_is_read_from_there(large_file: tuple[Path, bytes]) -> None:
    path, data = large_file
    assert path.read_bytes() == data
    with LocalStorage().open(str(path)) as reader:
        assert not reader.passes_cache


def test_a_file_that_a_fast_disk_brings_at_once_is_not_taken_for_a_cached_one(
    large_file: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = large_file
    real_preadv = os.preadv
    monkeypatch.setattr(local_reader.os, "preadv", lambda file, into, at, _flags=0: real_preadv(file, into, at))
    with LocalStorage().open(str(path)) as reader:
        assert reader.passes_cache


def test_of_a_file_of_another_user_a_read_that_does_not_wait_tells(
    large_file: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = large_file

    def preadv(descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
        assert flags == os.RWF_NOWAIT
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(local_reader, "_may_be_cached", lambda *_: True)  # as the kernel reports of such a file
    monkeypatch.setattr(local_reader.os, "preadv", preadv)
    with LocalStorage().open(str(path)) as reader:
        assert reader.passes_cache


def test_a_filesystem_without_direct_reads(large_file: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    path, data = large_file
    refused = []
    real_preadv = os.preadv

    def preadv(descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_preadv(descriptor, buffers, offset, flags)

    monkeypatch.setattr(local_reader.os, "preadv", preadv)
    memory = StagingBuffer(2**20)
    with LocalStorage().open(str(path)) as reader:
        reader.read_into(2**20, memory.memory)
    assert memory.memory == data[2**20 : 2 * 2**20] and refused == [2**20]
    memory.close()


def test_a_disk_error_during_a_direct_read_is_told(
    large_file: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = large_file

    def preadv(descriptor: int, *_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    memory = StagingBuffer(2**20)
    with LocalStorage().open(str(path)) as reader:
        assert reader.passes_cache
        monkeypatch.setattr(local_reader.os, "preadv", preadv)
        with pytest.raises(StorageError, match="cannot read") as caught:
            reader.read_into(2**20, memory.memory)
    assert caught.value.errno == errno.EIO and caught.value.path == str(path)
    memory.close()


def test_a_path_with_a_nul_character_is_refused_by_name(tmp_path: Path) -> None:
    path = f"{tmp_path}/a\0b"
    with Checkpointer(strategy="async") as checkpointer:
        for action in (lambda: checkpointer.save({}, path), lambda: checkpointer.load(path), lambda: verify(path)):
            with pytest.raises(StorageError, match="NUL") as caught:
                action()
            assert caught.value.remedy is not None


def test_the_working_directory_is_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run" / "inside").mkdir(parents=True)
    (tmp_path / "run" / "precious").touch()
    monkeypatch.chdir(tmp_path / "run" / "inside")
    checkpointer = Checkpointer(strategy="sync")
    for path in ("", ".", "..", tmp_path, "/"):
        with pytest.raises(StorageError, match="works") as caught:
            checkpointer.remove(path)
        assert "give the path of a checkpoint" in str(caught.value)
    assert sorted(os.listdir(tmp_path / "run")) == ["inside", "precious"]
    os.rmdir(tmp_path / "run" / "inside")  # from here on, relative paths lead nowhere
    with DirectoryCheckpointer(strategy="sync") as directories:
        for _ in range(2):
            directories.save([Part("model", {"w": torch.ones(2)}, Kind.REPLICATED)], tmp_path / "step", step=1)
    checkpointer.remove(tmp_path / "step")
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_the_working_directory_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run" / "inside").mkdir(parents=True)
    (tmp_path / "run" / "precious").touch()
    monkeypatch.chdir(tmp_path / "run" / "inside")
    state = [Part("model", {"w": torch.ones(2)}, Kind.REPLICATED)]
    for path in (".", "..", tmp_path / "run"):
        with (
            pytest.raises(StorageError, match="works") as caught,
            DirectoryCheckpointer(strategy="sync") as checkpointer,
        ):
            checkpointer.save(state, path, step=1)
        assert "inside it" in str(caught.value)
    assert os.getcwd() == str(tmp_path / "run" / "inside")
    assert sorted(os.listdir("..")) == ["inside", "precious"]
    with DirectoryCheckpointer(strategy="sync") as checkpointer:
        checkpointer.save(state, "step", step=1)
    assert verify("step")


def test_a_small_file_whose_write_fails_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    LocalStorage().write_whole(str(path), b"before")
    full = FaultyStorage(LocalStorage(), [Fault("write_at", error=OSError(errno.ENOSPC, "full"))])
    with pytest.raises(StorageError):
        full.write_whole(str(path), b"after")
    assert os.listdir(tmp_path) == ["note.json"]
    with LocalStorage().open(str(path)) as reader:
        assert reader.read_whole() == b"before"


def test_two_threads_that_meet_the_limits_of_direct_io_both_write_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = local_module.LocalFileWriter(str(tmp_path / "a"), 2**20)
    if not writer._direct:
        writer.abort()
        pytest.skip("the filesystem has no direct I/O")
    both_refused, pwrite = threading.Barrier(2), os.pwrite
    refused: list[int] = []

    def refused_together(descriptor: int, data: memoryview, offset: int) -> int:
        try:
            return pwrite(descriptor, data, offset)
        except OSError as error:
            refused.append(error.errno or 0)
            is_second = both_refused.wait(200.0) == 1
            while is_second and writer._direct:  # the other thread leaves direct I/O first
                os.sched_yield()
            raise

    monkeypatch.setattr(os, "pwrite", refused_together)
    buffer = StagingBuffer(8192)
    buffer.memory[:] = bytes(range(256)) * 32
    # From aligned memory, but to offsets that direct I/O refuses.
    writes = [(1, buffer.memory[:4096]), (4097, buffer.memory[4096:])]
    run_parallel(lambda write: writer.write_at(*write), writes, threads=2)
    writer.commit(8193)
    assert refused == [errno.EINVAL, errno.EINVAL]
    assert (tmp_path / "a").read_bytes() == b"\0" + bytes(range(256)) * 32


class OneOfAUser(LocalStorage):
    """A user's storage; importable, so that it can be pickled."""


def test_a_copy_is_of_the_same_class_and_knows_no_directories_in_the_making(tmp_path: Path) -> None:
    storage = OneOfAUser(follow_links=True)
    storage.begin_directory(str(tmp_path / "step=1"), "token")
    copy = pickle.loads(pickle.dumps(storage))
    assert type(copy) is OneOfAUser
    assert copy._follow_links is True
    assert copy._staging._locks == set()
    storage.discard_directory(str(tmp_path / "step=1"), "token")


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: LocalStorage("x"), "follow_links must be true or false, not 'x'"),  # type: ignore[arg-type]
        (lambda: FaultyStorage(5), "inner must be a ckpt_core.storage.Storage, not 5"),  # type: ignore[arg-type]
        (lambda: FaultyStorage(LocalStorage(), ["create"]), "faults must be a list of ckpt_core.storage.Fault, not"),  # type: ignore[list-item]
        (lambda: FaultyStorage(LocalStorage(), Fault("create")), "faults must be a list"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_refused_where_they_are_given(make: Callable[[], object], problem: str) -> None:
    with pytest.raises(ValueError, match=f"^{problem}"):
        make()
