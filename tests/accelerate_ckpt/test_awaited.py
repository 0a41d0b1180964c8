"""Scripts find a checkpoint that they have just saved, although it is saved in the background."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("awaited_script.py")


def found_by(fork_script: Any, out: Path, *launcher: str) -> dict[str, Any]:
    code = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    if launcher:
        code = "import runpy, sys; runpy.run_module('accelerate_ckpt', run_name='__main__', alter_sys=True)"
    result = fork_script(code, *launcher, SCRIPT, out, env={"ACCELERATE_USE_CPU": "true"})
    return dict(json.loads(line) for line in result.stdout.splitlines() if line.startswith("["))


@pytest.fixture(scope="module")
def by_stock() -> dict[str, Any]:
    return {}


@pytest.mark.parametrize("strategy", ["async", pytest.param("sharded", marks=pytest.mark.slow)])
def test_a_script_finds_what_it_finds_with_stock(
    fork_script: Any, tmp_path: Path, strategy: str, by_stock: dict[str, Any]
) -> None:
    if not by_stock:  # once is enough for all strategies
        by_stock.update(found_by(fork_script, tmp_path / "stock"))
    assert len(by_stock) > 30
    assert not [case for case, found in by_stock.items() if str(found).endswith("Error")]
    assert found_by(fork_script, tmp_path / "ours", "--strategy", strategy) == by_stock
