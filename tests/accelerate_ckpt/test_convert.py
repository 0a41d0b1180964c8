"""``ckpt convert`` from and to the directories of stock Accelerate; stock Accelerate loads the results."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from accelerate_ckpt import attach
from ckpt_core import Checkpointer
from ckpt_core.cli import main
from tests.support.accelerate_ranks import Ranks
from tests.support.states import assert_same_state

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.b.weight = self.a.weight
        self.norm = torch.nn.BatchNorm1d(3)

    def forward(self, data: torch.Tensor) -> Any:
        return self.norm(self.b(self.a(data)))


class Counter:
    value = 1

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def prepared(accelerator: Accelerator) -> tuple[Any, Any, Any, Counter]:
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    return *accelerator.prepare(model, optimizer, scheduler), counter


def draws() -> tuple[Any, ...]:
    return random.random(), np.random.rand(), torch.rand(1).item()


@pytest.mark.parametrize("is_ours", [True, False])
def test_stock_and_ours_become_each_other(tmp_path: Path, is_ours: bool) -> None:
    set_seed(3)
    accelerator = attach(Accelerator(), strategy="sync", recorder=False) if is_ours else Accelerator()
    model, optimizer, scheduler, counter = prepared(accelerator)
    counter.value = 7
    for _ in range(2):
        accelerator.backward(model(torch.randn(4, 3)).sum())
        optimizer.step()
        scheduler.step()
    first, other, back = (str(tmp_path / name) for name in ("first", "other", "back"))
    accelerator.save_state(first)
    wanted = draws()
    there, here = ("accelerate", "directory") if is_ours else ("directory", "accelerate")
    assert main(["convert", first, other, "--to", there]) == 0
    assert main(["convert", other, back, "--to", here]) == 0
    assert main(["convert", other, f"{other}.ckpt", "--to", "file"]) == 0
    for path in (first, other, back):
        is_directory_of_ours = os.path.exists(f"{path}/manifest.json")
        loading = attach(Accelerator(), strategy="sync", recorder=False) if is_directory_of_ours else Accelerator()
        loaded = prepared(loading)
        set_seed(99)
        loading.load_state(path)
        assert draws() == wanted
        assert_same_state(loaded[0].state_dict(), model.state_dict())
        assert_same_state(loaded[1].optimizer.state_dict(), optimizer.optimizer.state_dict())
        assert loaded[2].state_dict() == scheduler.state_dict() and loaded[3].value == 7


def test_a_directory_that_was_made_a_file_is_loaded_again(tmp_path: Path) -> None:
    set_seed(3)
    accelerator = attach(Accelerator(gradient_accumulation_steps=4), strategy="sync", recorder=False)
    model, optimizer, scheduler, counter = prepared(accelerator)
    counter.value = 7
    for _ in range(3):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.randn(4, 3)).sum())
            optimizer.step()
            scheduler.step()
    first, file, back = (str(tmp_path / name) for name in ("first", "file.ckpt", "back"))
    accelerator.save_state(first)
    wanted = draws()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    assert main(["convert", first, file, "--to", "file"]) == 0
    assert main(["convert", file, back, "--to", "directory"]) == 0
    assert main(["diff", first, back]) == 0
    loading = attach(Accelerator(gradient_accumulation_steps=4), strategy="sync", recorder=False)
    loaded = prepared(loading)
    set_seed(99)
    loading.load_state(back)
    assert draws() == wanted and loaded[3].value == 7 and loading.step == accelerator.step == 3
    assert loaded[0].b.weight is loaded[0].a.weight
    for mine, theirs in zip((model, optimizer, scheduler), loaded, strict=False):
        assert_same_state(mine.state_dict(), theirs.state_dict())
    assert all(map(torch.equal, gradients, [parameter.grad for parameter in loaded[0].parameters()]))


def test_a_file_of_several_processes_is_refused_when_it_is_made_a_directory(
    tmp_path: Path, ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    program = """
        accelerator = attach(Accelerator(), "sync")
        accelerator.prepare(nn.Linear(2, 2))
        accelerator.save_state(path)
        accelerator.end_training()
    """
    saved = ranks.run(program, 2, path=str(tmp_path / "two"))
    assert [rank.error for rank in saved] == [None, None]
    assert main(["convert", str(tmp_path / "two"), str(tmp_path / "two.ckpt"), "--to", "file"]) == 0
    assert main(["convert", str(tmp_path / "two.ckpt"), str(tmp_path / "back"), "--to", "directory"]) == 1
    assert "saved by 2 processes, each with its own state" in capsys.readouterr().err
    assert not (tmp_path / "back").exists()


def test_a_lightning_checkpoint_becomes_one_that_stock_loads(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "lr_schedulers": []}
    Checkpointer(strategy="sync").save({**state, "global_step": 1}, tmp_path / "last.ckpt")
    assert main(["convert", str(tmp_path / "last.ckpt"), str(tmp_path / "stock"), "--to", "accelerate"]) == 0
    accelerator = Accelerator()
    mine = torch.nn.Linear(2, 2)
    mine, adam = accelerator.prepare(mine, torch.optim.Adam(mine.parameters()))
    accelerator.load_state(str(tmp_path / "stock"))
    assert_same_state(mine.state_dict(), model.state_dict())
    assert_same_state(adam.optimizer.state_dict(), optimizer.state_dict())


def test_what_runs_code_or_is_no_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accelerator = Accelerator()
    model, *_ = prepared(accelerator)
    accelerator.save_state(str(tmp_path / "stock"))
    torch.save({"value": model}, tmp_path / "stock" / "custom_checkpoint_0.pkl")
    assert main(["convert", str(tmp_path / "stock"), str(tmp_path / "out"), "--to", "directory"]) == 1
    assert "custom_checkpoint_0.pkl" in capsys.readouterr().err
    Checkpointer(strategy="sync").save({"numbers": [1]}, tmp_path / "a.ckpt")
    assert main(["convert", str(tmp_path / "a.ckpt"), str(tmp_path / "out"), "--to", "accelerate"]) == 1
    assert "there is no model to write for Accelerate: the checkpoint has numbers" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
