"""Runs the cells of ``exact_cells`` on a number of ranks, once for all tests of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.accelerate_ranks import Ranks

BODY = """
import sys
sys.path.insert(0, root)
from tests.accelerate_ckpt.exact_script import train_all
tell(found=train_all(mode, Path(directory), cells))
"""
ROOT = Path(__file__).resolve().parents[2]

Found = list[dict[str, dict[str, str]]]


def run_and_resume(ranks: Ranks, directory: Path, world_size: int, cells: list[str]) -> tuple[Found, Found]:
    """Train the cells without interruption, and from each of their checkpoints in other processes.

    Returns:
        For each rank and cell, what was not the same bit for bit: with and without the plugin, and after each resume.
    """
    found = []
    for mode in ("run", "resume"):
        names: dict[str, Any] = {"root": str(ROOT), "directory": str(directory), "mode": mode, "cells": cells}
        results = ranks.run(BODY, world_size, timeout=600, **names)
        assert all(result.ended and result.error is None for result in results), results
        found.append([result.told["found"] for result in results])
    return found[0], found[1]


def selected_cells(request: pytest.FixtureRequest) -> list[str]:
    """Return the cells of the tests of the file that were selected to run."""
    found = {}
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.module is request.module:
            found[item.callspec.params["cell"]] = None
    return list(found)
