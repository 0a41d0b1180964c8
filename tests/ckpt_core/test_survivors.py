"""What surviving ranks agree on, and how they know the state of a dead rank."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, distribute_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckpt_core.errors import StorageError
from ckpt_core.survivors import (
    BufferCopies,
    LiveWeights,
    Rescue,
    Survivors,
    _follow,
    shards_of,
    wait_seconds_of,
    why_not_replicas,
)

RANKS = """
    import json, os, pathlib, signal, sys, time
    from ckpt_core.survivors import Survivors

    folder, case = pathlib.Path(sys.argv[1]), sys.argv[2]
    rank = int(os.environ["LOCAL_RANK"])
    mine = Survivors(str(folder / "saved"), rank, 3, "run", wait_seconds=20.0)
    for step in range(1, 6 + (case == "ahead" and rank == 1)):
        mine.note({"own": {"rank": rank, "step": step}})
    (folder / f"ready.{rank}").touch()
    while not all((folder / f"ready.{other}").exists() for other in range(3)):
        time.sleep(0.01)
    if rank == (2 if case == "ahead" else 0):
        os.kill(os.getpid(), signal.SIGKILL)
    assert mine.is_loss(ValueError("seen by the lock of the dead one"))
    if rank == 1 and case == "leaves":
        mine.leave()
        os._exit(0)
    holds = None if case == "torn" and rank == 1 else mine.last
    found = []
    saved = mine.rescue(holds, lambda rescue: found.append([rescue.number, rescue.ranks, sorted(rescue.unknown)]))
    assert saved == bool(found)
    (folder / f"found.{rank}").write_text(json.dumps(found))
    os._exit(0)
"""


@pytest.mark.parametrize(
    ("case", "saver"),
    [("dead", 1), ("ahead", 0), pytest.param("torn", 2, marks=pytest.mark.slow),
     pytest.param("leaves", 2, marks=pytest.mark.slow)],
)  # fmt: skip
def test_one_survivor_saves_the_last_step_of_all(case: str, saver: int, fork_script: Any, tmp_path: Path) -> None:
    fork_script(RANKS, tmp_path, case, ranks=3, check=False)
    everything = [{"own": {"rank": rank, "step": 5}} for rank in range(3)]
    found = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("found.*")}
    assert found.pop(f"found.{saver}") == [[5, everything, []]]
    assert all(others == [] for others in found.values())


def test_a_store_that_refuses_connections_is_no_lost_rank(tmp_path: Path) -> None:
    mine = Survivors(str(tmp_path / "saved"), 0, 2, "run")
    refused = ConnectionRefusedError("Connection refused")
    failure = StorageError("no answer: Connection refused", path="s3://bucket/1")
    failure.__cause__ = refused
    assert not mine.is_loss(failure)
    assert mine.is_loss(refused)
    mine.close()


def _take_part(saved: str, session: str, told: Any) -> None:
    mine = Survivors(saved, 0, 2, session)
    told.send("began")
    told.recv()
    mine.close(remove=True)


def test_a_process_of_an_earlier_start_that_ends_late_is_not_the_rank_of_now(tmp_path: Path) -> None:
    saved, fork = str(tmp_path / "saved"), multiprocessing.get_context("fork")
    processes = {}
    for session in ("stopped for hours", "now"):
        told, theirs = fork.Pipe()
        process = fork.Process(target=_take_part, args=(saved, session, theirs), daemon=True)
        process.start()
        theirs.close()
        assert told.recv() == "began"
        processes[session] = process, told
    mine = Survivors(saved, 1, 2, "now")
    mine.note({"step": 1})
    assert mine.sees_all
    process, told = processes["stopped for hours"]
    told.send("end")
    process.join()
    assert mine.sees_all
    assert mine.find_dead() == []
    process, _ = processes["now"]
    process.kill()
    process.join()
    assert mine.find_dead() == [0]
    mine.close()


def test_each_shard_is_saved_by_the_lowest_rank_that_holds_it_at_a_step_of_which_all_are_there(tmp_path: Path) -> None:
    mine = Survivors(str(tmp_path / "saved"), 0, 4, "run", shards=[0, 1, 0, 1])
    five, six, both = [5, 5], [6, 6], [5, 6]
    assert mine._writers({0: five, 1: five, 2: five, 3: None}) == (5, [0, 1, 0, 1])
    assert mine._writers({1: five, 2: five}) == (5, [2, 1, 2, 1])
    assert mine._writers({0: six, 1: five, 2: five, 3: six}) == (5, [2, 1, 2, 1])
    assert mine._writers({0: six, 1: five, 3: six}) == (6, [0, 3, 0, 3])
    assert mine._writers({0: both, 1: five}) == (5, [0, 1, 0, 1])
    assert mine._writers({0: six, 1: five, 2: six}) == mine._writers({0: six, 2: six}) == (None, [])
    mine.close()


def test_what_a_rank_had_no_time_to_note_is_taken_over_where_both_were_alike() -> None:
    lost: list[str] = []
    before = {"rng": torch.tensor([1]), "epoch": 3, "batches": 7, "gauss": None, "metrics": {"sum": 0.0}}
    now = {"rng": torch.tensor([2]), "epoch": 3, "batches": 8, "gauss": None, "metrics": {"sum": 1.0}}
    theirs = {"rng": torch.tensor([5]), "epoch": 4, "batches": 7, "gauss": None, "metrics": {"sum": 0.0}}
    found = _follow(theirs, before, now, "", lost)
    assert (found["epoch"], found["batches"]) == (4, 8)
    assert lost == ["rng", "metrics.sum"]
    assert Rescue(1, [], {2: ["own.rng", "own.recorder.x", "shared"]}, [], []).notes(0, "own") == [
        "rank 2 was lost, and continues with rng of rank 0"
    ]
    several = Rescue(1, [], {2: ["own.rng", "own.rng", "custom.0.seen", "shared"]}, [], [])
    assert several.notes(0, "own", "custom") == ["rank 2 was lost, and continues with rng, custom.0.seen of rank 0"]


def test_a_rank_that_has_noted_no_step_is_followed_from_its_start(tmp_path: Path) -> None:
    mine, other = (Survivors(str(tmp_path / "saved"), rank, 2, "run") for rank in range(2))
    for rank, each in enumerate((mine, other)):
        each.note_start({"seed": rank, "rng": 10 * rank, "batch": 0})
        each.note_exchange({"rng": 10 * rank + 1})
    assert (mine.last, mine._noted(1, 0)["seed"]) == (0, 1)
    assert mine._writers({0: None}) == (None, [])  # nothing is saved of a start
    mine.note({"seed": 0, "rng": 1, "batch": 1})
    assert mine._taken_over(1, 1) == ({"seed": 1, "rng": 11, "batch": 1}, [])
    mine.note({"seed": 0, "rng": 1, "batch": 2})  # at the end of an epoch, before another exchange
    assert mine._taken_over(1, 2) == ({"seed": 1, "rng": 11, "batch": 2}, [])
    for batch in range(3, 7):
        mine.note({"seed": 0, "rng": 1, "batch": batch})
    assert mine._taken_over(1, 6)[1] == ["all that it had"]
    for each in (mine, other):
        each.close(remove=True)


def test_what_another_run_has_noted_or_a_kill_has_torn_does_not_count(tmp_path: Path) -> None:
    first = Survivors(str(tmp_path / "saved"), 0, 1, "first")
    first.note({"own": 1})
    assert first._noted(0, 1) == {"own": 1}
    first.close()
    second = Survivors(str(tmp_path / "saved"), 0, 1, "second")
    assert second._noted(0, 1) is None
    second.note({"own": torch.arange(100)})
    path = tmp_path / ".saved.survivor-rank0"
    data = bytearray(path.read_bytes())
    data[data.rindex(b"tensor") + 40] ^= 1
    path.write_bytes(data)
    assert second._noted(0, 1) is None
    second.close(remove=True)
    assert not path.exists()


def test_a_rank_that_catches_its_error_takes_part_again(tmp_path: Path) -> None:
    one, other = (Survivors(str(tmp_path / "saved"), rank, 2, "run") for rank in range(2))
    one.note({}), other.note({})
    assert not one.is_rank_gone()
    other.leave()
    assert one.is_rank_gone() and not one.is_rank_lost() and one.find_dead() == []
    other.note({})
    assert not one.is_rank_gone()
    one.close(), other.close()


def test_a_state_that_is_too_large_is_not_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine = Survivors(str(tmp_path / "saved"), 0, 1, "run")
    mine.note(torch.zeros(1 << 21))
    assert mine.last == 0
    assert list(tmp_path.glob(".saved*")) == [], "to others it would look dead"
    assert "just_in_time will save nothing if a rank dies: a rank's own state has" in caplog.text


def test_buffers_go_back_to_where_they_were_after_the_last_step() -> None:
    norm = torch.nn.BatchNorm1d(2)
    copies = BufferCopies([norm])
    norm(torch.randn(4, 2))
    assert not copies.put_back(), "never copied"
    copies.take()
    kept = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    norm(torch.randn(4, 2))
    assert copies.changed and copies.put_back()
    assert all(torch.equal(buffer, kept[name]) for name, buffer in norm.named_buffers())


def test_how_long_survivors_wait() -> None:
    assert (wait_seconds_of(True), wait_seconds_of(False), wait_seconds_of(3)) == (15.0, None, 3.0)
    for wrong in (-1, 0, "soon"):
        with pytest.raises(ValueError, match="just_in_time must be"):
            wait_seconds_of(wrong)


@pytest.fixture
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_alone")
def test_only_ranks_that_hold_the_whole_state_save_for_others() -> None:
    model, words = torch.nn.Linear(2, 2), "it is for ranks that hold what others hold, too (DDP, HSDP), and this is "
    plain, zero = torch.optim.SGD(model.parameters()), ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD)
    assert why_not_replicas("DDP", [model], [plain], are_replicas=True) is None
    assert why_not_replicas("FSDP", [model], [plain], are_replicas=False) == f"{words}FSDP"
    assert why_not_replicas("DDP", [model], [zero], are_replicas=True) == f"{words}ZeroRedundancyOptimizer"
    mesh = init_device_mesh("cpu", (1,))
    sharded = distribute_module(torch.nn.Linear(2, 2), mesh, lambda name, module, mesh: None)
    assert (
        why_not_replicas("DDP", [model, sharded], [plain], are_replicas=True)
        == f"{words}a model of distributed tensors"
    )


@pytest.fixture
def _four() -> Iterator[None]:
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_four")
def test_ranks_hold_the_same_shard_where_a_mesh_replicates() -> None:
    names = ("replicas", "shards")
    model = torch.nn.Linear(4, 4)
    assert shards_of([model], 4) is None, "no distributed tensors"
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=names))
    assert shards_of([model], 4) == [0, 1, 0, 1]
    with torch.no_grad():
        model(torch.ones(1, 4))
    assert not any(isinstance(each, DTensor) for each in model.parameters()), "an evaluation leaves whole ones there"
    assert shards_of([model], 4) == [0, 1, 0, 1]
    assert shards_of([model, torch.nn.Linear(4, 4)], 4) is None, "which is not known to be the same on all"
    assert shards_of([model], 8) is None, "a mesh of some ranks only"
    assert shards_of([fully_shard(torch.nn.Linear(4, 4), mesh=init_device_mesh("cpu", (4,)))], 4) is None
    other = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=names)
    turned = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=names)
    neighbours = fully_shard(torch.nn.Linear(4, 4), mesh=turned)
    assert shards_of([neighbours], 4) == [0, 0, 1, 1]
    assert shards_of([neighbours, fully_shard(torch.nn.Linear(4, 4), mesh=other)], 4) is None


def test_weights_are_noted_until_they_change() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    weights = LiveWeights([model])
    assert not weights.are_noted
    for number in (4, 5):  # such as before and after a validation
        weights.note(number)
        assert (weights.are_noted, weights.since) == (True, 4)
    model(torch.randn(4, 2))
    assert weights.are_noted and not weights.buffers
    assert not weights.put_back(), "as they were at the start"
    weights.note(6)
    assert weights.since == 6 and len(weights.buffers) == 3 and weights.put_back()
    with torch.no_grad():
        model[0].weight.add_(1)
    assert not weights.are_noted


WAITING = """
    import os, pathlib, sys, time
    import torch, torch.distributed as dist
    from torch.distributed import distributed_c10d
    from ckpt_core.process.process_groups import abort_process_groups

    if sys.argv[2] == "moved":
        del distributed_c10d._abort_process_group
    abort_process_groups()  # without a group there is nothing to do
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=2)
    dist.barrier()
    held = dist.group.WORLD  # as DDP does
    if dist.get_rank() == 0:
        try:
            dist.recv(torch.zeros(1), src=1)
        except RuntimeError:
            pathlib.Path(sys.argv[1], "out").touch()
    else:
        time.sleep(0.3)
        abort_process_groups()
        while not pathlib.Path(sys.argv[1], "out").exists():  # its end would bring rank 0 out, too
            time.sleep(0.01)
    os._exit(0)
"""


@pytest.mark.parametrize("torch_has", ["it", "moved"])
def test_a_rank_is_brought_out_of_a_collective(torch_has: str, fork_script: Any, tmp_path: Path) -> None:
    fork_script(WAITING, tmp_path, torch_has, ranks=2)


def test_torch_has_not_moved_what_brings_ranks_out_of_collectives() -> None:
    from torch.distributed import distributed_c10d

    assert callable(distributed_c10d._abort_process_group), "only the default group is ended: see process_groups.py"
    assert isinstance(distributed_c10d._world.pg_map, dict), "gloo: the default group alone: see process_groups.py"
