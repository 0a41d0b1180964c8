"""A short campaign, the judgement of warnings, and whether the tests exist that docs/exact_resume.md names."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from typing import NoReturn

import pytest

from tests.campaign.judging import Outcome, compare
from tests.conftest import ROOT
from tests.simulated_device import find_compiler


def test_the_tests_that_the_page_about_exact_resumes_names_are_there() -> None:
    page = (ROOT / "docs" / "exact_resume.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", page))
    files = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    there = {name for text in files for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)}
    assert len(named) >= 20
    assert named - there == set()


@pytest.mark.parametrize(
    ("named", "place", "verdict"),
    [
        ("state.best", "0 4", "exact"),  # differed after a step, if only there
        ("state.best", "0", "exact"),
        ("other", "0 4", "FALSE ALARM"),
        ("total", "0 4", "exact"),  # a global, which is not noted: any difference counts
    ],
)
def test_an_alarm_is_false_if_what_it_names_was_never_another_one(named: str, place: str, verdict: str) -> None:
    text = f"this resume begins without variables of the script that training had changed: `{named}` of run() in a.py"
    base, resumed = Outcome(marks={"early": [0, 0, 0, 0]}), Outcome(warned=[text])
    for run, best in ((base, "a"), (resumed, "b")):
        run.attributes = {"end": {"variables": {f"state, {place}": best, f"other, {place}": "c"}}}
    assert compare(base, resumed, "early").verdict == verdict


@pytest.mark.parametrize(("calls", "verdict"), [("a", "exact"), ("b", "FALSE ALARM")])
def test_an_alarm_is_true_if_the_attribute_that_it_names_was_another_one(calls: str, verdict: str) -> None:
    text = "it begins without variables of the script that training had changed: `noise.calls` of Net (if training"
    base = Outcome(marks={"early": [0, 0, 0, 0]}, attributes={"early": {"Net": {"noise": "b"}}})
    resumed = Outcome(warned=[text], attributes={"begun": {"Net": {"noise": calls}}})
    assert compare(base, resumed, "early").verdict == verdict


@pytest.mark.extended
def test_resumes_on_a_device_are_exact_or_said_too(unavailable: Callable[[str], NoReturn]) -> None:
    if find_compiler() is None:
        unavailable("no C++ compiler for the simulated device")
    tool = [sys.executable, str(ROOT / "tools" / "recorder_campaign.py"), "--device", "simulated", "--verbose"]
    only = ["simulated: keeps in place", "generator made at first batch"]
    done = subprocess.run(
        [*tool, "--only", *only, "--points", "middle", "--killed", "0"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.findall(r" middle +(\w+):", done.stdout) == ["exact", "said", "said"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_no_resume_of_a_short_campaign_is_silently_inexact_or_falsely_warned_of() -> None:
    tool = [sys.executable, str(ROOT / "tools" / "recorder_campaign.py")]
    done = subprocess.run(
        [*tool, "--part", "0/8", "--points", "middle", "epoch-end"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " configurations in " in done.stdout
