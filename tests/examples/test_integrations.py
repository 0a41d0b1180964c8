"""The integrations that the README shows: configuration files, and Fabric."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from ckpt_core import verify
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


@pytest.mark.extended_cells("tiers.yaml-AsyncCheckpointIO")
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


def test_retention_takes_the_same_words_in_yaml_as_elsewhere(tmp_path: Path) -> None:
    cli = pytest.importorskip("lightning.pytorch.cli")
    config = f"""
trainer:
  accelerator: cpu
  logger: false
  enable_progress_bar: false
  max_steps: 10
  plugins: lightning_ckpt.AsyncCheckpointIO
  callbacks:
    class_path: lightning_ckpt.ResumableCheckpoint
    init_args:
      dirpath: {tmp_path}/checkpoints
      filename: "{{step}}"
      every_n_train_steps: 1
      retention: latest=2,every_steps=4
"""
    (tmp_path / "config.yaml").write_text(config)
    command = ["fit", "--config", str(tmp_path / "config.yaml")]
    cli.LightningCLI(BoringModel, args=command, save_config_callback=None)
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("*.ckpt")) == [
        "step=10.ckpt",
        "step=4.ckpt",
        "step=8.ckpt",
        "step=9.ckpt",
    ]


# Sends a script a signal when it has saved so many checkpoints.
ENDED = """
import os, runpy, signal, sys, time
from ckpt_core import Catalog

script, directory, number, count = sys.argv[1], sys.argv[3], int(sys.argv[-2]), int(sys.argv[-1])
child = os.fork()
if child == 0:
    sys.argv = sys.argv[1:-2]
    status = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        status = ended.code
    os._exit(status)
while len(Catalog(directory).checkpoints()) < count:
    assert os.waitpid(child, os.WNOHANG) == (0, 0), "the run ended before it could be ended"
    time.sleep(0.005)
os.kill(child, number)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_fabric_goes_on_after_a_kill(fork_script: RunScript, tmp_path: Path) -> None:
    script = ROOT / "examples/fabric_loop.py"
    whole = fork_script(script, "--output", str(tmp_path / "whole"), "--steps", "600", modules=LIGHTNING).stdout
    command = (str(script), "--output", str(tmp_path / "parts"), "--steps", "600")
    for number, count, status in ((signal.SIGKILL, 3, -signal.SIGKILL), (signal.SIGTERM, 6, 143)):
        ended = fork_script(ENDED, *command, int(number), count, modules=LIGHTNING)
        assert int(ended.stdout.splitlines()[-1]) == status
    resumed = fork_script(script, "--output", str(tmp_path / "parts"), "--steps", "600", modules=LIGHTNING).stdout
    assert "resumed at step" in resumed
    assert resumed.splitlines()[-1] == whole.splitlines()[-1]
    assert whole.splitlines()[-1].startswith("weights ")
