"""Weights and optimizers' state of another type than the module is built with come back with all of their bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from tests.lightning_ckpt.captured import END, MIDDLE, Training, train_and_resume
from tests.lightning_ckpt.exact_cases import Model
from tests.support.optimizers import MomentumOfAnotherType

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Own(Model):
    def configure_optimizers(self) -> Any:
        return MomentumOfAnotherType(self.parameters(), lr=0.01)


class LogsShort(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("short", torch.rand((), dtype=torch.float32), on_step=False, on_epoch=True, batch_size=3)
        return super().training_step(batch, batch_idx)


class SeesTypes(Callback):
    def __init__(self) -> None:
        self.seen: list[set[torch.dtype]] = []

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        states = [state["momentum"].dtype for state in trainer.optimizers[0].state.values()]
        self.seen.append({parameter.dtype for parameter in pl_module.parameters()} | set(states))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("at", [MIDDLE, END], ids=["middle", "end"])
@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "bf16-mixed"])
def test_weights_that_are_converted_after_they_are_restored(precision: str, at: Any, tmp_path: Path) -> None:
    expected, found, said = train_and_resume(Training(Model, trainer={"precision": precision}), tmp_path, at)
    assert not said
    assert found == expected


@pytest.mark.sampled(1)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "64-true"])
def test_state_of_another_type_than_its_parameter(precision: str, tmp_path: Path) -> None:
    sees = SeesTypes()
    expected, found, said = train_and_resume(Training(Own, lambda: [sees], {"precision": precision}), tmp_path)
    assert not said
    assert found == expected
    assert sees.seen[0] == sees.seen[1] >= {torch.bfloat16, torch.float32}


def test_means_of_later_epochs_are_added_up_in_the_same_type(tmp_path: Path) -> None:
    expected, found, said = train_and_resume(Training(LogsShort, trainer={"precision": "64-true"}), tmp_path)
    assert not said
    assert found == expected
