"""Fine-tuning over frozen weights: what ``sharded`` links, and what stays one file that others can read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import GradientState
from safetensors import safe_open
from torch import nn

from accelerate_ckpt import attach
from accelerate_ckpt._state.session import session_of
from ckpt_core.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("fresh_accelerate")

WIDTH = 300


def run(strategy: str, seed: int = 0) -> tuple[Accelerator, nn.Module, Any]:
    GradientState._reset_state()
    accelerator = attach(Accelerator(cpu=True), strategy)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10))
    model[:2].requires_grad_(False)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model[2].parameters(), lr=0.1))
    return accelerator, model, optimizer


def train(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    accelerator.backward(model(torch.randn(4, WIDTH)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def save(accelerator: Accelerator, path: Path) -> None:
    accelerator.save_state(str(path))
    session = session_of(accelerator)
    assert session is not None
    session.checkpointer.wait()


@pytest.mark.parametrize("strategy", ["sync", "async", "sharded"])
def test_each_checkpoint_of_a_fine_tune_is_whole(strategy: str, tmp_path: Path) -> None:
    accelerator, model, optimizer = run(strategy)
    weights = {}
    for number in range(5):
        weights[number] = train(accelerator, model, optimizer)
        save(accelerator, tmp_path / str(number))
    accelerator.end_training()
    files = sorted((tmp_path / "4").glob("model*"))
    if strategy == "sharded":
        assert [file.stat().st_nlink for file in files] == [5, 1]
        assert files[0].stat().st_size > 20 * files[1].stat().st_size
    else:
        assert [(file.name, file.stat().st_nlink) for file in files] == [("model.safetensors", 1)]
        with safe_open(files[0], "pt") as file:
            assert all(torch.equal(file.get_tensor(name), value) for name, value in weights[4].items())
    for gone in (0, 1, 2, 4):
        shutil.rmtree(tmp_path / str(gone))
    accelerator, model, optimizer = run(strategy, seed=1)
    accelerator.load_state(str(tmp_path / "3"))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in weights[3].items())
    train(accelerator, model, optimizer)
    save(accelerator, tmp_path / "next")
    if strategy == "sharded":
        assert max(file.stat().st_nlink for file in (tmp_path / "next").glob("model*")) == 2
    accelerator.end_training()
    for path in (tmp_path / "3", tmp_path / "next"):
        session = session_of(run(strategy)[0])
        assert session is not None
        with session.checkpointer.load(path) as checkpoint:
            checkpoint.verify()


def test_stock_accelerate_does_not_take_a_part_of_the_model_for_all_of_it(tmp_path: Path) -> None:
    accelerator, model, optimizer = run("sharded")
    for number in range(3):
        train(accelerator, model, optimizer)
        save(accelerator, tmp_path / str(number))
    accelerator.end_training()
    assert not (tmp_path / "2" / "model.safetensors").exists()
    GradientState._reset_state()
    stock = Accelerator(cpu=True)
    stock.prepare(nn.Linear(3, 3))
    with pytest.raises((OSError, CheckpointError)):
        stock.load_state(str(tmp_path / "2"))
