"""Runs Accelerate's tests of stateful loaders on two processes; Accelerate itself needs several GPUs for them."""

from __future__ import annotations

import pytest
import torch
from accelerate import debug_launcher
from accelerate.test_utils.scripts import test_distributed_data_loop as script


@pytest.mark.parametrize("iterable", [True, False])
@pytest.mark.parametrize("name", ["_test_stateful_dataloader_resume", "_test_stateful_dataloader_save_state_resume"])
def test_stateful_dataloader(name: str, iterable: bool) -> None:
    """Run one of the script's tests on two processes; an exception in one of them fails it."""
    if not hasattr(script, name):
        pytest.skip(f"this release of Accelerate has no {name}")
    debug_launcher(run, args=(name, iterable), num_processes=2)


def run(name: str, iterable: bool) -> None:
    """Run one of the script's tests, on one of two processes."""
    accelerator = script.create_accelerator()
    torch.manual_seed(accelerator.process_index)
    getattr(script, name)(accelerator, iterable=iterable)
    accelerator.end_training()
