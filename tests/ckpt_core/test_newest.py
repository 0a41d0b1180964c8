"""Which checkpoint is the newest: what a checkpoint records counts, not the file system's dates."""

from __future__ import annotations

import enum
import logging
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from ckpt_core import Catalog, CheckpointCorruptedError, Checkpointer, DirectoryCheckpointer, Kind, Part, commit_time
from ckpt_core.catalog import CheckpointInfo, newest_first
from ckpt_core.cli import main
from ckpt_core.resume import newest_to_resume
from ckpt_core.storage import Fault, FaultyStorage, FileReader, LocalStorage
from tests.support.server_fixtures import server_of, servers
from tests.support.servers import Server

__all__ = ["server_of", "servers"]

STEPS = range(1, 13)
LAYOUTS = ["file", "directory"]


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that forgets what this process has seen; each test begins with a call of it."""

    def begin() -> None:
        monkeypatch.setattr(commit_time, "_clock", commit_time._Clock())

    begin()
    return begin


def save(path: Any, step: int | None, layout: str = "file", **options: Any) -> None:
    if layout == "file":
        with Checkpointer(strategy="sync", **options) as checkpointer:
            checkpointer.save(
                {"w": torch.full((3,), float(step or 0)), **({} if step is None else {"step": step})}, path
            )
    else:
        with DirectoryCheckpointer(strategy="sync", **options) as checkpointer:
            checkpointer.save([Part("w", {"w": torch.ones(3)}, Kind.REPLICATED)], path, step=step)


def name_of(step: int) -> str:
    return f"epoch=0-step={step}.ckpt"


def run_of(folder: Path, layout: str) -> Path:
    for step in STEPS:
        save(folder / name_of(step), step, layout)
    return folder


def newest(folder: Any, **options: Any) -> str:
    info = Catalog(folder, **options).newest_verified()
    assert info is not None
    return os.path.basename(info.path)


def set_times(folder: Path, time_of: Callable[[int], float]) -> None:
    for step in STEPS:
        path = folder / name_of(step)
        for each in [path, *(path.iterdir() if path.is_dir() else [])]:
            os.utime(each, (time_of(step), time_of(step)))


def in_order(of: str) -> str:
    return "mkdir {t}; for f in $(cd {s}; " + of + "); do cp -r {s}/$f {t}/; sleep 0.01; done"


COPIES = {
    "cp -a": "cp -a {s} {t}",
    "cp -r": "cp -r {s} {t}",
    "by name": in_order("ls"),
    "by name, reversed": in_order("ls -r"),
    "largest first": in_order("ls -v -r"),
    "tar without dates": "mkdir {t}; tar -C {s} -cf - . | tar -C {t} -xmf -",
    "links": "cp -al {s} {t}",
}
DATES: dict[str, Callable[[int], float]] = {
    "equal": lambda step: 1e9,
    "reversed": lambda step: 2e9 - step,
    "one in the future": lambda step: 4e9 if step == 3 else 1e9 + step,
    "none": lambda step: 0.0,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_has_the_same_newest_checkpoint(layout: str, tmp_path: Path) -> None:
    source = run_of(tmp_path / "run", layout)
    expected = [name_of(step) for step in reversed(STEPS)]
    for number, command in enumerate(COPIES.values()):
        target = tmp_path / str(number)
        subprocess.run(command.format(s=source, t=target), shell=True, check=True)
        assert [info.name for info in Catalog(target).checkpoints()] == expected, command
        assert newest(target) == name_of(12)
    for name, time_of in DATES.items():
        set_times(source, time_of)
        assert [info.name for info in Catalog(source).checkpoints()] == expected, name
        assert newest(source) == name_of(12)


def test_dates_that_say_otherwise_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_of(tmp_path, "file")
    newest(tmp_path)
    assert caplog.messages == []
    set_times(tmp_path, DATES["reversed"])
    newest(tmp_path)
    (message,) = caplog.messages
    assert str(tmp_path / name_of(12)) in message
    assert str(tmp_path / name_of(11)) in message
    assert "by file dates" in message


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_that_went_back_on_purpose_goes_on_from_its_own_last(
    layout: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (50, 100, 60):
        save(tmp_path / name_of(step), step, layout)
    assert newest(tmp_path) == name_of(60)
    (message,) = caplog.messages
    assert str(tmp_path / name_of(60)) in message
    assert str(tmp_path / name_of(100)) in message


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("looks", [True, False])
def test_a_clock_that_is_set_back_makes_no_newer_checkpoint_older(
    layout: str, looks: bool, tmp_path: Path, new_process: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time
    for life, ahead in enumerate((7200, 3600, 0, -3600)):  # each on a node whose clock is behind the previous one
        new_process()
        monkeypatch.setattr(commit_time.time, "time", lambda ahead=ahead: real() + ahead)
        if looks and life:
            assert newest(tmp_path) == name_of(10 * life)
        save(tmp_path / name_of(10 * life + 10), 10 * life + 10, layout)
    new_process()
    assert newest(tmp_path) == name_of(40)


def test_thousands_of_commits_take_no_memory() -> None:
    clock = commit_time._Clock()
    times = [clock.now() for _ in range(5000)]
    assert times == sorted(set(times))
    clock.note(times[-1] - 1)
    clock.note(times[-1] + 7200)
    assert clock.now() > times[-1] + 7200
    assert len(clock._seen) < 100


def test_a_clock_that_is_set_back_where_the_store_was_looked_at(
    new_process: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, root = time.time, "memory://set-back"
    for life in range(3):
        new_process()
        monkeypatch.setattr(commit_time.time, "time", lambda life=life: real() - 3600 * life)
        if life:
            assert newest(root) == name_of(life)
        save(f"{root}/{name_of(life + 1)}", life + 1)
    assert newest(root) == name_of(3)


def test_a_store_that_was_synchronised_in_another_order(server_of: Callable[[str], Server]) -> None:
    server = server_of("moto")
    root, options = f"{server.new_bucket()}/runs", dict(server.options)
    with Checkpointer(strategy="sync", storage_options=options) as checkpointer:
        for step in (8, 9, 10):
            checkpointer.save({"step": step}, f"{root}/{name_of(step)}")
    with DirectoryCheckpointer(strategy="sync", storage_options=options) as directories:
        directories.save([Part("w", {"w": torch.ones(3)}, Kind.REPLICATED)], f"{root}/{name_of(11)}", step=11)
    filesystem, _ = fsspec.core.url_to_fs(root, **options)
    for path in reversed(filesystem.find(root)):
        target = path.replace("/runs/", "/copy/")
        filesystem.pipe_file(target, filesystem.cat_file(path))
    copy = root.replace("/runs", "/copy")
    infos = Catalog(copy, storage_options=options).checkpoints()
    assert [(info.step, info.is_directory) for info in infos] == [(11, True), (10, False), (9, False), (8, False)]


# ---- checkpoints that do not record their commit time
# -----------------------------------------------------------------------------------------------


@pytest.fixture
def old_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write manifests without a stamp, as older versions did."""
    monkeypatch.setattr(commit_time.Stamp, "fields", lambda self: {})


def test_older_checkpoints_are_ordered_by_the_step_that_they_hold(old_writer: None, tmp_path: Path) -> None:
    for number, step in enumerate((5, 20, 100, 9)):
        save(tmp_path / f"{'abcd'[number]}.ckpt", step)
        torch.save({"global_step": step + 1, "state_dict": {}}, tmp_path / f"{'stuv'[number]}.ckpt")
        with DirectoryCheckpointer(strategy="sync") as checkpointer:
            metadata = {"accelerate_ckpt": {"step": step + 2}}
            checkpointer.save([], tmp_path / f"{'wxyz'[number]}.ckpt", metadata=metadata)
    for path in tmp_path.iterdir():
        os.utime(path, (1e9, 1e9))
    infos = Catalog(tmp_path).checkpoints()
    assert [info.committed for info in infos] == [None] * 12
    assert [info.step for info in infos] == [102, 101, 100, 22, 21, 20, 11, 10, 9, 7, 6, 5]


class Model:
    """A class that the pickles of other programs contain."""

    class Mode(enum.Enum):
        TRAIN = 1

    class Settings:
        pass

    class Named:
        def __new__(cls, *, name: str) -> Model.Named:
            return super().__new__(cls)

        def __getnewargs_ex__(self) -> tuple[Any, ...]:
            return (), {"name": "a"}

    def method(self) -> None:
        pass


def test_checkpoints_of_other_programs_with_objects_of_nested_classes(tmp_path: Path) -> None:
    values: list[Any] = [Model.Mode.TRAIN, Model.Settings(), Model.Named(name="b"), Model.Mode, Model().method]
    for step, value in enumerate(values):
        torch.save({"hyper_parameters": {"value": value}, "global_step": step}, tmp_path / f"{'vwxyz'[step]}.ckpt")
    infos = Catalog(tmp_path).checkpoints()
    assert [(info.step, info.is_readable) for info in infos] == [(step, True) for step in (4, 3, 2, 1, 0)]


def test_checkpoints_of_other_programs_beside_ours_are_compared_by_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in range(1, 9):
        if step in (3, 4, 8):
            torch.save(
                {"global_step": step},
                tmp_path / f"model-{'abcdefgh'[step]}.ckpt" if step < 8 else tmp_path / "last.ckpt",
            )
        else:
            save(tmp_path / name_of(step), step)
    for reverse in (False, True):
        for age, info in enumerate(
            sorted(Catalog(tmp_path).checkpoints(), key=lambda info: info.step or 0, reverse=reverse)
        ):
            os.utime(info.path, (1e9 + age, 1e9 + age))
        assert [info.step for info in Catalog(tmp_path).checkpoints()] == list(range(8, 0, -1))
        assert newest(tmp_path) == "last.ckpt"
    assert len(caplog.messages) == 1  # only the reversed dates are warned about


def test_numbers_in_names_come_before_dates_and_dates_alone_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for epoch in (2, 10, 9):
        torch.save({"w": 1}, tmp_path / f"epoch={epoch}.ckpt")
        os.utime(tmp_path / f"epoch={epoch}.ckpt", (1e9 - epoch, 1e9 - epoch))
    assert [info.name for info in Catalog(tmp_path).checkpoints()] == ["epoch=10.ckpt", "epoch=9.ckpt", "epoch=2.ckpt"]
    caplog.clear()
    torch.save({"w": 1}, tmp_path / "run-7.ckpt")  # from another series, and the newest by date
    assert newest(tmp_path) == "run-7.ckpt"
    (message,) = caplog.messages
    assert str(tmp_path / "run-7.ckpt") in message
    assert str(tmp_path / "epoch=10.ckpt") in message


def test_names_are_no_account() -> None:
    """Renamed checkpoints keep their order; of two names of one checkpoint, the one without numbers comes first."""
    infos = [
        CheckpointInfo("r/step=9.ckpt", 1, 1.0, committed=5.0, step=1),
        CheckpointInfo("r/step=1.ckpt", 1, 9.0, committed=6.0, step=9),
        CheckpointInfo("r/last.ckpt", 1, 2.0, committed=6.0, step=9),
    ]
    assert [info.name for info in newest_first(infos)] == ["last.ckpt", "step=1.ckpt", "step=9.ckpt"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_within_a_run_says_what_its_original_says(layout: str, tmp_path: Path) -> None:
    kind = Checkpointer if layout == "file" else DirectoryCheckpointer
    for step in (1, 2):
        save(tmp_path / name_of(step), step, layout)
        with kind(strategy="sync") as checkpointer:
            checkpointer.copy(tmp_path / name_of(step), tmp_path / "last.ckpt")
    one, *_ = infos = Catalog(tmp_path).checkpoints()
    assert [info.name for info in infos] == ["last.ckpt", name_of(2), name_of(1)]
    assert (infos[1].committed, infos[1].step) == (one.committed, one.step) == (one.committed, 2)
    assert time.time() - 600 < (one.committed or 0) <= time.time()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_catalog_reads_each_account_once_and_no_tensor(layout: str, tmp_path: Path) -> None:
    class Counting(LocalStorage):
        opened = 0

        def open(self, path: str) -> FileReader:
            type(self).opened += 1
            return super().open(path)

    run_of(tmp_path, layout)
    catalog = Catalog(tmp_path, storage=Counting())
    assert len(catalog.paths()) == len(STEPS)
    assert Counting.opened == 0
    for _ in range(3):
        assert [info.step for info in catalog.checkpoints()] == list(reversed(STEPS))
    assert Counting.opened == len(STEPS)
    save(tmp_path / name_of(3), 77, layout)  # the checkpoint is replaced
    assert catalog.checkpoints()[0].step == 77


def test_ls_shows_the_account(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "a.ckpt", 7)
    save(tmp_path / "b.ckpt", None)
    torch.save({"x": 1}, tmp_path / "c.ckpt")
    os.utime(tmp_path / "a.ckpt", (1e9, 1e9))
    assert main(["ls", str(tmp_path)]) == 0
    lines = {line.split()[-1][-6]: line for line in capsys.readouterr().out.splitlines()}
    assert " step 7 " in lines["a"]
    assert "2001" not in lines["a"]
    assert "step" not in lines["b"].replace(str(tmp_path), "")
    assert "file date" in lines["c"]


# ---- a file that cannot be read is never the newest
# -------------------------------------------------------------------------


def old_format(path: Path) -> bytes:
    torch.save({"step": 99, "w": torch.ones(50)}, path, _use_new_zipfile_serialization=False)
    return path.read_bytes()


def flipped(path: Path) -> bytes:
    torch.save({"step": 99, "w": torch.randn(1000)}, path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    return bytes(data)


DAMAGED: dict[str, Callable[[Path], bytes]] = {
    "garbage": lambda path: b"\x80garbage" * 10,
    "begun": lambda path: old_format(path)[:40],
    "without its end": lambda path: old_format(path)[:-4],
    "a bit": flipped,
    "cut": lambda path: flipped(path)[:-200],
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_what_cannot_be_read_is_passed_over(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "epoch=0-step=99.ckpt"
    path.write_bytes(DAMAGED[damage](path))
    catalog = Catalog(tmp_path)
    with pytest.raises(CheckpointCorruptedError, match="1 do not verify"):
        catalog.newest_verified()
    save(tmp_path / name_of(1), 1)
    caplog.clear()
    assert newest(tmp_path) == name_of(1)
    (message,) = caplog.messages
    assert f"passed over the checkpoint {path}" in message


@pytest.mark.parametrize("name", ["zip", "old", "no CRCs", "objects"])
def test_a_whole_file_of_another_program_counts(name: str, tmp_path: Path) -> None:
    save(tmp_path / name_of(1), 1)
    path = tmp_path / name_of(2)
    state = {"step": 2, "w": torch.randn(1000)}
    if name == "no CRCs":
        torch.serialization.set_crc32_options(False)
    try:
        torch.save(
            {**state, "o": shutil.Error} if name == "objects" else state,
            path,
            _use_new_zipfile_serialization=name != "old",
        )
    finally:
        torch.serialization.set_crc32_options(True)
    assert newest(tmp_path) == name_of(2)


def test_a_symbolic_link_to_a_checkpoint_is_the_checkpoint(tmp_path: Path) -> None:
    run = run_of(tmp_path / "far", "directory")
    (tmp_path / "run").mkdir()
    for step in (1, 12, 5):
        (tmp_path / "run" / name_of(step)).symlink_to(run / name_of(step), target_is_directory=True)
    assert newest(tmp_path / "run") == name_of(12)


def test_errors_are_not_logged_where_all_is_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        run_of(tmp_path, "file")
        assert newest(tmp_path) == name_of(12)
    assert caplog.messages == []


def test_commit_times_grow_and_are_written_at_one_length() -> None:
    given = [commit_time.commit_time() for _ in range(2000)]
    assert given == sorted(set(given))
    assert {len(repr(moment).partition(".")[2]) for moment in given} == {6}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gone", [1, 2])
def test_what_is_deleted_during_the_look_up_is_not_taken_for_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, layout: str, gone: int
) -> None:
    for step in (1, 2):
        save(tmp_path / name_of(step), step, layout)

    def deleted_meanwhile(infos: list[CheckpointInfo]) -> list[CheckpointInfo]:
        for info in [info for info in infos if info.name in (name_of(2), name_of(1))[:gone]]:
            shutil.rmtree(info.path) if info.is_directory else os.remove(info.path)
        return infos

    catalog = Catalog(tmp_path)
    found = catalog.newest_verified(order=deleted_meanwhile)
    assert (found.name if found else None) == (name_of(1) if gone == 1 else None)
    assert catalog.passed_over == {}
    assert "passed over" not in caplog.text


def test_a_storage_that_does_not_answer_ends_no_look_up(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path / name_of(step), step)
    with open(tmp_path / name_of(2), "r+b") as file:
        file.seek(200)
        file.write(b"damage")
    faulty = FaultyStorage(LocalStorage(), [Fault("exists", number=None, error=TimeoutError())])
    found = Catalog(tmp_path, storage=faulty).newest_verified()
    assert found is not None and found.name == name_of(1)
    assert any(operation.name == "exists" for operation in faulty.operations)


def test_the_root_of_a_volume_holds_checkpoints(anyones_path: Path) -> None:
    lost = anyones_path / "lost+found"
    lost.mkdir(mode=0o700)
    save(anyones_path / "1.ckpt", 1)  # as root, which may read it; also loads what the other user cannot
    assert Catalog(anyones_path).newest_verified() is not None
    user = os.geteuid()
    if user != 0:
        lost.chmod(0)  # as if another user owned it
    try:
        if user == 0:
            os.seteuid(65534)
        save(anyones_path / "2.ckpt", 2)
        newest = Catalog(anyones_path).newest_verified()
    finally:
        os.seteuid(user)
        lost.chmod(0o700)
    assert newest is not None and newest.name == "2.ckpt"


def test_a_directory_that_has_lost_its_manifest_is_no_first_start(tmp_path: Path) -> None:
    save(tmp_path / "epoch=0.ckpt", 0, "directory")
    (tmp_path / "epoch=0.ckpt" / "manifest.json").unlink()
    with pytest.raises(CheckpointCorruptedError, match=r"such as epoch=0\.ckpt: its manifest\.json is missing"):
        Catalog(tmp_path).newest_verified()
    assert Catalog(tmp_path, suffix=".other").newest_verified() is None
    (tmp_path / "train.log").touch()
    with pytest.raises(CheckpointCorruptedError, match=r"such as epoch=0\.ckpt: its manifest\.json is missing"):
        newest_to_resume(tmp_path)
    assert main(["latest", str(tmp_path)]) == 1
    save(tmp_path / "epoch=1.ckpt", 1)
    found = Catalog(tmp_path).newest_verified()
    assert found is not None
    assert found.name == "epoch=1.ckpt"


def test_one_that_has_lost_its_manifest_is_found_as_deep_as_checkpoints_are(tmp_path: Path) -> None:
    save(tmp_path / "s" / "0.ckpt", 0, "directory")
    (tmp_path / "s" / "0.ckpt" / "manifest.json").unlink()
    assert Catalog(tmp_path).newest_verified() is None
    with pytest.raises(CheckpointCorruptedError, match=r"0\.ckpt: its manifest\.json is missing"):
        Catalog(tmp_path, levels=1).newest_verified()
