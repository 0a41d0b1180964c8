"""``gpu_check``, the check of a machine's accelerator: on the simulated device and without any accelerator."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import gpu_check
from tests.support.accelerators import Accelerator

TINY = ["--no-tests", "--gigabytes", "0.002", "--steps", "4", "--every", "1", "--step-ms", "0", "--batch", "2"]


@pytest.mark.extended
def test_one_table_says_what_saves_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], accelerator: Accelerator
) -> None:
    assert gpu_check.main([str(tmp_path), *TINY]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"torch {torch.__version__}, 0.00 GB of weights and moments, a save every 1 steps of" in lines[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    assert rows[0] == ["saves", "stall", "training slower", "saved after", "extra device memory"]
    assert [row[0] for row in rows[2:6]] == ["async, overlap=True", "sharded, overlap=True", "async", "sharded"]
    for row in rows[2:6]:
        assert float(row[1].removesuffix(" ms")) > 0
        assert row[2].endswith(" %")
        assert float(row[3].removesuffix(" s")) > 0
    assert [row[0].partition(":")[0] for row in rows[6:]] == ["DCP async_save", "DCP async_save, DefaultStager"]
    assert lines[-2].startswith("Pinned copy: ")
    assert lines[-1].startswith("Load to the device, verified: ")
    assert lines[-1].endswith("bit for bit the state of the save.")
    assert os.listdir(tmp_path) == []


class _Refuses(gpu_check.Contender):
    def __init__(self) -> None:
        super().__init__("refuses")

    def save(self, state: dict[str, Any], path: str) -> None:
        raise RuntimeError("no")


def test_a_row_that_fails_says_so_and_the_others_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], accelerator: Accelerator
) -> None:
    assert gpu_check.main([str(tmp_path), *TINY], [_Refuses, gpu_check.CONTENDERS[2]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| refuses: RuntimeError | - | - | - | - |" in lines
    assert any(line.startswith("| async | ") for line in lines)


def test_other_bits_than_those_of_the_save_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "equal", lambda *_: False)
    assert gpu_check.main([str(tmp_path), *TINY], []) == 1
    assert "NOT the state of the save" in capsys.readouterr().out.splitlines()[-1]


def test_where_there_is_no_accelerator_one_line_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert gpu_check.main([]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert "finds no accelerator" in line


@pytest.mark.extended
@pytest.mark.parametrize("fails", [False, True])
def test_in_a_clone_the_tests_that_need_an_accelerator_are_run_first(
    fails: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], accelerator: Accelerator
) -> None:
    (tmp_path / "tests/support").mkdir(parents=True)
    (tmp_path / "tests/support/accelerators.py").touch()
    (tmp_path / "tests/test_one.py").write_text(
        f"import pytest\n@pytest.mark.gpu\ndef test_copy(): assert {not fails}\ndef test_of_the_host(): assert False\n"
    )
    assert gpu_check.main([str(tmp_path), *TINY[1:]], [], tmp_path / "tests") == fails
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0].startswith(
        f"Tests that need an accelerator: 1 {'failed' if fails else 'passed'}, 1 deselected"
    )
    assert ("test_copy" in printed.err) == fails
    assert "bit for bit the state of the save." in printed.out
