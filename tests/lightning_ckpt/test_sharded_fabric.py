"""Sharded saves of Fabric on real gloo ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import LIGHTNING, ScriptRunner

SCRIPT = """
import json, sys, torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from lightning_ckpt import ShardedCheckpointIO

kind, directory, world, setup = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
path = f"{directory}/saved"

def parallelize(model, mesh):
    fully_shard(model, mesh=mesh["data_parallel"])
    return model

def work(fabric, seed, steps):
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(16, 513), torch.nn.Linear(513, 3)]
    layers.insert(1, torch.nn.BatchNorm1d(513))
    model = torch.nn.Sequential(*layers)
    if kind == "mp":
        model = getattr(fabric, setup)(model)
        optimizer = fabric.setup_optimizers(torch.optim.Adam(model.parameters(), lr=0.1))
    else:
        model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.1))
    return model, optimizer

def train(fabric, model, optimizer, steps):
    losses = []
    for step in steps:
        loss = model(torch.sin(torch.arange(64.0).reshape(4, 16) + step + fabric.global_rank)).pow(2).mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

def main(fabric):
    if world == 2:
        model, optimizer = work(fabric, 0, 3)
        train(fabric, model, optimizer, range(3))
        fabric.save(path, {"model": model, "optimizer": optimizer, "step": 3, "note": {"a": (1, 2.5)}})
        own = [buffer.clone() for buffer in model.buffers()]
        after = train(fabric, model, optimizer, range(3, 5))
    model, optimizer = work(fabric, 1, 3)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    rest = fabric.load(path, state)
    assert state["step"] == 3 and rest == {"note": {"a": (1, 2.5)}}, (state["step"], rest)
    if world == 2 and kind == "mp":  # DDP continues with those of rank 0
        assert all(map(torch.equal, own, model.buffers())), "another rank's"
    fabric.save(f"{directory}/again{world}", state)
    found = train(fabric, model, optimizer, range(3, 5))
    if world == 2:
        assert found == after, (found, after)
    whole = fabric.load(path)
    assert whole["model"]["0.weight"].shape == (513, 16) and whole["step"] == 3
    print("DONE", fabric.global_rank)

io = ShardedCheckpointIO(mode="sync")
if kind == "mp":
    strategy = ModelParallelStrategy(parallelize, data_parallel_size=world, tensor_parallel_size=1)
    given = {"strategy": strategy, "callbacks": [io]}
else:
    given = {"strategy": "ddp", "plugins": [io], "callbacks": [] if world == 2 else [io]}
fabric = Fabric(accelerator="cpu", devices=world, **given)
fabric.launch()
main(fabric)
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["ddp", "mp"])
def test_state_of_fabric_is_saved_and_loaded(fork_script: ScriptRunner, tmp_path: Path, kind: str) -> None:
    given = {"modules": LIGHTNING, "timeout": 280}
    for world, setup in ((2, "setup"), (3, "setup_module")):
        done = fork_script(SCRIPT, kind, tmp_path, world, setup, **given, ranks=world)
        assert done.stdout.count("DONE") == world
    assert len(list((tmp_path / "saved").glob("model-*-of-00002.safetensors"))) == 2
    from tests.lightning_ckpt.sharded_runs import assert_same_tensors, parts_at

    for world in (2, 3):
        assert_same_tensors(parts_at(tmp_path / f"again{world}"), parts_at(tmp_path / "saved"))


SPOILED = """
import sys, torch
from lightning.fabric import Fabric
from ckpt_core import CheckpointError
from lightning_ckpt import ShardedCheckpointIO

class Picky:
    def state_dict(self):
        if fabric.global_rank == spoils:
            raise KeyError("not mine")
        return {}

directory = sys.argv[1]
for mode, spoils in (("sync", 0), ("sync", 1), ("async", 0), ("async", 1)):
    io = ShardedCheckpointIO(mode=mode, commit_timeout=200.0)
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", plugins=[io])
    fabric.launch()
    model = fabric.setup(torch.nn.Linear(2, 2))
    try:
        fabric.save(f"{directory}/{mode}{spoils}", {"model": model, "own": Picky()})
    except (CheckpointError, KeyError) as error:
        assert "not mine" in str(error), error
    else:
        raise AssertionError("saved")
    try:
        io.checkpointer.wait()
    except CheckpointError as error:
        assert "not mine" in str(error), error
    print("DONE", fabric.global_rank)
"""


def test_what_one_rank_of_fabric_cannot_save_does_not_leave_the_other_waiting(
    fork_script: ScriptRunner, tmp_path: Path
) -> None:
    done = fork_script(SPOILED, tmp_path, modules=LIGHTNING, ranks=2)
    assert done.stdout.count("DONE") == 8


EXPORTED = """
import os, sys, torch
import safetensors.torch
from lightning.fabric import Fabric
from ckpt_core import load_into
from ckpt_core.cli import main
from lightning_ckpt import ShardedCheckpointIO

os.chdir(sys.argv[1])

def work(fabric, seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    return fabric.setup(model, torch.optim.Adam(model.parameters()))

fabric = Fabric(accelerator="cpu", devices=1, plugins=[ShardedCheckpointIO(mode="sync")])
model, optimizer = work(fabric, 0)
fabric.backward(model(torch.randn(5, 4)).square().mean())
optimizer.step()
fabric.save("saved", {"model": model, "optimizer": optimizer, "step": 3})
wanted = model.state_dict()
for layout in ("file", "safetensors", "dcp", "accelerate"):
    assert main(["convert", "-q", "saved", layout, "--to", layout]) == 0
for name in ("saved", "file", "safetensors", "dcp", "accelerate"):
    found = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    assert set(load_into(name, found).taken) == set(wanted), name
    assert all(torch.equal(value, wanted[key]) for key, value in found.state_dict().items()), name
stock = Fabric(accelerator="cpu", devices=1)
model, optimizer = work(stock, 1)
state = {"model": model, "optimizer": optimizer, "step": 0}
assert stock.load("file", state) == {} and state["step"] == 3
assert all(torch.equal(value, wanted[key]) for key, value in model.state_dict().items())
assert optimizer.state_dict()["state"][0]["step"] == 1
print("DONE")
"""


def test_conversions_of_what_fabric_saved_have_the_buffers(fork_script: ScriptRunner, tmp_path: Path) -> None:
    assert fork_script(EXPORTED, tmp_path, modules=LIGHTNING).stdout.count("DONE") == 1
