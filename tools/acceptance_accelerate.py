"""Run Accelerate's own tests with ``save_state`` and ``load_state`` replaced by ours.

The tests run with the installed Accelerate: in an environment without this project (stock), then with each of our
strategies installed for every Accelerator. Every test that passes on stock must pass with ours; otherwise it is listed,
and the exit status is 1. One more run, for information only, does not wait for small states, because the models of
these tests are all small. Logs and results are kept in ``.acceptance/``.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from acceptance import OUTPUT, RUN_TIMEOUT_SECONDS, TEST_TIMEOUT_SECONDS, AcceptanceError, Run
from stock_environment import StockEnvironmentError, make_stock_environment

ROOT = Path(__file__).resolve().parents[1]
NEVER_WAITING = "async never waiting"
STRATEGIES = {"stock": "", "sync": "sync", "async": "async", "sharded": "sharded", NEVER_WAITING: "async"}
# Files below tests/ of which all tests run.
FILES = (
    "test_accelerator.py",
    "test_cpu.py",
    "test_data_loader.py",
    "test_grad_sync.py",
    "test_optimizer.py",
    "test_scheduler.py",
    "test_state_checkpointing.py",
)
# Compares the free memory of the whole machine before and after, so the result depends on other programs.
NOT_COUNTED = "test_accelerator.py::AcceleratorTester::test_free_memory_dereferences_prepared_components"
# Tests on two processes, which Accelerate keeps in its package and starts only from a script that needs several GPUs.
TWO_PROCESSES = Path(__file__).with_name("acceptance_accelerate_processes.py")
EXTRA_PACKAGES = {"parameterized": "parameterized==0.9.0", "pytest_subtests": "pytest-subtests==0.15.0"}
PACKAGES = OUTPUT / "packages"


def tests_folder(checkout: Path) -> Path:
    """Return the folder of the tests, given it or the checkout."""
    for folder in (checkout / "tests", checkout):
        if (folder / "test_state_checkpointing.py").is_file():
            return folder.resolve()
    raise AcceptanceError(f"{checkout} is no checkout of Accelerate: it has no tests/test_state_checkpointing.py")


def install_extra_packages() -> None:
    """Install what the tests need beyond the environment."""
    for module, requirement in EXTRA_PACKAGES.items():
        if importlib.util.find_spec(module) is None and not (PACKAGES / module).is_dir():
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(PACKAGES)]
            if subprocess.run([*command, requirement], check=False).returncode:
                raise AcceptanceError(
                    f"cannot install {requirement}, without which Accelerate's tests cannot be imported"
                )


def run_tests(name: str, tests: Path, python: str | Path, extra: list[str]) -> Run:
    """Run all tests with one strategy."""
    output = OUTPUT / "accelerate" / name.replace(" ", "_")
    shutil.rmtree(output, ignore_errors=True)
    working_directory = output / "work"
    working_directory.mkdir(parents=True)
    results, log = output / "results.jsonl", output / "log"
    results.touch()
    missing = [file for file in FILES if not (tests / file).exists()]
    for file in missing:
        print(f"not in this checkout: tests/{file}")
    environment = {
        **os.environ,
        "ACCEPTANCE_STRATEGY": STRATEGIES[name],
        "ACCEPTANCE_NEVER_WAIT": "1" if name == NEVER_WAITING else "",
        "ACCEPTANCE_RESULTS": str(results),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "tools", tests.parent, PACKAGES))),
    }
    command = [
        str(python),
        "-m",
        "pytest",
        "-p",
        "acceptance_accelerate_plugin",
        "-p",
        "no:cacheprovider",
        "-q",
        "-ra",
    ]
    # Neither the checkout's settings nor ours, so that they are the same for every version.
    command += ["-c", os.devnull, f"--rootdir={tests}", f"--timeout={TEST_TIMEOUT_SECONDS}", "--tb=short"]
    command += [f"--deselect={NOT_COUNTED}"]
    command += [f"--basetemp={output / 'tmp'}", *(str(tests / file) for file in FILES if file not in missing)]
    run = Run()
    begin = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        try:
            status = subprocess.run(
                [*command, str(TWO_PROCESSES), *extra],
                cwd=working_directory,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=RUN_TIMEOUT_SECONDS,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            status = -1
    run.read(results)
    run.seconds = time.monotonic() - begin
    print(f"{name}: pytest ended with status {status}, see {log.relative_to(ROOT)}", flush=True)
    shutil.rmtree(output / "tmp", ignore_errors=True)
    if STRATEGIES[name] and not (run.calls["save_state"] and run.calls["load_state"]):
        raise AcceptanceError(f"{name} was never called: the swap did not work")
    return run


def report(runs: dict[str, Run]) -> bool:
    """Print the table and the lost tests; return whether there are none, apart from the run for information."""
    print("\n| methods | passed | failed | errors | skipped | saves | loads | time |")
    print("|---|---|---|---|---|---|---|---|")
    for name, run in runs.items():
        counts = [len(run.passed), len(run.failed), len(run.errors), len(run.skipped)]
        calls = [run.calls[verb] if STRATEGIES[name] else "" for verb in ("save_state", "load_state")]
        print("|", " | ".join(map(str, [name, *counts, *calls, f"{run.seconds:.0f} s"])), "|")
    lost = {name: run.lost(runs["stock"]) for name, run in runs.items() if name != "stock"}
    for name, tests in lost.items():
        print(f"\n{name}: {len(tests)} of the tests that pass on stock do not pass")
        for test in tests:
            print(f"  {test}")
    return not any(tests for name, tests in lost.items() if name != NEVER_WAITING)


def main() -> int:
    """Run everything and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of Accelerate, or its tests/ folder")
    options, extra = parser.parse_known_args()
    try:
        tests = tests_folder(options.checkout)
        install_extra_packages()
        stock_python = make_stock_environment(OUTPUT / "stock_environment")
        runs = {
            name: run_tests(name, tests, sys.executable if strategy else stock_python, extra)
            for name, strategy in STRATEGIES.items()
        }
        if not runs["stock"].passed:
            raise AcceptanceError("nothing passes on stock: see .acceptance/accelerate/stock")
    except (AcceptanceError, StockEnvironmentError) as error:
        print(f"acceptance: {error}", file=sys.stderr)
        return 2
    return 0 if report(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
