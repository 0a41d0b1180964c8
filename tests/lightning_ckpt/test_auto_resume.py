"""``ResumableCheckpoint(resume="auto")``: what a ``fit`` without ``ckpt_path`` continues from."""

from __future__ import annotations

import json
import logging
import os
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import CheckpointCorruptedError, CheckpointInfo
from ckpt_core.errors import StateMismatchError, StorageError
from ckpt_core.resume import ResumePoint
from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint, SyncCheckpointIO
from lightning_ckpt._callbacks.resume import AutoResume, find_resume
from tests.conftest import LIGHTNING, ScriptRunner
from tests.lightning_ckpt.reliable_cases import BATCHES, NUMBERS, Callback, model_of, names, trainer_of
from tests.support.damage import flip_bit

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
]


def started(root: Path, *, raise_at: int | None = None, steps: int = BATCHES, fits: bool = True, **options: Any) -> Any:
    trainer_options = options.pop("trainer", {})
    settings = {"every_n_train_steps": 1, "save_top_k": -1, "filename": "{step}", "resume": "auto", **options}
    fit = settings.pop("fit", {})
    callback = ResumableCheckpoint(**settings)
    trainer = trainer_of(
        root, [callback], plugins=[AsyncCheckpointIO()], **{"max_epochs": 1, "max_steps": steps, **trainer_options}
    )
    trainer.callback = callback
    if fits:
        trainer.fit(model_of(raise_at=raise_at), **fit)
    return trainer


def crash(root: Path, **options: Any) -> Any:
    with pytest.raises(ValueError, match="on fire"):
        started(root, raise_at=1, **options)


def taken(trainer: Any) -> str | None:
    return trainer.callback.resumed and os.path.basename(trainer.callback.resumed.path)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("logger", [True, False])
def test_a_script_without_a_directory_finds_itself_again(tmp_path: Path, logger: bool) -> None:
    first = started(tmp_path, steps=4, trainer={"logger": logger})
    assert first.callback.resumed is None
    second = started(tmp_path, trainer={"logger": logger})
    saved = tmp_path / "checkpoints"
    assert second.callback.resumed == ResumePoint(str(saved / "step=4.ckpt"), step=4, epoch=0, batch=4)
    assert second.model.batches == BATCHES - 4
    assert torch.equal(second.model.weight, torch.full((NUMBERS,), float(BATCHES)))
    assert [name for name in names(saved) if name.startswith(".")] == []  # the run ended well: no attempt is recorded


def test_the_tasks_of_an_array_do_not_resume_from_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for task, steps in (("1", 4), ("2", 2), ("1", 6)):
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", task)
        trainer = started(tmp_path, steps=steps)
    assert trainer.callback.resumed == ResumePoint(
        str(tmp_path / "checkpoints/task_1/step=4.ckpt"), step=4, epoch=0, batch=4
    )
    assert names(tmp_path / "checkpoints" / "task_2") == ["step=1.ckpt", "step=2.ckpt"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("pattern", ["{step}/{epoch}", "{step}-{val/loss:.2f}", "runs/a/{step}"])
def test_names_with_slashes_are_found_below_the_directory(tmp_path: Path, pattern: str) -> None:
    first = started(tmp_path, steps=4, filename=pattern)
    newest = first.callback.best_model_path
    assert os.path.dirname(newest) != str(tmp_path / "checkpoints")
    second = started(tmp_path, filename=pattern)
    assert second.callback.resumed == ResumePoint(newest, step=4, epoch=0, batch=4)
    assert second.model.batches == BATCHES - 4
    directory = tmp_path / "checkpoints"
    third = started(tmp_path, filename=pattern, resume=None, dirpath=directory, fit={"ckpt_path": "last"})
    assert third.callback.resumed == ResumePoint(second.callback.best_model_path, step=BATCHES, epoch=0, batch=BATCHES)


def test_damage_to_all_names_with_slashes_is_an_error(tmp_path: Path) -> None:
    saved = Path(started(tmp_path, steps=1, filename="{step}/{epoch}").callback.best_model_path)
    flip_bit(saved, 100)
    with pytest.raises(CheckpointCorruptedError):
        started(tmp_path, filename="{step}/{epoch}")


def test_a_first_start_says_so_in_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lightning.pytorch")
    started(tmp_path, dirpath=tmp_path / "here", steps=1)
    lines = [record.getMessage() for record in caplog.records if "nothing to resume" in record.getMessage()]
    assert lines == [f"There is nothing to resume in {tmp_path / 'here'}: this run starts from the beginning."]


@pytest.mark.parametrize("resume", ["auto", None])
def test_a_directory_that_is_a_file_is_told_before_training(tmp_path: Path, resume: Any) -> None:
    (tmp_path / "file").write_text("precious")
    trainer = started(tmp_path, dirpath=tmp_path / "file", resume=resume, fits=False)
    with pytest.raises(StorageError, match=r"Not a directory\n  file: .*file\n  what to do: a part of the path is"):
        trainer.fit(model_of())
    assert trainer.global_step == 0
    kept_none = started(tmp_path, dirpath=tmp_path / "file", resume=None, save_top_k=0)
    assert kept_none.global_step == BATCHES  # because it saves nothing


def test_a_link_to_what_is_not_mounted_is_no_first_start(tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to(tmp_path / "not mounted")
    with pytest.raises(StorageError, match="link that leads nowhere"):
        started(tmp_path, dirpath=tmp_path / "runs" / "7")
    assert not (tmp_path / "not mounted").exists()
    started(tmp_path, dirpath=tmp_path / "runs" / "7", resume=None)  # as with Lightning
    assert (tmp_path / "not mounted" / "7" / "step=1.ckpt").exists()


def test_a_path_that_is_given_wins(tmp_path: Path) -> None:
    saved = tmp_path / "checkpoints"
    started(tmp_path, steps=4)
    assert taken(started(tmp_path, fit={"ckpt_path": saved / "step=2.ckpt"})) == "step=2.ckpt"
    trainer = started(tmp_path, fits=False)
    trainer.ckpt_path = str(saved / "step=1.ckpt")
    trainer.fit(model_of())
    assert taken(trainer) == "step=1.ckpt"


def test_what_the_trainer_has_trained_itself_is_continued(tmp_path: Path) -> None:
    trainer = started(tmp_path, steps=2)
    started(tmp_path, steps=5)
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit_loop.max_epochs = 2
    trainer.fit(trainer.lightning_module)
    assert trainer.global_step == 4
    assert trainer.callback.resumed is None


def test_trials_and_validations_resume_nothing(tmp_path: Path) -> None:
    started(tmp_path, steps=4)
    before = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    trial = {"fast_dev_run": True, "max_steps": -1, "limit_val_batches": 1}
    trainer = started(tmp_path, trainer=trial, save_last=True)
    assert trainer.callback.resumed is None
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == before
    model = model_of()
    trainer = started(tmp_path, fits=False, trainer={"limit_val_batches": 1})
    trainer.validate(model, verbose=False)
    assert float(model.weight.sum()) == 0.0


def test_damaged_checkpoints_are_passed_over_and_never_lead_to_a_fresh_start(tmp_path: Path) -> None:
    started(tmp_path, steps=2)
    saved = tmp_path / "checkpoints"
    for number, expected in ((2, "step=1.ckpt"), (1, None)):
        path = saved / f"step={number}.ckpt"
        flip_bit(path)
        if expected is None:
            with pytest.raises(CheckpointCorruptedError):
                started(tmp_path, steps=2, every_n_train_steps=50)
        else:
            assert taken(started(tmp_path, steps=1, every_n_train_steps=50)) == expected


def test_a_checkpoint_on_which_the_run_crashes_is_stepped_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    started(tmp_path, steps=3)
    saved = tmp_path / "checkpoints"
    for _ in range(3):
        crash(tmp_path)
    assert "stepped over" not in caplog.text
    trainer = started(tmp_path, save_top_k=1)
    assert taken(trainer) == "step=2.ckpt"
    assert f"skipped the checkpoint {saved / 'step=3.ckpt'}" in caplog.text
    assert (saved / "step=3.ckpt").exists()
    assert taken(started(tmp_path, steps=9, trainer={"max_epochs": 2})) == f"step={BATCHES}.ckpt"


def test_an_end_that_was_asked_for_is_no_crash(tmp_path: Path) -> None:
    started(tmp_path, steps=3)
    for _ in range(4):
        trainer = started(tmp_path, steps=3)  # nothing left to train
        assert taken(trainer) == "step=3.ckpt"
    for _ in range(2):
        crash(tmp_path, resume_attempts=1)
    assert taken(started(tmp_path, steps=3, resume_attempts=None)) == "step=3.ckpt"


def test_another_model_is_no_crash(tmp_path: Path) -> None:
    trainer = started(tmp_path, steps=3)
    for _ in range(3):
        trainer = started(tmp_path, fits=False)
        other = model_of()
        other.extra = torch.nn.Linear(1, 1)
        with pytest.raises(StateMismatchError, match="extra"):
            trainer.fit(other)
    assert taken(started(tmp_path)) == "step=3.ckpt"


TOLD_ON_TWO_RANKS = """
    import fcntl, os, signal, sys, threading, time
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint

    is_alone, preempt, at_start = sys.argv[1] == "alone", sys.argv[2] == "preempt", sys.argv[3] == "at start"
    alive = open(f"alive.{os.environ['LOCAL_RANK']}", "w")  # locked for as long as this rank lives
    fcntl.flock(alive, fcntl.LOCK_EX)

    def end():
        if os.environ["LOCAL_RANK"] == "0":
            fcntl.flock(open("alive.1"), fcntl.LOCK_EX)
        os.kill(os.getpid(), signal.SIGTERM)

    class Model(BoringModel):
        def on_fit_start(self):
            if not at_start or callback.resumed is None:
                return
            if is_alone and self.global_rank == 1:
                os._exit(0)
            # where Python runs no handlers, and Lightning has none yet
            threading.Thread(target=end).start()
            torch.distributed.TCPStore("127.0.0.1", 0, is_master=True).wait(["never"])

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if callback.resumed is None or batch_idx != 5:  # in an accumulation window: nobody waits for the other rank
                return
            if is_alone and self.global_rank == 1:
                os._exit(0)
            if is_alone:
                fcntl.flock(open("alive.1"), fcntl.LOCK_EX)
            os.kill(os.getpid(), signal.SIGTERM)  # by the launcher
            time.sleep(1)

    callback = ResumableCheckpoint("run", every_n_train_steps=1, filename="one", resume="auto", preempt=preempt)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", accumulate_grad_batches=4, callbacks=[callback],
        max_steps=9 if os.path.exists("run") else 1, plugins=[AsyncCheckpointIO()], limit_val_batches=0, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Model())
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("who", "preempt", "attempts"), [("alone", "preempt", [1]), ("alone", "", [1]), ("together", "", [])]
)
def test_the_crash_of_another_rank_counts_though_the_launcher_tells_this_one_to_end(
    fork_script: ScriptRunner, tmp_path: Path, who: str, preempt: str, attempts: list[int]
) -> None:
    fork_script(TOLD_ON_TWO_RANKS, who, preempt, "", modules=LIGHTNING, ranks=2)
    ended = fork_script(TOLD_ON_TWO_RANKS, who, preempt, "", modules=LIGHTNING, ranks=2, check=False)
    assert ("ends this rank alone" in ended.stderr) == (who == "alone"), ended.stderr
    record = tmp_path / "run" / ".ckpt-resumes.json"
    assert (list(json.loads(record.read_text())["attempts"].values()) if record.exists() else []) == attempts
    assert [path.name for path in (tmp_path / "run").glob("*.ckpt")] == ["one.ckpt"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("who", "attempts"), [("alone", [1]), ("together", [])])
def test_a_rank_that_waits_before_it_trains_ends_at_once_when_it_is_told_to(
    fork_script: ScriptRunner, tmp_path: Path, who: str, attempts: list[int]
) -> None:
    fork_script(TOLD_ON_TWO_RANKS, who, "", "at start", modules=LIGHTNING, ranks=2)
    fork_script(TOLD_ON_TWO_RANKS, who, "", "at start", modules=LIGHTNING, ranks=2, check=False)  # within its time
    record = tmp_path / "run" / ".ckpt-resumes.json"
    assert (list(json.loads(record.read_text())["attempts"].values()) if record.exists() else []) == attempts


def test_the_newest_of_several_callbacks_is_taken(tmp_path: Path) -> None:
    def trainer_with(steps: int) -> Any:
        settings: dict[str, Any] = {"save_top_k": -1, "filename": "{step}", "resume": "auto"}
        often = ResumableCheckpoint(tmp_path / "often", every_n_train_steps=1, **settings)
        seldom = ResumableCheckpoint(tmp_path / "seldom", every_n_train_steps=3, **settings)
        trainer = trainer_of(tmp_path, [seldom, often], plugins=[SyncCheckpointIO()], max_epochs=1, max_steps=steps)
        trainer.fit(model_of())
        return trainer

    trainer_with(4)
    trainer = trainer_with(BATCHES)
    assert trainer.model.batches == BATCHES - 4
    assert [callback.resumed.step for callback in trainer.checkpoint_callbacks] == [4, 4]


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.zeros(100, 1))


class Stops(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == self.step  # as max_time and EarlyStopping do


EACH_EPOCH = {"every_n_epochs": 1}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("steps", "options", "trainer", "stops", "said"),
    [
        (4, EACH_EPOCH, {}, False, True),
        (4, EACH_EPOCH, {}, True, True),
        (BATCHES, EACH_EPOCH, {}, False, False),
        (BATCHES, EACH_EPOCH, {}, True, False),
        (4, EACH_EPOCH, {"limit_train_batches": 4}, False, False),
        (4, {"every_n_train_steps": 2, "save_last": True}, {}, False, False),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_epoch_that_max_steps_or_a_stop_has_cut_is_said(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    steps: int,
    options: dict[str, Any],
    trainer: dict[str, Any],
    stops: bool,
    said: bool,
    stream: bool,
) -> None:
    length = trainer.get("limit_train_batches", BATCHES)
    trainer = {"limit_train_batches": length, **trainer} if stream else trainer

    def fit(limit: int, *callbacks: Any) -> Any:
        resumable = ResumableCheckpoint(tmp_path / "saved", resume="auto", **options)
        found = trainer_of(tmp_path, [resumable, *callbacks], max_epochs=2, max_steps=limit, **trainer)
        data = {"train_dataloaders": torch.utils.data.DataLoader(Stream(), batch_size=1)} if stream else {}
        found.fit(model_of(), **data)
        return found

    caplog.set_level(logging.INFO)
    fit(*((-1, Stops(steps)) if stops else (steps,)))
    fit(steps)  # nothing is left to train
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed = fit(-1)
    told = [str(each.message) for each in caught if "had ended an epoch" in str(each.message)]
    assert [f"after {steps} batches" in text for text in told] == [True] * said, told
    assert resumed.model.batches == (length if said else 2 * length - steps)


def test_last_without_a_directory_is_told_where_the_checkpoints_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        started(tmp_path, resume=None, steps=2, fit={"ckpt_path": "last"}, trainer={"logger": True})
    told = [record.getMessage() for record in caplog.records if "give ResumableCheckpoint a dirpath" in record.message]
    assert len(told) == 1
    assert str(tmp_path / "lightning_logs" / "version_0" / "checkpoints") in told[0]


def test_other_values_are_refused() -> None:
    with pytest.raises(ValueError, match="resume must be 'auto' or None, not 'last'"):
        ResumableCheckpoint(resume="last")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="resume_attempts must be a whole number of at least 1, not 0"):
        ResumableCheckpoint(resume="auto", resume_attempts=0)


@pytest.mark.parametrize("option", ["exact", "recorder", "log_metrics", "resume_attempts", "preempt", "retention"])
def test_a_wrong_value_of_the_callback_is_refused_by_name(option: str) -> None:
    with pytest.raises(ValueError, match=f"^{option} "):
        ResumableCheckpoint(**{option: "no"})


def test_what_another_callback_has_found_is_compared_with_a_later_find() -> None:
    class Callback:
        def __init__(self, step: int) -> None:
            self.auto_resume, self.found = AutoResume(3), CheckpointInfo(f"{step}.ckpt", 1, 0.0, committed=step)

        def look_for_resume(self, trainer: object) -> CheckpointInfo:
            return self.found

    older, newer = Callback(5), Callback(9)
    assert find_resume(types.SimpleNamespace(callbacks=[older, newer])) == ["9.ckpt"]
    for callback in (older, newer):
        assert not callback.auto_resume.is_newer(CheckpointInfo("in memory", 1, 0.0, committed=7.0))
        assert callback.auto_resume.is_newer(CheckpointInfo("in memory", 1, 0.0, committed=11.0))
