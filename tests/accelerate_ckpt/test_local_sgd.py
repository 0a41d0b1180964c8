"""LocalSGD: each rank has its own weights and moments, and gets them back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.accelerate_ranks import Ranks

TRAINING = """
    from accelerate.local_sgd import LocalSGD
    from tests.accelerate_ckpt.training import model_of
    accelerator = attach(Accelerator(), strategy)
    torch.manual_seed(rank)
    model = model_of(0)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    torch.manual_seed(10 + rank)

    def state():
        moments = optimizer.state_dict()["state"]
        return {
            "weights": [p.tolist() for p in model.parameters()],
            "buffers": [b.tolist() for b in model.buffers()],
            "moments": [moments[i]["exp_avg"].tolist() for i in sorted(moments)],
        }

    def train(local, steps):
        for _ in range(steps):
            accelerator.backward(model(torch.rand(4, 4)).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            local.step()
"""
WHOLE = """
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=4) as local:
        train(local, at)
        accelerator.save_state(saved)
        tell(saved_state=state(), saved_steps=local.num_steps)
        train(local, 13 - at)
        tell(end=state(), steps=local.num_steps)
    tell(after=state())
    accelerator.end_training()
"""
RESUMED = """
    torch.rand(7)
    accelerator.load_state(saved)
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=4) as local:
        tell(loaded_state=state(), loaded_steps=local.num_steps)
        train(local, 13 - at)
        tell(end=state(), steps=local.num_steps)
    tell(after=state())
    accelerator.end_training()
"""


@pytest.mark.parametrize(("strategy", "at"), [("async", 6), ("sharded", 8)])
def test_every_rank_goes_on_with_its_own(ranks: Ranks, tmp_path: Path, strategy: str, at: int) -> None:
    names: dict[str, Any] = {"strategy": strategy, "at": at, "saved": str(tmp_path / "saved")}
    whole = ranks.run(TRAINING + WHOLE, 2, **names)
    resumed = ranks.run(TRAINING + RESUMED, 2, **names)
    assert [result.error for result in [*whole, *resumed]] == [None] * 4
    for rank in range(2):
        assert resumed[rank].told["loaded_state"] == whole[rank].told["saved_state"]
        assert resumed[rank].told["loaded_steps"] == whole[rank].told["saved_steps"] == at
        for moment in ("end", "steps", "after"):
            assert resumed[rank].told[moment] == whole[rank].told[moment], moment
    # Ranks must differ for this to prove anything: in their moments always, in their weights between averagings.
    one, other = (result.told["saved_state"] for result in whole)
    assert (one["weights"] == other["weights"]) == (at % 4 == 0)
    assert one["moments"] != other["moments"]


def test_moments_stay_each_ranks_own_after_the_context(ranks: Ranks, tmp_path: Path) -> None:
    names: dict[str, Any] = {"strategy": "async", "saved": str(tmp_path / "saved")}
    saving = """
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=4) as local:
        train(local, 5)
    accelerator.save_state(saved)
    tell(state=state())
    accelerator.end_training()
"""
    loading = """
    accelerator.load_state(saved)
    tell(state=state())
    accelerator.end_training()
"""
    saved = ranks.run(TRAINING + saving, 2, **names)
    loaded = ranks.run(TRAINING + loading, 2, **names)
    assert [result.told["state"] for result in loaded] == [result.told["state"] for result in saved]
    assert saved[0].told["state"]["weights"] == saved[1].told["state"]["weights"]
    assert saved[0].told["state"]["moments"] != saved[1].told["state"]["moments"]
    assert (tmp_path / "saved" / "model.safetensors").exists()  # the weights are the same, so one copy is enough


def test_another_number_of_ranks_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    names: dict[str, Any] = {"strategy": "async", "saved": str(tmp_path / "saved"), "at": 6}
    ranks.run(TRAINING + WHOLE, 2, **names)
    alone = ranks.run(TRAINING + RESUMED, 1, **names)
    assert alone[0].error == "StateMismatchError"
    assert "LocalSGD" in alone[0].message and "resume with 2 processes" in alone[0].message
