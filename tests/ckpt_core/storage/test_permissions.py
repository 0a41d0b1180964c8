"""A checkpoint whose permissions exclude others excludes them after its next save, too."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ckpt_core import Checkpointer, DirectoryCheckpointer, Kind, Part
from ckpt_core.storage import LocalStorage, local, local_directory

NOBODY = 65534


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def save_directory(path: Path, value: float, **options: object) -> None:
    state = {"frozen": torch.ones(300_000), "trained": torch.full((300_000,), value)}
    with DirectoryCheckpointer(strategy="sync") as checkpointer:
        checkpointer.save([Part("model", state, Kind.REPLICATED)], path, metadata={"step": 1}, step=1)


@pytest.mark.parametrize("strategy", ["sync", "async"])
@pytest.mark.parametrize("wanted", [0o600, 0o640, 0o444, 0o666])
def test_a_file_keeps_its_mode(strategy: str, wanted: int, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    with Checkpointer(strategy=strategy) as checkpointer:  # type: ignore[arg-type]
        checkpointer.save({"x": torch.ones(3)}, path)
        checkpointer.wait()
        assert mode(path) == 0o644
        path.chmod(wanted)
        checkpointer.save({"x": torch.zeros(3)}, path)
        checkpointer.wait()
        assert checkpointer.load(path)["x"].tolist() == [0.0, 0.0, 0.0]
    assert mode(path) == wanted


def test_nobody_else_can_read_a_file_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.touch(0o600)
    writer = LocalStorage().create(str(path), 4096)
    (hidden,) = set(tmp_path.iterdir()) - {path}
    assert mode(hidden) == 0o600
    writer.abort()


def test_what_is_set_during_a_save_counts(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.touch()
    writer = LocalStorage().create(str(path), 4096)
    path.chmod(0o600)
    writer.commit(0)
    assert mode(path) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_keeps_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.touch(0o640)
    os.chown(path, NOBODY, NOBODY)
    with Checkpointer(strategy="sync") as checkpointer:
        checkpointer.save({}, path)
    assert (path.stat().st_uid, path.stat().st_gid, mode(path)) == (NOBODY, NOBODY, 0o640)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_group_that_cannot_be_kept_is_not_replaced_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    path.touch()
    path.chmod(0o664)
    os.chown(path, -1, NOBODY)

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "chown", refuse)
    with Checkpointer(strategy="sync") as checkpointer:
        checkpointer.save({}, path)
    assert mode(path) == 0o644


def test_a_link_to_the_newest_keeps_its_mode_and_leaves_that_of_the_newest(tmp_path: Path) -> None:
    last, first, second = tmp_path / "last.ckpt", tmp_path / "1.ckpt", tmp_path / "2.ckpt"
    with Checkpointer(strategy="sync") as checkpointer:
        checkpointer.save({"step": 1}, first)
        checkpointer.copy(first, last)
        assert last.samefile(first)
        last.chmod(0o600)  # of both names: they are one file
        checkpointer.save({"step": 2}, second)
        checkpointer.copy(second, last)
        assert checkpointer.load(last) == checkpointer.load(second) == {"step": 2}
    assert [mode(path) for path in (first, second, last)] == [0o600, 0o644, 0o600]


def test_a_copy_where_there_are_no_links_has_the_mode_of_the_original(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(local_directory.CANNOT_LINK[0], "no links here")

    monkeypatch.setattr(local.os, "link", refuse)
    with Checkpointer(strategy="sync") as checkpointer:
        checkpointer.save({"step": 1}, tmp_path / "1.ckpt")
        (tmp_path / "1.ckpt").chmod(0o600)
        checkpointer.copy(tmp_path / "1.ckpt", tmp_path / "last.ckpt")
    assert mode(tmp_path / "last.ckpt") == 0o600


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_directory_and_its_files_keep_their_modes(
    exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanges:
        monkeypatch.setattr(local_directory, "_exchange", lambda *_: False)
    path = tmp_path / "last"
    save_directory(path, 1.0)
    path.chmod(0o700)
    for file in path.iterdir():
        file.chmod(0o600)
    save_directory(path, 2.0)
    assert mode(path) == 0o700
    assert {mode(file) for file in path.iterdir()} == {0o600}
    assert DirectoryCheckpointer().load(path).load("model")["trained"][0] == 2.0
    assert os.listdir(tmp_path) == ["last"]


def test_nobody_else_can_look_into_a_directory_while_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "last").mkdir(0o700)
    storage = LocalStorage()
    hidden = storage.begin_directory(str(tmp_path / "last"), "session-0-1")
    assert mode(Path(hidden)) == 0o700
    storage.leave_directory(str(tmp_path / "last"), "session-0-1")


def test_files_that_are_new_or_shared_with_another_checkpoint_are_closed_too(tmp_path: Path) -> None:
    """A directory whose files are closed gets a new file, and one that is a link to another checkpoint's."""
    first, last = tmp_path / "1", tmp_path / "last"
    with DirectoryCheckpointer(strategy="sync") as checkpointer:

        def save(path: Path, names: str, value: float) -> None:
            state = {"frozen": torch.ones(300_000), "trained": torch.full((300_000,), value)}
            checkpointer.save([Part(name, state, Kind.REPLICATED) for name in names], path, step=1)

        save(last, "a", 0.0)
        for file in last.iterdir():
            file.chmod(0o600)
        for step in range(3):
            save(first, "ab", step)
        save(last, "ab", 3.0)
        assert any(file.stat().st_nlink > 1 for file in first.iterdir()) is False
    assert {mode(file) for file in last.iterdir()} == {0o600}
    assert {mode(file) for file in first.iterdir()} == {0o644}
    assert DirectoryCheckpointer().load(last).load("b")["trained"][0] == 3.0
    DirectoryCheckpointer().load(last).verify()


def test_a_directory_that_not_even_its_owner_may_write_to_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "last"
    save_directory(path, 1.0)
    path.chmod(0o500)
    save_directory(path, 2.0)
    assert mode(path) == 0o500
    assert os.listdir(tmp_path) == ["last"]
    path.chmod(0o700)
