"""``torch.distributed.checkpoint`` on real gloo ranks, with a model that FSDP2 shards, and our checkpoints under it.

One script saves on two ranks and loads on one and three; the tests check the files that it leaves.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt_core import DirectoryCheckpointer
from ckpt_core.cli import main
from ckpt_core.interchange import CkptStorageReader, export_dcp, import_dcp
from tests.conftest import ScriptRunner
from tests.support.states import assert_same_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SCRIPT = """
import gc, json, os, sys, traceback, warnings
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from ckpt_core import DirectoryCheckpointer, Kind, Part, RankGroup
from ckpt_core.interchange import CkptStorageReader, CkptStorageWriter
from tests.support.states import assert_same_state

warnings.simplefilter("ignore")

def start(world, work):
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                dist.init_process_group("gloo", store=dist.FileStore(f"store-{world}", world), rank=rank, world_size=world)
                work(rank, world)
                dist.destroy_process_group()
                status = 0
            except BaseException:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(status)
        pids.append(pid)
    assert not any([os.waitpid(pid, 0)[1] for pid in pids])

def trained(world):
    # Sizes that no number of ranks divides; of the last bias there is nothing on most ranks.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.arange(20.0).view(4, 5)).sum().backward()
    optimizer.step()
    return model, optimizer

def state_of(model, optimizer):
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer), "step": 7, "names": ("a", 1)}

def mapped(function, value):
    if isinstance(value, dict):
        return {key: mapped(function, item) for key, item in value.items()}
    return function(value) if isinstance(value, torch.Tensor) else value

def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()

def broadcast(value):
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]

def save(rank, world):
    model, optimizer = trained(world)
    state = state_of(model, optimizer)
    whole = mapped(full, state)
    if rank == 0:
        torch.save(whole, "expected.pt")
    writer = CkptStorageWriter("run/dcp", metadata={"by": "dcp"})
    dcp.save(state, storage_writer=writer)
    dcp.save(state, checkpoint_id="stock")

    # Plans that DCP remembers, by a new writer each time; values and then types change.
    for name, change in (("cached", lambda t: t + 1), ("cached", lambda t: t + 2), ("half", lambda t: t.half())):
        changed = {"model": mapped(change, state["model"])}
        dcp.save(changed, storage_writer=CkptStorageWriter(f"run/{name}"), planner=DefaultSavePlanner(enable_plan_caching=True))

    future = dcp.async_save(state, storage_writer=CkptStorageWriter("run/async"))
    future.result()

    # One rank has what cannot be saved: nobody's save succeeds, and the one before stays.
    bad = {**state, "step": 8, f"of rank {rank}": object() if rank == 1 else 0}
    try:
        dcp.save(bad, storage_writer=writer)
        failures = None
    except dcp.CheckpointException as error:
        failures = {str(where): [type(found).__name__, str(found)] for where, (found, _) in error.failures.items()}
    del writer
    gc.collect()  # what DCP has kept of the failed save may be a cycle
    with open(f"failures-{rank}.json", "w") as file:
        json.dump(failures, file)

    group = RankGroup.connect(rank, world, broadcast)
    with DirectoryCheckpointer(ranks=group, strategy="sync") as checkpointer:
        parts = [Part(name, state[name], Kind.SHARDED) for name in ("model", "optimizer")]
        checkpointer.save([*parts, Part("own", {"rank": rank, "t": torch.tensor(rank)}, Kind.PER_RANK)], "run/ours")
    dist.barrier()
    group.close()

def load(rank, world):
    expected = torch.load("expected.pt")
    for name in ("dcp", "ours", "async"):
        state = state_of(*trained(world))
        state["model"] = mapped(torch.zeros_like, state["model"])
        state["optimizer"] = mapped(torch.zeros_like, state["optimizer"])
        if name == "ours":
            del state["step"], state["names"]
            if rank < 2:
                state["own"] = {"rank": -1, "t": torch.tensor(-1)}
        else:
            state["step"], state["names"] = 0, None
        dcp.load(state, storage_reader=CkptStorageReader(f"run/{name}"))
        found = mapped(full, state)
        if name == "ours" and rank < 2:
            assert found.pop("own") == {"rank": rank, "t": torch.tensor(rank)}
        wanted = expected if name != "ours" else {key: expected[key] for key in ("model", "optimizer")}
        assert found.keys() == wanted.keys(), (found.keys(), wanted.keys())
        assert_same_state(found, wanted)
    # A type that would have to be rounded.
    model = {"model": mapped(lambda t: t.half() if t.is_floating_point() else t, state["model"])}
    try:
        dcp.load(model, storage_reader=CkptStorageReader("run/dcp"))
        raise AssertionError("rounded")
    except dcp.CheckpointException as error:
        assert {type(found).__name__ for found, _ in error.failures.values()} == {"StateMismatchError"}, error

start(2, save)
start(1, load)
start(3, load)
print("ok")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture
def saved(folder: Path, fork_script: ScriptRunner) -> Path:
    """The directory that the only run of the script leaves; the first test starts it."""
    if not (folder / "expected.pt").exists():
        assert fork_script(SCRIPT, cwd=folder).stdout == "ok\n"
    return folder


def expected(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(folder / "expected.pt")
    return state


def zeros_like(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: zeros_like(value) for key, value in state.items()}
    if isinstance(state, list) and any(isinstance(value, dict) for value in state):
        return [zeros_like(value) for value in state]
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else None


@pytest.mark.extended
def test_what_dcp_saved_is_a_checkpoint_of_ours(saved: Path) -> None:
    wanted = expected(saved)
    assert main(["verify", str(saved / "run" / "dcp")]) == 0
    names = {path.name for path in (saved / "run" / "dcp").iterdir()}
    assert {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"} < names
    for name in ("dcp", "async"):
        with DirectoryCheckpointer().load(saved / "run" / name) as checkpoint:
            assert checkpoint.world_size == 2
            assert checkpoint.metadata == ({"by": "dcp"} if name == "dcp" else {})
            assert_same_state(checkpoint.load("model"), wanted["model"])
            found = checkpoint.load("optimizer")
            assert_same_state(found["state"], wanted["optimizer"]["state"])
            assert found["param_groups"] == wanted["optimizer"]["param_groups"]
            assert checkpoint.load("root") == {"step": 7, "names": ("a", 1)}


def test_plans_that_dcp_remembers_do_not_mix_saves(saved: Path) -> None:
    model = expected(saved)["model"]
    with DirectoryCheckpointer().load(saved / "run" / "cached") as checkpoint:
        checkpoint.verify()
        assert_same_state(checkpoint.load("model"), {key: value + 2 for key, value in model.items()})
    # DCP's own metadata would still say float32 here.
    with DirectoryCheckpointer().load(saved / "run" / "half") as checkpoint:
        assert_same_state(checkpoint.load("model"), {key: value.half() for key, value in model.items()})


def test_a_rank_that_cannot_save_leaves_the_last_checkpoint_as_it_was(saved: Path) -> None:
    for rank in range(2):
        failures = json.loads((saved / f"failures-{rank}.json").read_text())
        assert list(failures) == ["1"]
        assert failures["1"][0] == "SerializationError"
        assert "of rank 1" in failures["1"][1]
    # test_what_dcp_saved... reads the checkpoint; here: nothing else is there.
    assert sorted(os.listdir(saved / "run")) == ["async", "cached", "dcp", "half", "ours"]


def test_ours_goes_to_stock_dcp_and_stock_dcp_comes_to_us(saved: Path, tmp_path: Path) -> None:
    wanted = expected(saved)
    export_dcp(saved / "run" / "ours", tmp_path / "exported")
    state = zeros_like({key: wanted[key] for key in ("model", "optimizer")})
    state["own"] = {str(rank): {"rank": None, "t": torch.tensor(-1)} for rank in range(2)}
    dcp.load(state, checkpoint_id=tmp_path / "exported", no_dist=True)
    assert state.pop("own") == {str(rank): {"rank": rank, "t": torch.tensor(rank)} for rank in range(2)}
    assert_same_state(state, {key: wanted[key] for key in ("model", "optimizer")})

    import_dcp(saved / "stock", tmp_path / "imported")
    with DirectoryCheckpointer().load(tmp_path / "imported") as checkpoint:
        checkpoint.verify()
        assert_same_state(checkpoint.load("model"), wanted["model"])
        assert_same_state(checkpoint.load("optimizer")["state"], wanted["optimizer"]["state"])
        assert checkpoint.load("root") == {"step": 7, "names": ("a", 1)}


def test_a_process_of_its_own_reads_them_without_ranks(saved: Path) -> None:
    wanted = expected(saved)
    for name in ("dcp", "ours"):
        state = zeros_like({"model": wanted["model"], "optimizer": wanted["optimizer"]})
        dcp.load(state, storage_reader=CkptStorageReader(saved / "run" / name), no_dist=True)
        assert_same_state(state, {"model": wanted["model"], "optimizer": wanted["optimizer"]})
    model = zeros_like(wanted["model"])
    dcp.load(model, storage_reader=CkptStorageReader(saved / "run" / "ours", part="model"), no_dist=True)
    assert_same_state(model, wanted["model"])
