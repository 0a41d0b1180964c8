"""The option ``just_in_time``: a survivor saves, and a run in which none can says so when it begins."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.accelerate_ckpt.test_save_state_fsdp import PREPARED as FSDP
from tests.support.accelerate_ranks import RankResult, Ranks
from tests.support.server_fixtures import server_of, servers
from tests.support.servers import Server

__all__ = ["server_of", "servers"]  # fixtures

TRAINING = """
    import os, signal

    accelerator = attach(Accelerator(project_dir=folder), resume="auto", just_in_time=10.0, **options)
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
            if step == saves:
                if rank == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                accelerator.gather(torch.ones(1)) if gathers else accelerator.save_state(f"{folder}/checkpoints/mine")
            if step == 12:
                break
    accelerator.end_training()
    tell(resumed=point and point.step)
    tell(weights=[value.tolist() for value in accelerator.unwrap_model(model).parameters()])
"""
LISTENS = """
    import logging

    texts = []
    tell(texts=texts)
    handler = logging.Handler()
    handler.emit = lambda record: "just_in_time" in record.getMessage() and texts.append(record.getMessage())
    logging.getLogger("accelerate_ckpt").addHandler(handler)
"""
REFUSED = """
    attach(accelerator, "sharded", just_in_time=True)
    train(3)
"""


def test_a_survivor_saves_the_last_step(ranks: Ranks, tmp_path: Path) -> None:
    def run(name: str, kill: int, **more: Any) -> list[RankResult]:
        (tmp_path / name).mkdir(exist_ok=True)
        names = {"folder": str(tmp_path / name), "kill": kill, "saves": -1, "gathers": False, "options": {}, **more}
        return ranks.run(TRAINING, 2, **names)

    whole = run("whole", -1)
    killed = run("run", 7)
    assert killed[1].error == "RuntimeError"  # of gloo
    resumed = run("run", -1)
    assert [result.told["resumed"] for result in resumed] == [7, 7]
    assert [result.told["weights"] for result in resumed] == [result.told["weights"] for result in whole]


@pytest.mark.parametrize("gathers", [True, False])
def test_a_survivor_saves_in_a_script_that_catches_what_is_raised(ranks: Ranks, tmp_path: Path, gathers: bool) -> None:
    names = {"folder": str(tmp_path), "kill": -1, "saves": 7, "gathers": gathers, "options": {}}
    result = ranks.run(TRAINING, 2, real_exit=True, **names)[1]
    assert result.error == ("RuntimeError" if gathers else "RankFailedError")  # of gloo, or of its own save
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_7"]
    (resumed,) = {str(each.told) for each in ranks.run(TRAINING, 2, **{**names, "saves": -1})}
    names["folder"] = str(tmp_path / "whole")
    whole = ranks.run(TRAINING, 2, **{**names, "saves": -1})[0]
    assert resumed == str({**whole.told, "resumed": 7})


@pytest.mark.slow
def test_a_survivor_saves_to_a_store(ranks: Ranks, tmp_path: Path, server_of: Callable[[str], Server]) -> None:
    server = server_of("moto")
    url = f"{server.new_bucket()}/run"

    def run(kill: int, **options: Any) -> list[RankResult]:
        names = {"folder": str(tmp_path), "kill": kill, "saves": -1, "gathers": False, "options": options}
        return ranks.run(TRAINING, 2, **names)

    store = {"checkpoint_dir": url, "storage_options": dict(server.options)}
    killed = run(7, **store)
    assert killed[1].error == "RuntimeError"  # of gloo
    resumed = run(-1, **store)
    whole = run(-1, checkpoint_dir=str(tmp_path / "whole"))
    assert [result.told["resumed"] for result in resumed] == [7, 7]
    assert [result.told["weights"] for result in resumed] == [result.told["weights"] for result in whole]


@pytest.mark.slow
def test_on_a_store_ranks_that_see_no_common_files_say_so(
    ranks: Ranks, tmp_path: Path, server_of: Callable[[str], Server]
) -> None:
    server = server_of("moto")
    apart = "import tempfile\ntempfile.tempdir = f'{folder}/{rank}'\nPath(tempfile.tempdir).mkdir()\n"
    options = {"checkpoint_dir": f"{server.new_bucket()}/run", "storage_options": dict(server.options)}
    results = ranks.run(
        apart + textwrap.dedent(LISTENS) + textwrap.dedent(TRAINING),
        2,
        folder=str(tmp_path),
        kill=-1,
        saves=-1,
        gathers=False,
        options=options,
    )
    assert [result.error for result in results] == [None, None]
    ((text,), none) = (result.told["texts"] for result in results)
    assert none == []
    assert "the checkpoints are on a store, and the ranks are on several machines" in text


def test_shards_are_refused_at_the_first_step(ranks: Ranks, tmp_path: Path) -> None:
    names: dict[str, Any] = {"version": 2, "accumulation": 1, "seed": 0, "alone": False, "saved": str(tmp_path)}
    zero, one = (result.told["texts"] for result in ranks.run(FSDP + LISTENS + REFUSED, 2, **names))
    assert one == []
    (text,) = zero
    assert text == (
        "just_in_time saves nothing when a rank dies: it is for ranks that each hold the whole state (DDP), and this "
        "is FSDP; the next start resumes from the last checkpoint"
    )
