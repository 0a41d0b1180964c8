"""Post-localSGD: each rank has its own weights and moments; counters decide when weights are averaged again."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import DirectoryCheckpointer
from tests.lightning_ckpt.sharded_runs import Runs
from tests.support.fork_server import LIGHTNING, ForkServers

STEPS = 14  # weights are averaged after steps 4, 8 and 12
BETWEEN = 6


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, fork_servers: ForkServers) -> Iterator[Runs]:
    script = Path(__file__).with_name("local_sgd_script.py")
    runs = Runs(fork_servers(LIGHTNING), script, tmp_path_factory.mktemp("log"))
    yield runs
    runs.close()


@dataclasses.dataclass
class Whole:
    """A run that nothing interrupted, with a checkpoint of each step."""

    saved: Path
    results: list[Any]

    def after(self, step: int) -> list[Any]:
        return after(self.results, step)


@pytest.fixture(scope="module")
def whole(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Whole]:
    """Return a function that runs a plugin on a number of ranks, each combination once."""
    root = tmp_path_factory.mktemp("whole")

    @functools.cache
    def run(io: str, ranks: int) -> Whole:
        saved = root / f"{io}-{ranks}"
        return Whole(saved, runs.run(saved, "whole", ranks=ranks, io=io, callback={"every_n_train_steps": 1}))

    return run


def after(results: list[Any], step: int) -> list[Any]:
    return [result["after"][str(step)] for result in results]


@pytest.mark.extended
def test_ranks_do_differ_between_averagings(whole: Callable[..., Whole]) -> None:
    run = whole("AsyncCheckpointIO", 2)
    equal = [step for step in range(1, STEPS + 1) if len({str(state["weights"]) for state in run.after(step)}) == 1]
    assert equal == [1, 2, 3, 4, 8, 12]
    assert [state["averager"] for state in run.after(STEPS)] == [STEPS, STEPS]
    assert run.after(8)[0]["moments"] != run.after(8)[1]["moments"]  # only weights are averaged


def assert_goes_on(runs: Runs, directory: Path, path: Path, expected: Whole, step: int, **spec: Any) -> None:
    resumed = runs.run(directory, "resumed", ckpt_path=str(path), **spec)
    assert [result["warnings"] for result in resumed] == [[]] * len(resumed)
    assert [result["started"] for result in resumed] == expected.after(step)
    for later in range(step + 1, STEPS + 1):
        assert after(resumed, later) == expected.after(later), later
    assert [result["losses"] for result in resumed] == [result["losses"][step:] for result in expected.results]
    assert [result["wrapped"] for result in resumed] == [[]] * len(resumed)


@pytest.mark.extended_cells("ShardedCheckpointIO-3")
@pytest.mark.parametrize(
    ("io", "ranks"),
    [("AsyncCheckpointIO", 2), ("ShardedCheckpointIO", 3)],
)
def test_a_killed_run_goes_on_bit_for_bit(
    runs: Runs, whole: Callable[..., Whole], tmp_path: Path, io: str, ranks: int
) -> None:
    saved = tmp_path / "saved"
    assert runs.run(saved, "killed", ranks=ranks, io=io, kill_at=BETWEEN, fails=True) == [None] * ranks
    path = saved / f"step={BETWEEN}.ckpt"
    assert_goes_on(runs, saved, path, whole(io, ranks), BETWEEN, ranks=ranks, io=io)


@pytest.mark.extended_cells("AsyncCheckpointIO-2-8", "ShardedCheckpointIO-3-7")
@pytest.mark.parametrize(
    ("io", "ranks", "step"),
    [("AsyncCheckpointIO", 2, 8), ("ShardedCheckpointIO", 2, 2), ("ShardedCheckpointIO", 3, 7)],
)
def test_any_checkpoint_is_gone_on_from_bit_for_bit(
    runs: Runs, whole: Callable[..., Whole], tmp_path: Path, io: str, ranks: int, step: int
) -> None:
    run = whole(io, ranks)
    assert_goes_on(runs, tmp_path / "saved", run.saved / f"step={step}.ckpt", run, step, ranks=ranks, io=io)


@pytest.mark.parametrize("io", ["AsyncCheckpointIO", "ShardedCheckpointIO"])
def test_the_model_of_a_checkpoint_is_the_mean_of_the_ranks(whole: Callable[..., Whole], io: str) -> None:
    saved = whole(io, 2).saved
    model, optimizer, own = _content(saved / f"step={BETWEEN}.ckpt", io)
    for name in ("net.0.weight", "net.3.bias"):
        one, other = (rank["weights"][name] for rank in own)
        assert not torch.equal(one, other)
        assert torch.equal(model[name], (one + other) / 2)
    one, other = (rank["optimizers"][0]["state"][0]["exp_avg"] for rank in own)
    assert not torch.equal(one, other)
    assert torch.equal(optimizer["state"][0]["exp_avg"], (one + other) / 2)
    assert float(optimizer["state"][0]["step"]) == BETWEEN
    # ranks have nothing of their own before they differ
    assert [rank for rank in _content(saved / "step=2.ckpt", io)[2] if rank] == []


def _content(path: Path, io: str) -> tuple[Any, Any, list[Any]]:
    """Return the model and the optimizer of a checkpoint, and the state that each rank has of its own."""
    if io == "ShardedCheckpointIO":
        with DirectoryCheckpointer().load(path) as opened:
            own = [opened.load("gradients", rank=rank).get("post-localSGD/", {}) for rank in range(2)]
            return opened.load("model"), opened.load("optimizer"), own
    state = torch.load(path, weights_only=True)
    ranks = state["lightning_ckpt"]["per-rank"]
    return state["state_dict"], state["optimizer_states"][0], [rank["post_local_sgd"] for rank in ranks]


@pytest.mark.sampled(1)
@pytest.mark.extended_cells("AsyncCheckpointIO-3")
@pytest.mark.parametrize(
    ("io", "ranks"), [("AsyncCheckpointIO", 3), ("ShardedCheckpointIO", 3), ("AsyncCheckpointIO", 1)]
)
def test_another_number_of_ranks_goes_on_with_the_mean_and_says_so(
    runs: Runs, whole: Callable[..., Whole], tmp_path: Path, io: str, ranks: int
) -> None:
    path = whole(io, 2).saved / f"step={BETWEEN}.ckpt"
    resumed = runs.run(tmp_path / "saved", "other", ranks=ranks, io=io, ckpt_path=str(path), steps=13)
    said = "this run averages no weights" if ranks == 1 else "(post-localSGD): all continue with their means"
    assert said in resumed[0]["warnings"][0]
    assert len({str(result["started"]) for result in resumed}) == 1
    if ranks == 3:
        assert [result["started"]["averager"] for result in resumed] == [BETWEEN] * 3
        assert [result["started"]["hook"] for result in resumed] == [3] * 3
        # weights are averaged at the same step as without the resume
        assert len({str(state["weights"]) for state in after(resumed, 12)}) == 1
        assert len({str(state["weights"]) for state in after(resumed, 11)}) == 3


def test_a_save_after_the_fit_has_the_ranks_own(runs: Runs, whole: Callable[..., Whole], tmp_path: Path) -> None:
    saved, io = tmp_path / "saved", "AsyncCheckpointIO"
    runs.run(saved, "first", io=io, steps=BETWEEN, after_fit=True)
    path = str(saved / "after.ckpt")
    resumed = runs.run(saved, "resumed", io=io, ckpt_path=path, steps=7)
    assert [result["started"] for result in resumed] == whole(io, 2).after(BETWEEN)
    elsewhere = runs.run(saved, "elsewhere", io=io, ranks=3, ckpt_path=path, steps=7)
    assert "all continue with those of rank 0" in elsewhere[0]["warnings"][0]


def test_ranks_do_not_write_one_model_together_unless_the_callback_makes_one_of_theirs(
    runs: Runs, tmp_path: Path
) -> None:
    results = runs.run(tmp_path / "saved", "no-callback", io="ShardedCheckpointIO", callback=None, fails=True)
    for result in results:
        assert result["raised"]["class"] == "CheckpointError"
        assert "would mix them in one model" in result["raised"]["message"]
        assert "ResumableCheckpoint" in result["raised"]["message"]


def test_a_communication_hook_whose_state_is_not_saved_is_named(runs: Runs, tmp_path: Path) -> None:
    saved, io = tmp_path / "saved", "AsyncCheckpointIO"
    whole = runs.run(saved, "whole", io=io, power=True)
    resumed = runs.run(saved, "resumed", io=io, power=True, ckpt_path=str(saved / f"step={BETWEEN}.ckpt"))
    assert after(resumed, STEPS) != after(whole, STEPS)  # PowerSGD's errors are lost, so the sums differ
    assert "the communication hook of DDP has a state (PowerSGDState) that is not saved" in resumed[0]["warnings"][0]
