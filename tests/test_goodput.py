"""``tools/goodput.py``: its simulation agrees with the closed form, and each tier reduces what failures cost."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import goodput

JOB = goodput.Job(mtbf=3600.0, interval=300.0, stall=5.0, commit=0.0, restart=300.0)


@pytest.mark.parametrize(
    "changes",
    [{}, {"interval": 60.0}, {"interval": 1800.0}, {"mtbf": 40_000.0}, {"restart": 0.0}, {"stall": 120.0}],
    ids=str,
)
def test_the_simulation_comes_to_the_closed_form(changes: dict[str, float]) -> None:
    job = dataclasses.replace(JOB, **changes)
    found = goodput.simulate(job, work=4000 * job.mtbf)
    assert found.goodput == pytest.approx(goodput.closed_form(job), rel=0.01)
    assert found.failures == pytest.approx(goodput.DAY / job.mtbf, rel=0.05)


def test_half_an_interval_and_a_commit_are_lost_at_each_failure() -> None:
    job = dataclasses.replace(JOB, mtbf=360_000.0, commit=200.0)
    found = goodput.simulate(job, work=4000 * job.mtbf)
    assert found.lost / found.failures == pytest.approx(300 / 2 + 200, rel=0.05)


def test_tiers_lose_a_step_or_less_than_their_own_interval() -> None:
    job = dataclasses.replace(JOB, interval=1800.0)
    work = 4000 * job.mtbf
    plain = goodput.simulate(job, work)
    memory = goodput.simulate(dataclasses.replace(job, memory_every=10.0, memory_survives=1.0), work)
    in_time = goodput.simulate(dataclasses.replace(job, just_in_time=1.0, step=2.0), work)
    assert plain.lost / plain.failures > 500
    assert memory.lost / memory.failures < 10
    assert in_time.lost / in_time.failures < 2
    assert memory.stalls > plain.stalls


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "many"], "must be whole numbers, such as 64,1024: many"),
        (["--stall", "short"], "must be a number: short"),
        (["--ranks", "0"], "a run has at least 1 rank, not 0"),
        (["--stall", "-1"], "must not be below 0"),
        (["--rank-mtbf-hours", "0"], "must be above 0"),
        (["--restart", "inf"], "infinite"),
    ],
)
def test_figures_that_no_job_has_are_refused(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["goodput.py", *arguments])
    with pytest.raises(SystemExit):
        goodput.main()
    assert words in capsys.readouterr().err
