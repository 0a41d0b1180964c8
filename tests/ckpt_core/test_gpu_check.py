"""The check of a machine's accelerator, on the simulated device and where there is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ckpt_core import gpu_check
from tests.support.accelerators import Accelerator

TINY = ["--gigabytes", "0.002", "--steps", "4", "--every", "1", "--step-ms", "0", "--batch", "2"]


def test_one_table_says_what_saves_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], accelerator: Accelerator
) -> None:
    assert gpu_check.main([str(tmp_path), *TINY]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"torch {torch.__version__}, 0.00 GB of weights and moments, a save every 1 steps of" in lines[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    assert rows[0] == ["saves", "stall", "training slower", "extra device memory"]
    assert [row[0] for row in rows[2:4]] == ["async, overlap=True", "async"]
    for row in rows[2:4]:
        assert float(row[1].removesuffix(" ms")) > 0
        assert row[2].endswith(" %")
    assert rows[4][0].startswith("DCP async_save")
    assert lines[-2].startswith("Pinned copy: ")
    assert lines[-1].startswith("Load to the device, verified: ")
    assert os.listdir(tmp_path) == []


def test_where_there_is_no_accelerator_one_line_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert gpu_check.main([]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert "finds no accelerator" in line
