"""``ckpt rehearse`` on a Trainer: an exact script passes, and each defect is reported with its place."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from ckpt_core.cli import main
from ckpt_core.rehearsal import CannotRehearseError, Result, rehearse, running
from ckpt_core.rehearsal.plan import Plan
from ckpt_core.testing import assert_resumes_exactly
from lightning_ckpt._rehearsing import Rehearsal
from tests.conftest import LIGHTNING, ScriptRunner

SCRIPT = Path(__file__).with_name("rehearsed_script.py")
Rehearse = Callable[..., Result]


@pytest.fixture
def forked(fork_script: ScriptRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes from one that has imported Lightning, which saves seconds each."""

    def run(self: object, words: list[str], output: str, plan: Plan) -> int:
        assert words[0] == sys.executable
        script, *arguments = words[1:]
        told = {"modules": LIGHTNING, "env": plan.variables(), "check": False}
        ranks = None if "early" in arguments else plan.ranks
        done = fork_script(Path(script), *arguments, ranks=ranks, **told)
        Path(output).write_text(done.stdout + done.stderr, encoding="utf-8")
        return done.returncode

    monkeypatch.setattr(running._Runs, "_run", run)


def of_case(case: str) -> list[str]:
    return [sys.executable, str(SCRIPT), case]


@pytest.mark.usefixtures("forked")
def test_an_exact_script_is_exact_at_every_point_and_its_own_checkpoints_are_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "last.ckpt").write_bytes(b"of another run")
    result = rehearse(of_case("exact"))
    assert result.is_exact, result.text()
    assert {resumed.point for resumed in result.resumes} == {"middle", "epoch-end", "accumulation", "validation"}
    # two epochs of 6 batches and some more; each resume repeats the steps after its save
    assert result.steps == 16
    assert sorted(resumed.steps for resumed in result.resumes) == [6, 10, 10, 13]
    assert {"data", "weights", "optimizers", "schedulers", "generators", "logged", "attributes"} <= set(result.subjects)
    assert [path.name for path in mine.iterdir()] == ["last.ckpt"]
    assert "exact: every resumed run was equal" in result.text()


@pytest.mark.extended
@pytest.mark.usefixtures("forked")
def test_points_that_the_script_cannot_come_to_are_missed_only_if_they_were_asked_for() -> None:
    result = rehearse(of_case("alone"))
    assert result.is_exact, result.text()
    assert {resumed.point for resumed in result.resumes} == {"middle", "epoch-end"} and result.missed == ()
    assert "did not occur" not in result.text()
    assert rehearse(of_case("alone"), points=["middle", "validation"]).missed == ("validation",)


def test_a_script_that_accumulates_in_a_later_epoch_may_come_to_that_point() -> None:
    plain: Any = SimpleNamespace(accumulate_grad_batches=1, callbacks=[], enable_validation=True)
    later: Any = SimpleNamespace(**{**vars(plain), "callbacks": [GradientAccumulationScheduler({4: 2})]})
    found = [Rehearsal._impossible(SimpleNamespace(), trainer) for trainer in (plain, later)]  # type: ignore[arg-type]
    assert found == [{"accumulation"}, set()]


@pytest.mark.extended
@pytest.mark.usefixtures("forked")
def test_nothing_comes_after_a_training_that_ends_by_itself_in_the_rehearsed_steps() -> None:
    result = rehearse(of_case("short"), points=["middle"])
    assert result.is_exact, result.text()
    assert result.steps == 6 + 1, "of an epoch, and its end"


@pytest.mark.sampled(1)
@pytest.mark.extended_cells("generators-generators-named3", "moments-weights-named4")
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("case", "subject", "named"),
    [
        ("clock", "data", ["ByTheClock (", "checkpoint differs here, too", "set a seed before anything is drawn"]),
        ("history", "data", ["WithHistory (", "rehearsed_script.py:SEEN", "has state that no checkpoint holds"]),
        ("annealed", "loss", ["Annealed.factor: 0.9 instead of 0.3", "Annealed (", "the resumed run said: "]),
        ("generators", "generators", ["torch: uint8["]),
        ("moments", "weights", ["after that: ", "optimizers (step 10)"]),
    ],
)
def test_a_defect_is_named_with_its_first_step_and_its_place(case: str, subject: str, named: list[str]) -> None:
    with pytest.raises(AssertionError) as failed:
        assert_resumes_exactly(of_case(case), at=[9], steps=11)
    text = str(failed.value)
    assert f"first difference: step 10 (epoch 1, batch 3)\n  {running.SUBJECTS[subject]}:\n" in text, text
    for words in named:
        assert words in text


@pytest.mark.usefixtures("forked")
def test_what_only_tells_of_a_run_and_is_another_in_each_process_is_no_difference() -> None:
    result = rehearse(of_case("timed"), at=[3], steps=5)
    assert result.is_exact, result.text()
    assert result.repeats == {"attributes:Timed.began"}


@pytest.mark.extended_cells("exact-each once", "repeats-4 AGAIN")
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("case", "samples"), [("exact", "each once"), ("loses", "4 LOST"), ("repeats", "4 AGAIN")])
def test_two_ranks_that_continue_an_epoch_are_to_have_each_sample_once(case: str, samples: str) -> None:
    result = rehearse(of_case(case), points=["middle", "accumulation"], ranks=[2])
    *same, shared = result.resumes
    assert all(resumed.is_exact and resumed.ranks is None for resumed in same), result.text()
    assert (shared.point, shared.ranks, shared.samples) == ("middle", 2, samples), result.text()
    assert result.is_exact == (case == "exact")
    told = "with 2 ranks: each sample of the epoch was handed out once"
    assert (told in result.text()) == (case == "exact")
    assert ("  resumed by 2 ranks: of 24 samples 4 " in result.text()) == (case != "exact")


@pytest.mark.extended
@pytest.mark.usefixtures("forked")
def test_a_script_that_sets_the_number_of_ranks_itself_is_said_to() -> None:
    with pytest.raises(
        CannotRehearseError, match=r"(?s)3 ranks should have resumed, but 1 did.*--resume-with '--devices"
    ):
        rehearse(of_case("early"), at=[8], steps=13, ranks=[3])


def test_the_number_of_ranks_is_that_of_the_launcher() -> None:
    given = ["torchrun", "--nproc_per_node", "4", "train.py", "--nproc_per_node", "2"]
    assert running._with_ranks(given, 3) == ["torchrun", "--nproc-per-node=3", "train.py", "--nproc_per_node", "2"]
    given = ["python", "-m", "torch.distributed.run", "--nproc-per-node=4", "train.py"]
    assert running._with_ranks(given, 3)[3:] == ["--nproc-per-node=3", "train.py"]
    given = ["/bin/accelerate", "launch", "--cpu", "-n", "4", "-m", "accelerate_ckpt", "train.py"]
    there = ["launch", "--cpu", "--num_processes=3", "-m", "accelerate_ckpt", "train.py"]
    assert running._with_ranks(given, 3)[1:] == there
    assert running._with_ranks(["accelerate", "launch", "train.py"], 3)[2:] == ["--num_processes=3", "train.py"]
    assert running._with_ranks(["python", "train.py"], 3) == ["python", "train.py"]


@pytest.mark.extended
@pytest.mark.usefixtures("forked")
def test_what_is_ignored_is_not_compared() -> None:
    loss = ["loss:*", "gradients:*", "weights:*", "optimizers:*", "logged:*", "attributes:Annealed.*"]
    assert rehearse(of_case("annealed"), at=[3], steps=5, ignore=loss).is_exact


@pytest.mark.extended
@pytest.mark.usefixtures("forked")
def test_the_command_says_it_in_json_and_by_its_exit_code(tmp_path: Path) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        options = ["--json", "--at", "2", "--steps", "4", "--keep", str(tmp_path / "kept")]
        code = main(["rehearse", *options, "--", *of_case("history")])
    found = json.loads(printed.getvalue())
    assert code == 1
    assert found["exact"] is False
    assert found["resumes"][0]["differences"][0]["subject"] == "data"
    assert (tmp_path / "kept" / "uninterrupted" / "output.txt").is_file()


def test_what_cannot_be_rehearsed_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "other.py"
    script.write_text("print('no Trainer')")
    with pytest.raises(CannotRehearseError, match="no Trainer"):
        rehearse([sys.executable, str(script)])
    assert main(["rehearse", "--", sys.executable, str(script)]) == 3
    assert main(["rehearse", "--points", "noon", "--", sys.executable, str(script)]) == 2
    assert "there is no point 'noon'" in capsys.readouterr().err
    assert main(["rehearse", "--ranks", "2,0", "--", sys.executable, str(script)]) == 2
    assert "ranks must be numbers of at least 1, not [2, 0]" in capsys.readouterr().err


def test_a_function_is_called_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trains.py").write_text("def train():\n    raise RuntimeError('called')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CannotRehearseError, match="RuntimeError: called"):
        assert_resumes_exactly(importlib.import_module("trains").train)
    with pytest.raises(ValueError, match="at the top of a module"):
        assert_resumes_exactly(lambda: None)
