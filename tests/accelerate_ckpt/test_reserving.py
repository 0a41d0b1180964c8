"""The first asynchronous ``save_state`` finds its memory allocated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest

from accelerate_ckpt import attach
from tests.accelerate_ckpt.training import Run
from tests.support.reserving import allocations, wait_until_reserved


@pytest.mark.parametrize(("strategy", "expected"), [("async", ["ckpt-reserve"]), ("sync", [])])
def test_memory_is_allocated_when_the_optimizer_has_stepped(
    strategy: Any, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocating = allocations(monkeypatch)
    run = Run(attach(accelerate.Accelerator(cpu=True), strategy), seed=1)
    run.train(2)
    wait_until_reserved()
    run.accelerator.save_state(str(tmp_path / "saved"))
    run.accelerator.end_training()
    assert allocating == expected
