"""Real runs by ``accelerate launch`` with the configurations and examples of this repository: killed and resumed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from ckpt_core import Catalog
from tests.support.accelerate_ranks import LAUNCHER
from tests.support.fork_server import ACCELERATE as MODULES

pytest.importorskip("sklearn", reason="the examples train on its digits")

ROOT = Path(__file__).parents[2]
CONFIGS, EXAMPLES = ROOT / "configs/accelerate", ROOT / "examples/accelerate"
ACCELERATE = Path(sysconfig.get_path("scripts")) / "accelerate"
FLAG = ("-m", "accelerate_ckpt", "--config", str(CONFIGS / "checkpoints.yaml"))
LONG = ("--epochs", "6")

RunScript = Callable[..., "subprocess.CompletedProcess[str]"]


def words(config: str, *more: str) -> list[str]:
    # Any free port: tests of several workers on one machine must not meet at the default one.
    return ["launch", "--config_file", str(CONFIGS / config), "--main_process_port", "0", *more]


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def weights_of(done: subprocess.CompletedProcess[str]) -> str:
    (found,) = re.findall(r"^weights ([0-9a-f]{64})$", done.stdout, re.MULTILINE)
    return found


@contextlib.contextmanager
def running(*command: str, cwd: Path, before: Sequence[str] = ()) -> Iterator[subprocess.Popen[str]]:
    """Launch, and kill all processes at the end; Accelerate starts them in their own sessions."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    log = (cwd / "killed.log").open("w")
    with (
        log,
        subprocess.Popen(
            [*before, sys.executable, str(ACCELERATE), *command],
            cwd=cwd,
            env=environment,
            stdout=log,
            stderr=log,
            text=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            family = [psutil.Process(process.pid)] if process.poll() is None else []
            # The launcher first: otherwise it would clean up after its workers.
            for member in [*family, *(child for parent in family for child in parent.children(recursive=True))]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()


def kill_after(checkpoint: Path, *command: str, cwd: Path) -> None:
    with running(*command, cwd=cwd) as process:
        deadline = time.monotonic() + 250
        while process.poll() is None and not (checkpoint / "manifest.json").exists():
            assert time.monotonic() < deadline, f"no checkpoint:\n{(cwd / 'killed.log').read_text()}"
            time.sleep(0.001)
        assert process.poll() is None, f"ended before it could be killed:\n{(cwd / 'killed.log').read_text()}"


def newest_in(directory: Path) -> Path:
    newest = Catalog(directory, suffix="").newest_verified()
    assert newest is not None
    return Path(newest.path)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["one_process.yaml", "two_processes.yaml"])
def test_a_script_that_knows_nothing_of_us_goes_on_bit_for_bit(
    config: str, run_script: RunScript, tmp_path: Path
) -> None:
    script = (str(EXAMPLES / "train.py"), *LONG, "--output_dir")
    stock = run_script(ACCELERATE, *words(config, *script, "stock"))
    kill_after(tmp_path / "ours/step_40", *words(config, *FLAG, *script, "ours"), cwd=tmp_path)
    newest = newest_in(tmp_path / "ours")
    last = words(config, *FLAG, *script, "ours", "--resume_from", str(newest))
    resumed = run_script(ACCELERATE, *last)
    assert f"resumed at step {newest.name.removeprefix('step_')}" in resumed.stdout
    # Both at once: the flag does not change the training, and neither does the kill.
    assert weights_of(resumed) == weights_of(stock)
    saved = {path.name for path in (tmp_path / "stock").iterdir()}
    assert {path.name for path in (tmp_path / "ours").iterdir()} == saved and len(saved) >= 8
    assert {path.parent.name for path in tmp_path.glob("*/*/manifest.json")} == saved
    assert not any((tmp_path / "stock").glob("*/manifest.json"))


@pytest.mark.slow
def test_a_script_that_attaches_goes_on_by_itself(run_script: RunScript, tmp_path: Path) -> None:
    script = (str(EXAMPLES / "train_attached.py"), *LONG, "--project_dir")
    whole = run_script(ACCELERATE, *words("one_process.yaml", *script, "whole"))
    third = tmp_path / "parts/checkpoints/checkpoint_2"
    kill_after(third, *words("one_process.yaml", *script, "parts"), cwd=tmp_path)
    # With our launcher as well: the two integrations do not interfere.
    resumed = run_script(ACCELERATE, *words("one_process.yaml", *FLAG, *script, "parts"))
    assert "resumed in epoch" in resumed.stdout
    assert weights_of(resumed) == weights_of(whole)
    assert len(os.listdir(tmp_path / "parts/checkpoints")) == 2


SAVE_AND_END = """
    import sys
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(512, 512))
    accelerator.save_state(sys.argv[1])
    if len(sys.argv) > 2:
        raise LookupError(sys.argv[2])
"""


def test_a_checkpoint_under_way_is_finished_when_the_script_raises(fork_script: RunScript, tmp_path: Path) -> None:
    train = tmp_path / "train.py"
    train.write_text(textwrap.dedent(SAVE_AND_END))
    done = fork_script(
        LAUNCHER,
        *words("one_process.yaml", "--quiet", "-m", "accelerate_ckpt", str(train), "saved/last", "no more data"),
        modules=MODULES,
        check=False,
    )
    assert done.returncode == 1
    traceback = done.stderr[done.stderr.index("Traceback") :]
    assert re.findall(r'File "(.+?)"', traceback) == [str(train)]
    assert traceback.rstrip().endswith("LookupError: no more data")
    assert newest_in(tmp_path / "saved").name == "last"


def test_a_last_save_that_fails_fails_the_run(fork_script: RunScript, tmp_path: Path) -> None:
    # Smaller than the checkpoint: the background save fails after the script has reached its end.
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
    (tmp_path / "train.py").write_text(limit + textwrap.dedent(SAVE_AND_END) + "print('through')\n")
    launched = words("one_process.yaml", "--quiet", "-m", "accelerate_ckpt", "train.py", "saved/last")
    done = fork_script(LAUNCHER, *launched, modules=MODULES, check=False)
    assert (done.returncode, done.stdout) == (1, "through\n")
    assert re.search(r"^ckpt_core\.errors\.StorageError: .*File too large", done.stderr, re.MULTILINE)
    assert Catalog(tmp_path / "saved", suffix="").checkpoints() == []


@pytest.mark.slow
def test_options_reach_the_checkpoints_a_flag_before_a_variable_before_the_file(
    run_script: RunScript, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SAVE_AND_END))
    (tmp_path / "options.yaml").write_text("event_log: by_file.jsonl\n")
    from_file = {"ACCELERATE_CKPT_CONFIG": "options.yaml"}
    from_both = {**from_file, "ACCELERATE_CKPT_EVENT_LOG": "by_variable.jsonl"}
    for name, flags, variables in (
        ("by_file", (), from_file),
        ("by_flag", ("--event_log", "by_flag.jsonl"), from_both),
    ):
        launched = words("one_process.yaml", "-m", "accelerate_ckpt", *flags, "train.py", f"saved/{name}")
        run_script(ACCELERATE, *launched, env=variables)
        events = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert [Path(event["path"]).name for event in events if event["event"] == "SaveCommitted"] == [name]
    assert not (tmp_path / "by_variable.jsonl").exists()


UNTIL_TOLD = """
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator()
    model, data = torch.nn.Linear(4, 1), torch.utils.data.DataLoader(torch.ones(1_000_000, 4))
    model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters()), data)
    accelerator.load_state()
    for step, batch in enumerate(data):
        accelerator.backward(model(batch).sum())
        optimizer.step()
        if step == 3:
            open(f"trains.{accelerator.process_index}", "w").close()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("config", "world_size"), [("one_process.yaml", 1), ("two_processes.yaml", 2)])
def test_a_launcher_that_ignores_the_signal_of_slurm_waits_until_its_ranks_have_saved(
    config: str, world_size: int, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(UNTIL_TOLD))
    options = ("-m", "accelerate_ckpt", "--resume", "auto", "--preempt", "SIGTERM,SIGUSR1", "train.py")
    ignoring = ("bash", "-c", 'trap "" USR1; exec "$@"', "bash")  # as the page about unattended runs shows it
    with running(*words(config, *options), cwd=tmp_path, before=ignoring) as launcher:
        deadline = time.monotonic() + 250
        while len(list(tmp_path.glob("trains.*"))) < world_size:
            assert launcher.poll() is None and time.monotonic() < deadline, (tmp_path / "killed.log").read_text()
            time.sleep(0.01)
        for process in [psutil.Process(launcher.pid), *psutil.Process(launcher.pid).children(recursive=True)]:
            process.send_signal(signal.SIGUSR1)  # SLURM sends it to all processes of a job step
        assert launcher.wait(250) == 1
    assert newest_in(tmp_path / "checkpoints").name.startswith("checkpoint_")
