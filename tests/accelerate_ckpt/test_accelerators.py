"""``save_state`` and ``load_state`` of a training on an accelerator; on GPUs, with half precision and its scaler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import PartialState
from accelerate.utils import set_seed

from accelerate_ckpt import attach
from tests.accelerate_ckpt.training import Run, assert_same
from tests.support.accelerators import Accelerator, late_copies


def run_of(accelerator: Accelerator, strategy: Any, precision: str, seed: int) -> Run:
    strategy, _, overlaps = strategy.partition("-")
    prepares = attach(accelerate.Accelerator(mixed_precision=precision), strategy, overlap=bool(overlaps))
    assert prepares.device.type == accelerator.type
    set_seed(seed)
    accelerator.module.manual_seed_all(seed)
    return Run(prepares, seed=seed, width=8192)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("precision", ["fp16", "no"])
@pytest.mark.parametrize("strategy", ["sync", "async", "sharded", "async-overlap", "sharded-overlap"])
def test_resumed_training_has_the_bits_of_the_whole_one(
    tmp_path: Path, strategy: str, precision: str, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    if accelerator.type != "cuda":
        if precision == "fp16":
            pytest.skip("half precision with a scaler is CUDA's")
        # Accelerate chooses from a fixed list of devices.
        monkeypatch.setattr(PartialState, "default_device", property(lambda _: torch.device(accelerator.type, 0)))
    copied_late = late_copies(monkeypatch)
    whole = run_of(accelerator, strategy, precision, 1)
    whole.train(11, save_after=5, path=tmp_path / "saved")
    whole.accelerator.end_training()
    resumed = run_of(accelerator, strategy, precision, 2)
    resumed.accelerator.load_state(tmp_path / "saved")
    resumed.train(6)
    assert copied_late() == ("overlap" in strategy)
    assert resumed.losses == whole.losses[5:]
    assert_same(resumed.state(), whole.state())
    if precision == "fp16":
        assert resumed.accelerator.scaler.state_dict() == whole.accelerator.scaler.state_dict()
    assert {p.device for p in resumed.model.parameters()} == {torch.device(accelerator.type, 0)}
    resumed.accelerator.end_training()
