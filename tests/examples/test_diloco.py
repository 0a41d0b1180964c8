"""DiLoCo, killed at any moment: the same bits with as many workers, and each batch once with any number."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch

from ckpt_core import Catalog, DirectoryCheckpointer
from tests.examples.local_updates import finish, kill_after


def ends(printed: str) -> list[str]:
    return sorted(re.findall(r"worker \d ends with [0-9a-f]{64}", printed))


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    arguments, dice = ("--workers", 3, "--window", 4, "--batches", 40), random.Random(1)
    whole = finish("diloco.py", tmp_path / "whole", *arguments)
    for _ in range(2):
        kill_after(3, dice, "diloco.py", tmp_path / "killed", *arguments)
    resumed = finish("diloco.py", tmp_path / "killed", *arguments)
    assert "resumes from" in resumed and "resumes from" not in whole
    assert len(ends(whole)) == 3
    assert ends(resumed) == ends(whole)
    assert len(set(ends(whole))) == 3  # workers have states of their own
    assert "20 checkpoints, 0 violations" in resumed


@pytest.mark.slow
def test_another_number_of_workers_uses_every_batch_once(tmp_path: Path) -> None:
    output, dice = tmp_path / "saved", random.Random(2)
    for workers in (3, 2):
        kill_after(4, dice, "diloco.py", output, "--workers", workers, "--window", 4, "--batches", 40)
    printed = finish("diloco.py", output, "--workers", 4, "--window", 4, "--batches", 40)
    assert "worker 3 resumes from" in printed
    newest = Catalog(output).checkpoints()[0].path
    with DirectoryCheckpointer().load(newest) as opened:
        assert torch.equal(opened.load("model")["used"].round(decimals=3), torch.ones(240))
    assert ", 0 violations" in printed
