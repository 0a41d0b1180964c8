"""Two ranks: every way to load data resumes bit for bit after a save at any point."""

from __future__ import annotations

import accelerate
import pytest

from tests.accelerate_ckpt.exact_worlds import DRAW_WHILE_READING, Worlds, check_attaching, check_resumes, worlds

__all__ = ["worlds"]

RANKS = 2
SHORT = [
    "default_workers",
    "own_batch_sampler",
    "split_batches",
    "uneven",
    "seedable_skip",
    "stateful_workers",
    "dispatched_stateful",
    "generator_stream",
    "stream_workers",
]
# cells that are also tested on one or three ranks
MORE = [
    "default",
    "default_skip",
    "default_accumulate",
    "stateful_samples",
    "dispatched",
    "together",
]
OTHERS = [
    "default_workers_skip",
    "default_persistent",
    "generator",
    "drop_last",
    "sequential",
    "weighted",
    "own_sampler",
    "sampler_is_batch_sampler",
    "own_rng",
    "uneven_seedable",
    "seedable",
    "seedable_workers",
    "stateful",
    "stateful_persistent",
    "stateful_seedable",
    "stateful_samples_workers",
    "dispatched_skip",
    "dispatched_split",
    "dispatched_workers",
    "dispatched_stream",
    "dispatched_stream_workers",
    "stream",
    "stream_split",
    "shuffled_stream",
    "stateful_stream",
    "stateful_stream_workers",
    "evaluate",
]
CELLS = [
    *SHORT,
    *(pytest.param(cell, marks=pytest.mark.extended) for cell in MORE),
    *(pytest.param(cell, marks=pytest.mark.slow) for cell in OTHERS),
]
pytestmark = pytest.mark.timeout(3600)


@pytest.mark.sampled(3)
@pytest.mark.extended_cells("default_workers")
@pytest.mark.parametrize("cell", CELLS)
def test_resumed_bit_for_bit(worlds: Worlds, cell: str) -> None:
    whole, resumed = worlds[cell]
    if any("KeyError: '_sampler_iter_yielded'" in rank.get("error", "") for rank in whole):
        assert accelerate.__version__.startswith("1.10.")
        pytest.skip("Accelerate 1.10 itself cannot iterate a stateful loader with workers on several ranks")
    check_resumes(resumed, draws_while_reading=cell in {*DRAW_WHILE_READING, "stateful_stream"})


@pytest.mark.parametrize("cell", CELLS)
def test_attaching_changes_nothing(worlds: Worlds, cell: str) -> None:
    check_attaching(worlds[cell][0], cell)
