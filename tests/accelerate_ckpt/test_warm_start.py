"""Warm starts: prepared models that start from the checkpoint of another model or of another program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from accelerate_ckpt import attach, warm_start
from ckpt_core.cli import main
from ckpt_core.errors import StateMismatchError

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def trained(accelerator: Accelerator, *layers: str) -> tuple[Any, Any]:
    model: Any = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in layers})
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    for layer in model.values():
        accelerator.backward(layer(torch.ones(1, 2)).sum())
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("is_ours", [True, False])
def test_what_fits_is_taken(tmp_path: Path, is_ours: bool) -> None:
    accelerator: Any = attach(Accelerator(), strategy="sync") if is_ours else Accelerator()
    old, optimizer = trained(accelerator, "a")
    accelerator.save_state(tmp_path / "old")
    wanted, moments = old["a"].weight.detach().clone(), optimizer.state[old["a"].weight]["exp_avg"].clone()
    accelerator.free_memory()

    model, optimizer = trained(accelerator, "encoder", "new")
    kept = model["new"].weight.detach().clone()
    (report,) = warm_start(accelerator, tmp_path / "old", rename={"a": "encoder"}, optimizers=True)
    assert set(report.taken) == {"encoder.weight", "encoder.bias"} == set(report.optimizer_taken)
    assert set(report.new) == {"new.weight", "new.bias"}
    assert torch.equal(model["encoder"].weight, wanted) and torch.equal(model["new"].weight, kept)
    assert torch.equal(optimizer.state[model["encoder"].weight]["exp_avg"], moments)
    with pytest.raises(StateMismatchError, match=r"encoder\.weight is not in the checkpoint"):
        warm_start(accelerator, tmp_path / "old", partial=False)


def test_state_whose_owner_the_files_do_not_tell_is_left(tmp_path: Path) -> None:
    accelerator = Accelerator()
    trained(accelerator, "b", "a")
    accelerator.save_state(str(tmp_path / "stock"))  # its tensors are in alphabetical order of their names
    accelerator.free_memory()
    model, optimizer = trained(accelerator, "a")
    before = optimizer.state[model["a"].weight]["exp_avg"].clone()
    for path in ("stock", "ours"):
        (report,) = warm_start(accelerator, tmp_path / path, optimizers=True)
        assert report.taken in (("a.bias", "a.weight"), ("a.weight", "a.bias"))
        assert report.optimizer_skipped == {"optimizer": "it is not certain which state belongs to which parameter"}
        assert torch.equal(optimizer.state[model["a"].weight]["exp_avg"], before)
        if path == "stock":
            assert main(["convert", str(tmp_path / "stock"), str(tmp_path / "ours"), "--to", "directory"]) == 0
