"""``accelerate-ckpt``: Accelerate's own flags and ours in one command, and the parts of Accelerate in it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser

from accelerate_ckpt import cli
from accelerate_ckpt._private import command_line
from tests.support.fork_server import ACCELERATE

RunScript = Callable[..., "subprocess.CompletedProcess[str]"]
COMMAND = "from accelerate_ckpt.cli import main; main()"

SCRIPT = """
import json, pathlib, sys
from accelerate import Accelerator

accelerator = Accelerator()
seen = [accelerator.num_processes, sys.argv[1:], hasattr(accelerator.save_state, "__wrapped__")]
pathlib.Path(f"rank-{accelerator.process_index}.json").write_text(json.dumps(seen))
accelerator.wait_for_everyone()
"""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[argparse.Namespace]:
    """Return what would be passed to Accelerate's launcher; no processes are started."""
    calls: list[argparse.Namespace] = []
    monkeypatch.setattr(command_line, "launch_command", calls.append)
    return calls


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.extended
def test_a_launch_with_flags_of_both(fork_script: RunScript, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["--cpu", "--num-processes", "1", "--num_machines=1", "--main_process_port", "0"]
    words += ["--ckpt-strategy", "sync", "--ckpt_max_pending=2"]
    environment = {"ACCELERATE_USE_CPU": "true"}
    fork_script(COMMAND, *words, "train.py", "--lr", "1", modules=ACCELERATE, env=environment)
    assert json.loads((tmp_path / "rank-0.json").read_text()) == [1, ["--lr", "1"], True]


def test_the_rest_is_what_accelerate_makes_of_it(launched: list[argparse.Namespace]) -> None:
    words = ["--multi_gpu", "--num_processes", "4", "--mixed-precision", "bf16"]
    cli.main([*words, "--ckpt_wait", "true", "-m", "package.train", "--lr", "1", "--ckpt_strategy", "the script's"])
    expected = launch_command_parser().parse_args(
        [*words, "-m", "accelerate_ckpt", "--wait=true", "-m", "package.train"]
    )
    expected.training_script_args += ["--lr", "1", "--ckpt_strategy", "the script's"]
    ours = {name for name in vars(launched[0]) if name.startswith("ckpt_")}
    assert {name: value for name, value in vars(launched[0]).items() if name not in ours | {"nondefault"}} == {
        name: value for name, value in vars(expected).items() if name != "nondefault"
    }
    assert launched[0].nondefault - ours == expected.nondefault


def test_without_flags_nothing_is_passed_on(launched: list[argparse.Namespace]) -> None:
    cli.main(["train.py"])
    assert (launched[0].training_script, launched[0].module) == ("accelerate_ckpt", True)
    assert launched[0].training_script_args == ["train.py"]


@pytest.mark.parametrize("words", [["--help"], ["--multi_gpu", "--use_fsdp", "--help"]])
def test_the_help_shows_ours_beside_accelerates(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["accelerate-ckpt", *words])  # Accelerate's formatter reads it
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and shown.startswith("usage: accelerate-ckpt")
    assert "--num_processes" in shown and "--ckpt_strategy {sync,async,sharded}" in shown
    assert "(default: async)" in shown and "--ckpt_storage_options JSON" in shown and "--ckpt_config FILE" in shown


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ["--ckpt_strategy", "asinc", "train.py"],
            "--ckpt_strategy: strategy must be one of 'sync', 'async', 'sharded'",
        ),
        (
            ["--ckpt_max_pending", "0", "train.py"],
            "--ckpt_max_pending: max_pending must be a whole number of at least 1",
        ),
        (["--ckpt_config", "missing.yaml", "train.py"], "--ckpt_config: missing.yaml cannot be read"),
        (["--ckpt_stratgy", "sync", "train.py"], "unrecognized arguments: --ckpt_stratgy"),
        (["--no_python", "train"], "--no_python: the script must be run by Python"),
    ],
)
def test_a_wrong_flag_ends_before_a_process_is_started(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str], launched: list[argparse.Namespace]
) -> None:
    assert f"accelerate-ckpt: error: {error}" in error_of(capsys, *words)
    assert launched == []


def test_a_wrong_variable_ends_before_a_process_is_started(
    capsys: pytest.CaptureFixture[str], launched: list[argparse.Namespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_CKPT_ON_ERROR", "panic")
    assert "ACCELERATE_CKPT_ON_ERROR: on_error must be one of" in error_of(capsys, "train.py")
    assert launched == []


def test_what_we_use_of_accelerates_parser_is_where_it_was() -> None:
    parser = command_line.launch_parser("Some Title")
    given = parser.parse_args(["--multi_gpu", "-m", "train", "--lr", "1"])
    assert (given.training_script, given.training_script_args) == ("train", ["--lr", "1"])
    assert (given.module, bool(given.no_python), given.multi_gpu) == (True, False, True)
    assert "Some Title" in parser.formatter_class("accelerate-ckpt").titles  # type: ignore[attr-defined]


def test_a_release_that_has_moved_the_parser_is_answered_with_the_other_way(fork_script: RunScript) -> None:
    done = fork_script(
        textwrap.dedent(
            """
            import accelerate.commands.launch as launch
            del launch.launch_command_parser
            import accelerate_ckpt.cli
            """
        ),
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: Accelerate ") and "launch_command_parser" in last
    assert "use 'accelerate launch [flags] -m accelerate_ckpt [options] train.py' instead" in last
