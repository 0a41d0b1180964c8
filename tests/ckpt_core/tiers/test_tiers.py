"""Two tiers: commits on a local disk, uploads in the background; which copy is read; what failures cost."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import (
    Catalog,
    CheckpointCorruptedError,
    Checkpointer,
    DirectoryCheckpointer,
    Kind,
    Part,
    StorageError,
    verify,
)
from ckpt_core.events import CheckpointUploaded, Event, RunSummary, SaveCommitted, UploadFailed, UploadProgressed
from ckpt_core.storage import Fault, FaultyStorage, LocalStorage, Operation, storage_for
from ckpt_core.tiers import LEDGER_NAME, Tiers

ELEMENTS = 1000
REFUSES = OSError(5, "the store is down")


class Layout:
    """A kind of checkpoint: how it is saved, loaded and damaged."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_file = name == "file"
        self.ending = ".ckpt" if self.is_file else ""

    def __repr__(self) -> str:
        return self.name

    def checkpointer(self, **settings: Any) -> Any:
        return (Checkpointer if self.is_file else DirectoryCheckpointer)(**settings)

    def save(self, checkpointer: Any, path: str, value: int) -> None:
        state = {"w": torch.full((ELEMENTS,), value, dtype=torch.int32)}
        checkpointer.save(state if self.is_file else [Part("model", state, Kind.REPLICATED)], path)

    def value(self, checkpointer: Any, path: str) -> int:
        if self.is_file:
            weight = checkpointer.load(path)["w"]
        else:
            with checkpointer.load(path) as checkpoint:
                weight = checkpoint.load("model")["w"]
        (value,) = set(weight.tolist())
        return int(value)

    def data_file(self, path: str) -> Path:
        return Path(path) if self.is_file else Path(path, "model.safetensors")

    def damage(self, path: str) -> None:
        file = self.data_file(path)
        content = bytearray(file.read_bytes())
        content[content.index(b"\x07\0\0\0" * 8) + 8] ^= 1  # inside the tensor, whose value is 7
        file.write_bytes(content)


class Setting:
    """A local directory, and a store in memory with the faults that a test chooses."""

    def __init__(self, layout: Layout, folder: Path) -> None:
        self.layout = layout
        self.local = str(folder / "local")
        self.remote = f"memory://{uuid.uuid4().hex}/run"
        self.events: list[Event] = []
        self.storage = self.store()

    def store(self, *faults: Fault) -> FaultyStorage:
        self.storage = FaultyStorage(storage_for(self.remote), faults)
        return self.storage

    def tiers(self, **settings: Any) -> Tiers:
        return Tiers(local_dir=self.local, upload_to=self.remote, remote=self.storage, **settings)

    def run(self, *, keep_local: int | None = None, **settings: Any) -> Any:
        tiers = self.tiers(keep_local=keep_local)
        return self.layout.checkpointer(tiers=tiers, listeners=[self.events.append], **settings)

    def here(self, name: Any) -> str:
        return f"{self.local}/{name}{self.layout.ending}"

    def there(self, name: Any) -> str:
        return f"{self.remote}/{name}{self.layout.ending}"

    def names_there(self) -> list[str]:
        """Return the committed uploads, as a program sees them that knows nothing of tiers."""
        found = Catalog(self.remote, suffix=self.layout.ending).checkpoints()
        return sorted(os.path.basename(info.path).removesuffix(".ckpt") for info in found)

    def names_here(self) -> list[str]:
        found = Catalog(self.local, suffix=self.layout.ending).checkpoints()
        return sorted(os.path.basename(info.path).removesuffix(".ckpt") for info in found)

    def value_there(self, name: Any) -> int:
        verify(self.there(name))
        return self.layout.value(self.layout.checkpointer(), self.there(name))

    def is_uploading(self, name: Any) -> bool:
        """Return whether the uploading thread has reached the first bytes of a checkpoint, where a store may hang."""
        return any(map(writes_of(str(name)), self.storage.operations))

    def uploaded(self) -> list[str]:
        """Return the names of the uploads, in order."""
        paths = [event.path for event in self.events if isinstance(event, CheckpointUploaded)]
        return [os.path.basename(path).removesuffix(".ckpt") for path in paths]


@pytest.fixture(params=["file", "directory"])
def setting(request: pytest.FixtureRequest, tmp_path: Path) -> Setting:
    return Setting(Layout(request.param), tmp_path)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def writes_of(name: str) -> Callable[[Operation], bool]:
    """Return a condition for the writes of an upload."""
    return lambda operation: operation.name == "write_at" and f"/run/{name}" in operation.path


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---- which path is which
# ----------------------------------------------------------------------------------------------


def test_a_path_of_either_tier_names_the_pair(tmp_path: Path) -> None:
    tiers = Tiers(local_dir=str(tmp_path / "fast" / ""), upload_to="s3://bucket/run/")
    local, remote = str(tmp_path / "fast/a/5.ckpt"), "s3://bucket/run/a/5.ckpt"
    for path in (local, remote, f"file://{local}"):
        assert (tiers.local_path(path), tiers.remote_path(path)) == (local, remote)
    assert tiers.local_path("s3://bucket/run") == str(tmp_path / "fast")
    (tmp_path / "link").symlink_to(tmp_path / "fast")
    assert tiers.remote_path(str(tmp_path / "link/a/5.ckpt")) == remote, "Lightning follows links"
    for outside in (
        tmp_path / "fast2/5.ckpt",
        "s3://bucket/run2/5.ckpt",
        "s3://bucket/run/../x",
        tmp_path / "fast/../x",
    ):
        assert not tiers.covers(str(outside))
        with pytest.raises(StorageError, match=r"neither below local_dir .* nor below upload_to"):
            tiers.local_path(str(outside))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local_dir": "/fast"}, "local_dir needs upload_to"),
        ({"upload_to": "s3://bucket"}, "upload_to needs local_dir"),
        ({"keep_local": 2}, "keep_local needs local_dir and upload_to"),
        ({"local_dir": "s3://bucket", "upload_to": "/slow"}, "local_dir must be a directory on a local disk"),
        ({"local_dir": "/a", "upload_to": "/a/b"}, "must lie apart"),
        ({"local_dir": "/a/b", "upload_to": "/a"}, "must lie apart"),
        ({"local_dir": "/a", "upload_to": "/b", "keep_local": 0}, "keep_local must be a whole number of at least 1"),
        ({"local_dir": "/a", "upload_to": "/b", "keep_local": "2"}, "keep_local must be a whole number of at least 1"),
        ({"local_dir": 5, "upload_to": "/b"}, "local_dir must be a directory, not 5"),
        ({"local_dir": "/a", "upload_to": ""}, "upload_to must be a URL or directory, not ''"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tiers.of(options.get("local_dir"), options.get("upload_to"), options.get("keep_local"))


def test_a_save_outside_of_both_is_refused_and_a_load_is_not(setting: Setting, tmp_path: Path) -> None:
    elsewhere = str(tmp_path / "elsewhere")
    setting.layout.save(setting.layout.checkpointer(strategy="sync"), elsewhere, 3)
    with setting.run() as run:
        with pytest.raises(StorageError, match="local_dir"):
            setting.layout.save(run, str(tmp_path / "other"), 1)
        assert setting.layout.value(run, elsewhere) == 3
        assert run.exists(elsewhere)


# ---- uploads
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_a_store_that_hangs_holds_up_no_save(setting: Setting, gate: threading.Event, strategy: str) -> None:
    setting.store(Fault("write_at", number=1, until=gate))
    run = setting.run(strategy=strategy)
    for step in range(3):
        setting.layout.save(run, setting.here(step), step)
    run.wait()  # this waits for the local tier only
    assert setting.names_here() == ["0", "1", "2"]
    assert setting.names_there() == []
    assert run.is_busy
    gate.set()
    until(lambda: not run.is_busy)
    run.close()
    assert not run.is_busy
    assert setting.uploaded() == ["0", "1", "2"], "in the order of the commits"
    assert [setting.value_there(step) for step in range(3)] == [0, 1, 2]
    committed = [event for event in setting.events if isinstance(event, SaveCommitted)]
    uploaded = [event for event in setting.events if isinstance(event, CheckpointUploaded)]
    assert [event.path for event in committed] == [setting.here(step) for step in range(3)]
    assert [event.target for event in uploaded] == [setting.there(step) for step in range(3)]


def test_at_the_end_the_newest_is_uploaded_next(setting: Setting, gate: threading.Event) -> None:
    setting.store(Fault("write_at", number=1, until=gate))
    run = setting.run()
    for step in range(4):
        setting.layout.save(run, setting.here(step), step)
    run.remove(setting.here(1))
    run.wait()
    until(lambda: setting.is_uploading(0))  # this may take a while, and until then the order may change
    closing = threading.Thread(target=run.close)
    closing.start()
    until(lambda: run._uploader.queue.pending[1] == setting.here(3))
    gate.set()
    closing.join()
    assert setting.uploaded() == ["0", "3", "2"]
    assert setting.names_there() == ["0", "2", "3"]


def test_at_the_end_the_newest_is_one_that_was_saved_again(setting: Setting, gate: threading.Event) -> None:
    setting.store(Fault("write_at", number=1, until=gate))
    run = setting.run()
    for step, name in enumerate(["0", "1", "last", "2", "last"]):
        setting.layout.save(run, setting.here(name), step)
    run.wait()
    until(lambda: setting.is_uploading(0))
    closing = threading.Thread(target=run.close)
    closing.start()
    until(lambda: run._uploader.queue.pending[1] == setting.here("last"))
    gate.set()
    closing.join()
    assert setting.uploaded() == ["0", "last", "1", "2"]
    assert setting.value_there("last") == 4


def test_closing_says_what_it_waits_for(
    setting: Setting, gate: threading.Event, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_core.tiers.uploader._SECONDS_BEFORE_LOG", 0.0)
    setting.store(Fault("write_at", number=1, until=gate))
    run = setting.run()
    setting.layout.save(run, setting.here(5), 5)
    with caplog.at_level(logging.WARNING, "ckpt_core"):
        closing = threading.Thread(target=run.close)
        closing.start()
        until(lambda: any("waiting for uploads" in record.message for record in caplog.records))
        assert closing.is_alive()
        gate.set()
        closing.join()
    assert setting.names_there() == ["5"]


def test_a_url_of_the_remote_tier_is_a_name_too(setting: Setting) -> None:
    with setting.run() as run:
        setting.layout.save(run, setting.there(4), 4)
        run.wait(setting.here(4))
        assert setting.names_here() == ["4"]
        assert setting.layout.value(run, setting.there(4)) == 4
    assert setting.names_there() == ["4"]


def test_a_copy_is_made_within_the_store(setting: Setting) -> None:
    with setting.run() as run:
        for step in range(2):
            setting.layout.save(run, setting.here(step), step)
            run.copy(setting.here(step), setting.here("last"))
            run.wait()
            until(lambda: not run.is_busy)
    assert setting.names_there() == ["0", "1", "last"]
    assert setting.value_there("last") == 1
    assert [setting.value_there(step) for step in range(2)] == [0, 1]
    written = [operation.path for operation in setting.storage.operations if operation.name == "create"]
    assert not [path for path in written if "/last" in path and not path.endswith("manifest.json")]


def test_a_large_file_goes_through_little_memory(tmp_path: Path) -> None:
    setting = Setting(Layout("file"), tmp_path)
    with setting.run() as run:
        run.save({"w": torch.zeros(10 * 2**20)}, setting.here("large"))
    sizes = [operation.size for operation in setting.storage.operations if operation.name == "write_at"]
    assert max(sizes) == 16 * 2**20
    assert sum(sizes) > 40 * 2**20
    verify(setting.there("large"))


def test_a_copy_of_the_checkpointer_has_the_same_tiers(setting: Setting) -> None:
    setting.storage = storage_for(setting.remote)  # type: ignore[assignment]
    twin = pickle.loads(pickle.dumps(setting.layout.checkpointer(tiers=setting.tiers(keep_local=1))))
    with twin:
        for step in range(2):
            setting.layout.save(twin, setting.here(step), step)
    assert setting.names_there() == ["0", "1"]
    assert setting.names_here() == ["1"]


# ---- failures
# ---------------------------------------------------------------------------------------------------------


def test_a_failed_upload_is_counted_and_made_up_for(setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    setting.store(Fault(writes_of("0"), number=1, error=REFUSES))
    with setting.run(on_error="warn") as run:
        setting.layout.save(run, setting.here(0), 0)
        until(lambda: run.failures == 1)
        assert setting.names_here() == ["0"]
        assert setting.names_there() == []
        setting.layout.save(run, setting.here(1), 1)
        until(lambda: setting.names_there() == ["0", "1"])  # before the end: a closing run uploads the newest first
    assert setting.uploaded() == ["0", "1"], "the failed one is tried again first"
    assert [setting.value_there(step) for step in range(2)] == [0, 1]
    failed = [event for event in setting.events if isinstance(event, UploadFailed)]
    assert [event.path for event in failed] == [setting.here(0)]
    assert "the store is down" in failed[0].error
    assert any(record.levelno == logging.WARNING and "the store is down" in record.message for record in caplog.records)


def test_what_is_left_is_uploaded_although_the_clock_was_ahead_when_it_was_saved(setting: Setting) -> None:
    with setting.layout.checkpointer() as before:
        setting.layout.save(before, setting.here(1), 1)
    tomorrow = time.time() + 86400
    for path in [Path(setting.here(1)), *Path(setting.here(1)).glob("*")]:
        os.utime(path, (tomorrow, tomorrow))
    with setting.run() as run:
        setting.layout.save(run, setting.here(2), 2)
    assert setting.names_there() == ["1", "2"]


def test_while_the_store_is_down_each_save_tries_again_only_one_upload(setting: Setting) -> None:
    is_down = threading.Event()
    is_down.set()
    setting.store(Fault(lambda operation: is_down.is_set() and operation.name == "write_at", None, REFUSES))
    with setting.run(on_error="warn") as run:
        for step in range(6):
            setting.layout.save(run, setting.here(step), step)
            until(lambda step=step: run.failures == 2 * step + 1 and not run.is_busy)
        is_down.clear()
        setting.layout.save(run, setting.here(6), 6)
        until(lambda: len(setting.names_there()) == 7)
    assert run.failures == 11
    assert setting.uploaded() == ["0", "6", "1", "2", "3", "4", "5"]
    assert [setting.value_there(step) for step in range(7)] == list(range(7))


def test_a_failed_upload_is_raised_once(setting: Setting) -> None:
    setting.store(Fault(writes_of("0"), number=1, error=REFUSES))
    run = setting.run()
    setting.layout.save(run, setting.here(0), 0)
    until(lambda: run.failures == 1)
    assert isinstance(run.failure, StorageError)
    with pytest.raises(StorageError, match="the store is down"):
        setting.layout.save(run, setting.here(1), 1)
    setting.layout.save(run, setting.here(2), 2)
    run.close()
    assert setting.names_there() == ["0", "2"]


def test_a_failure_while_closing_is_raised_by_it(setting: Setting) -> None:
    setting.store(Fault("write_at", number=None, error=REFUSES))
    run = setting.run()
    setting.layout.save(run, setting.here(0), 0)
    with pytest.raises(StorageError, match="the store is down"):
        run.close()
    assert setting.names_here() == ["0"]


@pytest.mark.sampled(1)
def test_closing_leaves_what_a_store_that_is_down_for_long_does_not_take(
    setting: Setting, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    begins = threading.Event()
    first = Fault(writes_of("0"), number=None, until=begins, error=REFUSES)
    setting.store(first, Fault(writes_of("1"), number=None, until=gate, error=REFUSES))
    run = setting.run(on_error="warn")
    for step in range(4):
        setting.layout.save(run, setting.here(step), step)
    run.wait()
    begins.set()
    until(lambda: run.failures == 1 and setting.is_uploading(1))
    setting.storage.has_given_up = True
    closing = threading.Thread(target=run.close)
    closing.start()
    names = ", ".join(os.path.basename(setting.here(step)) for step in (3, 2))
    until(lambda: f"the next run uploads {names}" in caplog.text)
    gate.set()
    closing.join()
    assert run.failures == 2
    assert setting.names_there() == []
    setting.store()
    with setting.run() as run:
        setting.layout.save(run, setting.here(4), 4)
    assert setting.names_there() == ["0", "1", "2", "3", "4"]


def test_a_damaged_local_copy_is_not_uploaded(setting: Setting, gate: threading.Event) -> None:
    setting.store(Fault(writes_of("0"), number=1, until=gate))
    with setting.run(on_error="warn") as run:
        setting.layout.save(run, setting.here(0), 0)
        setting.layout.save(run, setting.here(1), 7)
        run.wait()
        setting.layout.damage(setting.here(1))
        gate.set()
        until(lambda: run.failures == 1)
        setting.layout.save(run, setting.here(2), 2)
    assert setting.names_there() == ["0", "2"]
    assert run.failures == 1, "it does not get better, and is not tried again"


def test_a_directory_replaced_during_its_upload_is_never_mixed(tmp_path: Path, gate: threading.Event) -> None:
    setting = Setting(Layout("directory"), tmp_path)
    mixed: list[int] = []

    class Watched(FaultyStorage):
        def publish_directory(self, path: str, *arguments: Any, **settings: Any) -> None:
            super().publish_directory(path, *arguments, **settings)
            mixed.append(setting.value_there("last"))  # this verifies it

    second_file = Fault(lambda operation: operation.name == "create" and ".digests" in operation.path, until=gate)
    setting.storage = Watched(storage_for(setting.remote), [second_file])
    with setting.run() as run:
        setting.layout.save(run, setting.here("last"), 1)
        until(lambda: any(".digests" in operation.path for operation in setting.storage.operations))
        setting.layout.save(run, setting.here("last"), 2)
        run.wait()
        gate.set()
    assert setting.value_there("last") == 2
    assert mixed == [2], "the first upload was given up"
    assert run.failures == 0


def test_a_directory_replaced_while_it_is_verified_is_not_taken_for_damaged(tmp_path: Path) -> None:
    setting = Setting(Layout("directory"), tmp_path)
    replaced = threading.Event()

    class ReplacedHalfRead(LocalStorage):
        def open(self, path: str) -> Any:
            if path.endswith(".digests") and not replaced.is_set():
                setting.layout.save(DirectoryCheckpointer(strategy="sync"), setting.here("last"), 2)
                replaced.set()
            return super().open(path)

    with setting.run(storage=ReplacedHalfRead()) as run:
        setting.layout.save(run, setting.here("last"), 1)
        until(replaced.is_set)
        run.upload(setting.here("last"))
    assert run.failures == 0
    assert setting.value_there("last") == 2


def test_a_file_replaced_during_its_upload_is_not_taken_for_what_it_was(tmp_path: Path) -> None:
    setting = Setting(Layout("file"), tmp_path)
    replaced = threading.Event()

    class ReplacedOnceSeen(LocalStorage):
        def open(self, path: str) -> Any:
            if threading.current_thread().name == "ckpt-uploader" and not replaced.is_set():
                os.link(path, setting.here("copy"))
                setting.layout.save(Checkpointer(strategy="sync"), path, 2)
                replaced.set()
            return super().open(path)

    with setting.run(storage=ReplacedOnceSeen()) as run:
        setting.layout.save(run, setting.here("last"), 1)
        until(replaced.is_set)
        run.upload(setting.here("copy"))  # the old content of "last"
        run.upload(setting.here("last"))
    assert setting.value_there("copy") == 1
    assert setting.value_there("last") == 2


def test_an_upload_that_another_process_has_replaced_is_not_recorded(
    setting: Setting, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = Setting(setting.layout, tmp_path / "other")
    other.remote, other.storage = setting.remote, storage_for(setting.remote)

    def other_is_uploaded_first(operation: Operation) -> bool:
        if operation.name == "create" and LEDGER_NAME in operation.path and not other.events:
            with other.run() as run:
                other.layout.save(run, other.here("last"), 2)
        return False

    setting.store(Fault(other_is_uploaded_first))
    with setting.run(keep_local=1) as run:
        setting.layout.save(run, setting.here("last"), 1)
    assert other.uploaded() == setting.uploaded() == ["last"]
    assert setting.value_there("last") == 2
    assert f"another process has written to {setting.there('last')}" in caplog.text
    with setting.run(keep_local=1) as run:
        setting.layout.save(run, setting.here("next"), 3)
    assert setting.uploaded() == ["last", "next", "last"], "nobody knew whether it was there"
    assert setting.value_there("last") == 1


# ---- removal and room on the local disk
# --------------------------------------------------------------------------------


def test_removal_is_of_both_and_waits_for_the_upload_of_the_successor(setting: Setting, gate: threading.Event) -> None:
    with setting.run() as run:
        setting.layout.save(run, setting.here(0), 0)
        until(lambda: setting.uploaded() == ["0"])
    setting.store(Fault(writes_of("1"), number=1, until=gate))
    with setting.run() as run:
        setting.layout.save(run, setting.here(1), 1)
        run.remove(setting.here(0))
        run.wait()
        until(lambda: setting.names_here() == ["1"])
        assert setting.names_there() == ["0"], "the only checkpoint of the remote tier stays until it has another"
        gate.set()
    assert setting.names_there() == ["1"]


def test_what_is_removed_before_its_turn_is_not_uploaded(setting: Setting, gate: threading.Event) -> None:
    setting.store(Fault(writes_of("0"), number=1, until=gate))
    with setting.run() as run:
        setting.layout.save(run, setting.here(0), 0)
        until(lambda: any(writes_of("0")(operation) for operation in setting.storage.operations))
        for step in range(1, 4):
            setting.layout.save(run, setting.here(step), step)
            run.remove(setting.here(step - 1))
        run.wait()
        until(lambda: setting.names_here() == ["0", "3"])  # 0 is being read
        gate.set()
    assert setting.uploaded() == ["0", "3"]
    assert setting.names_here() == ["3"]
    assert setting.names_there() == ["3"]


def test_the_remote_tier_keeps_the_old_when_the_new_is_not_uploaded(setting: Setting) -> None:
    with setting.run() as run:
        setting.layout.save(run, setting.here(0), 0)
    setting.store(Fault(writes_of("1"), number=1, error=REFUSES))
    with setting.run(on_error="warn") as run:
        setting.layout.save(run, setting.here(1), 1)
        run.remove(setting.here(0))
        until(lambda: run.failures == 1)
        run.drain()
        assert setting.names_there() == ["0"]
        setting.layout.save(run, setting.here(2), 2)
    assert setting.names_there() == ["1", "2"], "made up for, with the removal"


def test_a_name_saved_anew_survives_the_removal_of_the_old(setting: Setting, gate: threading.Event) -> None:
    setting.store(Fault(writes_of("0"), number=1, until=gate))
    with setting.run() as run:
        setting.layout.save(run, setting.here(0), 1)
        until(lambda: run.is_busy and any(writes_of("0")(operation) for operation in setting.storage.operations))
        run.remove(setting.here(0))
        setting.layout.save(run, setting.here(0), 2)
        run.wait()
        gate.set()
    assert setting.names_here() == ["0"]
    assert setting.names_there() == ["0"]
    assert setting.value_there(0) == 2


def test_room_is_made_only_for_what_is_uploaded(setting: Setting, gate: threading.Event) -> None:
    def is_of_others(operation: Operation) -> bool:
        return operation.name in ("write_at", "copy") and any(
            f"/run/{name}" in operation.path for name in ("1", "2", "last")
        )

    setting.store(Fault(is_of_others, number=None, until=gate))
    with setting.run(keep_local=1) as run:
        for step in range(3):
            setting.layout.save(run, setting.here(step), step)
            run.copy(setting.here(step), setting.here("last"))
        run.wait()
        assert {"1", "2"} <= set(setting.names_here())
        gate.set()
    kept = {"2", "last"} if setting.layout.is_file else {"last"}  # names of one file take no room of their own
    assert set(setting.names_here()) == kept
    assert setting.names_there() == ["0", "1", "2", "last"]
    with setting.run() as run:
        assert [setting.layout.value(run, setting.here(step)) for step in range(3)] == [0, 1, 2]


def test_no_room_is_made_for_a_save_over_what_is_uploaded(setting: Setting) -> None:
    with setting.run() as run:
        setting.layout.save(run, setting.here("last"), 1)
    setting.store(Fault(writes_of("last"), number=None, error=REFUSES))
    with setting.run(keep_local=1, on_error="warn") as run:
        setting.layout.save(run, setting.here("last"), 2)
        setting.layout.save(run, setting.here(5), 5)
    assert setting.uploaded() == ["last", "5"]
    assert setting.names_here() == ["5", "last"]
    assert setting.layout.value(setting.layout.checkpointer(), setting.here("last")) == 2


def test_no_room_is_made_while_the_store_is_down(setting: Setting) -> None:
    setting.store(Fault("write_at", number=None, error=REFUSES))
    with setting.run(keep_local=1, on_error="warn") as run:
        for step in range(3):
            setting.layout.save(run, setting.here(step), step)
    assert setting.names_here() == ["0", "1", "2"]


# ---- reading
# ----------------------------------------------------------------------------------------------------------


def test_the_local_copy_is_read_where_it_is_whole(setting: Setting) -> None:
    with setting.run() as run:
        setting.layout.save(run, setting.here(7), 7)
    reader = setting.run()
    setting.store(Fault("open", number=None, error=REFUSES))
    assert setting.layout.value(reader, setting.here(7)) == 7
    assert setting.layout.value(setting.run(), setting.there(7)) == 7


def test_a_damaged_local_copy_is_replaced_by_the_other(setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    with setting.run() as run:
        setting.layout.save(run, setting.here(7), 7)
    setting.layout.damage(setting.here(7))
    catalog = Catalog(setting.local, suffix=setting.layout.ending, tiers=setting.tiers())
    newest = catalog.newest_verified()
    assert newest is not None
    assert newest.path == setting.here(7)
    with setting.run(on_error="warn") as run:
        assert setting.layout.value(run, setting.here(7)) == 7
    took = [record for record in caplog.records if "instead of the local one" in record.getMessage()]
    assert len(took) == 1
    assert setting.there(7) in took[0].getMessage()


def test_the_upload_of_an_earlier_save_does_not_take_its_place(setting: Setting) -> None:
    with setting.run() as run:
        setting.layout.save(run, setting.here("last"), 1)
        setting.layout.save(run, setting.here("before"), 1)
    setting.store(Fault("write_at", number=None, error=REFUSES))
    with setting.run(on_error="warn") as run:
        setting.layout.save(run, setting.here("last"), 7)
    setting.layout.damage(setting.here("last"))
    with pytest.raises(CheckpointCorruptedError):
        setting.layout.value(setting.run(), setting.here("last"))
    newest = Catalog(setting.local, suffix=setting.layout.ending, tiers=setting.tiers()).newest_verified()
    assert newest is not None
    assert newest.path == setting.here("before")


def test_a_machine_with_an_empty_disk_goes_on(setting: Setting) -> None:
    with setting.run() as run:
        for step in (10, 9, 11):  # not in the order of the names
            setting.layout.save(run, setting.here(step), step)
    shutil.rmtree(setting.local)
    for root in (setting.local, setting.remote):
        newest = Catalog(root, suffix=setting.layout.ending, tiers=setting.tiers()).newest_verified()
        assert newest is not None
        assert newest.path == f"{root}/11{setting.layout.ending}"
    with setting.run() as run:
        assert run.exists(setting.here(11))
        assert run.is_taken(setting.here(11))
        assert not run.is_taken(setting.here(12))
        assert setting.layout.value(run, setting.here(11)) == 11
        setting.layout.save(run, setting.here(12), 12)
    assert setting.names_there() == ["10", "11", "12", "9"]


def test_a_late_upload_is_no_newer_checkpoint(setting: Setting) -> None:
    setting.store(Fault(writes_of("0"), number=1, error=REFUSES))
    with setting.run(on_error="warn") as run:
        setting.layout.save(run, setting.here(0), 0)
        until(lambda: run.failures == 1)
    plain = Setting(setting.layout, Path(setting.local))
    plain.local, plain.remote, plain.storage = setting.local, setting.remote, storage_for(setting.remote)  # type: ignore[assignment]
    time.sleep(0.05)
    with plain.run() as run:  # as the next process
        setting.layout.save(run, setting.here(1), 1)
    assert plain.uploaded() == ["1", "0"], "what is new goes first"
    shutil.rmtree(setting.local)
    for tiers in (None, setting.tiers()):
        newest = Catalog(setting.remote, suffix=setting.layout.ending, tiers=tiers).newest_verified()
        assert newest is not None
        assert newest.path == setting.there(1)


@pytest.mark.parametrize(("rank", "uploaded"), [(0, ["0"]), (1, [])])
def test_of_ranks_that_load_one_uploads_what_was_left(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, rank: int, uploaded: list[str]
) -> None:
    setting.layout.save(setting.layout.checkpointer(strategy="sync"), setting.here(0), 0)
    monkeypatch.setattr("ckpt_core.checkpointer.rank_of_process", lambda: rank)
    with setting.run() as run:
        assert setting.layout.value(run, setting.here(0)) == 0
    assert setting.uploaded() == uploaded


def test_without_the_store_the_local_tier_is_looked_at(setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    with setting.run() as run:
        setting.layout.save(run, setting.here(1), 1)
    setting.store(Fault(lambda operation: operation.name.startswith(("list", "open")), number=None, error=REFUSES))
    catalog = Catalog(setting.local, suffix=setting.layout.ending, tiers=setting.tiers())
    newest = catalog.newest_verified()
    assert newest is not None
    assert newest.path == setting.here(1)
    assert "the store is down" in caplog.text
    shutil.rmtree(setting.local)
    with pytest.raises(StorageError, match="the store is down"):
        catalog.newest_verified()


def test_a_damaged_record_of_uploads_costs_uploads_only(setting: Setting) -> None:
    with setting.run() as run:
        setting.layout.save(run, setting.here(0), 0)
    store: Any = storage_for(setting.remote)
    store.put(f"{setting.remote}/{LEDGER_NAME}", b'{"version": 1, "uploads": [')
    with setting.run() as run:
        setting.layout.save(run, setting.here(1), 1)
    assert [setting.value_there(step) for step in range(2)] == [0, 1]
    assert setting.names_there() == ["0", "1"]


@pytest.mark.parametrize("layout", ["file", "directory"])
def test_an_upload_that_takes_long_says_how_far_it_is(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_core.process.console._SILENT", 0.0)
    heard, said, summary = list[Event](), list[str](), RunSummary()
    summary.say = said.append
    tiers = Tiers.of(str(tmp_path / "local"), f"memory://{uuid.uuid4().hex}/run", None)
    state = {"w": torch.zeros(10_000_000)}
    listeners = [heard.append, summary]
    kind: Any = Checkpointer if layout == "file" else DirectoryCheckpointer
    with kind(strategy="sync", tiers=tiers, listeners=listeners) as checkpointer:
        path = str(tmp_path / "local" / "a.ckpt")
        checkpointer.save(state if layout == "file" else [Part("model", state, Kind.REPLICATED)], path)
    told = [event for event in heard if isinstance(event, UploadProgressed)]
    (uploaded,) = [event for event in heard if isinstance(event, CheckpointUploaded)]
    assert told and [event.bytes for event in told] == sorted({event.bytes for event in told})
    assert all(0 < event.bytes < event.total == uploaded.bytes and event.target == uploaded.target for event in told)
    assert said == [str(event) for event in told]
    assert any(line.startswith(f"uploading to {uploaded.target}: 16.8 MB of 40.0 MB, about ") for line in said)
