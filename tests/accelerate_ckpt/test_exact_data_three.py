"""Three ranks: every way to load data goes on bit for bit after a save at any point."""

from __future__ import annotations

import pytest

from tests.accelerate_ckpt.exact_worlds import Worlds, check_attaching, check_resumes, selected_cells
from tests.support.accelerate_ranks import Ranks

CELLS = [
    "default",
    "default_accumulate",
    "default_workers",
    "drop_last",
    "uneven",
    "seedable",
    "stateful",
    "dispatched",
    "stream",
    # several gradient buckets, which DDP would rebuild after the first step of a process
    "buckets",
]
pytestmark = pytest.mark.timeout(1200)

# the order of a stream cannot depend on them here, which the plugin cannot know
DRAW_WHILE_READING = {"dispatched_stream", "stream", "stream_split", "shuffled_stream", "generator_stream"}


@pytest.fixture(scope="module")
def worlds(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Worlds:
    return Worlds(ranks, tmp_path_factory.mktemp("cells"), 3, selected_cells(request))


@pytest.mark.parametrize("cell", CELLS)
def test_resumed_bit_for_bit(worlds: Worlds, cell: str) -> None:
    _, resumed = worlds[cell]
    check_resumes(resumed, draws_while_reading=cell in DRAW_WHILE_READING)


@pytest.mark.parametrize("cell", CELLS)
def test_attaching_changes_nothing(worlds: Worlds, cell: str) -> None:
    check_attaching(worlds[cell][0], cell)
