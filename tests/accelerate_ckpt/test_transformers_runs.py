"""The example with ``transformers.Trainer``: killed, resumed, and compared bit for bit with the Trainer alone."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ckpt_core import Catalog

pytest.importorskip("transformers", reason="the optional extra is not installed")

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/accelerate/transformers_trainer.py"
ACCELERATE = Path(sysconfig.get_path("scripts")) / "accelerate"
TWO = ("launch", "--config_file", str(ROOT / "configs/accelerate/two_processes.yaml"), "--main_process_port", "0")

RunScript = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))


def result_of(output: str) -> tuple[str, list[str]]:
    (weights,) = re.findall(r"^weights ([0-9a-f]{64})$", output, re.MULTILINE)
    (losses,) = re.findall(r"^losses (.*)$", output, re.MULTILINE)
    return weights, losses.split()


def kill_after(checkpoint: Path, *command: str, cwd: Path) -> None:
    log = cwd / "killed.log"
    with log.open("w") as file, subprocess.Popen(command, cwd=cwd, stdout=file, stderr=file) as process:
        deadline = time.monotonic() + 200
        while process.poll() is None and not (checkpoint / "manifest.json").exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        came = process.poll() is None and (checkpoint / "manifest.json").exists()
        family = [process.pid]
        if process.poll() is None:
            # The launcher first: otherwise it would clean up after its workers.
            family += [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        for member in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
    assert came, f"ended before it could be killed:\n{log.read_text()}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "options"),
    [
        ((), ("--samples", "164")),  # 41 batches: the last window of an epoch is half a one
        ((str(ACCELERATE), *TWO), ("--samples", "320", "--strategy", "sharded")),
    ],
    ids=["one process", "two processes"],
)
def test_a_killed_run_goes_on_bit_for_bit(
    launcher: tuple[str, ...], options: tuple[str, ...], run_script: RunScript, tmp_path: Path
) -> None:
    command = (*launcher, str(EXAMPLE), *options, "--save_steps", "3", "--epochs", "4", "--output_dir")
    # With the Trainer alone: the later --strategy overrides the earlier options.
    program, *rest = (*command, "stock", "--strategy", "stock")
    stock = run_script(Path(program), *rest)
    kill_after(tmp_path / "ours/checkpoint-6", sys.executable, *command, "ours", cwd=tmp_path)
    newest = Catalog(tmp_path / "ours", suffix="").newest_verified()
    assert newest is not None
    step = int(Path(newest.path).name.removeprefix("checkpoint-"))
    assert 6 <= step < 80 and step % 3 == 0
    program, *rest = (*command, "ours")
    resumed = run_script(Path(program), *rest)
    # Both at once: the callback does not change the training, and neither does the kill. The losses of all steps are
    # there, those before the kill from the checkpoint.
    assert result_of(resumed.stdout) == result_of(stock.stdout)
    names = {path.name for path in (tmp_path / "ours").glob("checkpoint-*")}
    assert names == {path.name for path in (tmp_path / "stock").glob("checkpoint-*")} and len(names) == 3
    if launcher:
        alone = run_script(EXAMPLE, "--output_dir", "ours", check=False)
        assert "StateMismatchError: the checkpoint was saved by 2 processes, and this run has 1" in alone.stderr
