"""Run Lightning's own checkpoint tests with each of our ``CheckpointIO`` plugins as the default plugin.

The tests run with the installed Lightning: with Lightning's own plugin in an environment without this project (stock),
the same with this project installed but not used, with ``SyncCheckpointIO`` and with ``AsyncCheckpointIO``. Every test
that passes on stock must pass in the other rows; otherwise it is listed, and the exit status is 1. Two more runs are
for information only: one also replaces ``ModelCheckpoint`` by ``ResumableCheckpoint``, and in one
``AsyncCheckpointIO`` does not wait for small states, because the models of these tests are all small. Logs and results
are kept in ``.acceptance/``.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from stock_environment import StockEnvironmentError, make_stock_environment

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / ".acceptance"
TEST_TIMEOUT_SECONDS = 120
RUN_TIMEOUT_SECONDS = 2 * 60 * 60

NEVER_WAITING = "AsyncCheckpointIO never waiting"
RESUMABLE = "ResumableCheckpoint"
STOCK, INSTALLED = "stock", "stock, project installed"
IOS = {
    STOCK: "",
    INSTALLED: "",
    "SyncCheckpointIO": "lightning_ckpt:SyncCheckpointIO",
    "AsyncCheckpointIO": "lightning_ckpt:AsyncCheckpointIO",
    RESUMABLE: "lightning_ckpt:AsyncCheckpointIO",
    NEVER_WAITING: "lightning_ckpt:AsyncCheckpointIO",
}
# Files and folders below tests/tests_pytorch of which all tests run.
ABOUT_CHECKPOINTS = (
    "checkpointing",
    "callbacks/test_model_checkpoint_additional_cases.py",
    "callbacks/test_model_checkpoint_edge_cases.py",
    "callbacks/test_model_checkpoint_manual_opt.py",
    "callbacks/test_model_checkpoint_step_interval_val_metric.py",
    "models/test_restore.py",
    "plugins/test_async_checkpoint.py",
    "plugins/test_checkpoint_io_plugin.py",
    "trainer/connectors/test_checkpoint_connector.py",
    "trainer/connectors/test_signal_connector.py",
)
# Files and folders of which only the tests run whose names match KEYWORDS.
TOUCHING_CHECKPOINTS = (
    "callbacks",
    "core/test_datamodules.py",
    "loops/test_loops.py",
    "loops/test_training_epoch_loop.py",
    "models/test_hooks.py",
    "strategies",
    "trainer/test_trainer.py",
    "tuner",
    "utilities/migration",
)
KEYWORDS = "ckpt or checkpoint or resume or restor or restart or state"
# Packages that the tests import and the development environment lacks: pinned, and installed outside of it.
EXTRA_PACKAGES = {
    "tensorboardX": ("tensorboardX==2.6.5", "protobuf==7.36.2"),
    "sklearn": ("scikit-learn==1.9.1", "scipy==1.17.1", "joblib==1.6.0", "narwhals==2.28.0", "threadpoolctl==3.8.0"),
}
PACKAGES = OUTPUT / "packages"


class AcceptanceError(Exception):
    """The tests could not be run, so there is no result."""


@dataclasses.dataclass
class Run:
    """The outcomes of one run, counted as pytest does: a test can pass and have an error in its teardown.

    Attributes:
        passed, failed, errors, skipped: Ids of tests.
        calls: How often the methods of our plugin were called.
        seconds: How long the run took.
    """

    passed: set[str] = dataclasses.field(default_factory=set)
    failed: set[str] = dataclasses.field(default_factory=set)
    errors: set[str] = dataclasses.field(default_factory=set)
    skipped: set[str] = dataclasses.field(default_factory=set)
    calls: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    seconds: float = 0.0

    def read(self, results: Path) -> None:
        """Add the outcomes and calls that the pytest plugin recorded."""
        for line in results.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if "calls" in record:
                self.calls.update(record["calls"])
            elif record["outcome"] == "skipped":
                self.skipped.add(record["test"])
            elif record["phase"] == "call":
                (self.passed if record["outcome"] == "passed" else self.failed).add(record["test"])
            elif record["outcome"] == "failed":
                self.errors.add(record["test"])

    def lost(self, stock: Run) -> list[str]:
        """Return the tests that pass on ``stock`` but not here, and those with an error only here."""
        unfinished_or_failed = stock.passed - self.passed
        new_errors = self.errors - stock.errors
        return sorted(unfinished_or_failed | new_errors)


def tests_folder(checkout: Path) -> Path:
    """Return the folder that holds ``tests_pytorch``, given that folder, its parent or one more level up."""
    for folder in (checkout / "tests", checkout, checkout.parent):
        if (folder / "tests_pytorch" / "conftest.py").is_file():
            return folder.resolve()
    raise AcceptanceError(f"{checkout} is no checkout of Lightning: it has no tests/tests_pytorch")


def install_extra_packages() -> None:
    """Install what the tests need beyond the environment; without it, some fail or skip on stock too."""
    for module, requirements in EXTRA_PACKAGES.items():
        if importlib.util.find_spec(module) is None and not (PACKAGES / module).is_dir():
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(PACKAGES)]
            if subprocess.run([*command, *requirements], check=False).returncode:
                print(f"cannot install {module}: the tests that need it are not counted", flush=True)


def selections(tests: Path, *, whole: bool) -> dict[str, list[str]]:
    """Return the pytest arguments of the parts of a run."""
    if whole:
        return {name: [str(tests / name)] for name in ("tests_fabric", "tests_pytorch")}
    folder = tests / "tests_pytorch"
    missing = [name for name in ABOUT_CHECKPOINTS + TOUCHING_CHECKPOINTS if not (folder / name).exists()]
    for name in missing:
        print(f"not in this checkout: tests_pytorch/{name}")
    about = [str(folder / name) for name in ABOUT_CHECKPOINTS if name not in missing]
    touching = [str(folder / name) for name in TOUCHING_CHECKPOINTS if name not in missing]
    if not any((tests / "legacy" / "checkpoints").rglob("*.ckpt")):
        # They need files that are downloaded separately, and load them without any plugin.
        about.append(f"--ignore={folder / 'checkpointing' / 'test_legacy_checkpoints.py'}")
    touching += ["-k", KEYWORDS, *(f"--ignore={path}" for path in about if not path.startswith("--"))]
    return {"about checkpoints": about, "touching checkpoints": touching}


def run_tests(name: str, tests: Path, python: str | Path, extra: list[str], *, whole: bool = False) -> Run:
    """Run all parts with one plugin as the default."""
    output = OUTPUT / name.replace(",", "").replace(" ", "_")
    shutil.rmtree(output, ignore_errors=True)
    site, working_directory = output / "site", output / "work"
    site.mkdir(parents=True)
    working_directory.mkdir()
    (site / "sitecustomize.py").write_text("import acceptance_plugin\n\nacceptance_plugin.install()\n")
    run = Run()
    begin = time.monotonic()
    for part, arguments in selections(tests, whole=whole).items():
        stem = part.replace(" ", "_")
        results, log = output / f"{stem}.jsonl", output / f"{stem}.log"
        results.touch()
        environment = {
            **os.environ,
            "ACCEPTANCE_IO": IOS[name],
            "ACCEPTANCE_CALLBACK": "lightning_ckpt:ResumableCheckpoint" if name == RESUMABLE else "",
            "ACCEPTANCE_NEVER_WAIT": "1" if name == NEVER_WAITING else "",
            "ACCEPTANCE_RESULTS": str(results),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": os.pathsep.join(map(str, (site, ROOT / "tools", tests, PACKAGES))),
        }
        command = [str(python), "-m", "pytest", "-p", "acceptance_plugin", "-p", "no:cacheprovider", "-q", "-ra"]
        # Neither the checkout's settings nor ours, so that they are the same for every version.
        command += ["-c", os.devnull, f"--rootdir={tests}", f"--timeout={TEST_TIMEOUT_SECONDS}", "--tb=short"]
        command += [f"--basetemp={output / 'tmp'}", *arguments, *extra]
        with log.open("w", encoding="utf-8") as file:
            try:
                status = subprocess.run(
                    command,
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
        print(f"{name}: {part}: pytest ended with status {status}, see {log.relative_to(ROOT)}", flush=True)
    run.seconds = time.monotonic() - begin
    shutil.rmtree(output / "tmp", ignore_errors=True)
    if IOS[name] and not run.calls["save_checkpoint"]:
        raise AcceptanceError(f"{name} was never called: the swap did not work")
    return run


def report(runs: dict[str, Run]) -> bool:
    """Print the table and the lost tests; return whether there are none, apart from the runs for information."""
    print("\n| default plugin | passed | failed | errors | skipped | saves | loads | removals | time |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, run in runs.items():
        counts = [len(run.passed), len(run.failed), len(run.errors), len(run.skipped)]
        calls = [run.calls[f"{verb}_checkpoint"] if IOS[name] else "" for verb in ("save", "load", "remove")]
        print("|", " | ".join(map(str, [name, *counts, *calls, f"{run.seconds:.0f} s"])), "|")
    stock = runs[STOCK]
    lost = {name: run.lost(stock) for name, run in runs.items() if name != STOCK}
    for name, tests in lost.items():
        print(f"\n{name}: {len(tests)} of the tests that pass on stock do not pass")
        for test in tests:
            print(f"  {test}")
    return not any(tests for name, tests in lost.items() if name not in (NEVER_WAITING, RESUMABLE))


def main() -> int:
    """Run everything and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of Lightning, or its tests/ folder")
    parser.add_argument("--only", choices=list(IOS), help="stock and this row")
    parser.add_argument("--whole", action="store_true", help="all of Lightning's tests, only with stock's plugin")
    options, extra = parser.parse_known_args()
    try:
        tests = tests_folder(options.checkout)
        install_extra_packages()
        stock_python = make_stock_environment(OUTPUT / "stock_environment")
        runs = {}
        rows = [STOCK, options.only] if options.only else [STOCK, INSTALLED] if options.whole else list(IOS)
        for name in dict.fromkeys(rows):
            python = stock_python if name == STOCK else sys.executable
            runs[name] = run_tests(name, tests, python, extra, whole=options.whole)
        if not runs[STOCK].passed:
            raise AcceptanceError("nothing passes on stock: see .acceptance/stock")
    except (AcceptanceError, StockEnvironmentError) as error:
        print(f"acceptance: {error}", file=sys.stderr)
        return 2
    return 0 if report(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
