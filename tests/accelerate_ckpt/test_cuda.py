"""``save_state`` and ``load_state`` of a training on a GPU, with half precision and its scaler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from accelerate_ckpt import attach
from tests.accelerate_ckpt.training import Run, assert_same

pytestmark = pytest.mark.gpu


def run_of(strategy: Any, precision: str, seed: int) -> Run:
    accelerator = attach(Accelerator(mixed_precision=precision), strategy)
    assert accelerator.device.type == "cuda"
    set_seed(seed)
    return Run(accelerator, seed=seed, width=32)


@pytest.mark.parametrize("precision", ["fp16", "no"])
@pytest.mark.parametrize("strategy", ["sync", "async", "sharded"])
def test_resumed_training_has_the_bits_of_the_whole_one(tmp_path: Path, strategy: str, precision: str) -> None:
    whole = run_of(strategy, precision, 1)
    whole.train(11, save_after=5, path=tmp_path / "saved")
    whole.accelerator.end_training()
    resumed = run_of(strategy, precision, 2)
    resumed.accelerator.load_state(tmp_path / "saved")
    resumed.train(6)
    assert resumed.losses == whole.losses[5:]
    assert_same(resumed.state(), whole.state())
    if precision == "fp16":
        assert resumed.accelerator.scaler.state_dict() == whole.accelerator.scaler.state_dict()
    assert {p.device for p in resumed.model.parameters()} == {torch.device("cuda", 0)}
    resumed.accelerator.end_training()
