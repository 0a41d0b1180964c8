"""Fixtures shared by all tests. Helpers that are not fixtures are in ``tests/support``."""

from __future__ import annotations

import ast
import collections
import contextlib
import functools
import gc
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

# Before torch is imported: it reads the variable once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Without it, processes would create a file with a secret in the user's home.
os.environ.setdefault("CKPT_SECRET", secrets.token_hex(32))

import pytest
import torch
from hypothesis import settings

from ckpt_core import commit_time
from tests.support.accelerators import CUDA, SIMULATED, Accelerator, CudaAccelerator, SimulatedAccelerator
from tests.support.descendants import kill_all, new_mark
from tests.support.fork_server import (  # noqa: F401 - tests import them from here
    ACCELERATE,
    CORE,
    LIGHTNING,
    RUN_FILE,
    ForkServer,
    ForkServers,
)
from tests.support.own_process import ChildReports, OwnProcesses
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[1]
SMALL_FILESYSTEM_BYTES = 8 * 2**20
THREAD_GRACE_SECONDS = 60.0
#: Timeout of a script. Long, because only scripts that hang should reach it: a busy machine must not fail a test.
HANG_SECONDS = 280.0

# A shell that runs pytest in the background makes it ignore SIGINT, and nohup makes it ignore SIGHUP: undo both.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

# No test passes or fails by the clock.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


#: Files that take longest: they begin first, so that no worker is left with a long one in the end.
LONGEST = (
    "examples/test_crash_demo.py",
    "lightning_ckpt/test_exact_resume.py",
    "lightning_ckpt/test_sharded.py",
    "lightning_ckpt/test_recorder.py",
    "lightning_ckpt/test_exact_interrupts.py",
    "lightning_ckpt/test_remote.py",
    "accelerate_ckpt/test_launch.py",
    "lightning_ckpt/test_elastic.py",
    "lightning_ckpt/test_preemption.py",
    "lightning_ckpt/test_just_in_time.py",
    "lightning_ckpt/test_post_local_sgd.py",
    "accelerate_ckpt/test_unattended.py",
    "accelerate_ckpt/test_transformers_unattended.py",
    "accelerate_ckpt/test_exact_data_two.py",
    "accelerate_ckpt/test_elastic.py",
    "accelerate_ckpt/test_rehearsal.py",
    "accelerate_ckpt/test_transformers.py",
    "lightning_ckpt/test_exact_processes.py",
    "lightning_ckpt/test_save_last.py",
    "lightning_ckpt/test_restores.py",
    "accelerate_ckpt/test_exact_data_three.py",
    "accelerate_ckpt/test_just_in_time.py",
    "accelerate_ckpt/test_launch_runs.py",
    "accelerate_ckpt/test_save_state_ranks.py",
    "accelerate_ckpt/test_exact_data_one.py",
    "lightning_ckpt/test_failures.py",
    "chaos/test_cut_chaos.py",
    "examples/test_integrations.py",
    "ckpt_core/storage/test_obstore.py",
    "ckpt_core/storage/test_requests.py",
    "ckpt_core/storage/test_contract.py",
    "ckpt_core/pipeline/test_directory_ranks.py",
    "ckpt_core/pipeline/test_processes.py",
    "ckpt_core/pipeline/test_faults.py",
)


#: Fixtures that start processes.
PROCESS_FIXTURES = {"run_script", "fork_script", "ranks"}
#: Folders whose tests train with a framework.
TRAINING_FOLDERS = {"accelerate_ckpt", "lightning_ckpt", "chaos", "examples"}
#: Modules that start processes.
PROCESS_MODULES = {"subprocess", "multiprocessing", "torch.multiprocessing"}


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin that runs tests marked ``own_process`` in child processes."""
    config.pluginmanager.register(ChildReports(config) if ChildReports.is_needed() else OwnProcesses())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the longest files first, add the derived markers, skip tests marked ``gpu`` where there is no GPU."""
    is_asked_for = "process" in config.option.markexpr  # finding them takes seconds, in each worker
    places = {ROOT / "tests" / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if "servers" in fixtures:
            item.add_marker("server")
        if TRAINING_FOLDERS.intersection(item.path.parts):
            item.add_marker("training")
        is_apart = item.get_closest_marker("own_process") is not None
        if is_asked_for and (is_apart or fixtures & PROCESS_FIXTURES or _starts_processes(item.path)):
            item.add_marker("process")
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    _extend(items)


def _extend(items: list[pytest.Item]) -> None:
    """Mark cells as ``extended``: those that ``extended_cells`` names, ``each_value`` does not need, or are too many."""
    tests = collections.defaultdict[str, dict[pytest.Item, set[tuple[str, int]]]](dict)
    at_most = dict[str, int]()
    for item in items:
        test, _, cell = item.nodeid.partition("[")
        if (named := item.get_closest_marker("extended_cells")) and cell[:-1] in named.args:
            item.add_marker("extended")
        sampled = item.get_closest_marker("sampled")
        if (sampled or item.get_closest_marker("each_value")) and not any(
            map(item.get_closest_marker, ("extended", "slow", "skip", "gpu"))
        ):
            parameters = item.callspec.params  # type: ignore[attr-defined]
            tests[test][item] = {(name, id(value)) for name, value in parameters.items()}
            at_most[test] = sampled.args[0] if sampled else sys.maxsize
    for test, cells in tests.items():
        missing, kept = set[tuple[str, int]]().union(*cells.values()), collections.Counter[tuple[str, int]]()
        count = min(at_most[test], len(cells))
        # what stands together in a list is alike: those that are an equal distance apart come first
        listed = list(cells)
        apart = [listed[place * len(listed) // count] for place in range(count)]
        left = {cell: cells[cell] for cell in (*apart, *listed)}
        while missing and count:
            # the cell with the most new values; of equals, one whose values are in the fewest cells chosen so far
            best = max(left, key=lambda cell: (len(missing & left[cell]), -sum(kept[value] for value in left[cell])))
            kept.update(left[best])
            missing -= left.pop(best)
            count -= 1
        for cell in left:
            cell.add_marker("extended")


def pytest_collectstart() -> None:
    """Disable garbage collection while modules are imported: there is next to no garbage."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Exclude what was imported from garbage collections, each of which would take a second."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test a new clock of commits, which is not ahead because other tests dated commits into the future."""
    monkeypatch.setattr(commit_time, "_clock", commit_time._Clock())


@functools.cache
def _starts_processes(path: Path) -> bool:
    """Return whether a test file, or a helper in ``tests`` that it imports, imports a module that starts processes."""
    seen, left = set[Path](), [path]
    while left:
        file = left.pop()
        if file not in seen:
            seen.add(file)
            names = _imports_of(file)
            if PROCESS_MODULES & names:
                return True
            helpers = [ROOT / (name.replace(".", "/") + ".py") for name in names if name.startswith("tests.")]
            left += [helper for helper in helpers if helper.is_file()]
    return False


@functools.cache
def _imports_of(path: Path) -> frozenset[str]:
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
    return frozenset(found)


@pytest.fixture(autouse=True)
def _torch_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the test with one torch thread, or with as many as the marker ``threads`` asks for."""
    marker = request.node.get_closest_marker("threads")
    before = torch.get_num_threads()
    torch.set_num_threads(marker.args[0] if marker else 1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _no_thread_left_behind() -> Iterator[None]:
    """Fail a test that leaves one of our threads alive: it did not close what it opened."""
    before = set(threading.enumerate())
    yield
    started = [
        thread
        for thread in threading.enumerate()
        # the thread that reads signals sleeps for as long as the process lives
        if thread.name.startswith("ckpt-") and thread.name != "ckpt-signals" and thread not in before
    ]
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


@pytest.fixture(params=[SIMULATED, CUDA])
def accelerator(request: pytest.FixtureRequest, unavailable: Callable[[str], NoReturn]) -> Iterator[Accelerator]:
    """Return the device that a test runs on: the simulated one, and CUDA where there is a GPU."""
    found = CudaAccelerator() if request.param == "cuda" else SimulatedAccelerator(unavailable)
    with found.in_use():
        yield found


@pytest.fixture
def anyones_path() -> Iterator[Path]:
    """Return a directory that every user may reach and write to; pytest's own ones are only for its user."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o777)
        yield Path(directory)


@pytest.fixture
def small_filesystem(tmp_path: Path, unavailable: Callable[[str], NoReturn]) -> Iterator[Path]:
    """Return the root of a real, empty filesystem of 8 MiB, which a test can fill."""
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
        # Lazily, so that a test that failed with a file open does not fail here, too, for that reason.
        subprocess.run(["umount", "--lazy", mount_point], check=True, capture_output=True, timeout=HANG_SECONDS)


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
    """Run the command; return its error message, or None if it succeeded."""
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not installed"
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=HANG_SECONDS)
    return None if done.returncode == 0 else f"{command[0]}: {done.stderr.strip()}"


ScriptRunner = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_script(tmp_path: Path) -> ScriptRunner:
    """Run Python code, or a script file, in a fresh process and return its exit status and output.

    ``run_script(script, *args, env=None, cwd=None, timeout=280, check=True)``: ``script`` is source text (indentation
    is removed) or a :class:`~pathlib.Path`; ``env`` adds variables to the environment, or removes those whose value is
    None; ``cwd`` is by default the test's ``tmp_path``; with ``check``, an exit status other than 0 fails the test. The
    process leads its own process group. In the end it is killed with all its descendants, including those in sessions
    of their own, such as the ranks of a launcher.
    """

    def run(
        script: str | Path,
        *args: object,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        timeout: float = HANG_SECONDS,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        code = [str(script)] if isinstance(script, Path) else ["-c", textwrap.dedent(script)]
        command = [sys.executable, *code, *map(str, args)]
        mark = new_mark()
        process = subprocess.Popen(
            command,
            cwd=cwd or tmp_path,
            env=_script_environment({**(env or {}), **mark}),
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
            _kill_tree(process, mark)
            stdout, stderr = process.communicate(timeout=30)
        finally:
            _kill_tree(process, mark)
        status = process.returncode
        _judge(status, stdout, stderr, timed_out=timed_out, timeout=timeout, check=check)
        return subprocess.CompletedProcess(command, status, stdout, stderr)

    return run


@pytest.fixture(scope="session")
def fork_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServers]:
    """Return a function that returns a process to fork from, which has imported the given modules."""
    servers: dict[tuple[str, ...], ForkServer] = {}

    def get(modules: tuple[str, ...]) -> ForkServer:
        if modules not in servers:
            parent = None if modules == CORE else get(CORE)
            servers[modules] = ForkServer(tmp_path_factory.mktemp("scripts"), modules, _script_environment({}), parent)
        return servers[modules]

    yield get
    for server in reversed(servers.values()):
        server.close()


@pytest.fixture
def fork_script(tmp_path: Path, fork_servers: ForkServers) -> ScriptRunner:
    """Run a script like ``run_script``, but forked from a process that has imported its modules, which saves seconds.

    ``fork_script(script, *args, modules=CORE, ranks=None, env=None, cwd=None, timeout=280, check=True)``: ``modules``
    have been imported; with ``ranks``, that many processes run the script, with the variables that a launcher would
    set, and the result is that of all of them. Everything else is as for ``run_script``.
    """

    def run(
        script: str | Path,
        *args: object,
        modules: tuple[str, ...] = CORE,
        ranks: int | None = None,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        timeout: float = HANG_SECONDS,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        words = [str(arg) for arg in args]
        code = textwrap.dedent(script) if isinstance(script, str) else RUN_FILE.format(str(script))
        mark = new_mark()
        changes = {**(env or {}), **mark}
        outcome = fork_servers(modules).run(
            code,
            words,
            cwd=cwd or tmp_path,
            environments=[_script_environment({**launched, **changes}) for launched in _launcher_variables(ranks)],
            timeout=timeout,
        )
        if outcome.status:  # only then: looking at all processes takes as long as a short script
            kill_all(mark)
        _judge(
            outcome.status, outcome.stdout, outcome.stderr, timed_out=outcome.timed_out, timeout=timeout, check=check
        )
        return subprocess.CompletedProcess(words, outcome.status, outcome.stdout, outcome.stderr)

    return run


def _launcher_variables(ranks: int | None) -> list[dict[str, str]]:
    if ranks is None:
        return [{}]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0", "WORLD_SIZE": str(ranks)}
    return [{**shared, "LOCAL_RANK": str(rank), "RANK": str(rank)} for rank in range(ranks)]


def _judge(status: int, stdout: str, stderr: str, *, timed_out: bool, timeout: float, check: bool) -> None:
    output = f"--- stdout\n{stdout}\n--- stderr\n{stderr}"
    if timed_out:
        pytest.fail(f"the script did not end within {timeout} s\n{output}")
    if check and status != 0:
        pytest.fail(f"the script exited with status {status}\n{output}")


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


def _kill_tree(process: subprocess.Popen[str], mark: dict[str, str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # a launcher first: it would clean up after its ranks
    kill_all(mark)
