"""The kill campaign in short, and what its judge notices. The long form is ``make chaos``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Checkpointer
from tests.chaos.campaign import RETENTION, SETTINGS, STAGING, STARTING, Campaign, phase_hit
from tests.chaos.jobs import Job, LogTail
from tests.chaos.judge import Judge

KILLS = 6


@pytest.mark.slow
def test_killed_trainings_lose_nothing_and_end_as_if_never_killed(tmp_path: Path) -> None:
    said: list[str] = []
    campaign = Campaign(tmp_path, 20, said.append, settings=SETTINGS[::2], kills_per_run=(3, 3))
    report = campaign.run(KILLS, parallel_share=0.0)
    assert report.violations == []
    assert report.kills >= KILLS
    assert report.runs >= 2
    assert set(report.by_setting) == {"async", "sync"}
    assert report.verified >= 2 * KILLS
    assert set(report.hit) != {STARTING}
    assert f"{report.kills} kills, 0 violations so far" in said[-1]
    assert "violations" in report.table()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("run-")] == [], "clean runs are removed"


# ---- the judge ----------------------------------------------------------------------------------------------------------


def save(run: Path, step: int, *names: str) -> None:
    with Checkpointer(strategy="sync") as checkpointer:
        for name in names:
            state = {"global_step": step, "optimizer_states": [], "w": torch.full((500,), float(step))}
            checkpointer.save(state, run / "checkpoints" / name)


def saved(run: Path, step: int, name: str) -> list[dict[str, Any]]:
    """The events of a save, after a line about its step in the log of steps."""
    with (run / "steps-rank0.jsonl").open("a") as log:
        log.write(json.dumps({"step": step, "end": float(step), "start": float(step)}) + "\n")
    path = str(run / "checkpoints" / name)
    kinds = ("SaveStarted", "SnapshotTaken", "SaveCommitted")
    return [{"event": kind, "path": path, "time": step + 0.5, "bytes": 1} for kind in kinds]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with the checkpoints of steps 3 and 6."""
    return tmp_path


@pytest.fixture
def judge(run: Path) -> Judge:
    """Has looked at the run once, and found it good."""
    judge = Judge(run, kept=2)
    save(run, 3, "step=3.ckpt")
    save(run, 6, "step=6.ckpt", "last.ckpt")
    (run / "checkpoints" / ".step=9.ckpt.0123456789ab.ckpt-part").write_bytes(b"half")
    assert judge.look(saved(run, 3, "step=3.ckpt") + saved(run, 6, "step=6.ckpt") + saved(run, 6, "last.ckpt")) == []
    assert judge.verified == 3
    assert len(judge.orphans) == 1
    return judge


def truncate(run: Path) -> None:
    path = run / "checkpoints" / "step=3.ckpt"
    path.write_bytes(path.read_bytes()[:-100])


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a truncated checkpoint": (truncate, "step=3.ckpt does not verify"),
    "a lost checkpoint": (lambda run: (run / "checkpoints" / "step=3.ckpt").unlink(), "retention left 1"),
    "last is gone": (lambda run: (run / "checkpoints" / "last.ckpt").unlink(), "last.ckpt is gone"),
    "a checkpoint written again": (lambda run: save(run, 6, "step=6.ckpt"), "changed although it was not saved"),
    "a checkpoint of an earlier step": (lambda run: save(run, 5, "step=6.ckpt"), "changed although it was not saved"),
    "a temporary file in sight": (
        lambda run: (run / "checkpoints" / "step=9.tmp").touch(),
        "unexpected file step=9.tmp",
    ),
    "a foreign file changed": (
        lambda run: (run / "checkpoints" / "notes.txt").write_text(""),
        "none of the training's",
    ),
    "another run's file deleted": (lambda run: (run / "other" / "step=1.ckpt").unlink(), "none of the training's"),
    "a checkpoint without digests": (
        lambda run: torch.save({"global_step": 9}, run / "checkpoints" / "step=9.ckpt"),
        "step=9.ckpt holds no digests",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_judge_notices(damage: str, run: Path, judge: Judge) -> None:
    harm, expected = DAMAGES[damage]
    harm(run)
    assert any(expected in problem for problem in judge.look([]))


def test_the_judge_notices_a_commit_that_is_not_there(run: Path, judge: Judge) -> None:
    assert judge.look(saved(run, 9, "step=9.ckpt")) == ["the newest checkpoint is of step 6, but step 9 was committed"]
    save(run, 9, "step=9.ckpt")
    assert judge.look([]) == []


def test_the_judge_notices_a_step_back(run: Path, judge: Judge) -> None:
    save(run, 3, "last.ckpt")
    problems = judge.look(saved(run, 6, "last.ckpt"))
    assert "last.ckpt went back from step 6 to 3" in problems


@pytest.mark.parametrize("event", ["SaveFailed", "CheckpointSkipped"])
def test_the_judge_notices_what_the_engine_complains_about(event: str, run: Path, judge: Judge) -> None:
    assert judge.look([{"event": event, "path": "x", "time": 0.0}]) != []


def test_a_job_that_ends_just_before_its_kill_was_not_killed(run: Path) -> None:
    answers = iter([None, 0])
    job = Job(2**30, LogTail(run / "events.jsonl"), lambda _: next(answers), run)
    assert not job.kill()
    job.finish()  # its end is not awaited again
    assert job.is_over()


def test_retention_is_no_violation(run: Path, judge: Judge) -> None:
    save(run, 9, "step=9.ckpt", "last.ckpt")
    events = saved(run, 9, "step=9.ckpt") + saved(run, 9, "last.ckpt")
    job = Job(0, LogTail(run / "events.jsonl"), lambda _: 0, run)
    job.launched, job.events = 0.0, events
    assert judge.look(events) == []
    assert phase_hit(job, judge, run) == RETENTION
    (run / "checkpoints" / "step=3.ckpt").unlink()
    assert judge.look([]) == []
    assert phase_hit(job, judge, run) != RETENTION
    job.events = [{"event": "SaveStarted", "path": str(run / "checkpoints" / "step=12.ckpt"), "time": 12.0}]
    assert phase_hit(job, judge, run) == STAGING
