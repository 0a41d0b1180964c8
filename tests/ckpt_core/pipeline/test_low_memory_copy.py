"""States that are larger than the host memory for their copies: they pass through it, and no thread waits for ever."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import queue
import signal
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Checkpointer, DirectoryCheckpointer, Kind, Part, SerializationError, StorageError
from ckpt_core._layouts.image import WINDOW, ImageAbandonedError
from ckpt_core._pipeline import staging
from ckpt_core._pipeline.buffer_pool import BufferPool
from ckpt_core._pipeline.jobs import JobQueue
from ckpt_core._pipeline.low_memory_copy import WindowRelay
from ckpt_core._pipeline.staging import Snapshot
from ckpt_core.buffers import StagingBuffer
from ckpt_core.events import Event, SnapshotTaken
from ckpt_core.options import CheckpointerOptions
from ckpt_core.storage import Fault, FaultyStorage, LocalStorage, Operation
from tests.support.accelerators import SIMULATED, SimulatedAccelerator
from tests.support.hanging import returns
from tests.support.states import assert_same_state

ROOM = 2 * WINDOW
LONGEST_SECONDS = 200  # for calls that must not hang
both_layouts = pytest.mark.parametrize("layout", ["file", "directory"])


class Saves:
    """Saves of one layout through 32 MiB of host memory."""

    def __init__(self, layout: str, directory: Path, **settings: Any) -> None:
        kind: Any = {"file": Checkpointer, "directory": DirectoryCheckpointer}[layout]
        self.events: list[Event] = []
        self.layout, self.directory = layout, directory
        self.checkpointer = kind(max_host_bytes=ROOM, listeners=[self.events.append], **settings)

    def save(self, state: dict[str, Any], name: str = "saved", **part: Any) -> None:
        if self.layout == "file":
            self.checkpointer.save(state, self.directory / name)
        else:
            rest = {key: state[key] for key in list(state)[1:]}
            parts = [
                Part("model", {"first": state["first"]}, Kind.REPLICATED, **part),
                Part("rest", rest, Kind.PER_RANK),
            ]
            self.checkpointer.save(parts, self.directory / name)

    def load(self, name: str = "saved") -> dict[str, Any]:
        if self.layout == "file":
            return dict(self.checkpointer.load(self.directory / name, map_location="cpu"))
        with self.checkpointer.load(self.directory / name) as opened:
            return {**opened.load("model", map_location="cpu"), **opened.load("rest", map_location="cpu")}

    def taken(self) -> list[SnapshotTaken]:
        return [event for event in self.events if isinstance(event, SnapshotTaken)]


def state_of(device: str = "cpu") -> dict[str, torch.Tensor]:
    """Return three windows and more: views, columns, odd sizes, and tensors across the windows' ends."""
    generator = torch.Generator().manual_seed(1)
    random = {
        "first": torch.randn(5 * 2**20 + 3, generator=generator),
        "odd": torch.randint(0, 255, (WINDOW + 12_345,), dtype=torch.uint8, generator=generator),
        "matrix": torch.randn(1500, 1001, generator=generator, dtype=torch.float64),
        **{f"small {number}": torch.randn(number, generator=generator) for number in range(50)},
    }
    state = {name: tensor.to(device) for name, tensor in random.items()}
    state["columns"] = state["matrix"].t()
    state["part"] = state["first"][100:300]
    return state


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> queue.SimpleQueue[WindowRelay]:
    """The window relays of the saves that are begun."""
    found: queue.SimpleQueue[WindowRelay] = queue.SimpleQueue()

    def make(*arguments: Any) -> WindowRelay:
        found.put(windows := WindowRelay(*arguments))
        return windows

    monkeypatch.setattr(staging, "WindowRelay", make)
    return found


def ends(act: Callable[[], Any]) -> None:
    """Run ``act``, which must not hang, and raise what it raises."""
    assert returns(act, LONGEST_SECONDS), "it hangs"


@pytest.mark.each_value
@both_layouts
@pytest.mark.parametrize("place", ["disk", "store"])
def test_a_state_that_is_larger_than_the_memory_is_saved_as_it_was(tmp_path: Path, layout: str, place: str) -> None:
    state = state_of()
    expected = {name: tensor.clone() for name, tensor in state.items()}
    directory: Any = tmp_path if place == "disk" else f"memory://passing-{layout}"
    saves = Saves(layout, tmp_path)
    saves.directory = directory if place == "disk" else _Url(directory)
    ends(lambda: saves.save(state))
    for tensor in (state["first"], state["odd"], state["matrix"]):
        tensor.zero_()
    saves.checkpointer.wait()
    assert_same_state(
        {name: tensor.contiguous() for name, tensor in saves.load().items()},
        {k: v.contiguous() for k, v in expected.items()},
    )
    assert [buffer.nbytes for buffer in saves.checkpointer._pipeline.buffers._idle] == [ROOM]
    saves.checkpointer.close()


class _Url(str):
    def __truediv__(self, name: str) -> str:
        return f"{self}/{name}"


@both_layouts
def test_training_waits_for_room_and_not_for_the_disk(
    tmp_path: Path, layout: str, made: queue.SimpleQueue[WindowRelay]
) -> None:
    opened = threading.Event()
    windows = Fault(lambda it: it.name == "write_at" and it.size >= 2**20, number=None, until=opened)
    saves = Saves(layout, tmp_path, storage=FaultyStorage(LocalStorage(), [windows]))
    state = state_of()
    saving = threading.Thread(target=saves.save, args=(state,))
    saving.start()
    waits_for_room(made.get(timeout=LONGEST_SECONDS))  # no window is written, and there is room for two
    waited = 0.1
    saving.join(waited)
    assert saving.is_alive()
    opened.set()
    saving.join(LONGEST_SECONDS)
    assert not saving.is_alive()
    (taken,) = saves.taken()
    assert waited < taken.memory_seconds <= taken.stall_seconds
    saves.checkpointer.close()


@both_layouts
def test_training_goes_on_while_the_last_windows_are_written(tmp_path: Path, layout: str) -> None:
    opened = threading.Event()
    last = Fault("commit" if layout == "file" else "publish_directory", number=None, until=opened)
    saves = Saves(layout, tmp_path, storage=FaultyStorage(LocalStorage(), [last]))
    state = state_of()
    try:
        ends(lambda: saves.save(state))
        assert saves.checkpointer.is_busy
        for tensor in (state["first"], state["odd"], state["matrix"]):
            tensor.zero_()
    finally:
        opened.set()
    saves.checkpointer.close()
    assert_same_state({"first": saves.load()["first"]}, {"first": state_of()["first"]})


@pytest.mark.sampled(1)
@both_layouts
@pytest.mark.parametrize("number", [1, 3, None])
def test_a_disk_that_is_full_ends_the_wait_and_the_next_save_is_right(
    tmp_path: Path, layout: str, number: int | None
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    # Late enough that other threads already wait for windows for which there is no room.
    meant = Fault(
        lambda it: it.name == "write_at" and "one" in it.path and it.size >= 2**20, number=number, error=full, delay=0.2
    )
    saves = Saves(layout, tmp_path, storage=FaultyStorage(LocalStorage(), [meant]))
    ends(lambda: saves.save(state_of(), "one"))
    with pytest.raises(StorageError):
        saves.checkpointer.wait()
    ends(lambda: saves.save(state_of(), "two"))
    saves.checkpointer.close()
    assert not saves.checkpointer.exists(tmp_path / "one")
    assert_same_state({"odd": saves.load("two")["odd"]}, {"odd": state_of()["odd"]})


@both_layouts
def test_a_file_that_cannot_be_begun_ends_the_wait(tmp_path: Path, layout: str) -> None:
    refused = Fault("create", error=OSError(errno.EACCES, "Permission denied"))
    saves = Saves(layout, tmp_path, storage=FaultyStorage(LocalStorage(), [refused]))
    ends(lambda: saves.save(state_of()))
    with pytest.raises(StorageError):
        saves.checkpointer.close()


def test_what_cannot_be_pickled_ends_the_save(tmp_path: Path) -> None:
    saves = Saves("file", tmp_path)
    with pytest.raises(SerializationError):
        ends(lambda: saves.save({**state_of(), "lock": threading.Lock()}))
    ends(lambda: saves.save(state_of()))
    saves.checkpointer.close()
    assert_same_state({"odd": saves.load()["odd"]}, {"odd": state_of()["odd"]})


@both_layouts
def test_a_window_that_cannot_be_copied_fails_the_save(
    tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckpt_core._layouts.directory.safetensors_file import SafetensorsImage
    from ckpt_core._layouts.torch_file.archive import FileImage

    kind: Any = FileImage if layout == "file" else SafetensorsImage
    whole = kind.digested_window

    def fail_later(self: Any, begin: int, scratch: Any) -> memoryview:
        if begin:
            raise RuntimeError("the device has gone")
        found: memoryview = whole(self, begin, scratch)
        return found

    saves = Saves(layout, tmp_path)
    monkeypatch.setattr(kind, "digested_window", fail_later)
    with pytest.raises(RuntimeError, match="the device has gone"):
        ends(lambda: saves.save(state_of()))
    assert not saves.checkpointer.is_busy
    monkeypatch.undo()
    ends(lambda: saves.save(state_of()))
    saves.checkpointer.close()


def test_frozen_tensors_are_not_written_again(tmp_path: Path) -> None:
    operations: list[Operation] = []
    storage = FaultyStorage(LocalStorage())
    storage.operations = operations
    saves = Saves("directory", tmp_path, storage=storage)
    state = state_of()
    for name in ("one", "two"):
        ends(lambda name=name: saves.save(state, name, frozen=frozenset(["first"])))
        saves.checkpointer.wait()
    state["first"][7] += 1  # declared frozen, but changed
    ends(lambda: saves.save(state, "three", frozen=frozenset(["first"])))
    saves.checkpointer.close()
    links = [tmp_path / name / "model.safetensors" for name in ("one", "two", "three")]
    assert [path.stat().st_nlink for path in links] == [2, 2, 1]
    for name in ("two", "three"):
        expected = state if name == "three" else state_of()
        assert_same_state({"first": saves.load(name)["first"]}, {"first": expected["first"]})


@both_layouts
def test_where_no_thread_can_write_training_waits_for_the_save(
    tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(JobQueue, "_start", lambda _: False)
    saves = Saves(layout, tmp_path)
    ends(lambda: saves.save(state_of()))
    assert not saves.checkpointer.is_busy
    assert "max_host_bytes leaves 33554432 for a copy" in caplog.text
    assert_same_state({"odd": saves.load()["odd"]}, {"odd": state_of()["odd"]})


@both_layouts
def test_what_has_room_is_copied_as_always(tmp_path: Path, layout: str) -> None:
    saves = Saves(layout, tmp_path)
    saves.save({"first": torch.ones(100), "rest": torch.ones(5)})
    saves.checkpointer.close()
    assert saves.taken()[0].memory_seconds == 0


@pytest.mark.parametrize("pending", [1, 2])
def test_too_little_is_refused_where_the_option_is_given(pending: int) -> None:
    for make in (Checkpointer, DirectoryCheckpointer, CheckpointerOptions):
        make(max_host_bytes=ROOM * pending, max_pending=pending)  # type: ignore[operator]
        with pytest.raises(ValueError, match="max_host_bytes must be at least"):
            make(max_host_bytes=ROOM * pending - 1, max_pending=pending)  # type: ignore[operator]


# ---- accelerators ----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("accelerator", [SIMULATED], indirect=True)
@pytest.mark.parametrize("overlap", [False, True])
@both_layouts
def test_states_of_an_accelerator_pass_through_pinned_memory_and_are_let_go_of(
    tmp_path: Path, layout: str, overlap: bool, accelerator: SimulatedAccelerator
) -> None:
    opened = threading.Event()
    last = Fault("commit" if layout == "file" else "publish_directory", number=None, until=opened)
    saves = Saves(layout, tmp_path, storage=FaultyStorage(LocalStorage(), [last]), overlap=overlap)
    gc.collect()
    before = accelerator.module.live_bytes()
    with torch.Stream(device=accelerator.type):
        state = state_of(accelerator.type)
        state["first"].mul_(2.0)
        ends_on_this_stream = torch.accelerator.current_stream()
        saves.save(state)
        state["first"].zero_()
    del state, ends_on_this_stream
    gc.collect()
    try:
        assert accelerator.module.live_bytes() == before
        assert saves.checkpointer.is_busy
    finally:
        opened.set()
    saves.checkpointer.wait()
    (buffer,) = saves.checkpointer._pipeline.buffers._idle
    assert buffer.tensor.is_pinned()
    assert_same_state({"first": saves.load()["first"]}, {"first": state_of()["first"] * 2})
    saves.checkpointer.close()


@pytest.mark.parametrize("accelerator", [SIMULATED], indirect=True)
def test_a_device_without_memory_for_a_temporary_fails_the_save(
    tmp_path: Path, accelerator: SimulatedAccelerator
) -> None:
    saves = Saves("directory", tmp_path)
    state = state_of(accelerator.type)
    with accelerator.module.limited_memory(0), pytest.raises(torch.OutOfMemoryError):
        saves.save(state)
    saves.save(state)
    saves.checkpointer.close()
    assert_same_state({"odd": saves.load()["odd"]}, {"odd": state_of()["odd"]})


class Windows:
    """The windows of a file, each of which is copied by a function of the test."""

    is_staged = False
    region_size = approximate_size = 4 * WINDOW
    tensors: tuple[torch.Tensor, ...] = ()
    staged_size = region_size

    def __init__(self, copy: Callable[[int], None]) -> None:
        self._copy = copy

    def digested_window(self, begin: int, scratch: Any) -> memoryview:
        self._copy(begin)
        return memoryview(scratch.memory)

    def forget_sources(self) -> None:
        """Do nothing: there are no sources."""


def copied_by_another(windows: WindowRelay) -> threading.Thread:
    """Copy the windows on another thread, as the training thread does; it ends whatever the copy raises."""

    def copy() -> None:
        with contextlib.suppress(BaseException):
            windows.copy()

    thread = threading.Thread(target=copy)
    thread.start()
    return thread


def waits_for_room(windows: WindowRelay) -> None:
    """Return once a thread waits for room."""
    deadline = time.monotonic() + LONGEST_SECONDS
    while not any(map(functools.partial(is_in_wait_for_room, windows), sys._current_frames().values())):
        assert time.monotonic() < deadline, "no thread waits for room"
        time.sleep(0.001)


def is_in_wait_for_room(windows: WindowRelay, frame: types.FrameType | None) -> bool:
    waits = False
    while frame is not None:
        if waits and frame.f_code is WindowRelay._find_room.__code__:
            return frame.f_locals["self"] is windows
        waits = frame.f_code is threading.Condition.wait_for.__code__
        frame = frame.f_back
    return False


def test_training_does_not_go_on_while_the_writer_reads_the_rest_of_the_file() -> None:
    reads, let_go = threading.Event(), threading.Event()
    begun_while_it_read: list[bool] = []

    class Rest(Windows):
        def tail(self) -> bytes:
            reads.set()
            begun_while_it_read.append(let_go.wait(0.2))
            return b""

        def forget_sources(self) -> None:
            let_go.set()

    windows = WindowRelay(StagingBuffer(2 * ROOM), lambda: None)
    (passed,) = windows.begin([("file", Rest(lambda _: reads.wait()))], lambda *_: False)
    copying = copied_by_another(windows)
    assert passed[1].tail() == b""
    ends(copying.join)
    assert begun_while_it_read == [False]


def test_all_saves_under_way_together_take_what_is_allowed() -> None:
    pool = BufferPool(2, 2 * ROOM)
    buffers = [pool.acquire(5 * ROOM) for _ in range(2)]
    assert [buffer.nbytes for buffer in buffers] == [ROOM, ROOM]


def test_who_waits_for_room_hears_that_nobody_writes_any_more() -> None:
    windows = WindowRelay(StagingBuffer(ROOM), lambda: None)
    (passed,) = windows.begin([("file", Windows(lambda _: None))], lambda *_: False)
    copied_by_another(windows)
    passed[1].digested_window(0, None)
    passed[1].digested_window(WINDOW, None)  # the room is full
    waits_for_room(windows)
    ends(windows.settle)


def test_who_waits_for_room_hears_that_a_copy_has_failed() -> None:
    windows = WindowRelay(StagingBuffer(ROOM), lambda: None)

    def copy(begin: int) -> None:
        if begin == WINDOW:
            waits_for_room(windows)
            raise OSError(errno.EIO, "cannot be copied")

    (passed,) = windows.begin([("file", Windows(copy))], lambda *_: False)
    with pytest.raises(OSError, match="cannot be copied"):
        ends(windows.copy)
    with pytest.raises(ImageAbandonedError):
        passed[1].digested_window(2 * WINDOW, None)


def test_the_memory_comes_back_when_nothing_is_copied_into_it_any_more() -> None:
    pool = BufferPool(1, ROOM)
    begun, may_end = threading.Event(), threading.Event()

    def copy(begin: int) -> None:
        begun.set()
        may_end.wait()

    snapshot, windows = Snapshot("saved", pool), Windows(copy)
    snapshot.take(windows)
    snapshot.pass_through([("file", windows)])
    training = threading.Thread(target=lambda: (snapshot.finish(), snapshot.seal()))
    training.start()
    begun.wait()
    release = threading.Thread(target=snapshot.release)
    release.start()
    release.join(0.2)
    assert pool.exhausted  # the buffer is still being written to
    may_end.set()
    ends(release.join)
    ends(training.join)
    assert not pool.exhausted


@both_layouts
def test_where_no_more_threads_can_be_started_the_one_that_trains_copies_alone(
    tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name != "ckpt-writer" and thread.name.startswith("ckpt-"):
            raise RuntimeError("can't start new thread")  # as with ulimit -u
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    saves = Saves(layout, tmp_path)
    ends(lambda: saves.save(state_of()))
    ends(saves.checkpointer.close)
    assert_same_state({"odd": saves.load()["odd"]}, {"odd": state_of()["odd"]})


def test_ctrl_c_in_the_wait_for_room_leaves_nothing_behind(
    tmp_path: Path, made: queue.SimpleQueue[WindowRelay]
) -> None:
    opened = threading.Event()
    windows = Fault(lambda it: it.name == "write_at" and it.size >= 2**20, number=None, until=opened)
    saves = Saves("file", tmp_path, storage=FaultyStorage(LocalStorage(), [windows]))
    state = state_of()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def interrupt_when_it_waits() -> None:
        waits_for_room(made.get())
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        opened.set()

    before = signal.signal(signal.SIGUSR1, interrupt)
    watching = threading.Thread(target=interrupt_when_it_waits, daemon=True)
    try:
        watching.start()
        with pytest.raises(KeyboardInterrupt):
            saves.save(state)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not saves.checkpointer.is_busy
    saves.save(state, "next")
    saves.checkpointer.close()
    assert not saves.checkpointer.exists(tmp_path / "saved")
    assert_same_state({"odd": saves.load("next")["odd"]}, {"odd": state["odd"]})
