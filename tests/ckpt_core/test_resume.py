"""Where an unattended run resumes, and what ``ckpt latest`` reports to a script."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from ckpt_core import CheckpointCorruptedError, Checkpointer, DirectoryCheckpointer, Kind, Part
from ckpt_core.catalog import RECORD_OF_RESUMES, Catalog
from ckpt_core.cli import main
from ckpt_core.errors import StorageError
from ckpt_core.resume import ResumeAttempts, ResumePoint, newest_to_resume
from ckpt_core.tiers import Tiers
from tests.support.closing import closed_to_this_user
from tests.support.damage import flip_bit


def save(directory: Path, *steps: int) -> None:
    checkpointer = Checkpointer(strategy="sync")
    for step in steps:
        checkpointer.save({"weight": torch.full((9,), float(step)), "global_step": step}, directory / f"{step}.ckpt")


def taken(directory: Path, attempts: int | None = 3) -> str | None:
    point = newest_to_resume(directory, attempts=attempts)
    return None if point is None else os.path.basename(point.path)


def test_nothing_to_resume_is_none(tmp_path: Path) -> None:
    assert newest_to_resume(tmp_path / "missing") is None
    assert newest_to_resume(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "metrics.csv").write_text("a,b")
    assert newest_to_resume(tmp_path) is None


def test_a_checkpoint_from_which_the_run_never_gets_on_is_stepped_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1, 2, 3)
    assert [taken(tmp_path) for _ in range(5)] == ["3.ckpt"] * 3 + ["2.ckpt"] * 2
    assert "skipped the checkpoint" in caplog.text
    assert str(tmp_path / "3.ckpt") in caplog.text
    assert (tmp_path / "3.ckpt").exists()
    save(tmp_path, 4)  # the run made progress
    caplog.clear()
    assert [taken(tmp_path) for _ in range(3)] == ["4.ckpt"] * 3
    assert caplog.text == ""
    assert taken(tmp_path) == "2.ckpt"


def test_copies_of_it_are_stepped_over_and_another_save_of_that_name_is_not(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    os.link(tmp_path / "2.ckpt", tmp_path / "last.ckpt")
    assert [taken(tmp_path, attempts=1) for _ in range(2)] == ["last.ckpt", "1.ckpt"]
    save(tmp_path, 2)
    assert taken(tmp_path, attempts=1) == "2.ckpt"


def test_when_the_run_crashes_on_all_of_them_the_newest_is_tried_again(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    assert [taken(tmp_path, attempts=1) for _ in range(3)] == ["2.ckpt", "1.ckpt", "2.ckpt"]


def test_a_damaged_older_one_is_worse_than_one_on_which_the_run_crashes(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    flip_bit(tmp_path / "1.ckpt", 100)
    assert [taken(tmp_path, attempts=1) for _ in range(2)] == ["2.ckpt", "2.ckpt"]
    flip_bit(tmp_path / "2.ckpt", 100)
    with pytest.raises(CheckpointCorruptedError):
        taken(tmp_path)


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="needs users")
@pytest.mark.parametrize("mode", [0o000, 0o444])
def test_a_directory_that_may_not_be_read_is_passed_over_and_starts_nothing_anew(
    mode: int, anyones_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    closed = anyones_path / "step=2"
    with DirectoryCheckpointer(strategy="sync") as checkpointer:
        checkpointer.save([Part("model", {"weight": torch.ones(2)}, Kind.REPLICATED)], closed)
    with closed_to_this_user(closed, mode=mode):
        with pytest.raises(
            CheckpointCorruptedError, match=r"1 do not verify, such as step=2: .*: Permission denied"
        ) as none:
            newest_to_resume(anyones_path)
        assert str(none.value.remedy).startswith("the user of this process may not: change the permissions")
        save(anyones_path, 3)
        flip_bit(anyones_path / "3.ckpt", 100)
        with pytest.raises(CheckpointCorruptedError, match=r"2 do not verify, such as step=2: .*: Perm") as both:
            newest_to_resume(anyones_path)
        assert both.value.remedy == none.value.remedy
        (anyones_path / "3.ckpt").unlink()
        save(anyones_path, 1)
        caplog.clear()
        assert taken(anyones_path) == "1.ckpt"
        catalog = Catalog(anyones_path, suffix="")
        assert {info.name: info.is_readable for info in catalog.checkpoints()} == {"1.ckpt": True, "step=2": False}
    (said,) = caplog.messages
    assert said.startswith(f"passed over the checkpoint {closed}: cannot ")
    assert said.endswith(f": Permission denied; took {anyones_path / '1.ckpt'} instead")


@pytest.mark.parametrize("place", ["file", "file/below", "link", "link/below", "closed", "closed/below"])
def test_a_directory_in_which_no_save_can_succeed_starts_nothing_anew(place: str, anyones_path: Path) -> None:
    (anyones_path / "file").write_text("precious")
    (anyones_path / "link").symlink_to(anyones_path / "not mounted" / "runs")
    (anyones_path / "closed").mkdir()
    remedies = {"file": "is a file: check the path", "link": "mount the filesystem", "closed": "change the permissions"}
    with closed_to_this_user(anyones_path / "closed", mode=0o555), pytest.raises(StorageError) as caught:
        newest_to_resume(anyones_path / place)
    first = place.partition("/")[0]
    assert str(anyones_path / first) in str(caught.value)
    assert remedies[first] in str(caught.value.remedy)
    assert sorted(os.listdir(anyones_path)) == ["closed", "file", "link"]
    assert os.listdir(anyones_path / "closed") == []


@pytest.mark.parametrize("files", [[], ["1.ckpt"]], ids=["new", "resumed"])
def test_a_run_that_cannot_save_hears_of_it_when_it_looks(files: list[str], small_filesystem: Path) -> None:
    save(small_filesystem, *range(1, len(files) + 1))
    subprocess.run(["mount", "-o", "remount,ro", small_filesystem], check=True, capture_output=True)
    try:
        with pytest.raises(StorageError, match="read-only: save to another directory"):
            newest_to_resume(small_filesystem)
        assert [info.name for info in Catalog(small_filesystem).checkpoints()] == files  # reading still works
    finally:
        subprocess.run(["mount", "-o", "remount,rw", small_filesystem], check=True, capture_output=True)
    assert taken(small_filesystem) == (files[0] if files else None)


def test_none_is_stepped_over_without_a_limit(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    assert {taken(tmp_path, attempts=None) for _ in range(5)} == {"2.ckpt"}
    with pytest.raises(ValueError, match="at least 1, not 0"):
        taken(tmp_path, attempts=0)


@pytest.mark.parametrize("content", ["", "[]", '{"attempts": {"a": "b"}}', '{"attempts": 3}'])
def test_a_record_that_cannot_be_read_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    save(tmp_path, 1)
    (tmp_path / RECORD_OF_RESUMES).write_text(content)
    assert taken(tmp_path) == "1.ckpt"
    assert "cannot be read, so no checkpoint is skipped" in caplog.text


def test_the_record_is_no_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)
    taken(tmp_path)
    assert (tmp_path / RECORD_OF_RESUMES).exists()
    assert [info.name for info in Catalog(tmp_path, suffix="").checkpoints()] == ["1.ckpt"]


@pytest.mark.parametrize("lost", ["local", "remote"])
def test_one_of_the_tiers_is_enough_to_know_of_crashes(tmp_path: Path, lost: str) -> None:
    save(tmp_path / "local" / "run", 1, 2)
    shutil.copytree(tmp_path / "local", tmp_path / "remote")
    tiers = Tiers.of(str(tmp_path / "local"), str(tmp_path / "remote"), None)

    def resumed_at() -> int | None:
        point = newest_to_resume(tmp_path / "remote" / "run", attempts=2, tiers=tiers)
        return None if point is None else point.step

    assert resumed_at() == 2
    shutil.rmtree(tmp_path / lost)  # the run continues on another machine
    assert [resumed_at(), resumed_at()] == [2, 1]
    ResumeAttempts(tmp_path / "local" / "run", tiers=tiers).end()
    assert list(tmp_path.rglob(RECORD_OF_RESUMES)) == []


def test_only_a_first_start_needs_the_place_of_the_uploads(tmp_path: Path) -> None:
    (tmp_path / "remote").symlink_to(tmp_path / "not mounted")
    run, tiers = tmp_path / "local" / "run", Tiers.of(str(tmp_path / "local"), str(tmp_path / "remote"), None)
    with pytest.raises(StorageError, match="link that leads nowhere"):
        newest_to_resume(run, tiers=tiers)
    save(run, 1)
    point = newest_to_resume(run, tiers=tiers)
    assert point is not None and point.step == 1


def test_what_is_known_of_a_point_is_said() -> None:
    assert str(ResumePoint("a.ckpt", step=7, batch=3)) == "a.ckpt (step 7, batch 3)"
    assert str(ResumePoint("a.ckpt")) == "a.ckpt"


# ---- ckpt latest -----------------------------------------------------------------------------------------------------


def test_latest_prints_a_path_for_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 1, 2)
    assert main(["latest", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / '2.ckpt'}\n"
    flip_bit(tmp_path / "2.ckpt", 100)
    assert main(["latest", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["path"], found["step"]) == (str(tmp_path / "1.ckpt"), 1)
    assert found["bytes"] == (tmp_path / "1.ckpt").stat().st_size
    flip_bit(tmp_path / "1.ckpt", 100)
    assert main(["latest", str(tmp_path)]) == 1
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", [".", "missing"])
def test_latest_tells_a_first_start_by_its_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    assert main(["latest", str(tmp_path / name)]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "nothing to resume" in captured.err


def test_latest_finds_directories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with DirectoryCheckpointer(strategy="sync") as checkpointer:
        for step in (1, 2):
            part = Part("model", {"weight": torch.ones(3)}, Kind.REPLICATED)
            checkpointer.save([part], tmp_path / f"checkpoint_{step}", step=step)
    assert main(["latest", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'checkpoint_2'}\n"
