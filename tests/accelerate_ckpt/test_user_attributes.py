"""Attributes of a model that training changes and no state holds are reported once, at a save; no others are."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from accelerate_ckpt import attach
from accelerate_ckpt._attach import uninstall


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.rate = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.rate


class Annealed(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rate *= 0.9
        return super().forward(x)


class Outer(torch.nn.Module):
    """A module around one whose attribute changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Annealed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Kept(Annealed):
    def get_extra_state(self) -> Any:
        return {"rate": self.rate}

    def set_extra_state(self, state: Any) -> None:
        self.rate = state["rate"]


class Schedule:
    rate = 0.5

    def state_dict(self) -> dict[str, float]:
        return {"rate": self.rate}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.rate = state["rate"]


class Scheduled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.schedule = Schedule()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.schedule.rate *= 0.9
        return super().forward(x)


@pytest.fixture
def accelerator() -> Iterator[Any]:
    yield Accelerator(cpu=True)
    uninstall()


def said(accelerator: Any, model: torch.nn.Module, directory: Path, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Train and save twice; return the log lines about attributes that no state holds."""
    attach(accelerator, "sync")
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    if isinstance(model, Scheduled):
        accelerator.register_for_checkpointing(model.schedule)
    with caplog.at_level(logging.WARNING):
        for step in range(4):
            accelerator.backward(model(torch.ones(2, 4)).sum())
            optimizer.step()
            if step % 2:
                accelerator.save_state(directory / f"step_{step}")
    return [record.message for record in caplog.records if "no state holds it" in record.message]


@pytest.mark.parametrize("model", [Annealed, Outer])
def test_a_changed_attribute_is_named_once_with_its_class_and_place(
    accelerator: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, model: type[torch.nn.Module]
) -> None:
    (message,) = said(accelerator, model(), tmp_path, caplog)
    assert message.startswith(f"the module Annealed ({__file__}:")
    assert "changed `rate` since training began" in message


@pytest.mark.parametrize("model", [Net, Kept, Scheduled])
def test_what_does_not_change_or_has_a_state_is_not_named(
    accelerator: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, model: type[torch.nn.Module]
) -> None:
    assert said(accelerator, model(), tmp_path, caplog) == []
