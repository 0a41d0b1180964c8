"""Three ranks: every way to load data resumes bit for bit after a save at any point."""

from __future__ import annotations

import pytest

from tests.accelerate_ckpt.exact_worlds import DRAW_WHILE_READING, Worlds, check_attaching, check_resumes, worlds

__all__ = ["worlds"]

RANKS = 3
SHORT = [
    "default_accumulate",
    "drop_last",
    "dispatched",
    "stream",
    "seedable",
    "stateful",
    # several gradient buckets, which DDP would rebuild after the first step of a process
    "buckets",
]
# cells that are also tested on one or two ranks
MORE = ["default", "default_workers", "uneven"]
CELLS = [*SHORT, *(pytest.param(cell, marks=pytest.mark.extended) for cell in MORE)]
pytestmark = pytest.mark.timeout(3600)


@pytest.mark.sampled(2)
@pytest.mark.extended_cells("default_accumulate")
@pytest.mark.parametrize("cell", CELLS)
def test_resumed_bit_for_bit(worlds: Worlds, cell: str) -> None:
    _, resumed = worlds[cell]
    check_resumes(resumed, draws_while_reading=cell in DRAW_WHILE_READING)


@pytest.mark.parametrize("cell", CELLS)
def test_attaching_changes_nothing(worlds: Worlds, cell: str) -> None:
    check_attaching(worlds[cell][0], cell)
