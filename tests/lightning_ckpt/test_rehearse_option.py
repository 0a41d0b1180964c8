"""``ResumableCheckpoint(rehearse=...)``: a script rehearses itself in other processes before it trains."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_core.errors import CheckpointError
from ckpt_core.rehearsal import CannotRehearseError
from lightning_ckpt import ResumableCheckpoint, _rehearsing
from tests.conftest import LIGHTNING, ScriptRunner
from tests.lightning_ckpt.exact_cases import Model, make_trainer

SCRIPT = Path(__file__).with_name("rehearsing_script.py")
INEXACT = "a resume of this script would not be exact"


def starts(tmp_path: Path) -> int:
    return len((tmp_path / "starts.txt").read_text().splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_an_exact_script_is_said_to_be_and_trains_as_without(
    tmp_path: Path, run_script: ScriptRunner, devices: int
) -> None:
    told = run_script(SCRIPT, "exact", "yes", devices, timeout=600)
    assert "exact: every resumed run was equal, bit for bit" in told.stderr
    assert INEXACT not in told.stderr
    # this run and three rehearsed ones, which do not rehearse themselves
    assert starts(tmp_path) == 4 * devices
    files = {path.name for path in (tmp_path / "mine").iterdir()}
    assert files == {"last.ckpt", f"epoch=2-step={18 // devices}.ckpt"}
    again = run_script(SCRIPT, "exact", "yes", devices)
    assert "This run resumes, so the script is not rehearsed first." in again.stderr
    assert starts(tmp_path) == 5 * devices
    without = run_script(SCRIPT, "exact", "no", devices, cwd=tmp_path / "mine")
    assert "trained" in told.stdout
    assert told.stdout == without.stdout


@pytest.mark.slow
@pytest.mark.parametrize("rehearse", ["yes", "strict"])
def test_what_differs_is_named_and_only_strict_does_not_train(
    tmp_path: Path, run_script: ScriptRunner, rehearse: str
) -> None:
    told = run_script(SCRIPT, "history", rehearse, timeout=600, check=False)
    assert INEXACT in told.stderr
    assert "defined in: WithHistory (" in told.stderr
    is_strict = rehearse == "strict"
    assert ("CheckpointError: " + INEXACT in told.stderr) == is_strict
    assert ("trained 18 steps" in told.stdout) != is_strict
    assert (told.returncode == 0) == (tmp_path / "mine").exists() == (not is_strict)


def test_a_training_that_does_not_ask_is_not_taken_for_the_one_that_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = SimpleNamespace(callbacks=[ResumableCheckpoint(tmp_path / "mine")])
    monkeypatch.setattr(_rehearsing, "_plan", lambda: SimpleNamespace(by_script=True))
    with pytest.raises(CheckpointError, match="rehearse works only with the first Trainer of a script that fits"):
        _rehearsing._begin(trainer)


@pytest.mark.extended
def test_no_other_training_of_the_script_is_taken_for_the_one_that_asks(
    tmp_path: Path, run_script: ScriptRunner
) -> None:
    told = run_script(SCRIPT, "second", "strict", check=False)
    said = "rehearse works only with the first Trainer of a script that fits"
    assert re.search(rf"\nckpt_core\S*Error: .*{said}", told.stderr)
    assert starts(tmp_path) == 2
    assert told.stdout.count("trained 18 steps") == 1
    assert told.returncode == 1 and not (tmp_path / "mine").exists()


@pytest.mark.parametrize("rehearse", [True, "strict"])
def test_only_strict_does_not_train_where_the_script_cannot_be_rehearsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rehearse: Any
) -> None:
    def cannot(*_: Any, **__: Any) -> None:
        raise CannotRehearseError("it comes second")

    monkeypatch.setattr(_rehearsing, "_command_of_this_process", list)
    monkeypatch.setattr(_rehearsing, "rehearse", cannot)
    monkeypatch.setattr(ResumableCheckpoint, "has_rehearsed", False)
    trainer = make_trainer(tmp_path, [ResumableCheckpoint(tmp_path / "mine", rehearse=rehearse)], max_epochs=1)
    if rehearse is True:
        with pytest.warns(UserWarning, match="no rehearsal before this training: it comes second"):
            trainer.fit(Model({}))
    else:
        with pytest.raises(CannotRehearseError):
            trainer.fit(Model({}))
    assert (trainer.global_step > 0) == (rehearse is True)


def test_what_cannot_be_started_again_is_refused(tmp_path: Path, fork_script: ScriptRunner) -> None:
    code = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); from rehearsing_script import main; main"
    launched = fork_script(
        f"{code}('exact', 'yes', '2')", modules=LIGHTNING, ranks=2, env={"TORCHELASTIC_RUN_ID": "1"}, check=False
    )
    told = "cannot restart the other ranks, which a launcher has started"
    assert launched.stderr.count(told) >= 2  # each rank ends
    prompt = fork_script(f"{code}('exact', 'strict')", modules=LIGHTNING, check=False)
    assert "rehearse starts the script again, but this process (a notebook, a test," in prompt.stderr
    assert "ckpt rehearse -- COMMAND" in prompt.stderr
    assert not (tmp_path / "mine").exists()


def test_a_wrong_value_is_refused() -> None:
    with pytest.raises(ValueError, match="rehearse must be True, False or 'strict', not 'yes'"):
        ResumableCheckpoint(rehearse="yes")  # type: ignore[arg-type]
