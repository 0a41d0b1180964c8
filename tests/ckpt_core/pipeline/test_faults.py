"""Every operation of a save, copy, removal and load fails once, in every way: nothing is lost, errors are raised."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Checkpointer, CheckpointError, CheckpointNotFoundError, StorageError, verify
from ckpt_core._pipeline.buffer_pool import BufferPool
from ckpt_core.events import Event, SaveCommitted, SaveFailed, SaveStarted, SnapshotTaken
from ckpt_core.storage import Fault, FaultyStorage, LocalStorage, Operation, Storage, local, storage_for
from ckpt_core.storage.fsspec_storage import FsspecStorage
from tests.ckpt_core.storage.test_storage import StorageContract
from tests.conftest import ScriptRunner
from tests.support.states import assert_same_state, tensor_of

CODES = [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EACCES]
REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EIO: "check it",
    errno.EDQUOT: "quota",
    errno.EACCES: "permissions",
}
STRATEGIES = ["sync", "async"]
OLD = {"w": tensor_of(torch.uint8, 50_000), "name": "old"}
NEW = {"w": tensor_of(torch.uint8, 60_000, seed=1), "name": "new"}


# ---- the system calls under the local storage
# ---------------------------------------------------------------------------


class SystemCalls:
    """Counts the system calls on files below ``root``, and makes one of them fail, or all from one on.

    Args:
        root: The directory.
        first: Number of the first call that fails, from 1; 0 for none.
        code: The error code with which it fails.
        lasting: Whether all later calls fail, too.
    """

    NAMES = ("open", "fstat", "pwrite", "preadv", "ftruncate", "fsync", "replace", "link", "unlink", "scandir", "close")

    def __init__(self, root: Path, first: int = 0, code: int = errno.EIO, *, lasting: bool = False) -> None:
        self.calls: list[str] = []
        self._root = str(root)
        self._first = first
        self._code = code
        self._lasting = lasting
        self._descriptors: set[int] = set()
        self._lock = threading.Lock()
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> SystemCalls:
        for name in self.NAMES:
            self._patch.setattr(local.os, name, self._wrap(name, getattr(os, name)))
        self._patch.setattr(local.fcntl, "flock", self._wrap("flock", local.fcntl.flock))
        reserve = local._reserve
        self._patch.setattr(local, "_reserve", self._wrap("fallocate", reserve))
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(subject: Any, *args: Any, **options: Any) -> Any:
            ours = subject in self._descriptors if isinstance(subject, int) else str(subject).startswith(self._root)
            if not ours:
                return real(subject, *args, **options)
            with self._lock:
                self.calls.append(name)
                number = len(self.calls)
            if name == "close":  # even if close() fails, the descriptor is gone
                self._descriptors.discard(subject)
                real(subject)
            if self._first and (number >= self._first if self._lasting else number == self._first):
                raise OSError(self._code, os.strerror(self._code))
            result = None if name == "close" else real(subject, *args, **options)
            if name == "open":
                self._descriptors.add(result)
            return result

        return call


def visible(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory) if not name.startswith("."))


def assert_tells(error: BaseException, path: Path, code: int) -> None:
    assert isinstance(error, StorageError)
    assert error.errno == code
    assert error.path == str(path)
    assert str(path) in str(error)
    assert os.strerror(code) in str(error)
    assert REMEDIES[code] in str(error)


def attempt(checkpointer: Checkpointer, act: Callable[[Checkpointer], Any]) -> CheckpointError | None:
    """Return the error of ``act`` and its background work, after checking that it surfaces only once."""
    error = None
    try:
        act(checkpointer)
        checkpointer.wait()
    except CheckpointError as raised:
        error = raised
    checkpointer.wait()
    checkpointer.raise_failure()
    assert checkpointer.failures == (error is not None and checkpointer.strategy == "async")
    return error


ACTIONS = ["save", "save again", "copy", "copy again"]


def act_on(action: str, path: Path) -> Callable[[Checkpointer], Any]:
    if action.startswith("copy"):
        return lambda checkpointer: checkpointer.copy(path.with_name("source.ckpt"), path)
    return lambda checkpointer: checkpointer.save(NEW, path)


def prepare(action: str, directory: Path) -> Path:
    """Make a directory that holds only what the action needs, and return the path that the action is about."""
    directory.mkdir(exist_ok=True)
    for name in os.listdir(directory):
        (directory / name).unlink()
    path = directory / "a.ckpt"
    with Checkpointer(strategy="sync") as checkpointer:
        if action.endswith("again"):
            checkpointer.save(OLD, path)
        if action.startswith("copy"):
            checkpointer.save(NEW, directory / "source.ckpt")
    return path


@pytest.mark.sampled(2)
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("action", ACTIONS)
def test_every_system_call_fails(
    action: str, strategy: Any, lasting: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalStorage, "claim", lambda *_: None)  # a claim tolerates any failure
    directory = tmp_path / "run"
    path = prepare(action, directory)
    with SystemCalls(directory) as whole:
        assert attempt(Checkpointer(strategy=strategy), act_on(action, path)) is None
    assert len(whole.calls) >= (6 if action.startswith("copy") else 12), whole.calls
    published = whole.calls.index("replace") + 1
    survived = set()
    for code in [errno.ENOSPC, errno.EIO] if lasting else CODES:
        for first in range(1, len(whole.calls) + 1):
            path = prepare(action, directory)
            before = path.read_bytes() if path.exists() else None
            names = visible(directory)
            checkpointer = Checkpointer(strategy=strategy)
            with SystemCalls(directory, first, code, lasting=lasting):
                error = attempt(checkpointer, act_on(action, path))
            failed = f"{whole.calls[first - 1]}, call {first} of {whole.calls}"
            if error is None:
                survived.add(whole.calls[first - 1])
                assert_same_state(checkpointer.load(path), NEW, failed)
            else:
                assert_tells(error, path, code)
                if first <= published:
                    assert (path.read_bytes() if path.exists() else None) == before, failed
                    assert visible(directory) == names, failed
                else:
                    assert_same_state(checkpointer.load(path), NEW, failed)
            if not lasting:
                assert visible(directory) == sorted(os.listdir(directory)), f"a temporary file is left: {failed}"
            assert all(verify(directory / name) for name in visible(directory))
            checkpointer.save(OLD, path)
            checkpointer.close()
            assert_same_state(checkpointer.load(path), OLD, failed)
            with Checkpointer(strategy="sync") as next_run:  # whose first save removes orphans
                next_run.save(OLD, path)
            assert visible(directory) == sorted(os.listdir(directory)), f"an orphan stays: {failed}"
    # Cleaning up may fail, and so may closing a descriptor once the bytes are durable, and reading how old the
    # other checkpoints are.
    assert survived <= {"scandir", "close", "unlink", "open", "fstat", "preadv", "stat", "lseek"}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_system_call_of_a_load_fails(strategy: Any, tmp_path: Path) -> None:
    path = prepare("save again", tmp_path / "run")
    before = path.read_bytes()
    checkpointer = Checkpointer(strategy=strategy)
    with SystemCalls(path.parent) as whole:
        checkpointer.load(path)
    assert whole.calls.count("preadv") >= 3
    for code in CODES:
        for first, name in enumerate(whole.calls, 1):
            with SystemCalls(path.parent, first, code):
                if name == "close":
                    checkpointer.load(path)
                    continue
                with pytest.raises(StorageError) as caught:
                    checkpointer.load(path)
            assert_tells(caught.value, path, code)
            assert_same_state(checkpointer.load(path), OLD)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["a.ckpt"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_a_removal_that_fails(strategy: Any, code: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = prepare("save again", tmp_path / "run")
    checkpointer = Checkpointer(strategy=strategy)
    with SystemCalls(path.parent, 1, code) as calls:
        if strategy == "sync":
            with pytest.raises(StorageError) as caught:
                checkpointer.remove(path)
            assert_tells(caught.value, path, code)
        else:  # a file that stays is no reason to end a training
            checkpointer.remove(path)
            checkpointer.wait()
            (record,) = (record for record in caplog.records if record.levelno == logging.WARNING)
            assert str(path) in record.getMessage()
            assert REMEDIES[code] in record.getMessage()
            assert checkpointer.failures == 1
    assert calls.calls == ["unlink"]
    assert_same_state(checkpointer.load(path), OLD)
    checkpointer.remove(path)
    checkpointer.close()
    assert os.listdir(path.parent) == []


@pytest.mark.extended_cells("2", "3")
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_disk_that_fills_up_after_some_windows(number: int, tmp_path: Path) -> None:
    path = prepare("save again", tmp_path / "run")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    disk = FaultyStorage(LocalStorage())
    storage = FaultyStorage(disk, [Fault("write_at", number, full, written=4096)])
    checkpointer = Checkpointer(strategy="async", storage=storage)
    error = attempt(checkpointer, lambda c: c.save({"w": tensor_of(torch.uint8, 40 * 2**20)}, path))
    assert error is not None
    assert_tells(error, path, errno.ENOSPC)
    assert sum(operation.name == "write_at" for operation in storage.operations) >= number
    assert Operation("write_at", str(path), 4096) in disk.operations, "a part of the bytes has reached the disk"
    assert os.listdir(path.parent) == ["a.ckpt"]
    assert_same_state(checkpointer.load(path), OLD)
    checkpointer.close()


# ---- any storage, by FaultyStorage
# ------------------------------------------------------------------------------------------


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Storage]]:
    """A directory, and the storage that holds it."""
    if request.param == "disk":
        (tmp_path / "run").mkdir()
        yield str(tmp_path / "run"), LocalStorage()
        return
    root = "memory://faults"
    storage = FsspecStorage(root, None)
    yield root, storage
    storage.remove(root)


def names_in(storage: Storage, root: str) -> list[str]:
    return sorted(os.path.basename(info.path) for info in storage.list(root))


ERRORS: list[OSError] = [
    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)),
    TimeoutError("no answer within 60 s"),
]


LOOKS = ("remove_orphans", "list", "list_directories")


@pytest.mark.each_value
@pytest.mark.parametrize("reply_lost", [False, True], ids=["", "reply lost"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_every_operation_of_a_storage_fails(
    error: OSError, strategy: Any, reply_lost: bool, place: tuple[str, Storage]
) -> None:
    root, inner = place
    path, source = f"{root}/a.ckpt", f"{root}/source.ckpt"
    actions: dict[str, Callable[[Checkpointer], Any]] = {
        "save": lambda checkpointer: checkpointer.save(NEW, path),
        "copy": lambda checkpointer: checkpointer.copy(source, path),
    }
    for action in actions.values():
        recording = FaultyStorage(inner)
        assert attempt(Checkpointer(strategy=strategy, storage=recording), action) is None
        expected = [operation.name for operation in recording.operations if operation.name not in LOOKS]
        assert expected in (["create", "write_at", "write_at", "commit"], ["copy"])
        for name in ("list", "list_directories"):  # what else is in the directory cannot prevent a save
            storage = FaultyStorage(inner, [Fault(name, 1, error)])
            assert attempt(Checkpointer(strategy=strategy, storage=storage), action) is None
        for index, name in enumerate(expected):
            if reply_lost and name == "create":
                continue
            number = expected[: index + 1].count(name)
            with Checkpointer(strategy="sync", storage=inner) as checkpointer:
                checkpointer.save(OLD, path)
                checkpointer.save(NEW, source)
            storage = FaultyStorage(inner, [Fault(name, number, error, reply_lost=reply_lost)])
            checkpointer = Checkpointer(strategy=strategy, storage=storage)
            raised = attempt(checkpointer, action)
            assert isinstance(raised, StorageError)
            assert raised.path == path
            assert raised.errno == error.errno
            assert raised.__cause__ is error
            aborted = "abort" in [operation.name for operation in storage.operations]
            assert aborted == (name in ("write_at", "commit"))
            done = reply_lost and name in ("commit", "copy")
            assert_same_state(checkpointer.load(path), NEW if done else OLD)
            assert names_in(inner, root) == ["a.ckpt", "source.ckpt"]
            checkpointer.save(NEW, path)
            checkpointer.close()
            assert_same_state(Checkpointer(storage=inner).load(path), NEW)


def test_every_operation_of_a_load_fails(place: tuple[str, Storage]) -> None:
    root, inner = place
    path = f"{root}/a.ckpt"
    with Checkpointer(strategy="sync", storage=inner) as checkpointer:
        checkpointer.save(OLD, path)
    recording = FaultyStorage(inner)
    Checkpointer(storage=recording).load(path)
    count = len(recording.operations)
    assert {operation.name for operation in recording.operations} == {"open", "read_into"}
    for number in range(1, count + 1):
        for error in ERRORS:
            checkpointer = Checkpointer(storage=FaultyStorage(inner, [Fault(lambda _: True, number, error)]))
            with pytest.raises(StorageError) as caught:
                checkpointer.load(path)
            assert caught.value.path == path
            assert caught.value.__cause__ is error
            assert_same_state(checkpointer.load(path), OLD)


def test_an_error_that_is_no_os_error_comes_as_it_is(tmp_path: Path) -> None:
    bug = ZeroDivisionError("a bug in somebody's storage")
    storage = FaultyStorage(LocalStorage(), [Fault("commit", error=bug)])
    with pytest.raises(ZeroDivisionError):
        Checkpointer(strategy="sync", storage=storage).save(NEW, tmp_path / "a.ckpt")
    storage = FaultyStorage(LocalStorage(), [Fault("commit", error=bug)])
    error = attempt(Checkpointer(strategy="async", storage=storage), lambda c: c.save(NEW, tmp_path / "a.ckpt"))
    assert error is not None
    assert error.__cause__ is bug
    assert error.path == str(tmp_path / "a.ckpt")
    assert os.listdir(tmp_path) == []


def test_faults_meet_the_operations_they_are_meant_for(tmp_path: Path) -> None:
    second, every = CheckpointNotFoundError("second"), CheckpointNotFoundError("every")
    storage = FaultyStorage(
        LocalStorage(),
        [
            Fault("exists", number=2, error=second),
            Fault(lambda operation: operation.path.endswith("b"), number=None, error=every),
            Fault("list", delay=0.05),
        ],
    )
    path, other = str(tmp_path / "a"), str(tmp_path / "b")
    assert not storage.exists(path)
    with pytest.raises(CheckpointNotFoundError, match="second"):
        storage.exists(path)
    assert not storage.exists(path)
    for _ in range(2):
        with pytest.raises(CheckpointNotFoundError, match="every"):
            storage.exists(other)
    before = time.monotonic()
    storage.list(path)
    assert time.monotonic() - before >= 0.05
    assert storage.operations == [
        *[Operation("exists", path)] * 3,
        *[Operation("exists", other)] * 2,
        Operation("list", path),
    ]


class TestWithoutFaultsItIsAStorageLikeAnyOther(StorageContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> tuple[str, dict[str, Any] | None]:
        return str(tmp_path), None

    @pytest.fixture
    def storage(self, place: tuple[str, dict[str, Any] | None]) -> Storage:
        return FaultyStorage(storage_for(*place))


# ---- a storage that hangs
# ---------------------------------------------------------------------------------------------------


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """An event that ends the hanging of the storage, and is always set at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


def in_thread(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.parametrize("operation", ["create", "write_at", "commit"])
@pytest.mark.parametrize("max_pending", [1, 2])
def test_a_storage_that_hangs(
    max_pending: int, operation: str, release: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, wait = threading.Event(), BufferPool.wait
    monkeypatch.setattr(BufferPool, "wait", lambda pool: (waits.set(), wait(pool)))
    other, path, next_path = (tmp_path / name for name in ("other.ckpt", "a.ckpt", "next.ckpt"))
    with Checkpointer(strategy="sync") as checkpointer:
        checkpointer.save(OLD, other)
    events: list[Event] = []
    storage = FaultyStorage(LocalStorage(), [Fault(operation, until=release)])
    checkpointer = Checkpointer(max_pending=max_pending, storage=storage, listeners=[events.append])
    checkpointer.save(NEW, path)
    assert checkpointer.is_pending(path)
    assert_same_state(checkpointer.load(other), OLD)  # this load does not wait

    loaded: list[Any] = []
    loading = in_thread(lambda: loaded.append(checkpointer.load(path)))
    saving = in_thread(lambda: checkpointer.save(NEW, next_path))
    if max_pending == 2:
        saving.join()  # this save finds a buffer
    else:
        waits.wait()
    assert visible(tmp_path) == ["other.ckpt"]
    assert not [event for event in events if isinstance(event, SaveCommitted)]
    release.set()
    loading.join()
    saving.join()
    assert_same_state(loaded, [NEW])
    checkpointer.close()
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "next.ckpt", "other.ckpt"]
    saved = [
        event for event in events if isinstance(event, (SaveStarted, SnapshotTaken)) and event.path == str(next_path)
    ]
    assert len(saved) == 2
    assert isinstance(saved[1], SnapshotTaken)
    assert (saved[1].waited_seconds > 0) == (max_pending == 1)


def test_a_sync_save_waits_for_a_storage_that_hangs(release: threading.Event, tmp_path: Path) -> None:
    storage = FaultyStorage(LocalStorage(), [Fault("commit", until=release)])
    checkpointer = Checkpointer(strategy="sync", storage=storage)
    saving = in_thread(lambda: checkpointer.save(NEW, tmp_path / "a.ckpt"))
    saving.join(0.2)
    assert saving.is_alive()
    assert visible(tmp_path) == []
    release.set()
    saving.join(200)
    assert_same_state(checkpointer.load(tmp_path / "a.ckpt"), NEW)


EXIT_WHILE_HANGING = """
import os, sys, threading, time, torch
from ckpt_core import Checkpointer
from ckpt_core.storage import Fault, FaultyStorage, LocalStorage

release = threading.Event()
checkpointer = Checkpointer(storage=FaultyStorage(LocalStorage(), [Fault("write_at", until=release)]))
checkpointer.save({"w": torch.ones(1000)}, "a.ckpt")

def let_go():
    while not threading._SHUTTING_DOWN:
        time.sleep(0.01)
    print("shutting down", os.path.exists("a.ckpt"), flush=True)
    release.set()

threading.Thread(target=let_go, daemon=True).start()
"""


def test_a_program_ends_when_the_storage_answers_again(run_script: ScriptRunner, tmp_path: Path) -> None:
    assert run_script(EXIT_WHILE_HANGING).stdout == "shutting down False\n"
    assert os.listdir(tmp_path) == ["a.ckpt"]
    assert_same_state(Checkpointer().load(tmp_path / "a.ckpt"), {"w": torch.ones(1000)})


def test_a_removal_waits_for_a_successor_that_hangs_and_is_given_up_when_it_fails(
    release: threading.Event, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, path = tmp_path / "old.ckpt", tmp_path / "a.ckpt"
    with Checkpointer(strategy="sync") as checkpointer:
        checkpointer.save(OLD, old)
    events: list[Event] = []
    broken = Fault("commit", until=release, error=TimeoutError("no answer"))
    storage = FaultyStorage(LocalStorage(), [broken])
    checkpointer = Checkpointer(storage=storage, listeners=[events.append])
    checkpointer.save(NEW, path)
    checkpointer.remove(old)
    assert old.exists()
    release.set()
    with pytest.raises(StorageError, match="no answer"):
        checkpointer.wait()
    checkpointer.close()
    assert [type(event) for event in events if isinstance(event, (SaveCommitted, SaveFailed))] == [SaveFailed]
    assert "kept the checkpoint" in caplog.text
    assert os.listdir(tmp_path) == ["old.ckpt"]
    assert verify(old)
