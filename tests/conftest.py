"""Fixtures shared by all tests. Helpers that are no fixtures live in ``tests/support`` as ``tests.support.<module>``."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

# Before torch is imported: it reads the variable once.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
SMALL_FILESYSTEM_BYTES = 8 * 2**20
THREAD_GRACE_SECONDS = 5.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked ``gpu`` where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _torch_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """One torch thread, or as many as the marker ``threads`` asks for."""
    marker = request.node.get_closest_marker("threads")
    before = torch.get_num_threads()
    torch.set_num_threads(marker.args[0] if marker else 1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _no_thread_left_behind() -> Iterator[None]:
    """Fail a test that leaves one of our threads alive: somebody did not close what they opened."""
    before = set(threading.enumerate())
    yield
    started = [thread for thread in threading.enumerate() if thread.name.startswith("ckpt-") and thread not in before]
    deadline = time.monotonic() + THREAD_GRACE_SECONDS
    for thread in started:
        # A thread that has been told to stop may need a moment to be gone.
        thread.join(max(0.0, deadline - time.monotonic()))
    alive = sorted(thread.name for thread in started if thread.is_alive())
    if alive:
        pytest.fail(f"threads left alive after the test: {', '.join(alive)}")


@pytest.fixture(scope="session")
def unavailable() -> Callable[[str], NoReturn]:
    """``unavailable(reason)`` ends a test that this machine cannot run: a skip, but a failure where CI is set."""

    def end_test(reason: str) -> NoReturn:
        if os.environ.get("CI"):
            pytest.fail(f"CI must be able to run this test: {reason}")
        pytest.skip(reason)

    return end_test


@pytest.fixture
def small_filesystem(tmp_path: Path, unavailable: Callable[[str], NoReturn]) -> Iterator[Path]:
    """The root of a real, empty filesystem of 8 MiB, for filling the disk in earnest."""
    if sys.platform != "linux" or os.geteuid() != 0:
        unavailable("only root on Linux can mount a small filesystem")
    mount_point = tmp_path / "small_filesystem"
    mount_point.mkdir()
    problem = _mount_tmpfs(mount_point)
    if problem:
        ext4_problem = _mount_ext4(mount_point, tmp_path / "small_filesystem.img")
        if ext4_problem:
            unavailable(f"no small filesystem can be mounted: {problem}; {ext4_problem}")
    try:
        yield mount_point
    finally:
        # Lazily, so that a test that failed with a file open is reported as itself.
        subprocess.run(["umount", "--lazy", mount_point], check=True, capture_output=True, timeout=30)


def _mount_tmpfs(mount_point: Path) -> str | None:
    return _problem_of(["mount", "-t", "tmpfs", "-o", f"size={SMALL_FILESYSTEM_BYTES}", "tmpfs", str(mount_point)])


def _mount_ext4(mount_point: Path, image: Path) -> str | None:
    with image.open("wb") as file:
        file.truncate(SMALL_FILESYSTEM_BYTES)
    problem = _problem_of(["mkfs.ext4", "-q", "-F", str(image)])
    if problem is None:
        problem = _problem_of(["mount", "-o", "loop", str(image), str(mount_point)])
    if problem is None:
        shutil.rmtree(mount_point / "lost+found")
    return problem


def _problem_of(command: list[str]) -> str | None:
    """Run the command; its complaint, or None if it worked."""
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not installed"
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    return None if done.returncode == 0 else f"{command[0]}: {done.stderr.strip()}"


ScriptRunner = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_script(tmp_path: Path) -> ScriptRunner:
    """Run Python code, or a script file, in a fresh process and return its exit status and output.

    ``run_script(script, *args, env=None, cwd=None, timeout=120, check=True)``: ``script`` is source text (indentation
    is removed) or a :class:`~pathlib.Path`; ``env`` adds to the environment, and None as a value removes; ``cwd`` is
    the test's ``tmp_path`` unless given; with ``check`` an exit status other than 0 fails the test. The process leads
    a group of its own, which is killed as a whole at the end, so a script that starts ranks leaves none behind.
    """

    def run(
        script: str | Path,
        *args: object,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        timeout: float = 120.0,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        code = [str(script)] if isinstance(script, Path) else ["-c", textwrap.dedent(script)]
        command = [sys.executable, *code, *map(str, args)]
        process = subprocess.Popen(
            command,
            cwd=cwd or tmp_path,
            env=_script_environment(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        timed_out = False
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
            _kill_group(process)
            stdout, stderr = process.communicate(timeout=30)
        finally:
            _kill_group(process)
        output = f"--- stdout\n{stdout}\n--- stderr\n{stderr}"
        if timed_out:
            pytest.fail(f"the script did not end within {timeout} s\n{output}")
        if check and process.returncode != 0:
            pytest.fail(f"the script exited with status {process.returncode}\n{output}")
        return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)

    return run


def _script_environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    search_path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    merged: dict[str, str | None] = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(search_path),
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": "1",
        **changes,
    }
    return {name: value for name, value in merged.items() if value is not None}


def _kill_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
