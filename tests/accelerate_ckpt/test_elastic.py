"""Elastic resume in the middle of an epoch: no sample is lost, and none is repeated except as padding."""

from __future__ import annotations

import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.accelerate_ckpt.elastic_cells import CELLS, SAMPLES
from tests.support.accelerate_ranks import Ranks

BODY = """
import sys
sys.path.insert(0, root)
from tests.accelerate_ckpt.elastic_cells import stage
tell(found=stage(Path(directory), name, source, save_after, cells, seed))
"""
ROOT = Path(__file__).resolve().parents[2]

Stage = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def stages(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    """Return a function that runs a stage once, and returns the results of each rank by cell."""
    directory = tmp_path_factory.mktemp("stages")
    done: dict[str, list[dict[str, Any]]] = {}

    def run(name: str, world_size: int, source: str | None = None, save_after: int = 2) -> list[dict[str, Any]]:
        if name not in done:
            results = ranks.run(
                BODY,
                world_size,
                root=str(ROOT),
                directory=str(directory),
                name=name,
                source=source,
                save_after=save_after,
                cells=list(CELLS),
                seed=len(done) + 1,
            )
            assert all(result.ended and result.error is None for result in results), results
            done[name] = [result.told["found"] for result in results]
        return done[name]

    return run


def chain(stages: Stage, *world_sizes: int) -> list[tuple[int, list[dict[str, Any]]]]:
    """Run stages with these numbers of ranks, each from two steps into the one before; return sizes and results."""
    found, source = [], None
    for length in range(1, len(world_sizes) + 1):
        name = "-".join(str(size) for size in world_sizes[:length])
        found.append((world_sizes[length - 1], stages(name, world_sizes[length - 1], source)))
        source = name
    return found


def given(ranks: list[dict[str, Any]], cell: str, epoch: int, steps: slice) -> list[list[int]]:
    """Return the samples of each step of an epoch, of all ranks together."""
    batches = [rank[cell]["epochs"][epoch][steps] for rank in ranks]
    assert len({len(of_rank) for of_rank in batches}) == 1, "the ranks did not make equally many steps"
    return [[sample for batch in step for sample in batch] for step in zip(*batches, strict=True)]


def check_exactly_once(steps: list[list[int]], dropped: int = 0, workers: int = 1) -> None:
    """Check that each sample comes once; only the last step (of each stream worker) may be padded with repeats."""
    times = collections.Counter(sample for step in steps[:-workers] for sample in step)
    assert max(times.values()) == 1, f"repeated: {[sample for sample, count in times.items() if count > 1]}"
    last = [sample for step in steps[-workers:] for sample in step]
    missing = set(range(SAMPLES)) - set(times) - set(last)
    assert len(missing) == dropped, f"lost: {sorted(missing)}"
    padding = len(times) + len(last) + dropped - SAMPLES
    assert 0 <= padding < workers * max(map(len, steps)), f"{padding} samples were repeated"
    if dropped:
        assert padding == 0, "samples were repeated"


MORE = [pytest.param(sizes, marks=pytest.mark.extended) for sizes in [(2, 1), (1, 2)]]
CHAINS = [(2, 3), (2, 3, 1), *MORE, pytest.param((2, 3, 1, 2), marks=pytest.mark.extended)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sizes", CHAINS, ids=lambda sizes: "-".join(map(str, sizes)))
def test_every_sample_exactly_once(stages: Stage, sizes: tuple[int, ...]) -> None:
    run = chain(stages, *sizes)
    for cell in CELLS:
        steps = []
        for _, ranks in run[:-1]:
            steps += given(ranks, cell, 0, slice(2))
        last_size, last = run[-1]
        steps += given(last, cell, 0, slice(None))
        dropped, workers = 0, 2 if cell == "stream_workers" else 1
        if cell == "drop_last":
            consumed = sum(size * 4 * 2 for size in sizes[:-1])
            dropped = (SAMPLES - consumed) % (4 * last_size)
        try:
            check_exactly_once(steps, dropped, workers)
            # the next epoch is a whole one
            whole = given(last, cell, 1, slice(None))
            check_exactly_once(whole, SAMPLES % (4 * last_size) if cell == "drop_last" else 0, workers)
        except AssertionError as error:
            raise AssertionError(f"{cell}: {error}") from error


def flat(steps: list[list[int]]) -> list[int]:
    return [sample for step in steps for sample in step]


@pytest.mark.parametrize("sizes", [(2, 3), *MORE], ids=lambda sizes: "-".join(map(str, sizes)))
def test_the_order_is_that_of_the_run_that_was_interrupted(stages: Stage, sizes: tuple[int, ...]) -> None:
    (_, before), (_, after) = chain(stages, *sizes)
    for cell in CELLS.keys() - {"stream_workers"}:
        whole = flat(given(before, cell, 0, slice(None)))[:SAMPLES]
        consumed = len(flat(given(before, cell, 0, slice(2))))
        rest = flat(given(after, cell, 0, slice(None)))[: SAMPLES - consumed]
        expected = whole[consumed:]
        length = min(len(rest), len(expected)) if cell == "drop_last" else SAMPLES - consumed
        assert rest[:length] == expected[:length], cell


def test_a_rest_of_an_epoch_is_resumed_exactly(stages: Stage) -> None:
    """Three ranks continue an epoch of two ranks, save, and are resumed by three ranks."""
    *_, (_, begun), (_, resumed) = chain(stages, 2, 3, 3)
    for cell in CELLS:
        for expected, got in zip(begun, resumed, strict=True):
            assert got[cell]["epochs"] == [expected[cell]["epochs"][0][2:], expected[cell]["epochs"][1]], cell
            assert got[cell]["numbers"] == expected[cell]["numbers"][2:], cell
            assert got[cell]["warned"] == []


@pytest.mark.parametrize(
    "sizes",
    [(2, 3), pytest.param((3, 1), marks=pytest.mark.extended)],
    ids=lambda sizes: "-".join(map(str, sizes)),
)
def test_between_epochs(stages: Stage, sizes: tuple[int, int]) -> None:
    before = stages(f"{sizes[0]} whole", sizes[0], None, 0)
    after = stages(f"{sizes[0]} whole-{sizes[1]}", sizes[1], f"{sizes[0]} whole")
    for cell in CELLS:
        workers = 2 if cell == "stream_workers" else 1
        first = given(after, cell, 0, slice(None))
        check_exactly_once(first, SAMPLES % (4 * sizes[1]) if cell == "drop_last" else 0, workers)
        if "stream" in cell:
            continue
        order = flat(first)[:SAMPLES]
        old = [flat(given(before, cell, epoch, slice(None)))[:SAMPLES] for epoch in (0, 1)]
        length = min(map(len, (order, *old)))
        assert order[:length] != old[0][:length], f"{cell}: an order was repeated"
        if sizes[0] > 1 and "dispatched" not in cell:
            assert order[:length] == old[1][:length], f"{cell}: not the order that was next"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [3, 4, pytest.param(1, marks=pytest.mark.extended)])
def test_the_padding_of_metrics_is_known(stages: Stage, size: int) -> None:
    _, (_, after) = chain(stages, 2, size)
    left = SAMPLES - 2 * 2 * 4
    assert after[0]["default"]["remainders"] == [left % (4 * size), SAMPLES % (4 * size)]


def test_it_says_what_is_not_exact(stages: Stage) -> None:
    _, (_, after) = chain(stages, 2, 3)
    for cell in CELLS:
        assert len(after[0][cell]["warned"]) == 1
        assert "saved by 2 ranks and is loaded by 3" in after[0][cell]["warned"][0]
        assert [rank[cell]["warned"] for rank in after[1:]] == [[], []]


def test_the_ranks_agree_on_the_step_and_not_on_random_numbers(stages: Stage) -> None:
    for sizes in ((2, 3), (2, 4)):
        _, (_, after) = chain(stages, *sizes)
        for cell in CELLS:
            # saved in the second batch of a window of two
            assert {rank[cell]["step"] for rank in after} == {2}
            numbers = [rank[cell]["random"] for rank in after]
            assert len(set(numbers[2:])) == len(numbers[2:]) and not set(numbers[2:]) & set(numbers[:2])
