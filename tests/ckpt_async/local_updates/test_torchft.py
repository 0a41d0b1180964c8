"""torchft's DiLoCo, whole and in fragments: killed, and continued bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckpt_async.local_updates import TorchftLoop
from ckpt_core.errors import CheckpointError
from tests.conftest import ScriptRunner

SCRIPT = Path(__file__).with_name("torchft_script.py")
WINDOWS, KILLED_AT = 4, 2


def train(run_script: ScriptRunner, root: Path, replicas: int, fragments: int, kill: int = 0) -> list[dict[str, Any]]:
    done = run_script(SCRIPT, root, replicas, fragments, WINDOWS, kill, check=False)
    assert done.returncode == (-9 if kill else 0), done.stderr[-5000:]
    return [] if kill else [json.loads(Path(f"{root}-{rank}.json").read_text()) for rank in range(replicas)]


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_killed_run_goes_on_bit_for_bit(run_script: ScriptRunner, tmp_path: Path, fragments: int) -> None:
    pytest.importorskip("torchft", reason="torchft is not installed")
    whole = train(run_script, tmp_path / "whole", 2, fragments)
    train(run_script, tmp_path / "killed", 2, fragments, kill=KILLED_AT)
    resumed = train(run_script, tmp_path / "killed", 2, fragments)
    assert [result["resumed"] for result in resumed] == [KILLED_AT] * 2
    assert [result["digest"] for result in resumed] == [result["digest"] for result in whole]
    assert [result["step"] for result in resumed] == [result["step"] for result in whole] == [WINDOWS] * 2
    assert all("of a window" in result["in_window"] and "at_boundary" in result["in_window"] for result in resumed)


def test_another_release_is_told_by_its_names() -> None:
    class Moved:
        _fragments = (object(),)

    with pytest.raises(CheckpointError, match=r"no _local_step, _fragments\[\]\._allreduce_work"):
        TorchftLoop(Moved(), None)
