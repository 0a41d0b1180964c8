"""One process: every way to load data resumes bit for bit after a save at any point."""

from __future__ import annotations

import pytest

from tests.accelerate_ckpt.exact_worlds import DRAW_WHILE_READING, Worlds, check_attaching, check_resumes, worlds

__all__ = ["worlds"]

RANKS = 1
SHORT = [
    "default",
    "default_skip",
    "default_workers",
    "own_rng",
    "stateful_samples",
    "stream",
    "stateful_stream_workers",
    "together",
]
# cells that are also tested on two or three ranks
MORE = ["default_accumulate", "seedable", "stateful_workers", "dispatched"]
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
CELLS = [
    *SHORT,
    *(pytest.param(cell, marks=pytest.mark.extended) for cell in MORE),
    *(pytest.param(cell, marks=pytest.mark.slow) for cell in OTHERS),
]
pytestmark = pytest.mark.timeout(3600)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cell", CELLS)
def test_resumed_bit_for_bit(worlds: Worlds, cell: str) -> None:
    _, resumed = worlds[cell]
    check_resumes(resumed, draws_while_reading=cell in DRAW_WHILE_READING)


@pytest.mark.parametrize("cell", CELLS)
def test_attaching_changes_nothing(worlds: Worlds, cell: str) -> None:
    check_attaching(worlds[cell][0], cell)
