"""Saves of two ranks that overlap with training on the simulated device: DDP, FSDP2, HSDP and TP, over gloo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from tests.conftest import CORE, ScriptRunner
from tests.simulated_device import find_compiler

SCRIPT = """
import os, sys, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tests import simulated_device
from tests.simulated_device import ranks
from ckpt_core import DirectoryCheckpointer, Kind, Part, RankGroup
from tests.support.accelerators import hold_late_copies

kind, directory = sys.argv[1:]
rank = int(os.environ["LOCAL_RANK"])
os.environ["RANK"] = str(rank)
simulated_device.load()
ranks.register()
simulated_device.set_device(rank)
dist.init_process_group(ranks.BACKEND)
device = torch.device("simulated", rank)
was_late = hold_late_copies()

class Training:
    def __init__(self, seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.BatchNorm1d(1024), torch.nn.Linear(1024, 33))
        model = model.to(device)
        if kind == "ddp":
            model = torch.nn.parallel.DistributedDataParallel(model)
        elif kind == "tp":
            model[1] = torch.nn.ReLU()
            parallelize_module(model, init_device_mesh("simulated", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
        else:
            shape, names = ((2,), ("shard",)) if kind == "fsdp" else ((2, 1), ("replicate", "shard"))
            mesh = init_device_mesh("simulated", shape, mesh_dim_names=names)
            for layer in (model[0], model[2]):
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=kind != "ddp")
        self.step(0)
        self.optimizer.zero_grad()

    def step(self, number):
        torch.manual_seed(1000 * number + rank)
        loss = self.model(torch.randn(8, 64).to(device)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def parts(self):
        moments = {
            f"{key}.{name}": state[key]
            for name, parameter in self.model.named_parameters()
            for state in [self.optimizer.state[parameter]]
            for key in ("exp_avg", "exp_avg_sq", "step")
        }
        buffers = {name: value for name, value in self.model.named_buffers() if "module" not in name}
        parameters = {name: value.detach() for name, value in self.model.named_parameters()}
        shared = Kind.REPLICATED if kind == "ddp" else Kind.SHARDED
        own = {name: value for name, value in self.model.named_buffers()}
        return [Part("model", {**parameters, **moments}, shared), Part("own", own, Kind.PER_RANK)]

    def on_host(self):
        return [
            {name: getattr(value, "_local_tensor", value).cpu().clone() for name, value in part.state.items()}
            for part in self.parts()
        ]

def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert torch.equal(one[name], other[name]), name

def broadcast(value):
    box = [value]
    dist.broadcast_object_list(box, 0, device=torch.device("cpu"))
    return box[0]

group = RankGroup.connect(rank, 2, broadcast)
training, expected, losses = Training(1), [], []
with DirectoryCheckpointer(ranks=group, overlap=True, slice_replicated=True) as checkpointer:
    with simulated_device.lazy(side_streams_only=True):
        for step in range(1, 6):
            expected.append(training.on_host())
            checkpointer.save(training.parts(), f"{directory}/{step}")
            losses.append(training.step(step))
        checkpointer.wait()
    assert was_late()
    for step, wanted in enumerate(expected, start=1):
        other = Training(2)
        with checkpointer.load(f"{directory}/{step}") as opened:
            for part in other.parts():
                opened.load(part.name, into=part.state)
        assert_same(other.on_host(), wanted)
    resumed = Training(3)
    with checkpointer.load(f"{directory}/3") as opened:
        for part in resumed.parts():
            opened.load(part.name, into=part.state)
    assert [resumed.step(step) for step in (3, 4, 5)] == losses[2:]
    assert_same(resumed.on_host(), training.on_host())
for index in range(2):
    simulated_device.synchronize(index)
assert simulated_device.take_violations() == [] and simulated_device.in_flight() == 0
print("DONE", flush=True)
os._exit(0)  # gloo now and then aborts a process that has done all its work
"""


@pytest.mark.extended_cells("hsdp", "tp")
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp", "tp"])
def test_every_rank_saves_the_state_of_its_step_and_resumes_from_it(
    fork_script: ScriptRunner, tmp_path: Path, kind: str, unavailable: Callable[[str], NoReturn]
) -> None:
    if find_compiler() is None:
        unavailable("no C++ compiler for the simulated device")
    done = fork_script(SCRIPT, kind, tmp_path / "saved", modules=CORE, ranks=2)
    assert done.stdout.count("DONE") == 2
