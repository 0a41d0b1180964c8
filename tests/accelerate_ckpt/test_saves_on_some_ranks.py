"""``save_state`` on some ranks only: a correct checkpoint or a clear error, never a wait for a time limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_core import DirectoryCheckpointer
from tests.accelerate_ckpt.test_save_state_fsdp import NAMES
from tests.accelerate_ckpt.test_save_state_fsdp import PREPARED as FSDP
from tests.support.accelerate_ranks import Ranks

RUN = """
    import time
    torch.manual_seed(1)
    accelerator = attach(Accelerator(), strategy)
    model = nn.Sequential(nn.Linear(8, 2000), nn.Dropout(0.1), nn.Linear(2000, 8))
    data = torch.utils.data.DataLoader(torch.arange(48.0).view(48, 1).expand(48, 8) / 48, batch_size=2, shuffle=True)
    model, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), data)
    steps, seen = 0, []

    def train(until):
        global steps
        for batch in data:
            seen.append(batch[:, 0].tolist())
            accelerator.backward(model(batch).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if steps in saves and (rank in savers or steps == joint):
                accelerator.save_state(f"{saved}/step_{steps}")
            if steps == until:
                break

    def weights():
        return [parameter.double().sum().item() for parameter in model.parameters()]
"""
TRAINED = """
    train(9)
    tell(weights=weights(), seen=seen)
    accelerator.end_training()
"""


def owners(path: Path) -> tuple[int, tuple[int, ...]]:
    with DirectoryCheckpointer().load(path) as checkpoint:
        checkpoint.verify()
        return checkpoint.world_size, checkpoint.ranks_with("own")


@pytest.mark.sampled(1)
@pytest.mark.extended_cells("sync")
@pytest.mark.parametrize("strategy", ["sync", "async", "sharded"])
def test_rank_zero_alone_saves_what_it_has_and_a_run_resumes_from_it(
    ranks: Ranks, tmp_path: Path, strategy: str, capfd: pytest.CaptureFixture[str]
) -> None:
    names = {"strategy": strategy, "saved": str(tmp_path), "saves": [3, 5, 7], "savers": [0], "joint": 0}
    cut = ranks.run(RUN + TRAINED, 2, **names)
    assert [result.error for result in cut] == [None, None], [result.message for result in cut]
    assert [owners(tmp_path / f"step_{step}") for step in (3, 5, 7)] == [(2, (0,))] * 3
    resume = f"""
    with torch.no_grad():
        [parameter.zero_() for parameter in model.parameters()]
    accelerator.load_state({str(tmp_path / "step_7")!r})
    steps, saves = 7, []
"""
    resumed = ranks.run(RUN + resume + TRAINED, 2, **names)
    assert [result.error for result in resumed] == [None, None], [result.message for result in resumed]
    for rank in range(2):  # the rest of the epoch, on each rank
        assert resumed[rank].told["seen"] == cut[rank].told["seen"][7:]
    assert resumed[0].told["weights"] == resumed[1].told["weights"]
    output = capfd.readouterr().out
    assert output.count("save_state was called on rank 0 and not on rank 1: as with stock Accelerate") <= 1


def test_a_save_on_all_ranks_has_all_after_saves_on_one(ranks: Ranks, tmp_path: Path) -> None:
    names = {"strategy": "async", "saved": str(tmp_path), "saves": [2, 3, 5, 6], "savers": [0], "joint": 5}
    results = ranks.run(RUN + TRAINED, 2, **names)
    assert [result.error for result in results] == [None, None], [result.message for result in results]
    found = [owners(tmp_path / f"step_{step}")[1] for step in (2, 3, 5, 6)]
    assert found == [(0,), (0,), (0, 1), (0,)]


def test_all_ranks_load_at_once_what_rank_zero_alone_is_saving(ranks: Ranks, tmp_path: Path) -> None:
    loading = """
    train(2)
    accelerator.wait_for_everyone()
    accelerator.load_state(f"{saved}/step_2")
    accelerator.save_state(f"{saved}/all")
    accelerator.end_training()
    """
    names = {"strategy": "async", "saved": str(tmp_path), "saves": [2], "savers": [0], "joint": 0}
    results = ranks.run(RUN + loading, 2, **names)
    assert [result.error for result in results] == [None, None], [result.message for result in results]
    assert [owners(tmp_path / name)[1] for name in ("step_2", "all")] == [(0,), (0, 1)]


@pytest.mark.extended_cells("sync")
@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_the_first_rank_of_each_machine_saves_for_those_that_come(ranks: Ranks, tmp_path: Path, strategy: str) -> None:
    names = {"strategy": strategy, "saved": str(tmp_path), "saves": [2, 4], "savers": [0, 2], "joint": 0}
    results = ranks.run(RUN + TRAINED, 3, **names)
    assert [result.error for result in results] == [None] * 3, [result.message for result in results]
    assert [owners(tmp_path / f"step_{step}") for step in (2, 4)] == [(3, (0, 2))] * 2


def test_a_rank_that_is_only_slow_is_waited_for(ranks: Ranks, tmp_path: Path) -> None:
    slow = """
    if rank == 1:  # rank 0 looks three times in a second who will not come
        save = accelerator.save_state
        accelerator.save_state = lambda path: (time.sleep(1), save(path))
"""
    # Nothing else keeps the ranks together: rank 0 would be gone before the other rank learns of the last save.
    together = TRAINED.replace("accelerator.end", "accelerator.wait_for_everyone()\n    accelerator.end")
    names = {"saved": str(tmp_path), "saves": [2, 4], "savers": [0, 1], "joint": 0}
    for strategy in ("sync", "async", "sharded"):
        results = ranks.run(
            RUN + slow + together, 2, **{**names, "strategy": strategy, "saved": str(tmp_path / strategy)}
        )
        assert [result.error for result in results] == [None, None], [result.message for result in results]
        assert [owners(tmp_path / strategy / f"step_{step}")[1] for step in (2, 4)] == [(0, 1)] * 2


def test_a_save_without_rank_zero_is_an_error_at_once(ranks: Ranks, tmp_path: Path) -> None:
    # Long before commit_timeout, which is ten minutes.
    names = {"strategy": "async", "saved": str(tmp_path), "saves": [2], "savers": [1], "joint": 0}
    results = ranks.run(RUN + "    import os\n" + TRAINED.replace("train(9)", ALONE), 2, **names)
    assert results[1].told["error"] == "RankFailedError"
    assert "called on rank 1, and not on rank 0, which continued without it" in results[1].told["message"]
    assert list(tmp_path.iterdir()) == []


ALONE = """
    try:
        train(9)
    except Exception as error:
        tell(error=type(error).__name__, message=str(error))
        os._exit(1)
"""


def test_fsdp_on_one_rank_alone_is_an_error_at_once(ranks: Ranks, tmp_path: Path) -> None:
    alone = """
    train(1)
    if rank == 0:
        try:
            accelerator.save_state(saved)
        except Exception as error:
            tell(error=type(error).__name__, message=str(error))
    train(1)
    """
    results = ranks.run(FSDP + alone, 2, seed=0, saved=str(tmp_path / "saved"), **NAMES)
    assert results[0].told["error"] == "RankFailedError", results
    assert "called on rank 0, and not on rank 1, which continued without it" in results[0].told["message"]
    assert list(tmp_path.iterdir()) == []


def test_this_release_of_torch_counts_collectives(ranks: Ranks) -> None:
    body = """
        from ckpt_core._commit.absent_ranks import collectives_begun
        accelerator = Accelerator()
        counts = [collectives_begun()]
        accelerator.wait_for_everyone()
        counts.append(collectives_begun())
        tell(counts=counts)
    """
    (first, *others) = (result.told["counts"] for result in ranks.run(body, 3))
    assert first[1] > first[0]
    assert others == [first, first]
