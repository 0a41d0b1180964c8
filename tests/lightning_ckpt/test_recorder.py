"""The flight recorder in Lightning: what it says agrees with a judge from outside, after a real SIGKILL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer

from lightning_ckpt import ResumableCheckpoint
from tests.conftest import LIGHTNING, ScriptRunner
from tests.lightning_ckpt.exact_cases import Model
from tests.lightning_ckpt.recorded_runs import CASES

SCRIPT = """
    import dataclasses, json, sys
    from pathlib import Path
    from tests.lightning_ckpt.recorded_runs import CASES, judge

    name, kill, every = json.loads(sys.argv[1])
    found = judge(CASES[name], kill, Path(sys.argv[2]), every=every)
    print(json.dumps({**dataclasses.asdict(found), "verdict": found.verdict}))
"""


def judged(fork_script: ScriptRunner, directory: Path, name: str, kill: list[int], every: int = 2) -> dict[str, Any]:
    done = fork_script(SCRIPT, json.dumps([name, kill, every]), directory, modules=LIGHTNING)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", ["shuffled; accumulates", "two workers; validates"])
def test_an_exact_resume_says_that_its_steps_are_equal(fork_script: ScriptRunner, tmp_path: Path, name: str) -> None:
    found = judged(fork_script, tmp_path, name, [1, 5], every=3)
    assert found["verdict"] == "equal", found
    assert found["recorder"].endswith("the first run's, bit for bit")
    assert found["warned"] == []


@pytest.mark.parametrize(
    ("name", "differs"),
    [
        ("engine forgets generators", "generators"),
        ("engine forgets a batch", "data"),
        ("engine forgets a moment", "weights"),
        ("model: calls", "loss"),
    ],
)
def test_what_a_resume_does_not_have_is_said(
    fork_script: ScriptRunner, tmp_path: Path, name: str, differs: str
) -> None:
    found = judged(fork_script, tmp_path, name, [1, 3])
    assert found["verdict"] == "said", found
    assert differs in found["differs"]
    assert len(found["warned"]) == 1


def test_the_recorder_can_be_left_out(tmp_path: Path) -> None:
    for recorder in (True, False):
        directory = tmp_path / str(recorder) / "checkpoints"
        callback = ResumableCheckpoint(directory, every_n_train_steps=1, recorder=recorder)
        trainer = Trainer(accelerator="cpu", max_steps=2, logger=False, enable_progress_bar=False, callbacks=[callback])
        trainer.fit(Model({}))
        assert (directory.parent / ".checkpoints.flight-rank0").exists() is recorder


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CASES))
def test_the_recorder_agrees_with_a_judge_from_outside(fork_script: ScriptRunner, tmp_path: Path, name: str) -> None:
    found = judged(fork_script, tmp_path, name, [2, 1])
    assert found["verdict"] not in ("false alarm", "WRONGLY EQUAL"), found
    assert found["is_exact"] is not None, found["problem"]
