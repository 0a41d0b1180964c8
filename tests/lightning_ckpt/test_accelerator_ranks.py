"""Lightning and Fabric on two ranks of the simulated device resume bit for bit like runs without interruption."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from tests.conftest import LIGHTNING, ScriptRunner
from tests.simulated_device import find_compiler

BEGIN = """
import os, sys, torch
from tests import simulated_device
from tests.simulated_device import ranks

which, directory = sys.argv[1:]
rank = int(os.environ["LOCAL_RANK"])
os.environ["RANK"] = str(rank)
simulated_device.load()
simulated_device.set_device(rank)
ranks.register()
torch.distributed.init_process_group(ranks.BACKEND)

import lightning.pytorch as pl
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from tests.support.accelerators import hold_late_copies
from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint, ShardedCheckpointIO
from tests.lightning_ckpt.test_accelerators import Model
from tests.support.lightning_device import SimulatedAccelerator
from tests.support.states import assert_same_state

plugin = {"async": AsyncCheckpointIO, "sharded": ShardedCheckpointIO}[which]
was_late = hold_late_copies()
devices = [torch.device("simulated", index) for index in range(2)]
given = dict(
    accelerator=SimulatedAccelerator(), parallel_devices=devices, cluster_environment=TorchElasticEnvironment(),
    process_group_backend=ranks.BACKEND, checkpoint_io=plugin(overlap=True),
)

def on_host(module):
    return {name: value.detach().cpu() for name, value in module.state_dict().items()}

"""

FIT = """
from lightning.pytorch.strategies import DDPStrategy

class Strategy(DDPStrategy):
    def determine_ddp_device_ids(self):
        return None  # torch knows the indices of CUDA's devices only

def fit(path, seed, steps, ckpt_path=None):
    pl.seed_everything(seed, verbose=False)
    simulated_device.manual_seed_all(seed + rank)
    model = Model()
    given["checkpoint_io"] = plugin(overlap=True)
    trainer = pl.Trainer(
        strategy=Strategy(**given), max_steps=steps, max_epochs=-1, logger=False, enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ResumableCheckpoint(dirpath=path, every_n_train_steps=3, save_top_k=-1, save_last=True)],
    )
    trainer.fit(model, ckpt_path=ckpt_path)
    assert trainer.world_size == 2 and model.devices == {"simulated"}, (trainer.world_size, model.devices)
    return model

with simulated_device.lazy(side_streams_only=True):
    whole = fit(f"{directory}/whole", 1, 7)
    first = fit(f"{directory}/parts", 1, 3)
    second = fit(f"{directory}/parts", 2, 7, ckpt_path="last")
assert was_late() or rank > 0  # rank 1 may write little or nothing
assert first.losses + second.losses == whole.losses, (first.losses, second.losses, whole.losses)
assert_same_state(on_host(second), on_host(whole))
print("DONE", flush=True)
os._exit(0)  # gloo now and then aborts a process that has done all its work
"""

FABRIC = """
from lightning.fabric.strategies import DDPStrategy

class Strategy(DDPStrategy):
    def _determine_ddp_device_ids(self):
        return None  # torch knows the indices of CUDA's devices only

fabric = Fabric(strategy=Strategy(**given))
fabric.launch()
assert fabric.world_size == 2 and fabric.device == devices[rank], (fabric.world_size, fabric.device)

def begin(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(16, 2049), torch.nn.BatchNorm1d(2049), torch.nn.Linear(2049, 3))
    model = model.to(fabric.device)
    return fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.1))

def train(model, optimizer, steps, save=False):
    losses, saved = [], []
    for step in steps:
        x = torch.sin(torch.arange(64.0).reshape(4, 16) + step + rank).to(fabric.device)
        loss = model(x).pow(2).mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if save and step < 4:
            saved.append(on_host(model))
            fabric.save(f"{directory}/{step}", {"model": model, "optimizer": optimizer, "step": step})
    return losses, saved

with simulated_device.lazy(side_streams_only=True):
    model, optimizer = begin(0)
    losses, saved = train(model, optimizer, range(5), save=True)
    fabric.strategy.checkpoint_io.checkpointer.wait()
assert was_late() or rank > 0  # rank 1 may write little or nothing
fabric.barrier()
for step in range(4):
    other, optimizer_of_other = begin(1 + step)
    state = {"model": other, "optimizer": optimizer_of_other, "step": 0}
    fabric.load(f"{directory}/{step}", state)
    expected = saved[step]
    if rank == 1:  # statistics are rank 0's
        expected = {name: value for name, value in expected.items() if "running" not in name}
    found = on_host(other)
    assert_same_state({name: found[name] for name in expected}, expected)
    assert state["step"] == step
print("DONE", flush=True)
os._exit(0)
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("script", "plugin"),
    [
        pytest.param(FIT, "async", id="fit-async"),
        pytest.param(FIT, "sharded", id="fit-sharded", marks=pytest.mark.slow),
        pytest.param(FABRIC, "sharded", id="fabric-sharded"),
        pytest.param(FABRIC, "async", id="fabric-async", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_save_beside_their_training_and_resume(
    fork_script: ScriptRunner, tmp_path: Path, plugin: str, script: str, unavailable: Callable[[str], NoReturn]
) -> None:
    if find_compiler() is None:
        unavailable("no C++ compiler for the simulated device")
    done = fork_script(BEGIN + script, plugin, tmp_path / "saved", modules=LIGHTNING, ranks=2)
    assert done.stdout.count("DONE") == 2
