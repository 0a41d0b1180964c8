"""``ckpt rehearse`` on a script with its own loop: an exact script passes, and each defect is reported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ckpt_core.rehearsal import SUBJECTS, CannotRehearseError, Result, rehearse, running
from ckpt_core.rehearsal.plan import Plan
from tests.conftest import ACCELERATE, ScriptRunner

SCRIPT = Path(__file__).with_name("rehearsed_script.py")
TRAINER = Path(__file__).with_name("rehearsed_trainer.py")
#: Imports of the script with the Trainer, which take longer than its training.
OF_TRAINER = ("transformers.trainer", "tensorboardX", "accelerate_ckpt.integrations.transformers")


@pytest.fixture
def forked(fork_script: ScriptRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes from one that has imported Accelerate, which saves seconds each."""

    def run(self: object, words: list[str], output: str, plan: Plan) -> int:
        script, *arguments = words[1:]
        modules = (*ACCELERATE, *OF_TRAINER) if script == str(TRAINER) else ACCELERATE
        told = {"modules": modules, "env": {**plan.variables(), "ACCELERATE_USE_CPU": "true"}, "check": False}
        done = fork_script(Path(script), *arguments, ranks=plan.ranks, **told)
        Path(output).write_text(done.stdout + done.stderr, encoding="utf-8")
        return done.returncode

    monkeypatch.setattr(running._Runs, "_run", run)


def rehearsed(case: str, *, steps: int | None = None, at: tuple[int, ...] = ()) -> Result:
    resume = [] if case == "auto" else ["{checkpoint}"]
    return rehearse([sys.executable, str(SCRIPT), case], steps=steps, at=at, resume_arguments=resume)


@pytest.mark.extended
@pytest.mark.usefixtures("forked")
def test_points_that_are_asked_for_are_tried_in_place_of_the_scripts_own() -> None:
    points = ["middle", "epoch-end", "accumulation", "validation"]
    command = [sys.executable, str(SCRIPT), "accumulates"]
    result = rehearse(command, points=points, resume_arguments=["{checkpoint}"])
    assert result.is_exact, result.text()
    assert [(resumed.point, resumed.place) for resumed in result.resumes] == [
        ("accumulation", "step 0"),
        ("epoch-end", "step 6"),
        ("middle", "step 7"),
    ]
    assert result.missed == ("validation",)


@pytest.mark.sampled(1)
@pytest.mark.extended_cells("exact-26-points0")
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("case", "steps", "points"),
    [
        # two epochs of 12 batches and some more; the script saves after every seventh
        ("exact", 26, [("save_state", 19), ("save_state", 12), ("save_state", 5)]),
        # also inside a window: 7 batches are three and a half steps
        ("accumulates", 14, [("save_state", 11), ("save_state", 7), ("save_state", 4)]),
        # a script that does not save, and that looks for its newest checkpoint itself
        ("auto", 26, [("middle", 13)]),
    ],
)
def test_an_exact_script_is_exact_and_its_own_directory_left_alone(
    tmp_path: Path, case: str, steps: int, points: list[tuple[str, int]]
) -> None:
    (tmp_path / "memory").mkdir()
    result = rehearsed(case)
    assert result.is_exact, result.text()
    assert result.steps == steps
    assert [(resumed.point, resumed.steps) for resumed in result.resumes] == points
    assert {"data", "weights", "optimizers", "schedulers", "generators", "logged", "objects"} <= set(result.subjects)
    assert list(tmp_path.glob("mine*")) == []
    assert list(tmp_path.glob("checkpoints*")) == []
    assert list((tmp_path / "memory").iterdir()) == []  # where the run would look for its newest snapshot


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("case", "subject", "named"),
    [
        ("clock", "data", ["ByTheClock (", "A second resume from the same checkpoint differs here, too"]),
        ("freezes", "modes", ["bias.requires_grad: True instead of False"]),
        ("curriculum", "loss", ["rehearsed_script.py:main():difficulty: 1 instead of 7"]),
        ("forgets", "objects", ["Count.kept: 1 instead of 7", "Count (", "load it in load_state_dict"]),
    ],
)
def test_a_defect_is_named_with_its_first_step_and_its_place(case: str, subject: str, named: list[str]) -> None:
    result = rehearsed(case, at=(6,), steps=9)
    assert not result.is_exact
    text = result.text()
    assert f"first difference: step 7\n  {SUBJECTS[subject]}:\n" in text, text
    for words in named:
        assert words in text


@pytest.mark.sampled(1)
@pytest.mark.extended_cells("exact-each once-each once, 4 again in the last batches", "repeats-2 AGAIN-2 AGAIN")
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("case", "at_two", "at_three"),
    [
        ("exact", "each once", "each once, 4 again in the last batches"),
        ("stream", "each once", "each once, 1 again in the last batches"),
        ("loses", "2 AGAIN; 2 LOST", "2 LOST"),
        ("repeats", "2 AGAIN", "2 AGAIN"),
        ("replaces", "not known", "not known"),
    ],
)
def test_other_ranks_that_continue_an_epoch_are_to_have_each_sample_once(
    tmp_path: Path, case: str, at_two: str, at_three: str
) -> None:
    command = [sys.executable, str(SCRIPT), case]
    result = rehearse(
        command, at=[14], points=["validation"], steps=25, ranks=[2, 3], resume_arguments=["{checkpoint}"]
    )
    found = [(resumed.ranks, resumed.samples) for resumed in result.resumes]
    assert found == [(None, "-"), (2, at_two), (3, at_three)], result.text()
    assert result.is_exact == (case in ("exact", "stream")), result.text()
    assert list(tmp_path.glob(".*")) == []  # such as files for just-in-time saves


@pytest.mark.sampled(1)
@pytest.mark.extended_cells("exact-26-points0", "short-12-points3")
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("case", "steps", "points"),
    [
        # two epochs of 12 steps and some more; the script saves after every seventh
        ("exact", 26, [("save_state", 7), ("save_state", 14), ("save_state", 21)]),
        ("accumulates", 14, [("save_state", 7)]),
        ("saves nothing", 26, [("middle", 13)]),
        ("short", 12, [("save_state", 7)]),
    ],
)
def test_the_trainer_of_transformers_is_resumed_without_being_told(
    tmp_path: Path, case: str, steps: int, points: list[tuple[str, int]]
) -> None:
    pytest.importorskip("transformers")
    result = rehearse([sys.executable, str(TRAINER), case])
    assert result.is_exact, result.text()
    assert result.steps == steps
    assert [(resumed.point, resumed.place) for resumed in result.resumes] == [(p, f"step {n}") for p, n in points]
    assert {"data", "weights", "optimizers", "generators", "logged", "objects"} <= set(result.subjects)
    assert [path.name for path in tmp_path.rglob("*")] == ["mine"], "an empty directory, which the Trainer makes"


@pytest.mark.usefixtures("forked")
def test_a_defect_under_the_trainer_of_transformers_is_named() -> None:
    pytest.importorskip("transformers")
    result = rehearse([sys.executable, str(TRAINER), "anneals"], at=(6,), steps=9)
    assert not result.is_exact
    text = result.text()
    assert f"first difference: step 7\n  {SUBJECTS['loss']}:\n" in text, text
    assert "Network.factor" in text and "Network (" in text


@pytest.mark.usefixtures("forked")
def test_a_script_that_does_not_resume_is_said_to_need_an_argument() -> None:
    with pytest.raises(CannotRehearseError, match=r"(?s)did not call accelerator\.load_state.*--resume-with"):
        rehearse([sys.executable, str(SCRIPT), "exact"], at=[2], steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["exact", "curriculum"])
def test_two_ranks_under_a_launcher_are_compared_one_by_one(tmp_path: Path, case: str) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    result = rehearse(
        [*launcher, str(SCRIPT), case],
        at=[3],
        steps=9,  # more than an epoch, which has 6
        resume_arguments=["{checkpoint}"],
        ranks=[1],
        directory=tmp_path / "kept",
        cwd=tmp_path,
        env={"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(SCRIPT.parents[2])},
        timeout=280,
    )
    assert len(list((tmp_path / "kept" / "uninterrupted").glob("rank-*.json"))) == 2
    assert [resumed.samples for resumed in result.resumes] == ["-", "each once"]
    found = {(difference.subject, difference.rank) for difference in result.resumes[0].differences}
    assert result.is_exact == (case == "exact"), result.text()
    assert ({("loss", 0), ("loss", 1)} <= found) == (case == "curriculum"), result.text()
