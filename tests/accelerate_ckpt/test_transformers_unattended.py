"""``ResumableCallback`` in runs that need no person: ``resume="auto"`` and ``preempt``."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers", reason="the optional extra is not installed")

from accelerate_ckpt._state.session import close_sessions  # noqa: E402
from accelerate_ckpt.integrations.transformers import ResumableCallback  # noqa: E402
from tests.accelerate_ckpt.test_transformers import (  # noqa: E402
    STEPS_PER_EPOCH,
    assert_same,
    logged,
    saved,
    trainer_for,
    weights,
)


class Sends(transformers.TrainerCallback):
    def __init__(self, step: int, number: int) -> None:
        self.step, self.number = step, number

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), self.number)


@pytest.fixture(autouse=True)
def _fresh(fresh_accelerate: None) -> Any:
    yield
    close_sessions()


def start(folder: Path, stop: int | None = None, **arguments: Any) -> Any:
    trainer = trainer_for(folder, callback=False, **arguments)
    ResumableCallback(trainer, resume="auto", preempt="SIGTERM,SIGUSR2")
    if stop is not None:
        trainer.add_callback(Sends(stop, signal.SIGUSR2))
    return trainer


@pytest.mark.parametrize("stop", [4, STEPS_PER_EPOCH - 1], ids=["middle", "end of the epoch"])
def test_a_preempted_run_resumes_exactly(tmp_path: Path, stop: int) -> None:
    arguments = {"save_steps": 100, "save_total_limit": 1, "eval_strategy": "steps", "eval_steps": 2}
    whole = trainer_for(tmp_path / "whole", **arguments)
    whole.train()
    first = start(tmp_path / "parts", stop, **arguments)
    with pytest.raises(SystemExit) as end:
        first.train()
    assert end.value.code == 128 + signal.SIGUSR2
    assert first.accelerator.resumed is None
    assert saved(tmp_path / "parts") == [f"checkpoint-{stop + 1}"]
    close_sessions()
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
    resumed = start(tmp_path / "parts", **arguments)
    resumed.train()
    assert resumed.accelerator.resumed.step == stop + 1
    assert_same(weights(resumed), weights(whole))
    assert logged(resumed) == logged(whole)


def test_false_is_a_fresh_start_and_auto_an_argument(tmp_path: Path) -> None:
    trainer_for(tmp_path, max_steps=3).train()
    fresh = start(tmp_path, max_steps=4)
    fresh.train(resume_from_checkpoint=False)
    assert fresh.accelerator.resumed is None
    asked = trainer_for(tmp_path, max_steps=4)
    asked.train(resume_from_checkpoint="auto")
    assert asked.accelerator.resumed.step == 4


def test_the_interval_saves_beside_the_strategy_of_the_trainer(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, callback=False, max_steps=23, save_strategy="no", save_total_limit=2)
    ResumableCallback(trainer, interval="auto", mtbf=1e9)
    trainer.train()
    assert saved(tmp_path) == ["checkpoint-10", "checkpoint-20"]
