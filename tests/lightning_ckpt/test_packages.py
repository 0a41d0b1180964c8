"""The callback and the plugins work with both packages of Lightning, also where only one of them is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.cli import LightningCLI

from ckpt_core import verify
from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint, SyncCheckpointIO
from lightning_ckpt.io import STATE_KEY
from tests.conftest import ScriptRunner
from tests.lightning_ckpt.reliable_cases import BATCHES, NUMBERS, model_of, names, trainer_of

PACKAGES = ["lightning.pytorch", "pytorch_lightning"]
PLUGINS = [SyncCheckpointIO, AsyncCheckpointIO]
LOSSES = (5.0, 3.0, 1.0, 2.0, 4.0, 6.0)

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::UserWarning:pytorch_lightning"),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("package", PACKAGES)
def test_a_trainer_of_either_package(package: str, plugin: type[Any], tmp_path: Path) -> None:
    saved = tmp_path / "saved"

    def trainer(**options: Any) -> Any:
        callback = ResumableCheckpoint(
            saved, every_n_train_steps=1, monitor="loss", filename="{step}", save_last=True, save_top_k=2
        )
        made = trainer_of(tmp_path, [callback], package=package, plugins=[plugin()], **options)
        assert made.checkpoint_callbacks == [callback]
        return made

    first = trainer(max_steps=4)
    assert type(first.strategy.checkpoint_io) is plugin
    model = model_of(package, metrics=LOSSES)
    assert type(model).__mro__[1].__module__.startswith(package)
    first.fit(model)
    assert names(saved) == ["last.ckpt", "step=3.ckpt", "step=4.ckpt"]
    for path in saved.iterdir():
        assert verify(path)
        assert STATE_KEY in torch.load(path)

    second = trainer(max_epochs=1)
    second.fit(again := model_of(package, metrics=LOSSES), ckpt_path="last")
    assert again.batches == BATCHES - 4
    assert torch.equal(again.weight, torch.full((NUMBERS,), float(BATCHES)))
    assert torch.load(saved / "last.ckpt")["global_step"] == BATCHES

    third = trainer(limit_val_batches=1)
    third.validate(fresh := model_of(package), ckpt_path="best", verbose=False)
    assert third.ckpt_path == str(saved / "step=3.ckpt")
    assert torch.equal(fresh.weight, torch.full((NUMBERS,), 3.0))


@pytest.mark.parametrize("package", PACKAGES)
def test_a_stock_callback_beside_ours_carries_the_exact_state(package: str, tmp_path: Path) -> None:
    stock = importlib.import_module(package).callbacks.ModelCheckpoint(
        tmp_path / "stock", every_n_train_steps=3, filename="{step}"
    )
    ours = ResumableCheckpoint(tmp_path / "ours", every_n_train_steps=3, filename="{step}")
    trainer_of(tmp_path, [stock, ours], package=package, plugins=[AsyncCheckpointIO()], max_epochs=1).fit(
        model_of(package)
    )
    for folder in ("stock", "ours"):
        assert STATE_KEY in torch.load(tmp_path / folder / "step=6.ckpt")


# ---- one of the two packages
# ------------------------------------------------------------------------------------------

ONLY = """
import sys
from pathlib import Path

missing = sys.argv[1].split(",")


class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Missing())
"""

TRAINS = """
import importlib
from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint, SyncCheckpointIO

package = sys.argv[2]
pl = importlib.import_module(package)
for cls, base in (
    (ResumableCheckpoint, pl.callbacks.ModelCheckpoint),
    (SyncCheckpointIO, pl.plugins.CheckpointIO),
    (AsyncCheckpointIO, pl.plugins.CheckpointIO),
):
    assert issubclass(cls, base), cls
from tests.lightning_ckpt.reliable_cases import model_of, trainer_of

trainer = trainer_of(
    Path.cwd(),
    [ResumableCheckpoint("saved", every_n_train_steps=2, filename="{step}", save_last=True)],
    package=package,
    plugins=[AsyncCheckpointIO()],
)
trainer.fit(model_of(package))
assert not [name for name in sys.modules if name.split(".")[0] in missing]
"""


@pytest.mark.extended_cells("lightning.pytorch-pytorch_lightning,lightning_fabric")
@pytest.mark.parametrize(
    ("package", "missing"),
    [("lightning.pytorch", "pytorch_lightning,lightning_fabric"), ("pytorch_lightning", "lightning")],
)
def test_with_only_one_of_the_two_packages(package: str, missing: str, tmp_path: Path, fork_script: Any) -> None:
    fork_script(ONLY + TRAINS, missing, package)
    assert names(tmp_path / "saved") == ["last.ckpt", "step=12.ckpt"]
    for path in (tmp_path / "saved").iterdir():
        assert verify(path)


def test_without_lightning_it_says_what_to_install(fork_script: Any) -> None:
    failed = fork_script(
        ONLY + "from lightning_ckpt import ResumableCheckpoint",
        "lightning,pytorch_lightning,lightning_fabric",
        check=False,
    )
    assert failed.returncode == 1
    assert "pip install '.[lightning]' or '.[pytorch-lightning]'" in failed.stderr


def test_what_a_package_itself_lacks_is_not_taken_for_its_absence(fork_script: Any) -> None:
    failed = fork_script(ONLY + "from lightning_ckpt import ResumableCheckpoint", "lightning_utilities", check=False)
    assert failed.returncode == 1
    assert "No module named 'lightning_utilities'" in failed.stderr.splitlines()[-1]


# ---- the command line
# -------------------------------------------------------------------------------------------------

CONFIGURATION = """
trainer:
  accelerator: cpu
  devices: 1
  max_epochs: 1
  logger: false
  enable_progress_bar: false
  limit_val_batches: 0
  callbacks:
    - class_path: lightning_ckpt.ResumableCheckpoint
      init_args: {dirpath: saved, every_n_train_steps: 2, filename: "{step}", save_last: true, data_resume: replay}
  plugins:
    - class_path: lightning_ckpt.AsyncCheckpointIO
      init_args: {max_pending: 2, on_error: warn, event_log: events.jsonl}
"""

CommandLine = Callable[..., Any]


@pytest.fixture
def command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "config.yaml").write_text(CONFIGURATION)

    def run(*arguments: str) -> Any:
        return LightningCLI(type(model_of()), args=list(arguments), save_config_callback=None)

    return run


@pytest.mark.parametrize(
    ("option", "name", "documented"),
    [
        (
            "callbacks",
            "ResumableCheckpoint",
            ["dirpath DIRPATH", "Directory of the checkpoints", "data_resume {auto,replay}", "How loaders get back"],
        ),
        (
            "plugins",
            "AsyncCheckpointIO",
            [
                "on_error {raise,warn}",
                "What to do when a background save fails",
                "max_pending MAX_PENDING",
                "How many saves",
            ],
        ),
        ("plugins", "SyncCheckpointIO", ["storage_options STORAGE_OPTIONS", "Passed to fsspec", "event_log EVENT_LOG"]),
    ],
)
def test_the_command_line_documents_the_arguments(
    command_line: CommandLine, capsys: pytest.CaptureFixture[str], option: str, name: str, documented: list[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command_line("fit", f"--trainer.{option}.help", f"lightning_ckpt.{name}")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for words in documented:
        assert words in shown


def test_the_command_line_trains_and_goes_on(command_line: CommandLine, tmp_path: Path) -> None:
    first = command_line("fit", "--config", "config.yaml").trainer
    assert type(first.strategy.checkpoint_io) is AsyncCheckpointIO
    assert first.checkpoint_callback.data_resume == "replay"
    saved = tmp_path / "saved"
    assert names(saved) == ["last.ckpt", "step=6.ckpt"]
    second = command_line("fit", "--config", "config.yaml", "--trainer.max_epochs", "2", "--ckpt_path", "last")
    assert second.model.batches == BATCHES
    state = torch.load(saved / "last.ckpt")
    assert state["global_step"] == 2 * BATCHES
    assert torch.equal(state["state_dict"]["weight"], torch.full((NUMBERS,), 2.0 * BATCHES))


def test_the_command_line_refuses_wrong_arguments(
    command_line: CommandLine, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command_line("fit", "--config", "config.yaml", "--trainer.plugins.init_args.on_error", "ignore")
    assert ended.value.code == 2
    assert "on_error" in capsys.readouterr().err


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("given", "signals", "looks"),
    [
        ("[SIGTERM, SIGUSR1]", ("SIGTERM", "SIGUSR1"), 1.0),
        ('"SIGTERM,SIGUSR1"', ("SIGTERM", "SIGUSR1"), 1.0),
        ("{signals: SIGUSR1, look_every: 3}", ("SIGUSR1",), 3.0),
        ("{class_path: ckpt_core.preemption.Preemption, init_args: {signals: [SIGUSR2]}}", ("SIGUSR2",), 1.0),
        ("true", ("SIGTERM",), 1.0),
    ],
)
def test_a_configuration_says_on_what_to_save_and_end_as_a_program_does(
    command_line: CommandLine, tmp_path: Path, given: str, signals: tuple[str, ...], looks: float
) -> None:
    options = CONFIGURATION.replace("data_resume: replay", f"data_resume: replay, preempt: {given}")
    (tmp_path / "config.yaml").write_text(options)
    trainer = command_line("fit", "--config", "config.yaml", "--trainer.fast_dev_run", "false").trainer
    preemption = trainer.checkpoint_callback._preemption
    assert (preemption.signals, preemption.look_every) == (signals, looks)


@pytest.mark.extended
@pytest.mark.parametrize("package", PACKAGES)
def test_messages_stay_with_the_logger_of_the_package_that_is_used(package: str, fork_script: ScriptRunner) -> None:
    code = f"""
import {package}
from lightning_utilities.core import rank_zero
before = rank_zero.log.name
import lightning_ckpt
print(before, rank_zero.log.name)
"""
    before, after = fork_script(code).stdout.split()
    assert before == after == f"{package}.utilities.rank_zero"


@pytest.mark.extended
def test_messages_go_to_lightning_if_no_package_was_imported(fork_script: ScriptRunner) -> None:
    code = "import lightning_ckpt; from lightning_utilities.core import rank_zero; print(rank_zero.log.name)"
    assert fork_script(code).stdout.split() == ["lightning.pytorch.utilities.rank_zero"]
