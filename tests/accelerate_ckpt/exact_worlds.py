"""Run the cells of ``exact_cells`` on a number of ranks, some at a time, and check their results."""

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
#: Cells that run in the same processes, because starting those takes longer than a cell.
AT_A_TIME = 9
#: Limit for processes that hang: on two cores with a load of 14, eight cells take more than 600 s.
HANG_SECONDS = 1700.0

# streams that draw while they are read: their order does not depend on it, but the plugin cannot know that
DRAW_WHILE_READING = {"dispatched_stream", "stream", "stream_split", "shuffled_stream", "generator_stream"}

Found = list[dict[str, dict[str, str]]]


class Worlds:
    """Trains cells without interruption, and resumes each of their checkpoints in other processes.

    Args:
        ranks: Starts processes.
        directory: Directory of the checkpoints.
        world_size: Number of ranks.
        cells: Names of the cells that will be asked for.
    """

    def __init__(self, ranks: Ranks, directory: Path, world_size: int, cells: list[str]) -> None:
        self.world_size = world_size
        self._ranks, self._directory = ranks, directory
        self._groups = [cells[begin : begin + AT_A_TIME] for begin in range(0, len(cells), AT_A_TIME)]
        self._found: dict[str, tuple[Found, Found]] = {}

    def __getitem__(self, cell: str) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
        """Return what differed on each rank: training with the plugin from training without it, and each resume."""
        if cell not in self._found:
            (group,) = (group for group in self._groups if cell in group)
            whole, resumed = (self._run(mode, group) for mode in ("run", "resume"))
            self._found.update(dict.fromkeys(group, (whole, resumed)))
        whole, resumed = self._found[cell]
        return [rank[cell] for rank in whole], [rank[cell] for rank in resumed]

    def _run(self, mode: str, cells: list[str]) -> Found:
        names: dict[str, Any] = {"root": str(ROOT), "directory": str(self._directory), "mode": mode, "cells": cells}
        results = self._ranks.run(BODY, self.world_size, timeout=HANG_SECONDS, **names)
        assert all(result.ended and result.error is None for result in results), results
        return [result.told["found"] for result in results]


def selected_cells(request: pytest.FixtureRequest) -> list[str]:
    """Return the cells of the tests of the file that were selected to run."""
    found = {}
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.module is request.module:
            found[item.callspec.params["cell"]] = None
    return list(found)


def check_resumes(resumed: list[dict[str, str]], *, draws_while_reading: bool) -> None:
    """Check that each resume of a cell was exact, on each rank, and said so."""
    for rank in resumed:
        warned = {point: cause for point, cause in rank.items() if point.startswith("warned")}
        assert {point: what for point, what in rank.items() if what and point not in warned} == {}
        assert len(rank) - len(warned) >= 3, "nothing was resumed"
        if draws_while_reading:
            assert all("draws random numbers" in cause for cause in warned.values())
        else:
            assert warned == {}


def check_attaching(whole: list[dict[str, str]], cell: str) -> None:
    """Check that training with the plugin gave the same bits as without."""
    if "stateful" in cell and ("workers" in cell or "persistent" in cell):
        pytest.skip("a stateful loader seeds its first workers when it is prepared, before it is followed")
    assert whole == [{"first": ""}] * len(whole)


@pytest.fixture(scope="module")
def worlds(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Worlds:
    """Return the cells, run on ``RANKS`` ranks of the module."""
    return Worlds(ranks, tmp_path_factory.mktemp("cells"), request.module.RANKS, selected_cells(request))
