"""The option ``just_in_time``: a surviving rank saves; a run in which none can save warns when it begins."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.accelerate_ckpt.test_save_state_fsdp import NAMES
from tests.accelerate_ckpt.test_save_state_fsdp import PREPARED as FSDP
from tests.support.accelerate_ranks import RankResult, Ranks
from tests.support.server_fixtures import server_of, servers
from tests.support.servers import Server

__all__ = ["server_of", "servers"]  # fixtures

TRAINING = """
    import logging, os, signal

    inexact = []
    tell(inexact=inexact)
    hears = logging.Handler()
    hears.emit = lambda record: "to be exact" in record.getMessage() and inexact.append(record.getMessage())
    logging.getLogger("accelerate_ckpt").addHandler(hears)
    accelerator = attach(Accelerator(project_dir=folder), resume="auto", **{"just_in_time": 10.0, **options})
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    data = torch.utils.data.DataLoader(torch.arange(160.0).reshape(40, 4) / 100, batch_size=2, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    torch.manual_seed(50 + rank)
    accelerator.load_state()
    point = accelerator.resumed
    step = point.step if point else 0
    while step < 12:
        for batch in data:
            loss = model(batch).pow(2).mean()
            if step == kill and rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            accelerator.backward(loss)
            if step == exchanged - 1 and rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
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
DIES_WRITING = """
import os, signal
from ckpt_core._pipeline import directory_save

write = directory_save.write_image
directory_save.write_image = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL) if rank else write(*a, **k)
"""
LISTENS = """
    import logging

    texts = []
    tell(texts=texts)
    handler = logging.Handler()
    handler.emit = lambda record: "just_in_time" in record.getMessage() and texts.append(record.getMessage())
    logging.getLogger("accelerate_ckpt").addHandler(handler)
"""
HSDP = """
    import logging, os, signal
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, ParallelismConfig
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: tell(errors=[record.getMessage().partition(": resume")[0]])
    logging.getLogger("ckpt_core.survivors").addHandler(handler)
    accelerator = Accelerator(project_dir=folder)
    state = accelerator.state
    mesh = ParallelismConfig(dp_replicate_size=2, dp_shard_size=accelerator.num_processes // 2)
    state.parallelism_config, state.device_mesh = mesh, mesh.get_device_mesh("cpu")
    state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", auto_wrap_policy="size_based_wrap", min_num_params=50,
        cpu_ram_efficient_loading=False
    )
    state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    state.device = PartialState._shared_state["device"] = torch.device("cpu")
    attach(accelerator, "sharded", resume="auto", just_in_time=10.0)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 63), nn.Dropout(0.2), nn.Linear(63, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    data = torch.utils.data.TensorDataset(torch.arange(1024.0).reshape(64, 16) / 1024)
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    torch.manual_seed(50 + rank)
    accelerator.load_state()
    point = accelerator.resumed
    step = point.step if point else 0
    tell(resumed=step)
    losses = []
    while step < 12:
        for (batch,) in loader:
            loss = model(batch).pow(2).mean()
            if step == kill and rank in killed:
                os.kill(os.getpid(), signal.SIGKILL)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            step += 1
            if step == 3:
                accelerator.save_state(f"{folder}/checkpoints/mine")
            if step == 12:
                break
    tell(losses=losses, lr=scheduler.get_last_lr())
    accelerator.end_training()
"""
NEVER: dict[str, Any] = {"victim": 0, "exchanged": -1, "saves": -1, "gathers": False, "options": {}}
REFUSED = """
    attach(accelerator, "sharded", just_in_time=True)
    train(3)
"""


@pytest.mark.extended_cells("False")
@pytest.mark.parametrize("exchanged", [False, True])
def test_a_survivor_saves_the_last_step(ranks: Ranks, tmp_path: Path, exchanged: bool) -> None:
    def run(name: str, kill: int, **more: Any) -> list[RankResult]:
        (tmp_path / name).mkdir(exist_ok=True)
        names = {"folder": str(tmp_path / name), "kill": kill, **NEVER, **more}
        return ranks.run(TRAINING, 2, **names)

    whole = run("whole", -1)
    killed = run("run", -1, exchanged=7) if exchanged else run("run", 7)
    assert killed[1].error == "RuntimeError"  # of gloo
    resumed = run("run", -1)
    assert [result.told["resumed"] for result in resumed] == [7, 7]
    assert [result.told["inexact"] for result in resumed] == [[], []]
    assert [result.told["weights"] for result in resumed] == [result.told["weights"] for result in whole]


@pytest.mark.extended_cells("0")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_is_killed_before_its_first_note_of_a_start(ranks: Ranks, tmp_path: Path, victim: int) -> None:
    def run(name: str, **more: Any) -> list[RankResult]:
        (tmp_path / name).mkdir(exist_ok=True)
        names = {**NEVER, "folder": str(tmp_path / name), "kill": -1, "victim": victim, **more}
        return ranks.run(TRAINING, 2, **names)

    whole = run("whole")
    for step in (1, 2):  # in the first step of a fresh run, and of a resumed one
        run("run", exchanged=step)
        assert f"checkpoint_{step}" in [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    resumed = run("run")
    assert [result.told["resumed"] for result in resumed] == [2, 2]
    assert [result.told["inexact"] for result in resumed] == [[], []]
    assert [result.told["weights"] for result in resumed] == [result.told["weights"] for result in whole]


def test_a_survivor_that_waits_for_another_one_comes_out_of_its_collective(ranks: Ranks, tmp_path: Path) -> None:
    # in a ring of four, rank 2 waits for its neighbours, which know that rank 0 is dead
    names = {**NEVER, "folder": str(tmp_path), "options": {"just_in_time": 1000.0}}
    killed = ranks.run(TRAINING, 4, kill=4, **names)
    assert [result.error for result in killed[1:]] == ["RuntimeError"] * 3  # of gloo
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_4"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("gathers", [True, False])
def test_a_survivor_saves_in_a_script_that_catches_what_is_raised(ranks: Ranks, tmp_path: Path, gathers: bool) -> None:
    names = {**NEVER, "folder": str(tmp_path), "kill": -1, "saves": 7, "gathers": gathers}
    result = ranks.run(TRAINING, 2, real_exit=True, **names)[1]
    assert result.error == ("RuntimeError" if gathers else "RankFailedError")  # of gloo, or of its own save
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_7"]
    resumed = ranks.run(TRAINING, 2, **{**names, "saves": -1})
    names["folder"] = str(tmp_path / "whole")
    whole = ranks.run(TRAINING, 2, **{**names, "saves": -1})
    assert [result.told["resumed"] for result in resumed] == [7, 7]
    assert [result.told["weights"] for result in resumed] == [result.told["weights"] for result in whole]
    ((text,), none) = (result.told["inexact"] for result in resumed)
    assert "what the script had left to do there" in text and none == []


@pytest.mark.extended_cells("async")
@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_no_save_waits_for_a_rank_that_died_in_it(ranks: Ranks, tmp_path: Path, strategy: str) -> None:
    names = {**NEVER, "folder": str(tmp_path), "kill": -1, "saves": 7, "options": {"strategy": strategy}}
    body = DIES_WRITING + textwrap.dedent(TRAINING).replace("if rank == 0:", "if False:")
    result = ranks.run(body, 2, real_exit=True, **names)[0]
    assert result.ended, "it waited for the other one's part"
    assert result.error == ("RuntimeError" if strategy == "async" else "RankFailedError")  # of gloo, or of the save
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_7"]


def test_no_save_waits_for_a_rank_that_died_before_it(ranks: Ranks, tmp_path: Path) -> None:
    names = {**NEVER, "folder": str(tmp_path), "kill": -1, "saves": 7, "options": {"strategy": "sharded"}}
    result = ranks.run(TRAINING.replace("if rank == 0:", "if rank == 1:"), 2, real_exit=True, **names)[0]
    assert result.ended and result.error == "RankFailedError"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_7"]


@pytest.mark.slow
def test_a_survivor_saves_to_a_store(ranks: Ranks, tmp_path: Path, server_of: Callable[[str], Server]) -> None:
    server = server_of("moto")
    url = f"{server.new_bucket()}/run"

    def run(kill: int, **options: Any) -> list[RankResult]:
        names = {**NEVER, "folder": str(tmp_path), "kill": kill, "options": options}
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
        **{**NEVER, "options": options},
    )
    assert [result.error for result in results] == [None, None]
    ((text,), none) = (result.told["texts"] for result in results)
    assert none == []
    assert "the checkpoints are on a store, and the ranks are on several machines" in text


def test_shards_are_refused_at_the_first_step(ranks: Ranks, tmp_path: Path) -> None:
    names = {**NAMES, "seed": 0, "saved": str(tmp_path)}
    zero, one = (result.told["texts"] for result in ranks.run(FSDP + LISTENS + REFUSED, 2, **names))
    assert one == []
    (text,) = zero
    assert text == (
        "just_in_time will save nothing if a rank dies: it is for ranks that hold what others hold, too (DDP, "
        "HSDP), and this is FSDP; the next start resumes from the last checkpoint"
    )


@pytest.mark.parametrize(
    ("killed", "point"),
    [([1, 2], 7), *[pytest.param([rank], 7, marks=pytest.mark.slow) for rank in (0, 3)],
     pytest.param([1, 3], 3, marks=pytest.mark.slow)],  # no survivor has the second shard: the last checkpoint
)  # fmt: skip
def test_survivors_of_hsdp_save_a_shard_each(ranks: Ranks, tmp_path: Path, killed: list[int], point: int) -> None:
    def run(name: str, kill: int) -> list[RankResult]:
        (tmp_path / name).mkdir(exist_ok=True)
        return ranks.run(HSDP, 4, folder=str(tmp_path / name), kill=kill, killed=killed)

    whole = run("whole", -1)
    assert [result.error for result in whole] == [None] * 4
    texts = run("run", 7)[0].told.get("errors", [])
    assert texts == ([] if point == 7 else ["rank 0: no surviving rank holds a complete state"])
    resumed = run("run", -1)
    assert [result.told["resumed"] for result in resumed] == [point] * 4
    assert [result.told["losses"] for result in resumed] == [result.told["losses"][point:] for result in whole]
    assert [result.told["lr"] for result in resumed] == [result.told["lr"] for result in whole]
