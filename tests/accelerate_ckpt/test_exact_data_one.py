"""One process: every way to load data goes on bit for bit after a save at any point."""

from __future__ import annotations

import pytest

from tests.accelerate_ckpt.exact_worlds import Found, run_and_resume, selected_cells
from tests.support.accelerate_ranks import Ranks

SHORT = [
    "default",
    "default_skip",
    "default_workers",
    "default_accumulate",
    "own_rng",
    "seedable",
    "stateful_workers",
    "stateful_samples",
    "dispatched",
    "stream",
    "stateful_stream_workers",
    "together",
]
OTHERS = [
    "default_workers_skip",
    "default_persistent",
    "generator",
    "weighted",
    "own_sampler",
    "own_batch_sampler",
    "stateful",
    "stateful_persistent",
    "stateful_samples_workers",
    "stream_workers",
    "generator_stream",
    "stateful_stream",
    "evaluate",
]
CELLS = [*SHORT, *(pytest.param(cell, marks=pytest.mark.slow) for cell in OTHERS)]
pytestmark = pytest.mark.timeout(1200)

# the order of a stream cannot depend on them here, which the plugin cannot know
DRAW_WHILE_READING = {"dispatched_stream", "stream", "stream_split", "shuffled_stream", "generator_stream"}


@pytest.fixture(scope="module")
def found(
    ranks: Ranks, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Found, Found]:
    return run_and_resume(ranks, tmp_path_factory.mktemp("cells"), 1, selected_cells(request))


@pytest.mark.parametrize("cell", CELLS)
def test_resumed_bit_for_bit(found: tuple[Found, Found], cell: str) -> None:
    for rank in found[1]:
        warned = {point: cause for point, cause in rank[cell].items() if point.startswith("warned")}
        assert {point: what for point, what in rank[cell].items() if what and point not in warned} == {}
        assert len(rank[cell]) - len(warned) >= 3, "nothing was resumed"
        if cell in DRAW_WHILE_READING:
            assert all("draws random numbers" in cause for cause in warned.values())
        else:
            assert warned == {}


@pytest.mark.parametrize("cell", CELLS)
def test_attaching_changes_nothing(found: tuple[Found, Found], cell: str) -> None:
    if "stateful" in cell and ("workers" in cell or "persistent" in cell):
        pytest.skip("a stateful loader seeds its first workers when it is prepared, before it is followed")
    assert [rank[cell] for rank in found[0]] == [{"first": ""}] * 1
