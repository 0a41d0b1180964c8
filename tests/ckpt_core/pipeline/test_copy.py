"""A copy of a checkpoint is unaffected by the removal and the replacement of its original."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import (
    Checkpointer,
    CheckpointError,
    CheckpointNotFoundError,
    DirectoryCheckpointer,
    Kind,
    Part,
    verify,
)
from ckpt_core.events import Event, SaveCommitted
from ckpt_core.storage import Fault, FaultyStorage, LocalStorage, Operation


def state(value: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((1000,), value)}


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_a_copy_survives_the_removal_and_the_replacement_of_its_original(strategy: str, tmp_path: Path) -> None:
    with Checkpointer(strategy=strategy) as checkpointer:  # type: ignore[arg-type]
        checkpointer.save(state(1), tmp_path / "a.ckpt")
        checkpointer.copy(tmp_path / "a.ckpt", tmp_path / "last.ckpt")
        checkpointer.save(state(2), tmp_path / "a.ckpt")
        checkpointer.wait()
        assert checkpointer.load(tmp_path / "last.ckpt")["weight"][0] == 1
        assert checkpointer.load(tmp_path / "a.ckpt")["weight"][0] == 2
        checkpointer.copy(tmp_path / "a.ckpt", tmp_path / "last.ckpt")
        checkpointer.remove(tmp_path / "a.ckpt")
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert verify(tmp_path / "last.ckpt")
    assert Checkpointer(strategy="sync").load(tmp_path / "last.ckpt")["weight"][0] == 2


def test_a_copy_takes_no_space_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    with Checkpointer(strategy="async") as checkpointer:
        checkpointer.save(state(1), tmp_path / "a.ckpt")
        for _ in range(2):  # the second time the target is already a link of the same file
            checkpointer.copy(tmp_path / "a.ckpt", tmp_path / "last.ckpt")
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "last.ckpt"]
    assert os.path.samefile(tmp_path / "a.ckpt", tmp_path / "last.ckpt")


def test_where_links_are_refused_bytes_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    checkpointer = Checkpointer(strategy="sync")
    checkpointer.save(state(3), tmp_path / "a.ckpt")
    checkpointer.copy(tmp_path / "a.ckpt", tmp_path / "b.ckpt")
    assert not os.path.samefile(tmp_path / "a.ckpt", tmp_path / "b.ckpt")
    assert verify(tmp_path / "b.ckpt")


def test_copying_nothing_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"none\.ckpt"):
        Checkpointer(strategy="sync").copy(tmp_path / "none.ckpt", tmp_path / "b.ckpt")
    assert os.listdir(tmp_path) == []


def test_the_copy_of_a_failed_save_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = Checkpointer(strategy="async")
    checkpointer.save(state(1), tmp_path / "last.ckpt")
    checkpointer.wait()

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        checkpointer.save(state(2), tmp_path / "a.ckpt")
        checkpointer.copy(tmp_path / "a.ckpt", tmp_path / "last.ckpt")
        checkpointer.drain()
    with pytest.raises(CheckpointError, match="Input/output error"):
        checkpointer.close()
    assert checkpointer.failures == 2
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert Checkpointer(strategy="sync").load(tmp_path / "last.ckpt")["weight"][0] == 1


@pytest.mark.parametrize("between", ["save", "copy", "nothing"])
@pytest.mark.parametrize("layout", ["file", "directory"])
def test_no_older_checkpoint_is_copied_in_place_of_one_whose_save_failed(
    layout: str, between: str, tmp_path: Path
) -> None:
    def fails(operation: Operation) -> bool:
        return (
            is_broken
            and operation.name == "write_at"
            and os.path.relpath(operation.path, tmp_path).lstrip(".")[0] == "a"
        )

    is_broken = False
    checkpointer: Checkpointer | DirectoryCheckpointer
    storage = FaultyStorage(LocalStorage(), [Fault(fails, number=None, error=OSError(5, "no"))])
    if layout == "file":
        checkpointer = Checkpointer(on_error="warn", storage=storage)
    else:
        checkpointer = DirectoryCheckpointer(on_error="warn", storage=storage)

    def save(value: int, name: str) -> None:
        found: Any = state(value)
        checkpointer.save(found if layout == "file" else [Part("m", found, Kind.REPLICATED)], tmp_path / name)
        checkpointer.drain()

    save(1, "a")
    is_broken = True
    save(2, "a")
    if between == "save":
        save(3, "x")
    elif between == "copy":
        checkpointer.copy(tmp_path / "a", tmp_path / "y")
    checkpointer.copy(tmp_path / "a", tmp_path / "b")
    checkpointer.drain()
    assert checkpointer.failures == {"save": 2, "copy": 3, "nothing": 2}[between]
    assert sorted(os.listdir(tmp_path)) == (["a", "x"] if between == "save" else ["a"])
    is_broken = False
    save(4, "a")
    checkpointer.copy(tmp_path / "a", tmp_path / "b")
    checkpointer.close()
    assert (tmp_path / "b").exists()


@pytest.mark.parametrize("layout", ["file", "directory"])
def test_no_older_checkpoint_is_copied_after_a_save_that_has_raised(layout: str, tmp_path: Path) -> None:
    is_file = layout == "file"
    storage = FaultyStorage(LocalStorage(), [Fault("write_at", number=None, error=OSError(5, "no"))])
    make: Any = Checkpointer if is_file else DirectoryCheckpointer
    first, broken = make(strategy="sync"), make(strategy="sync", storage=storage)
    content: Any = state(1) if is_file else [Part("m", state(1), Kind.REPLICATED)]
    first.save(content, tmp_path / "a")
    with pytest.raises(CheckpointError):
        broken.save(content, tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"the save of .*a failed"):
        broken.copy(tmp_path / "a", tmp_path / "b")
    assert os.listdir(tmp_path) == ["a"]
    first.save(content, tmp_path / "c")
    broken.copy(tmp_path / "c", tmp_path / "a")
    broken.copy(tmp_path / "a", tmp_path / "b")


def test_a_copy_after_a_failed_save_does_not_let_the_older_one_go(tmp_path: Path) -> None:
    broken = Fault(lambda it: it.name == "write_at" and "new" in it.path, error=OSError(5, "no"))
    checkpointer = Checkpointer(on_error="warn", storage=FaultyStorage(LocalStorage(), [broken]))
    checkpointer.save(state(1), tmp_path / "old")
    checkpointer.save(state(2), tmp_path / "new")
    checkpointer.copy(tmp_path / "old", tmp_path / "copy")
    checkpointer.remove(tmp_path / "old")
    checkpointer.close()
    assert sorted(os.listdir(tmp_path)) == ["copy", "old"]


def test_events_of_a_copy(tmp_path: Path) -> None:
    events: list[Event] = []
    with Checkpointer(strategy="async", listeners=[events.append]) as checkpointer:
        checkpointer.save(state(1), tmp_path / "a.ckpt")
        checkpointer.copy(tmp_path / "a.ckpt", tmp_path / "b.ckpt")
    names = [(type(event).__name__, os.path.basename(event.path)) for event in events if event.path.endswith("b.ckpt")]
    assert names == [("SaveStarted", "b.ckpt"), ("SnapshotTaken", "b.ckpt"), ("SaveCommitted", "b.ckpt")]
    committed = [event for event in events if isinstance(event, SaveCommitted)]
    assert committed[0].bytes == committed[1].bytes == (tmp_path / "b.ckpt").stat().st_size


def test_local_storage_follows_a_link_to_the_original(tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").write_bytes(b"a")
    os.symlink("a.ckpt", tmp_path / "link.ckpt")
    LocalStorage().copy(str(tmp_path / "link.ckpt"), str(tmp_path / "b.ckpt"))
    assert not (tmp_path / "b.ckpt").is_symlink()
    assert (tmp_path / "b.ckpt").read_bytes() == b"a"
