"""The same in fresh processes: one is killed right after its save is on disk, another goes on under another seed."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("exact_script.py")
BATCHES = 8


@dataclasses.dataclass(frozen=True)
class Case:
    """What to train and where to kill it (see ``exact_script.py``)."""

    hook: str
    count: int
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    trainer: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return int(self.trainer.get("devices", 1))


DDP = {"devices": 2, "strategy": "ddp"}
CASES = {
    "plain": Case("on_train_batch_end", BATCHES + 3),
    "workers, accumulation": Case(
        "on_train_batch_end", BATCHES + 2, {"workers": 2}, {"accumulate_grad_batches": 3}
    ),
    "stateful, workers": Case("on_train_batch_end", BATCHES, {"loader": "stateful", "workers": 2}),
    "stateful stream, workers": Case("on_train_batch_end", 5, {"loader": "stateful_stream", "workers": 2}),
    "stream, workers": Case("on_train_batch_end", 3, {"loader": "stream", "workers": 2}),
    "inside validation": Case("on_validation_batch_end", 5, {"val": True}, {"val_check_interval": 3}),
    "max_steps, epoch end": Case("on_train_epoch_end", 1, {}, {"max_steps": 19, "max_epochs": -1}),
    "two ranks, workers, accumulation": Case(
        "on_train_batch_end", 6, {"workers": 2}, {**DDP, "accumulate_grad_batches": 4}
    ),
    "two ranks, stateful, validation end": Case(
        "on_validation_end", 2, {"loader": "stateful", "val": True}, {**DDP, "val_check_interval": 3}
    ),
    "two ranks, sampler of the user, epoch end": Case(
        "on_train_epoch_end", 2, {"loader": "stateful_distributed", "workers": 2}, DDP
    ),
}
IOS = ["stock"]


def run(run_script: Callable[..., Any], directory: Path, name: str, case: Case, **spec: Any) -> list[Any] | int:
    """Run the script; what each rank wrote, or the exit status if it was killed."""
    whole = {
        "options": case.options,
        "trainer": case.trainer,
        "seed": 1,
        "save": None,
        "kill": False,
        "checkpoint": str(directory / f"{spec.get('resume') or spec.get('kill') or 'whole'}.ckpt"),
        "resume": False,
        "result": str(directory / name),
        "io": "stock",
        **spec,
    }
    path = directory / f"{name}.spec.json"
    path.write_text(json.dumps(whole))
    done = run_script(SCRIPT, path, check=not whole["kill"], env={"PL_GLOBAL_SEED": None}, timeout=100)
    if whole["kill"]:
        assert not list(directory.glob(f"{name}.[0-9].json")), done.stdout + done.stderr
        return int(done.returncode)
    return [json.loads((directory / f"{name}.{rank}.json").read_text()) for rank in range(case.ranks)]


@pytest.mark.parametrize("io", IOS)
@pytest.mark.parametrize("case", CASES.values(), ids=[name.replace(" ", "-") for name in CASES])
def test_killed_run_goes_on(run_script: Callable[..., Any], tmp_path: Path, case: Case, io: str) -> None:
    save, saved = [case.hook, case.count], str(tmp_path / "killed.ckpt")
    expected = run(run_script, tmp_path, "whole", case, save=save, io=io)
    status = run(run_script, tmp_path, "killed", case, save=save, kill=True, checkpoint=saved, io=io)
    assert status == -signal.SIGKILL
    found = run(run_script, tmp_path, "resumed", case, resume=True, seed=77, checkpoint=saved, io=io)
    for rank in range(case.ranks):
        assert found[rank]["warnings"] == []
        assert found[rank]["whole"] == expected[rank]["after_save"], f"rank {rank}"
