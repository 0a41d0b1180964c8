"""Accelerate on two ranks of the simulated device: resumes are bit for bit like runs without interruption."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from tests.conftest import ACCELERATE, ScriptRunner
from tests.simulated_device import find_compiler

SCRIPT = """
import os, sys, torch
import torch.distributed as dist
from tests import simulated_device
from tests.simulated_device import ranks

strategy, path = sys.argv[1:]
rank = int(os.environ["LOCAL_RANK"])
os.environ["RANK"] = str(rank)
simulated_device.load()
simulated_device.set_device(rank)
ranks.register()
dist.init_process_group(ranks.BACKEND)

from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import set_seed
from accelerate_ckpt import attach
from tests.support.accelerators import hold_late_copies
from tests.accelerate_ckpt.training import Run, assert_same

device = torch.device("simulated", rank)
PartialState(cpu=True).device = device  # Accelerate chooses from a fixed list of devices
was_late = hold_late_copies()

def run_of(seed):
    accelerator = attach(Accelerator(), strategy, overlap=True)
    assert accelerator.device == device and accelerator.num_processes == 2, (accelerator.device, accelerator.state)
    set_seed(seed)
    simulated_device.manual_seed_all(seed + rank)
    return Run(accelerator, seed=seed, width=8192)

with simulated_device.lazy(side_streams_only=True):
    whole = run_of(1)
    whole.train(8, save_after=3, path=path)
    whole.accelerator.wait_for_everyone()
    resumed = run_of(2)
    resumed.accelerator.load_state(path)
    resumed.train(5)
resumed.accelerator.end_training()
assert was_late() or rank > 0  # rank 1 writes little
assert resumed.losses == whole.losses[3:], (resumed.losses, whole.losses)
assert_same(resumed.state(), whole.state())
assert {p.device for p in resumed.model.parameters()} == {device}
print("DONE", flush=True)
os._exit(0)  # gloo now and then aborts a process that has done all its work
"""


@pytest.mark.extended_cells("sharded")
@pytest.mark.parametrize("strategy", ["sharded", pytest.param("async", marks=pytest.mark.slow)])
def test_resumed_training_has_the_bits_of_the_whole_one(
    fork_script: ScriptRunner, tmp_path: Path, strategy: str, unavailable: Callable[[str], NoReturn]
) -> None:
    if find_compiler() is None:
        unavailable("no C++ compiler for the simulated device")
    done = fork_script(SCRIPT, strategy, tmp_path / "saved", modules=ACCELERATE, ranks=2)
    assert done.stdout.count("DONE") == 2
