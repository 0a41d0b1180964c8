from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ckpt_core import Checkpointer, DirectoryCheckpointer, Kind, Part
from ckpt_core.cli import main


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    checkpointer = Checkpointer(strategy="sync")
    checkpointer.save({"weight": torch.ones(2, 3), "step": 7}, tmp_path / "a.ckpt")
    checkpointer.save({"weight": torch.zeros(2, 3)}, tmp_path / "b.ckpt")
    os.utime(tmp_path / "a.ckpt", (1_000, 1_000))
    return tmp_path


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


def test_ls_lists_newest_first(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == [str(directory / "b.ckpt"), str(directory / "a.ckpt")]


def test_inspect_shows_every_leaf(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(directory / "a.ckpt")]) == 0
    out = capsys.readouterr().out
    assert "verified" in out
    assert "weight: float32[2, 3]" in out
    assert "step: 7" in out


def test_verify_tells_whole_from_damaged(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(directory)]) == 0
    damage(directory / "a.ckpt")
    assert main(["verify", str(directory)]) == 1
    damaged, whole = sorted(capsys.readouterr().out.splitlines()[2:])
    assert whole == f"whole  {directory / 'b.ckpt'}"
    assert damaged.startswith(f"DAMAGED  {directory / 'a.ckpt'}")


def test_errors_are_one_message_and_exit_code_1(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(directory / "missing.ckpt")]) == 1
    assert "CheckpointNotFoundError" in capsys.readouterr().err


def test_prune_deletes_orphans_only(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    orphan = directory / ".c.ckpt.0123456789ab.ckpt-part"
    orphan.write_bytes(b"half")
    assert main(["prune", str(directory)]) == 0
    assert capsys.readouterr().out == f"deleted {orphan}\n"
    assert sorted(path.name for path in directory.iterdir()) == ["a.ckpt", "b.ckpt"]


@pytest.fixture
def directories(tmp_path: Path) -> Path:
    with DirectoryCheckpointer(strategy="sync") as checkpointer:
        for step in (1, 2):
            parts = [Part("model", {"weight": torch.ones(2, 3)}, Kind.REPLICATED)]
            checkpointer.save(parts, tmp_path / f"step={step}", metadata={"step": step})
            os.utime(tmp_path / f"step={step}" / "manifest.json", (step, step))
    (tmp_path / "logs").mkdir()
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    return tmp_path


def test_directories_are_checkpoints_too(directories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(directories)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == [str(directories / "step=2"), str(directories / "step=1")]

    assert main(["inspect", str(directories / "step=1")]) == 0
    out = capsys.readouterr().out
    assert "saved by 1 rank, verified" in out
    assert "metadata.step: 1" in out
    assert "model: replicated, 1 tensor" in out
    assert "weight: float32[2, 3]" in out
    assert "model.safetensors" in out

    assert main(["verify", str(directories)]) == 0
    data = (directories / "step=1" / "model.safetensors").read_bytes()
    (directories / "step=1" / "model.safetensors").write_bytes(data[:-1] + b"x")
    assert capsys.readouterr().out.count("whole") == 2
    assert main(["verify", str(directories / "step=1"), str(directories / "step=2")]) == 1
    damaged, whole = capsys.readouterr().out.splitlines()
    assert damaged.startswith(f"DAMAGED  {directories / 'step=1'}")
    assert whole == f"whole  {directories / 'step=2'}"
    assert main(["inspect", str(directories / "step=1")]) == 1
    assert "CheckpointCorruptedError" in capsys.readouterr().err


def test_prune_deletes_unfinished_directories(directories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    orphan = directories / ".step=3.0123456789ab-0-3.ckpt-part"
    orphan.mkdir()
    (orphan / "model.safetensors").write_bytes(b"half")
    assert main(["prune", str(directories)]) == 0
    assert capsys.readouterr().out == f"deleted {orphan}\n"
    assert sorted(path.name for path in directories.iterdir()) == ["logs", "notes.txt", "step=1", "step=2"]
