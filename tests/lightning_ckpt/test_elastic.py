"""Elastic resume: every sample of an epoch is used once when another number of ranks continues it."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import pytest

from tests.lightning_ckpt.sharded_runs import Runs

HERE = 64  # samples in an epoch


def used(results: list[Any], first: int = 0, last: int | None = None) -> collections.Counter[int]:
    """Count how often each sample of the first epoch was trained on, over all ranks."""
    rows = [row for result in results for row in result["seen"][first:last] if row[0] == 0]
    return collections.Counter(i for row in rows for i in row[3])


@pytest.mark.extended_cells("ddp-data0", "mp-data1")
@pytest.mark.parametrize(("kind", "data"), [("ddp", {}), ("mp", {}), ("ddp", {"loader": "stateful", "workers": 2})])
def test_no_sample_is_lost_or_repeated_over_several_changes(
    runs: Runs, tmp_path: Path, kind: str, data: dict[str, Any]
) -> None:
    # Lightning gives ModelParallelStrategy a DistributedSampler with one rank, too
    directory = tmp_path / "run"
    total: collections.Counter[int] = collections.Counter()
    changes = [(2, 2), (3, 4), (1, 6), (2, 100)]
    for number, (ranks, step) in enumerate(changes):
        found = runs.run(
            directory,
            f"{number}",
            ranks=ranks,
            kind=kind,
            seed=number,
            trainer={"max_steps": min(step, 20), "max_epochs": 1 if step > 20 else 100},
            callback={"every_n_train_steps": 2, "save_top_k": -1, "filename": "{step}"},
            ckpt_path="last" if number else None,
            **data,
        )
        total += used(found)
        for result in found:
            told = [warning for warning in result["warnings"] if f"resumed by {ranks}" in warning]
            assert len(told) == (1 if number and result is found[0] else 0)
            assert all("every sample that was left" in warning for warning in told)
    # 64 - 16 - 24 - 8 = 16 samples are left for the last two ranks: no padding is needed
    assert total == collections.Counter(range(HERE))
    # the last batches end the epoch where Lightning expects its end
    assert [row[1] for row in found[0]["seen"]] == [6, 7]


@pytest.mark.extended
def test_resumed_division_is_exact_at_the_same_number_of_ranks(runs: Runs, tmp_path: Path) -> None:
    first = tmp_path / "first"
    callback = {"every_n_train_steps": 2, "save_top_k": -1, "filename": "{step}"}
    runs.run(first, "first", trainer={"max_steps": 2}, callback=callback)
    start = str(first / "step=2.ckpt")
    whole = runs.run(
        tmp_path / "whole", "whole", ranks=3, trainer={"max_steps": 9}, callback=callback, ckpt_path=start, workers=1
    )
    again = tmp_path / "again"
    runs.run(again, "begun", ranks=3, trainer={"max_steps": 4}, callback=callback, ckpt_path=start, workers=1)
    found = runs.run(
        again, "resumed", ranks=3, trainer={"max_steps": 9}, callback=callback, ckpt_path="last", workers=1, seed=8
    )
    for one, other in zip(found, whole, strict=True):
        assert one["warnings"] == []
        assert one["seen"] == other["seen"][2:] and one["losses"] == other["losses"][2:]
        assert one["weights"] == other["weights"]


@pytest.mark.extended_cells("sampler")
@pytest.mark.parametrize("loader", ["sampler", "map"])
def test_open_window_is_begun_again(runs: Runs, tmp_path: Path, loader: str) -> None:
    directory = tmp_path / "run"
    trainer = {"max_epochs": 1, "accumulate_grad_batches": 3}
    save = ["on_train_batch_end", 5, True]  # two batches into the second window
    runs.run(directory, "first", fails=True, trainer=trainer, callback={}, save_at=save, loader=loader)
    found = runs.run(
        directory,
        "second",
        ranks=4,
        trainer=trainer,
        callback={},
        ckpt_path=str(directory / "saved.ckpt"),
        loader=loader,
    )
    # one window of three batches of two ranks has made a step; the 40 samples left make 10 for each of 4 ranks
    assert sum(used(found).values()) == 40 and max(used(found).values()) == 1
    assert [len(row[3]) for row in found[0]["seen"]] == [4, 4, 2]
    assert found[0]["seen"][0][1] == 1, "16 batches of all ranks are 4 of each of these, of which 3 are left"


def test_open_window_of_the_users_own_is_carried(runs: Runs, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    save = ["on_train_batch_end", 5, True]
    runs.run(directory, "first", fails=True, trainer={"max_epochs": 1}, callback={}, save_at=save, manual=3)
    found = runs.run(
        directory,
        "second",
        ranks=1,
        trainer={"max_epochs": 1},
        callback={},
        ckpt_path=str(directory / "saved.ckpt"),
        manual=3,
    )
    assert sum(used(found).values()) == HERE - 5 * 8 and max(used(found).values()) == 1


def test_saved_at_the_end_of_an_epoch_the_next_one_is_whole(runs: Runs, tmp_path: Path) -> None:
    for hook, count in (("on_train_epoch_end", 1), ("on_train_batch_end", 8)):
        directory = tmp_path / hook
        trainer = {"max_epochs": 2}
        runs.run(directory, "first", fails=True, trainer=trainer, callback={}, save_at=[hook, count, True])
        found = runs.run(
            directory, "second", ranks=1, trainer=trainer, callback={}, ckpt_path=str(directory / "saved.ckpt")
        )
        assert {row[0] for row in found[0]["seen"]} == {1}, hook
        assert sorted(i for row in found[0]["seen"] for i in row[3]) == list(range(HERE)), hook
        assert found[0]["step"] == 8 + 16, hook


def test_data_that_cannot_be_divided_is_said_to_begin_again(runs: Runs, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    save = ["on_train_batch_end", 3, True]
    trainer = {"max_epochs": 1}
    runs.run(directory, "first", ranks=1, fails=True, trainer=trainer, callback={}, save_at=save, loader="stream")
    found = runs.run(
        directory, "second", trainer=trainer, callback={}, ckpt_path=str(directory / "saved.ckpt"), loader="stream"
    )
    (warning,) = found[0]["warnings"]
    assert "an iterable dataset divides itself" in warning and "begins again" in warning
    assert len(found[0]["seen"]) == 16
