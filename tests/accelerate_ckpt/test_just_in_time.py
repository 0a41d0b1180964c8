"""The option ``just_in_time``: a survivor saves, and a run in which none can says so when it begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.accelerate_ckpt.test_save_state_fsdp import PREPARED as FSDP
from tests.support.accelerate_ranks import RankResult, Ranks

TRAINING = """
    import os, signal

    accelerator = attach(Accelerator(project_dir=folder), resume="auto", just_in_time=10.0)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    data = torch.utils.data.DataLoader(torch.arange(160.0).reshape(40, 4) / 100, batch_size=2, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    accelerator.load_state()
    point = accelerator.resumed
    step = point.step if point else 0
    while step < 12:
        for batch in data:
            loss = model(batch).pow(2).mean()
            if step == kill and rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == 12:
                break
    accelerator.end_training()
    tell(resumed=point and point.step)
    tell(weights=[value.tolist() for value in accelerator.unwrap_model(model).parameters()])
"""
REFUSED = """
    import logging

    texts = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger("accelerate_ckpt").addHandler(handler)
    attach(accelerator, "sharded", just_in_time=True)
    train(3)
    tell(texts=[text for text in texts if "just_in_time" in text])
"""


def test_a_survivor_saves_the_last_step(ranks: Ranks, tmp_path: Path) -> None:
    def run(name: str, kill: int) -> list[RankResult]:
        (tmp_path / name).mkdir(exist_ok=True)
        return ranks.run(TRAINING, 2, folder=str(tmp_path / name), kill=kill)

    whole = run("whole", -1)
    killed = run("run", 7)
    assert killed[1].error == "RuntimeError"  # of gloo
    resumed = run("run", -1)
    assert [result.told["resumed"] for result in resumed] == [7, 7]
    assert [result.told["weights"] for result in resumed] == [result.told["weights"] for result in whole]


def test_shards_are_refused_at_the_first_step(ranks: Ranks, tmp_path: Path) -> None:
    names: dict[str, Any] = {"version": 2, "accumulation": 1, "seed": 0, "alone": False, "saved": str(tmp_path)}
    zero, one = (result.told["texts"] for result in ranks.run(FSDP + REFUSED, 2, **names))
    assert one == []
    (text,) = zero
    assert text == (
        "just_in_time saves nothing when a rank dies: it is for ranks that each hold the whole state (DDP), and this "
        "is FSDP; the next start resumes from the last checkpoint"
    )
