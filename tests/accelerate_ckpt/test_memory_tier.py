"""The option ``memory_every_n_steps``: after a crash, ``load_state`` continues from the machine's memory."""

from __future__ import annotations

import os
import shutil
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.accelerate_ranks import RankResult, Ranks

TRAINING = """
    import os, signal
    from accelerate.utils import ProjectConfiguration
    from accelerate_ckpt._state.session import live_sessions

    project = ProjectConfiguration(folder, **project)
    options = {"resume": "auto", "memory_every_n_steps": 1, "memory_dir": memory, "strategy": "sync", **options}
    accelerator = attach(Accelerator(project_config=project, gradient_accumulation_steps=2), **options)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    data = torch.utils.data.DataLoader(torch.arange(160.0).reshape(40, 4) / 100, batch_size=2, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    if hook:
        accelerator.register_save_state_pre_hook(lambda models, weights, directory: None)
    accelerator.load_state()
    point = accelerator.resumed
    step = point.step if point else 0
    while step < 12:
        for batch in data:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()
            step += accelerator.sync_gradients
            if accelerator.sync_gradients and step == save_at:
                accelerator.save_state(f"{folder}/checkpoints/step_{step}")
            if kill - 2 <= step < kill:  # a snapshot that is due while the one before is being written is left out
                live_sessions()[0].memory.checkpointer.wait()
            if step == kill and rank in killed:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == 12:
                break
    accelerator.end_training()
    tell(resumed=point and [point.path.rpartition("/")[2], point.step])
    tell(weights=[value.tolist() for value in accelerator.unwrap_model(model).parameters()])
"""


@pytest.fixture
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as directory:
        yield Path(directory)


def run(ranks: Ranks, folder: Path, memory: Path, world_size: int = 1, **names: Any) -> list[RankResult]:
    defaults: dict[str, Any] = {"project": {}, "options": {}, "kill": -1, "save_at": -1, "hook": False}
    defaults["killed"] = [world_size - 1]
    folder.mkdir(exist_ok=True)
    return ranks.run(TRAINING, world_size, **{**defaults, "folder": str(folder), "memory": str(memory), **names})


@pytest.mark.parametrize(
    ("world_size", "options"), [(1, {}), pytest.param(2, {"strategy": "sharded"}, marks=pytest.mark.slow)]
)
def test_after_sigkill_the_bits_are_those_of_a_run_without(
    tmp_path: Path, memory: Path, ranks: Ranks, world_size: int, options: dict[str, Any]
) -> None:
    killed = run(ranks, tmp_path / "killed", memory, world_size, options=options, kill=8, save_at=2)
    assert killed[-1].told == {}  # it did not come to its end
    assert sorted(path.name for path in memory.glob("ckpt-*/*/snapshots/*"))  # the snapshots are still in memory
    results = run(ranks, tmp_path / "killed", memory, world_size, options=options)
    whole = run(ranks, tmp_path / "whole", memory, world_size, options=options, save_at=2)
    for result, without in zip(results, whole, strict=True):
        name, step = result.told["resumed"]
        assert name == f"snapshot-{step}"
        assert 2 < step <= 8
        assert without.told["resumed"] is None
        assert result.told["weights"] == without.told["weights"]
    assert list(memory.iterdir()) == []


def test_automatic_numbers_continue_after_those_on_the_disk(tmp_path: Path, memory: Path, ranks: Ranks) -> None:
    project = {"automatic_checkpoint_naming": True}
    run(ranks, tmp_path / "run", memory, project=project, save_at=3, kill=6)
    (result,) = run(ranks, tmp_path / "run", memory, project=project, save_at=9)
    assert result.told["resumed"] == ["snapshot-5", 5]
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("check*")) == [
        "checkpoint_0",
        "checkpoint_1",
    ]


def test_the_disk_is_taken_where_it_is_newer_and_hooks_take_no_snapshots(
    tmp_path: Path, memory: Path, ranks: Ranks
) -> None:
    run(ranks, tmp_path / "run", memory, kill=5)
    killed = run(ranks, tmp_path / "run", memory, kill=8, save_at=6, hook=True)
    assert killed[-1].told == {}  # it did not come to its end
    (result,) = run(ranks, tmp_path / "run", memory)
    assert result.told["resumed"] == ["step_6", 6]
    assert list(memory.iterdir()) == []


def on_machines(ranks: Ranks, folder: Path, memory: Path, *sizes: int, **names: Any) -> list[RankResult]:
    """Run ``sizes`` ranks on simulated machines, on each of which the same path is another directory in memory."""
    machines = [machine for machine, size in enumerate(sizes) for _ in range(size)]
    for machine in machines:
        (memory / str(machine) / "memory").mkdir(parents=True, exist_ok=True)
    defaults: dict[str, Any] = {"project": {}, "options": {}, "kill": -1, "save_at": -1, "hook": False}
    defaults |= {"killed": list(range(len(machines))), "memory": "/proc/self/cwd/memory", "folder": str(folder)}
    names = {**defaults, "directories": [str(memory / str(machine)) for machine in machines], **names}
    return ranks.run("import os\nos.chdir(directories[rank])\n" + textwrap.dedent(TRAINING), len(machines), **names)


@pytest.mark.skipif(not os.path.isdir("/proc/self/cwd"), reason="machines are simulated with Linux's /proc")
@pytest.mark.parametrize(
    ("sizes", "lost", "strategy"),
    [
        ((1, 1), 0, "sharded"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [((1, 1), 1, "sharded"), ((1, 1), 1, "async"), ((2, 2), 0, "sharded"), ((1, 2, 1), 1, "sync")]
        ),
    ],
)
def test_what_a_lost_machine_had_in_memory_comes_from_another_one(
    tmp_path: Path, memory: Path, ranks: Ranks, sizes: tuple[int, ...], lost: int, strategy: str
) -> None:
    options = {"strategy": strategy}
    killed = on_machines(ranks, tmp_path / "killed", memory, *sizes, options=options, kill=4)
    assert all(result.told == {} for result in killed)  # they did not reach their ends
    shutil.rmtree(memory / str(lost))
    results = on_machines(ranks, tmp_path / "killed", memory, *sizes, options=options)
    whole = on_machines(ranks, tmp_path / "whole", memory, *sizes, options=options)
    for result, without in zip(results, whole, strict=True):
        name, step = result.told["resumed"]
        assert name.startswith(f"snapshot-{step}-")
        assert 2 <= step <= 4
        assert without.told["resumed"] is None
        assert result.told["weights"] == without.told["weights"]
    assert list(memory.glob("*/memory/*")) == []


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self/cwd"), reason="machines are simulated with Linux's /proc")
def test_a_machine_that_is_not_replaced_is_not_needed(tmp_path: Path, memory: Path, ranks: Ranks) -> None:
    options = {"strategy": "sharded"}
    on_machines(ranks, tmp_path / "run", memory, 1, 1, options=options, kill=4)
    shutil.rmtree(memory / "0")
    (memory / "1").rename(memory / "0")
    (result,) = on_machines(ranks, tmp_path / "run", memory, 1, options=options)
    name, step = result.told["resumed"]
    assert name.startswith(f"snapshot-{step}-")
    assert 2 <= step <= 4


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self/cwd"), reason="machines are simulated with Linux's /proc")
def test_where_two_neighbours_are_lost_the_disk_is_taken(tmp_path: Path, memory: Path, ranks: Ranks) -> None:
    options = {"strategy": "sharded"}
    on_machines(ranks, tmp_path / "run", memory, 1, 1, 1, options=options, kill=6, save_at=2)
    for lost in ("0", "1"):
        shutil.rmtree(memory / lost)
    results = on_machines(ranks, tmp_path / "run", memory, 1, 1, 1, options=options)
    assert [result.told["resumed"] for result in results] == [["step_2", 2]] * 3
