"""``.ci/run``, which CI runs: lint and tests both count, and an aborted run leaves no process running."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RUN = ROOT / ".ci" / "run"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a project to which :func:`start` adds a Makefile with only the targets that CI makes."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(RUN, tmp_path / ".ci")
    servers = tmp_path / ".ci" / "install_servers"
    servers.write_text("#!/bin/sh\n")
    servers.chmod(0o755)
    return tmp_path


def start(project: Path, lint: str, test: str) -> subprocess.Popen[str]:
    recipes = {"venv": "true", "lint": lint, "test": test}
    (project / "Makefile").write_text("".join(f"{name}:\n\t@{recipe}\n" for name, recipe in recipes.items()))
    return subprocess.Popen([project / ".ci" / "run"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize(
    ("lint", "test", "closing"),
    [
        ("true", "echo 3 passed in 1.0s", "lint passed, tests passed\n3 passed in 1.0s\n"),
        ("echo E501; false", "echo 3 passed in 1.0s", "E501\n"),
        ("true", "echo 1 failed, 2 passed in 1.0s; false", "lint passed, tests failed\n1 failed, 2 passed in 1.0s\n"),
        ("true", "echo 3 skipped in 1.0s", "lint passed, tests failed\n3 skipped in 1.0s\n"),
    ],
)
def test_both_run_and_both_count(project: Path, lint: str, test: str, closing: str) -> None:
    run = start(project, lint, test)
    output, _ = run.communicate(timeout=60)
    assert closing in output
    assert (run.returncode == 0) == ("lint passed, tests passed" in output)


def test_after_lint_it_says_which_tests_failed(project: Path) -> None:
    failing = "FAILED tests/test_a.py::test_b - assert 1 == 2"
    told = f"echo '{failing}'; echo 1 failed, 2 passed in 1.0s; false"
    output, _ = start(project, "echo All checks passed", told).communicate(timeout=60)
    closing = "lint passed, tests failed\n1 failed, 2 passed in 1.0s\n"
    assert output.endswith(f"\n{failing}\n{closing}")
    assert output.count(failing) == 2  # as pytest prints it, and after lint
    assert output.index("All checks passed") < output.rindex(failing)


def test_it_runs_make_test_as_it_is_and_another_job_what_that_leaves_out(
    project: Path, pytestconfig: pytest.Config
) -> None:
    assert any(marker.startswith("extended:") for marker in pytestconfig.getini("markers"))
    output, _ = start(project, "true", "echo \"3 passed in 1.0s: '$(MARKS)'\"").communicate(timeout=60)
    assert "3 passed in 1.0s: ''\n" in output
    # without the variables that a make which runs this test would pass on
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "MARKS"))}
    for command, marks in (
        (["make", "-n", "test"], "not slow and not extended"),
        (["make", "-n", "test", "MARKS=not slow"], "not slow"),
        (["make", "-n", "coverage"], "not slow"),
    ):
        told = subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True, text=True)
        assert f"-m '{marks}'" in told.stdout
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert 0 < workflow.find("- run: .ci/install_servers") < workflow.find("- run: make coverage\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_aborted_run_leaves_nothing_running(project: Path, number: signal.Signals) -> None:
    until_lint = "until test -e begun; do sleep 0.01; done; echo begun"
    run = start(
        project, "flock lint.lock sh -c 'touch begun; sleep 600'", f"flock test.lock sh -c '{until_lint}; sleep 600'"
    )
    assert run.stdout is not None
    while run.stdout.readline() != "begun\n":
        assert run.poll() is None
    run.send_signal(number)
    for name in ("lint", "test"):
        with (project / f"{name}.lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # held by what make has started, until that ends
    run.communicate()
    assert run.returncode == 128 + number
