"""The catalog finds the newest usable checkpoint, and reports which ones it passes over."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Catalog, CheckpointCorruptedError, Checkpointer, DirectoryCheckpointer, Kind, Part
from ckpt_core._pipeline.loading import peek
from ckpt_core.events import CheckpointSkipped, Event
from ckpt_core.storage import LocalStorage
from ckpt_core.storage.base import FileInfo, FileReader
from tests.support.damage import flip_bit


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    checkpointer = Checkpointer(strategy="sync")
    for step in (1, 2, 3):
        path = tmp_path / f"{step}.ckpt"
        checkpointer.save({"weight": torch.full((50_000,), step), "kind": "weights" if step == 3 else "all"}, path)
        os.utime(path, (step, step))
    (tmp_path / ".4.ckpt.0123456789ab.ckpt-part").write_bytes(b"unfinished")
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    return tmp_path


def flip(path: Path, offset: int) -> None:
    status = path.stat()
    flip_bit(path, offset)
    os.utime(path, (status.st_mtime, status.st_mtime))


def names(infos: list[Any]) -> list[str]:
    return [os.path.basename(info.path) for info in infos]


def test_only_committed_checkpoints_are_listed_newest_first(directory: Path) -> None:
    infos = Catalog(directory).checkpoints()
    assert names(infos) == ["3.ckpt", "2.ckpt", "1.ckpt"]
    assert infos[0].size == (directory / "3.ckpt").stat().st_size
    assert infos[0].modified == 3


def test_what_is_deleted_after_it_was_listed_is_left_out(directory: Path) -> None:
    class BesideARun(LocalStorage):
        def list(self, directory: str) -> Sequence[FileInfo]:
            found = super().list(directory)
            Path(directory, "2.ckpt").unlink(missing_ok=True)  # as the run's retention does
            return found

    assert names(Catalog(directory, storage=BesideARun()).checkpoints()) == ["3.ckpt", "1.ckpt"]


@pytest.mark.parametrize("layout", ["file", "directory"])
@pytest.mark.parametrize("opened", [1, 2, 3])  # the open() at which it is replaced: for its age, its bytes
def test_what_replaces_the_only_checkpoint_while_it_is_read_is_found(tmp_path: Path, layout: str, opened: int) -> None:
    """While an earlier start of the run still saves with save_top_k=1, a resume must not start from the beginning."""

    def save(step: int) -> None:
        path = tmp_path / f"step={step}.ckpt"
        if layout == "file":
            Checkpointer(strategy="sync").save({"weight": torch.ones(9)}, path)
        else:
            part = Part("model", {"weight": torch.ones(9)}, Kind.REPLICATED)
            DirectoryCheckpointer(strategy="sync").save([part], path)

    class BesideARun(LocalStorage):
        left = opened

        def open(self, path: str) -> FileReader:
            self.left -= 1
            if self.left == 0:
                save(2)
                LocalStorage().remove(str(tmp_path / "step=1.ckpt"))
            return super().open(path)

    save(1)
    info = Catalog(tmp_path, storage=BesideARun()).newest_verified()
    assert info is not None
    assert info.name == ("step=1.ckpt" if opened == 3 and layout == "file" else "step=2.ckpt")


def test_walk_back_to_the_newest_that_verifies(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    flip(directory / "3.ckpt", 5_000)
    (directory / "2.ckpt").write_bytes((directory / "2.ckpt").read_bytes()[:-100])
    os.utime(directory / "2.ckpt", (2, 2))
    events: list[Event] = []
    with caplog.at_level(logging.WARNING):
        info = Catalog(directory, listeners=[events.append]).newest_verified()
    assert info is not None
    assert os.path.basename(info.path) == "1.ckpt"
    assert [record.args[0] for record in caplog.records if record.args] == [  # type: ignore[index]
        str(directory / "3.ckpt"),
        str(directory / "2.ckpt"),
    ]
    skipped = [event for event in events if isinstance(event, CheckpointSkipped)]
    assert [os.path.basename(event.path) for event in skipped] == ["3.ckpt", "2.ckpt"]
    assert "'weight'" in skipped[0].reason


def test_none_verifies(directory: Path) -> None:
    for step in (1, 2, 3):
        flip(directory / f"{step}.ckpt", 5_000)
    catalog = Catalog(directory)
    with pytest.raises(CheckpointCorruptedError, match=r"3 do not verify, such as 3\.ckpt") as caught:
        catalog.newest_verified()
    assert caught.value.path == str(directory)
    assert list(catalog.passed_over) == [str(directory / f"{step}.ckpt") for step in (3, 2, 1)]
    assert not isinstance(caught.value, FileNotFoundError)  # which programs take for an empty directory


def test_none_at_all_is_none(tmp_path: Path) -> None:
    assert Catalog(tmp_path).newest_verified() is None
    assert Catalog(tmp_path / "missing").newest_verified() is None


def test_accept_chooses_by_content_without_reading_tensors(directory: Path) -> None:
    info = Catalog(directory).newest_verified(lambda state: state["kind"] == "all")
    assert info is not None
    assert os.path.basename(info.path) == "2.ckpt"


def test_peek_gives_shapes_and_plain_values_even_of_a_damaged_tensor(directory: Path) -> None:
    flip(directory / "3.ckpt", 5_000)
    state = peek(str(directory / "3.ckpt"), storage=LocalStorage())
    assert state["kind"] == "weights"
    assert state["weight"].shape == (50_000,)
    assert state["weight"].dtype == torch.int64


def test_verify_reports_each(directory: Path) -> None:
    flip(directory / "2.ckpt", 5_000)
    found = Catalog(directory).verify()
    assert {os.path.basename(path): type(error) for path, error in found.items()} == {
        "1.ckpt": type(None),
        "2.ckpt": CheckpointCorruptedError,
        "3.ckpt": type(None),
    }


def test_remote_urls() -> None:
    with Checkpointer(strategy="async") as checkpointer:
        checkpointer.save({"step": 1}, "memory://catalog/a.ckpt")
        checkpointer.save({"step": 2}, "memory://catalog/b.ckpt")
    catalog = Catalog("memory://catalog")
    info = catalog.newest_verified(lambda state: state["step"] == 1)
    assert info is not None
    assert info.path.endswith("catalog/a.ckpt")
    assert Checkpointer().load(info.path) == {"step": 1}


def test_what_was_saved_within_one_second_is_told_by_its_numbers(tmp_path: Path) -> None:
    for name in ("step=9", "last", "step=10", "epoch=1-step=4"):
        torch.save({"a": 1}, tmp_path / f"{name}.ckpt")
        os.utime(tmp_path / f"{name}.ckpt", (7, 7))
    assert names(Catalog(tmp_path).checkpoints()) == ["last.ckpt", "step=10.ckpt", "step=9.ckpt", "epoch=1-step=4.ckpt"]
