"""The ways in that the README shows: configuration files, and Fabric."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckpt_core import Catalog, verify
from tests.conftest import LIGHTNING

ROOT = Path(__file__).parents[2]
RunScript = Callable[..., "subprocess.CompletedProcess[str]"]

pytest.importorskip("jsonargparse")


def fit(fork_script: RunScript, directory: Path, config: str, *more: str) -> None:
    directory.mkdir(exist_ok=True)
    fork_script(
        ROOT / "examples/lightning_cli/main.py",
        "fit",
        "--config",
        str(ROOT / "configs/lightning" / config),
        "--trainer.enable_progress_bar=false",
        "--data.characters=4000",
        *more,
        modules=LIGHTNING,
        cwd=directory,
        timeout=240,
    )


def assert_same_training(first: Path, second: Path) -> None:
    one, two = (torch.load(path / "checkpoints/last.ckpt", weights_only=True) for path in (first, second))
    assert one["global_step"] == two["global_step"] > 0
    for name, weight in one["state_dict"].items():
        assert torch.equal(weight, two["state_dict"][name]), name
    moments = zip(*(c["optimizer_states"][0]["state"].values() for c in (one, two)), strict=True)
    for expected, found in moments:
        assert torch.equal(expected["exp_avg"], found["exp_avg"])


@pytest.mark.parametrize(
    ("config", "io"),
    [
        ("plugins.yaml", "AsyncCheckpointIO"),
        pytest.param("strategy.yaml", "SyncCheckpointIO", marks=pytest.mark.slow),
        ("tiers.yaml", "AsyncCheckpointIO"),
    ],
)
def test_a_run_by_configuration_alone_resumes_bit_for_bit(
    config: str, io: str, fork_script: RunScript, tmp_path: Path
) -> None:
    assert f"lightning_ckpt.{io}" in (ROOT / "configs/lightning" / config).read_text()
    saving = "--trainer.callbacks.every_n_train_steps=10"
    fit(fork_script, tmp_path / "whole", config, saving, "--trainer.max_steps=40")
    fit(fork_script, tmp_path / "parts", config, saving, "--trainer.max_steps=20")
    assert verify(tmp_path / "parts/checkpoints/last.ckpt")
    fit(fork_script, tmp_path / "parts", config, saving, "--trainer.max_steps=40", "--ckpt_path=last")
    assert_same_training(tmp_path / "whole", tmp_path / "parts")


def test_fabric_goes_on_after_a_kill(fork_script: RunScript, tmp_path: Path) -> None:
    script = ROOT / "examples/fabric_loop.py"
    whole = fork_script(script, "--output", str(tmp_path / "whole"), "--steps", "600", modules=LIGHTNING).stdout
    command = [sys.executable, str(script), "--output", str(tmp_path / "parts"), "--steps", "600"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for number, count in ((signal.SIGKILL, 3), (signal.SIGTERM, 6)):
        with subprocess.Popen(command, env=environment, start_new_session=True) as process:
            while process.poll() is None and len(Catalog(tmp_path / "parts").checkpoints()) < count:
                time.sleep(0.001)
            assert process.poll() is None, "the run ended before it could be ended"
            os.killpg(process.pid, number)
            assert process.wait(60) == (143 if number == signal.SIGTERM else -signal.SIGKILL)
    resumed = fork_script(script, "--output", str(tmp_path / "parts"), "--steps", "600", modules=LIGHTNING).stdout
    assert "resumed at step" in resumed
    assert resumed.splitlines()[-1] == whole.splitlines()[-1]
    assert whole.splitlines()[-1].startswith("weights ")
