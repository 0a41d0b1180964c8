"""Background saves: order, bounds, memory, failures, and events."""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import ckpt_core.checkpointer as checkpointer_module
from ckpt_core import (
    Checkpointer,
    CheckpointError,
    CheckpointNotFoundError,
    SerializationError,
    SnapshotTornError,
    StorageError,
    verify,
)
from ckpt_core._pipeline import host_copy
from ckpt_core._pipeline.buffer_pool import BufferPool
from ckpt_core.events import (
    CheckpointLoaded,
    CheckpointRemoved,
    Event,
    EventLog,
    SaveCommitted,
    SaveFailed,
    SaveStarted,
    SnapshotTaken,
)
from ckpt_core.storage import FileWriter, LocalStorage
from ckpt_core.tiers import Tiers
from tests.support.states import assert_same_state, tensor_of

SECONDS = 200.0  # longer than any test here takes: what is not finished by then hangs


class Gate:
    """Blocks every write of the storage until it is opened, and can make writes fail."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.failures: dict[str, BaseException] = {}

    def open(self) -> None:
        self.opened.set()

    def pass_through(self, path: str) -> None:
        assert self.opened.wait(SECONDS)
        if os.path.basename(path) in self.failures:
            raise self.failures.pop(os.path.basename(path))


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()

    class GatedStorage(LocalStorage):
        def create(self, path: str, expected_size: int) -> FileWriter:
            gate.pass_through(path)
            return super().create(path, expected_size)

    monkeypatch.setattr(checkpointer_module, "storage_for", lambda *_: GatedStorage())
    yield gate
    gate.open()


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def in_thread(action: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread


def ended(thread: threading.Thread, seconds: float = SECONDS) -> bool:
    thread.join(seconds)
    return not thread.is_alive()


# Order, and reads that see what was saved


def test_a_load_waits_for_its_own_save_and_for_no_other(gate: Gate, tmp_path: Path) -> None:
    gate.open()
    checkpointer = Checkpointer(max_pending=2)
    checkpointer.save({"a": 0}, tmp_path / "done.ckpt")
    checkpointer.wait()
    gate.opened.clear()
    checkpointer.save({"a": torch.arange(3)}, tmp_path / "pending.ckpt")
    assert checkpointer.pending == (str(tmp_path / "pending.ckpt"),)
    assert checkpointer.exists(tmp_path / "pending.ckpt")
    assert not (tmp_path / "pending.ckpt").exists()
    assert checkpointer.load(tmp_path / "done.ckpt") == {"a": 0}

    loaded: list[Any] = []
    reader = in_thread(lambda: loaded.append(checkpointer.load(os.path.relpath(tmp_path / "pending.ckpt"))))
    assert not ended(reader, 0.2)
    gate.open()
    assert ended(reader)
    assert_same_state(loaded[0], {"a": torch.arange(3)})
    checkpointer.close()
    assert checkpointer.pending == ()


def test_saves_and_removals_happen_in_the_order_asked_for(gate: Gate, tmp_path: Path) -> None:
    events: list[Event] = []
    with Checkpointer(max_pending=3, listeners=[events.append]) as checkpointer:
        for step in range(3):
            checkpointer.save({"step": step}, tmp_path / f"{step}.ckpt")
            if step:
                checkpointer.remove(tmp_path / f"{step - 1}.ckpt")
        assert names(tmp_path) == []
        assert checkpointer.pending == tuple(str(tmp_path / f"{step}.ckpt") for step in range(3))
        gate.open()
    background = [event for event in events if isinstance(event, (SaveCommitted, CheckpointRemoved))]
    assert [(type(event).__name__, Path(event.path).stem) for event in background] == [
        ("SaveCommitted", "0"),
        ("SaveCommitted", "1"),
        ("CheckpointRemoved", "0"),
        ("SaveCommitted", "2"),
        ("CheckpointRemoved", "1"),
    ]
    assert names(tmp_path) == ["2.ckpt"]


def test_the_last_of_several_saves_of_one_name_stays(gate: Gate, tmp_path: Path) -> None:
    with Checkpointer(max_pending=3) as checkpointer:
        for step in range(3):
            checkpointer.save({"step": step}, tmp_path / "last.ckpt")
        gate.open()
        assert checkpointer.load(tmp_path / "last.ckpt") == {"step": 2}


def test_a_checkpoint_is_kept_when_its_successor_fails(
    gate: Gate, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[Event] = []
    checkpointer = Checkpointer(on_error="warn", max_pending=2, listeners=[events.append])
    gate.open()
    checkpointer.save({"step": 1}, tmp_path / "1.ckpt")
    gate.failures["2.ckpt"] = StorageError("the disk is on fire", path="2.ckpt")
    checkpointer.save({"step": 2}, tmp_path / "2.ckpt")
    checkpointer.remove(tmp_path / "1.ckpt")
    checkpointer.wait()
    assert names(tmp_path) == ["1.ckpt"]
    assert not any(isinstance(event, CheckpointRemoved) for event in events)
    kept = [record.getMessage() for record in caplog.records if "kept the checkpoint" in record.getMessage()]
    assert len(kept) == 1
    assert "1.ckpt" in kept[0]
    assert "2.ckpt" in kept[0]

    checkpointer.save({"step": 3}, tmp_path / "3.ckpt")
    checkpointer.remove(tmp_path / "1.ckpt")
    checkpointer.close()
    assert names(tmp_path) == ["3.ckpt"]


def test_a_path_is_fixed_when_the_save_is_asked_for(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "before").mkdir()
    (tmp_path / "after").mkdir()
    monkeypatch.chdir(tmp_path / "before")
    with Checkpointer() as checkpointer:
        checkpointer.save({"a": 1}, "a.ckpt")
        monkeypatch.chdir(tmp_path / "after")
        gate.open()
    assert names(tmp_path / "before") == ["a.ckpt"]
    assert names(tmp_path / "after") == []


# At most max_pending


@pytest.mark.parametrize("limit", [1, 2])
def test_the_save_above_the_limit_waits_and_says_how_long(
    limit: int, gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, wait = threading.Event(), BufferPool.wait
    monkeypatch.setattr(BufferPool, "wait", lambda pool: (waits.set(), wait(pool)))
    events: list[Event] = []
    checkpointer = Checkpointer(max_pending=limit, listeners=[events.append])
    for step in range(limit):
        checkpointer.save({"step": step}, tmp_path / f"{step}.ckpt")
    above = in_thread(lambda: checkpointer.save({"step": "above"}, tmp_path / "above.ckpt"))
    assert waits.wait(SECONDS)
    assert not ended(above, 0.1)
    assert len(checkpointer.pending) == limit
    gate.open()
    assert ended(above)
    checkpointer.close()
    taken = [event for event in events if isinstance(event, SnapshotTaken)]
    assert [event.waited_seconds for event in taken[:limit]] == [0.0] * limit
    assert 0 < taken[limit].waited_seconds <= taken[limit].stall_seconds
    assert len(names(tmp_path)) == limit + 1


def test_pool_lends_at_most_its_limit_and_reuses_what_fits() -> None:
    pool = BufferPool(2)
    one, two = pool.acquire(100_000), pool.acquire(50_000)
    assert pool.exhausted
    waiting = in_thread(lambda: pool.release(pool.acquire(10)))
    assert not ended(waiting, 0.1)
    address = one.tensor.data_ptr()
    pool.release(one)
    assert ended(waiting)
    again = pool.acquire(90_000)
    assert again.tensor.data_ptr() == address
    pool.release(two)
    small = weakref.ref(two)
    del two
    larger = pool.acquire(1_000_000)  # the idle buffer is too small and must be freed by now
    assert small() is None
    assert larger.nbytes >= 1_000_000
    pool.release(larger)
    pool.release(again)
    pool.close()
    assert not pool.exhausted


def test_pool_gives_the_place_back_when_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = BufferPool(1)
    with pytest.raises((MemoryError, OSError)):
        pool.acquire(2**60)
    assert not pool.exhausted
    pool.release(pool.acquire(10))
    pool.close()


def test_the_same_memory_is_used_again_and_freed_by_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lent: list[tuple[int, weakref.ref[Any]]] = []
    acquire = BufferPool.acquire

    def remember(pool: BufferPool, nbytes: int) -> Any:
        buffer = acquire(pool, nbytes)
        lent.append((buffer.tensor.data_ptr(), weakref.ref(buffer)))
        return buffer

    monkeypatch.setattr(BufferPool, "acquire", remember)
    checkpointer = Checkpointer()
    for step in range(5):
        checkpointer.save({"w": torch.full((300_000,), float(step))}, tmp_path / f"{step}.ckpt")
        checkpointer.wait()
    assert len({address for address, _ in lent}) == 1
    assert lent[0][1]() is not None
    checkpointer.close()
    assert lent[0][1]() is None
    checkpointer.save({"a": 1}, tmp_path / "again.ckpt")  # a closed checkpointer may be used again
    checkpointer.close()
    assert verify(tmp_path / "again.ckpt")


# Snapshots


class Meddler:
    """Changes a tensor while the state is pickled, as a training thread could."""

    def __init__(self, change: Callable[[], Any]) -> None:
        self.change = change

    def __reduce__(self) -> tuple[Any, ...]:
        self.change()
        return dict, ()


@pytest.mark.parametrize("strategy", ["sync", "async"])
@pytest.mark.parametrize("change", ["add", "view", "out"])
def test_a_tensor_changed_while_it_is_copied_fails_the_save(
    change: str, strategy: Literal["sync", "async"], tmp_path: Path
) -> None:
    weight, other = torch.zeros(1000), torch.zeros(10)
    changes: dict[str, Callable[[], Any]] = {
        "add": lambda: weight.add_(1),
        "view": lambda: weight[3:5].fill_(7),
        "out": lambda: torch.ones(1000, out=weight),
    }
    path = tmp_path / "a.ckpt"
    with Checkpointer(strategy=strategy) as checkpointer:
        checkpointer.save({"weight": torch.ones(3)}, path)
        for _ in range(2):
            with pytest.raises(SnapshotTornError, match="1 of 2 tensors changed") as caught:
                checkpointer.save({"weight": weight, "meddler": Meddler(changes[change]), "other": other}, path)
            assert caught.value.path == str(path)
        checkpointer.wait()
        assert_same_state(checkpointer.load(path), {"weight": torch.ones(3)})
        checkpointer.save({"weight": weight}, path)  # the buffer was returned to the pool
    assert names(tmp_path) == ["a.ckpt"]


def test_a_tensor_only_read_while_it_is_copied_is_saved(tmp_path: Path) -> None:
    weight = torch.zeros(1000)
    with Checkpointer() as checkpointer:
        checkpointer.save(
            {"weight": weight, "meddler": Meddler(lambda: weight.sum() + weight[3:5].max())}, tmp_path / "a"
        )
    assert verify(tmp_path / "a")


def test_an_interrupted_snapshot_gives_its_buffer_back_only_when_nothing_writes_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()
    finished: list[bool] = []
    copy = host_copy._move_small

    def slow(*args: int) -> None:
        begun.set()
        time.sleep(0.3)
        copy(*args)
        finished.append(True)

    def interrupt() -> None:
        begun.wait()  # until another thread copies
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Checkpointer() as checkpointer:
            with monkeypatch.context() as patch:
                patch.setattr(host_copy, "_move_small", slow)
                state = {"w": torch.ones(50), "meddler": Meddler(interrupt)}
                with pytest.raises(KeyboardInterrupt):
                    checkpointer.save(state, tmp_path / "a.ckpt")
                assert finished == [True]
            checkpointer.save({"w": torch.ones(50)}, tmp_path / "b.ckpt")
    finally:
        signal.signal(signal.SIGINT, before)
    assert names(tmp_path) == ["b.ckpt"]


def test_changes_after_the_save_do_not_reach_the_file(gate: Gate, tmp_path: Path) -> None:
    class Box:
        def __init__(self) -> None:
            self.inside = tensor_of(torch.float32, 100, seed=2)

        def __reduce__(self) -> tuple[Any, ...]:
            return list, ([self.inside],)

    box = Box()
    state = {"w": tensor_of(torch.float32, 1000, seed=1), "box": box, "numbers": [1, 2], "nested": {"a": 1}}
    expected = {
        "w": state["w"].clone(),
        "box": [box.inside.clone()],
        "numbers": [1, 2],
        "nested": {"a": 1},
    }
    with Checkpointer() as checkpointer:
        checkpointer.save(state, tmp_path / "a.ckpt")
        state["w"].fill_(-1)
        box.inside.fill_(-1)
        state["numbers"].append(3)
        state["nested"]["a"] = 2
        gate.open()
        assert_same_state(checkpointer.load(tmp_path / "a.ckpt", weights_only=False), expected)


# Failures


@pytest.mark.parametrize(
    "error",
    [StorageError("no"), OSError(5, "no"), RuntimeError("no"), SystemExit(3), KeyboardInterrupt(), MemoryError()],
)
@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_no_failure_of_a_write_hangs_or_is_lost(
    error: BaseException, on_error: Any, gate: Gate, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[Event] = []
    checkpointer = Checkpointer(on_error=on_error, listeners=[events.append])
    gate.open()
    gate.failures["a.ckpt"] = error
    checkpointer.save({"w": torch.ones(5)}, tmp_path / "a.ckpt")
    assert ended(in_thread(checkpointer.drain))
    if on_error == "raise":
        with pytest.raises(CheckpointError) as caught:
            checkpointer.wait()
        assert caught.value is error or caught.value.__cause__ is error
    checkpointer.wait()
    assert checkpointer.failures == 1
    assert [event.path for event in events if isinstance(event, SaveFailed)] == [str(tmp_path / "a.ckpt")]
    assert str(tmp_path / "a.ckpt") in caplog.text
    for _ in range(3):  # the buffer was returned and the thread is alive
        assert ended(in_thread(lambda: checkpointer.save({"w": torch.ones(5)}, tmp_path / "a.ckpt")))
    checkpointer.close()
    assert verify(tmp_path / "a.ckpt")


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_listener_that_fails_harms_no_save(error: type[BaseException], gate: Gate, tmp_path: Path) -> None:
    def listener(event: Event) -> None:
        if isinstance(event, (SaveCommitted, SaveFailed)):
            raise error("from the listener")

    checkpointer = Checkpointer(on_error="warn", listeners=[listener])
    gate.open()
    for _ in range(3):
        assert ended(in_thread(lambda: checkpointer.save({"a": 1}, tmp_path / "a.ckpt")))
        assert ended(in_thread(checkpointer.drain))
    checkpointer.close()
    assert verify(tmp_path / "a.ckpt")
    assert checkpointer.pending == ()


def test_a_save_that_fails_before_the_background_gives_its_buffer_back(tmp_path: Path) -> None:
    def interrupt(event: Event) -> None:
        if isinstance(event, SnapshotTaken):
            raise KeyboardInterrupt

    listeners: list[Any] = [interrupt]
    checkpointer = Checkpointer(listeners=listeners)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            checkpointer.save({"a": torch.ones(2)}, tmp_path / "a.ckpt")
    assert names(tmp_path) == []
    assert not checkpointer._pipeline.buffers.exhausted
    checkpointer.close()


def test_the_oldest_failure_is_raised_and_the_others_are_logged(
    gate: Gate, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = Checkpointer(max_pending=2)
    for name in ("a.ckpt", "b.ckpt"):
        gate.failures[name] = StorageError(f"failure of {name}", path=name)
        checkpointer.save({"a": 1}, tmp_path / name)
    gate.open()
    with pytest.raises(StorageError, match=r"failure of a\.ckpt"):
        checkpointer.wait()
    checkpointer.close()
    assert checkpointer.failures == 2
    assert [record.levelno for record in caplog.records if "failure of" in record.getMessage()] == [logging.ERROR] * 2


def test_writer_works_when_no_thread_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with Checkpointer() as checkpointer:
        for step in range(2):
            checkpointer.save({"w": torch.full((9,), float(step))}, tmp_path / "a.ckpt")
        assert checkpointer.pending == ()
        checkpointer.remove(tmp_path / "b.ckpt")
        assert_same_state(checkpointer.load(tmp_path / "a.ckpt"), {"w": torch.full((9,), 1.0)})


# Settings, copies, events


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "shraded"}, "'sync' or 'async', not 'shraded'"),
        ({"max_pending": 0}, "at least 1, not 0"),
        ({"on_error": "ignore"}, "'raise' or 'warn', not 'ignore'"),
    ],
)
def test_wrong_settings_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Checkpointer(**arguments)


def test_a_copy_for_another_process_has_the_same_settings(gate: Gate, tmp_path: Path) -> None:
    checkpointer = Checkpointer(strategy="async", max_pending=3, on_error="warn", storage_options={"a": 1})
    checkpointer.save({"a": 1}, tmp_path / "a.ckpt")
    copy = pickle.loads(pickle.dumps(checkpointer))
    assert copy.strategy == "async"
    assert copy.pending == ()
    given = {"max_pending": 3, "on_error": "warn", "storage_options": {"a": 1}}
    assert {name: copy._made_with[name] for name in given} == given
    assert copy._made_with == checkpointer._made_with
    gate.open()
    checkpointer.close()


def test_a_copy_of_one_that_leaves_the_uploads_to_others_uploads_nothing(tmp_path: Path) -> None:
    tiers = Tiers(local_dir=str(tmp_path / "local"), upload_to=str(tmp_path / "remote"))
    uploaded = {}
    for uploads in (False, True):
        copy = pickle.loads(pickle.dumps(Checkpointer(strategy="sync", tiers=tiers, uploads=uploads)))
        with copy:
            copy.save({"a": 1}, tmp_path / "local" / f"{uploads}.ckpt")
        uploaded[uploads] = (tmp_path / "remote" / f"{uploads}.ckpt").exists()
    assert uploaded == {False: False, True: True}


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_events_tell_what_happened_in_order(strategy: Any, tmp_path: Path) -> None:
    events: list[Event] = []
    path = tmp_path / "a.ckpt"
    log = tmp_path / "log" / "events.jsonl"
    with Checkpointer(strategy=strategy, listeners=[events.append, EventLog(log)]) as checkpointer:
        checkpointer.save({"w": torch.zeros(5000)}, path)
        checkpointer.wait()
        checkpointer.load(path)
        size = path.stat().st_size
        checkpointer.remove(path)
        checkpointer.wait()
        with pytest.raises(CheckpointNotFoundError):
            checkpointer.load(path)
    assert [type(event) for event in events] == [
        *(SaveStarted, SnapshotTaken, SaveCommitted, CheckpointLoaded, CheckpointRemoved)
    ]
    assert {event.path for event in events} == {str(path)}
    times = [event.time for event in events]
    assert times == sorted(times)
    _, taken, committed, loaded, _ = events
    assert isinstance(taken, SnapshotTaken)
    assert isinstance(committed, SaveCommitted)
    assert isinstance(loaded, CheckpointLoaded)
    assert 20_000 <= taken.bytes <= size
    assert taken.stall_seconds > 0
    assert taken.waited_seconds == 0
    assert committed.bytes == loaded.bytes == size
    assert (committed.background_seconds > 0) == (strategy == "async")
    assert loaded.verified
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["event"] for line in lines] == [type(event).__name__ for event in events]
    assert all(line["pid"] == os.getpid() and line["path"] == str(path) for line in lines)
    assert lines[2]["bytes"] == size


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_the_size_of_a_snapshot_counts_what_is_no_tensor(strategy: Any, tmp_path: Path) -> None:
    events: list[Event] = []
    with Checkpointer(strategy=strategy, listeners=[events.append]) as checkpointer:
        checkpointer.save({"w": torch.zeros(3), "order": list(range(100_000))}, tmp_path / "a.ckpt")
    (taken,) = [event for event in events if isinstance(event, SnapshotTaken)]
    size = (tmp_path / "a.ckpt").stat().st_size
    assert 0.98 * size <= taken.bytes <= size


def test_a_failed_save_is_an_event_in_both_strategies(tmp_path: Path) -> None:
    for strategy in ("sync", "async"):
        events: list[Event] = []
        (tmp_path / "folder").mkdir(exist_ok=True)
        checkpointer = Checkpointer(strategy=strategy, listeners=[events.append])
        with pytest.raises(StorageError):
            checkpointer.save({"a": 1}, tmp_path / "folder")
            checkpointer.wait()
        failed = [event for event in events if isinstance(event, SaveFailed)]
        assert len(failed) == 1
        assert "directory" in failed[0].error
        assert not any(isinstance(event, SaveCommitted) for event in events)


def test_errors_survive_a_trip_to_another_process() -> None:
    error = StorageError("full", path="/a", key="k", remedy="free", errno=28)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.path, copy.key, copy.remedy) == (StorageError, str(error), "/a", "k", "free")


@pytest.mark.parametrize("fails", [False, True])
def test_a_save_is_made_where_no_thread_can_be_started(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    state = {"weight": torch.arange(100_000), **({"lambda": lambda: 0} if fails else {})}
    with Checkpointer() as checkpointer, monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        if fails:
            with pytest.raises(SerializationError):
                checkpointer.save(state, tmp_path / "a.ckpt")
        else:
            checkpointer.save(state, tmp_path / "a.ckpt")
            assert checkpointer.pending == ()
    assert names(tmp_path) == ([] if fails else ["a.ckpt"])
    assert fails or verify(tmp_path / "a.ckpt")
