"""``ResumableCallback`` in runs that need no person: ``resume="auto"`` and ``preempt``."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers", reason="the optional extra is not installed")

from accelerate_ckpt._state.session import close_sessions  # noqa: E402
from accelerate_ckpt.integrations.transformers import ResumableCallback  # noqa: E402
from ckpt_core.preemption import NOT_SAVED  # noqa: E402
from ckpt_core.storage import Fault, FaultyStorage, LocalStorage  # noqa: E402
from tests.accelerate_ckpt.test_transformers import (  # noqa: E402
    STEPS_PER_EPOCH,
    assert_same,
    logged,
    saved,
    trainer_for,
    weights,
)
from tests.conftest import ACCELERATE  # noqa: E402
from tests.support.accelerate_ranks import RankResult, Ranks  # noqa: E402
from tests.support.filling import fill  # noqa: E402


class Sends(transformers.TrainerCallback):
    def __init__(self, step: int, number: int) -> None:
        self.step, self.number = step, number

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), self.number)


@pytest.fixture(autouse=True)
def _fresh(fresh_accelerate: None) -> Any:
    yield
    close_sessions()


def start(folder: Path, stop: int | None = None, **arguments: Any) -> Any:
    trainer = trainer_for(folder, callback=False, **arguments)
    ResumableCallback(trainer, resume="auto", preempt="SIGTERM,SIGUSR2")
    if stop is not None:
        trainer.add_callback(Sends(stop, signal.SIGUSR2))
    return trainer


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stop", [4, STEPS_PER_EPOCH - 1], ids=["middle", "end of the epoch"])
def test_a_preempted_run_resumes_exactly(tmp_path: Path, stop: int) -> None:
    arguments = {"save_steps": 100, "save_total_limit": 1, "eval_strategy": "steps", "eval_steps": 2}
    whole = trainer_for(tmp_path / "whole", **arguments)
    whole.train()
    first = start(tmp_path / "parts", stop, **arguments)
    with pytest.raises(SystemExit) as end:
        first.train()
    assert end.value.code == 128 + signal.SIGUSR2
    assert first.accelerator.resumed is None
    assert saved(tmp_path / "parts") == [f"checkpoint-{stop + 1}"]
    close_sessions()
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
    resumed = start(tmp_path / "parts", **arguments)
    resumed.train()
    assert resumed.accelerator.resumed.step == stop + 1
    assert_same(weights(resumed), weights(whole))
    assert logged(resumed) == logged(whole)


class Moves(transformers.TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        os.makedirs("elsewhere", exist_ok=True)
        os.chdir("elsewhere")  # below tmp_path, at each step


def test_a_run_stays_where_it_began_though_its_working_directory_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = trainer_for(Path("run"), callback=False, callbacks=[Moves()], save_total_limit=1, max_steps=6)
    ResumableCallback(trainer, resume="auto")
    trainer.train()
    assert saved(tmp_path / "run") == ["checkpoint-6"]
    assert len(list(tmp_path.glob("elsewhere/**/checkpoint-*"))) == 0


class Fills(transformers.TrainerCallback):
    def __init__(self, step: int, directory: Path) -> None:
        self.step, self.directory = step, directory

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            fill(self.directory)


@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_a_run_whose_last_save_fails_ends_as_it_was_told(
    small_filesystem: Path, caplog: pytest.LogCaptureFixture, strategy: str
) -> None:
    trainer = trainer_for(small_filesystem / "run", callback=False, save_steps=2)
    ResumableCallback(trainer, strategy, resume="auto", preempt="SIGUSR2")
    trainer.add_callback(Sends(2, signal.SIGUSR2))
    trainer.add_callback(Fills(2, small_filesystem))
    with pytest.raises(SystemExit) as end:
        trainer.train()
    assert end.value.code == 128 + signal.SIGUSR2
    assert saved(small_filesystem / "run") == ["checkpoint-2"]
    (said,) = [record.getMessage() for record in caplog.records if NOT_SAVED in record.getMessage()]
    assert "No space left on device" in said


def test_a_run_that_only_warns_says_that_its_last_save_failed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_for(tmp_path / "run", callback=False, save_steps=100)
    callback = ResumableCallback(trainer, "async", on_error="warn", preempt="SIGUSR2")
    broken = Fault("write_at", None, error=OSError(errno.EIO, "Input/output error"))
    callback._session.checkpointer._storage = FaultyStorage(LocalStorage(), [broken])
    trainer.add_callback(Sends(2, signal.SIGUSR2))
    with pytest.raises(SystemExit) as end:
        trainer.train()
    assert end.value.code == 128 + signal.SIGUSR2
    assert [record.getMessage() for record in caplog.records].count(NOT_SAVED) == 1
    assert "Input/output error" in caplog.text


LOSS = """
    import logging, os, signal
    from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
    from accelerate_ckpt.integrations.transformers import ResumableCallback
    from ckpt_core.survivors import Survivors

    noted, note = [], Survivors.note
    Survivors.note = lambda self, state: (noted.append(state["step"]), note(self, state))[1]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4))

        def forward(self, inputs, labels):
            return {"loss": (self.layers(inputs) - labels).pow(2).mean()}

    class Dies(TrainerCallback):
        def dies(self, args, state, control, **_):
            if state.global_step == kill and rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)

    setattr(Dies, event, Dies.dies)
    inexact = []
    hears = logging.Handler()
    hears.emit = lambda record: "to be exact" in record.getMessage() and inexact.append(record.getMessage())
    logging.getLogger("accelerate_ckpt").addHandler(hears)

    set_seed(1)
    rows = [{"inputs": row, "labels": row} for row in torch.arange(160.0).reshape(40, 4) / 100]
    arguments = TrainingArguments(
        folder, max_steps=12, per_device_train_batch_size=2, gradient_accumulation_steps=2, save_strategy=save,
        save_steps=4, eval_strategy="steps", eval_steps=4, logging_steps=3, learning_rate=0.1, use_cpu=True, report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(Model(), arguments, train_dataset=rows, eval_dataset=rows[:8], callbacks=[Dies()])
    ResumableCallback(trainer, resume="auto", just_in_time=True)
    torch.manual_seed(rank)
    trainer.train()
    tell(resumed=trainer.accelerator.resumed and trainer.accelerator.resumed.step)
    tell(noted=noted, inexact=inexact)
    tell(logged=[{name: item[name] for name in ("step", "loss", "eval_loss") if name in item}
                 for item in trainer.state.log_history if "train_runtime" not in item])
    tell(weights=[value.tolist() for value in trainer.accelerator.unwrap_model(trainer.model).parameters()])
"""


NEVER: dict[str, Any] = {"kill": -1, "victim": 0, "event": "on_substep_end"}


@pytest.mark.extended_cells("after the first step", "after an epoch's last step")
@pytest.mark.parametrize(
    ("victim", "event", "step", "held"),
    [
        pytest.param(0, "on_substep_end", 7, 7, marks=pytest.mark.slow),
        pytest.param(1, "on_pre_optimizer_step", 6, 7, marks=pytest.mark.slow),
        (1, "on_step_end", 1, 1),
        (0, "on_step_end", 5, 5),
    ],
    ids=["in the window", "after the exchange", "after the first step", "after an epoch's last step"],
)
def test_when_a_rank_is_lost_the_other_saves_what_the_trainer_resumes_from(
    ranks: Ranks, tmp_path: Path, victim: int, event: str, step: int, held: int
) -> None:
    def run(name: str, **more: Any) -> list[RankResult]:
        return ranks.run(LOSS, 2, folder=str(tmp_path / name), save="no", **{**NEVER, **more})

    whole = run("whole")
    assert run("run", kill=step, victim=victim, event=event)[1 - victim].error == "RuntimeError"  # of gloo
    assert saved(tmp_path / "run") == [f"checkpoint-{held}"]
    resumed = run("run")
    assert [(result.told["resumed"], result.told["inexact"]) for result in resumed] == [(held, [])] * 2
    for found, expected in zip(resumed, whole, strict=True):
        assert (found.told["weights"], found.told["logged"]) == (expected.told["weights"], expected.told["logged"])


def test_each_step_is_noted_once_whether_or_not_the_run_saves(ranks: Ranks, tmp_path: Path) -> None:
    def noted(save: str) -> list[list[int]]:
        found = ranks.run(LOSS, 2, folder=str(tmp_path / save), save=save, **NEVER)
        return [result.told["noted"] for result in found]

    ends = [5, 10, 12]  # ends of epochs, when the Trainer may evaluate once more
    assert noted("no") == noted("steps") == [sorted([*range(1, 13), *ends])] * 2


AFTER = """
    import os, signal
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from accelerate_ckpt.integrations.transformers import ResumableCallback

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, inputs, labels):
            output = self.layer(inputs)
            return {"loss": (output - labels).pow(2).mean(), "output": output}

    class Told(TrainerCallback):
        def on_prediction_step(self, args, state, control, **_):
            is_now = {"training": state.global_step == 6, "before": state.global_step == 0, "after": training_is_over}
            if is_now[moment] and rank == last and not os.path.exists(f"{folder}.told"):
                open(f"{folder}.told", "w").close()
                os.kill(os.getpid(), signal.SIGTERM)

    training_is_over = False
    rows = [{"inputs": row, "labels": row} for row in torch.arange(64.0).reshape(16, 4) / 64]
    arguments = TrainingArguments(
        folder, max_steps=6, per_device_train_batch_size=2, save_strategy="no", eval_strategy="steps", eval_steps=6,
        use_cpu=True, report_to=[], disable_tqdm=True,
    )
    trainer = Trainer(Model(), arguments, train_dataset=rows, eval_dataset=rows, callbacks=[Told()])
    ResumableCallback(trainer, resume="auto", preempt=True)
    if moment == "before":
        trainer.evaluate()
    trainer.train()
    tell(steps=trainer.state.global_step, resumed=trainer.accelerator.resumed and trainer.accelerator.resumed.step)
    training_is_over = True
    trainer.evaluate()
    tell(over=True)
"""


@pytest.mark.extended_cells("1")
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_trainer_that_is_told_after_its_last_step_saves_and_ends(
    ranks: Ranks, tmp_path: Path, world_size: int
) -> None:
    names = {"folder": str(tmp_path), "moment": "training", "last": world_size - 1}
    ended = ranks.run(AFTER, world_size, **names)
    assert [(result.error, result.message.strip()) for result in ended] == [("SystemExit", "143")] * world_size
    assert saved(tmp_path) == ["checkpoint-6"]
    resumed = ranks.run(AFTER, world_size, **names)
    assert [result.told for result in resumed] == [{"steps": 6, "resumed": 6, "over": True}] * world_size


@pytest.mark.parametrize(("moment", "told"), [("before", {}), ("after", {"steps": 6, "resumed": None})])
def test_an_evaluation_outside_of_the_training_ends_as_without_the_option(
    ranks: Ranks, tmp_path: Path, moment: str, told: dict[str, Any]
) -> None:
    (result,) = ranks.run(AFTER, 1, folder=str(tmp_path), moment=moment, last=0)
    assert (result.told, result.error) == (told, None)


CRASHES_ON_ONE_RANK = """
    import fcntl, os, signal, time, torch
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from accelerate_ckpt.integrations.transformers import ResumableCallback

    alive = open(f"alive.{os.environ['LOCAL_RANK']}", "w")  # locked for as long as this rank lives
    fcntl.flock(alive, fcntl.LOCK_EX)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, inputs, labels):
            return {"loss": (self.layer(inputs) - labels).pow(2).mean()}

    class Crashes(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 3 and is_second:
                if args.process_index == 1:
                    os._exit(0)
                fcntl.flock(open("alive.1"), fcntl.LOCK_EX)
                os.kill(os.getpid(), signal.SIGTERM)  # by the launcher
                time.sleep(1)

    is_second = os.path.exists("run")
    rows = [{"inputs": row, "labels": row} for row in torch.arange(64.0).reshape(16, 4) / 64]
    arguments = TrainingArguments(
        "run", max_steps=6 if is_second else 1, per_device_train_batch_size=1, save_steps=1 if not is_second else 99,
        use_cpu=True, report_to=[], disable_tqdm=True,
    )
    trainer = Trainer(Model(), arguments, train_dataset=rows, callbacks=[Crashes()])
    ResumableCallback(trainer, resume="auto", preempt=True)
    trainer.train()
"""


@pytest.mark.extended
def test_the_crash_of_another_rank_counts_though_the_launcher_tells_this_one_to_end(
    fork_script: Any, tmp_path: Path
) -> None:
    modules = (*ACCELERATE, "transformers.trainer")
    fork_script(CRASHES_ON_ONE_RANK, modules=modules, ranks=2)
    ended = fork_script(CRASHES_ON_ONE_RANK, modules=modules, ranks=2, check=False)
    assert "ends this rank alone" in ended.stdout + ended.stderr
    record = json.loads((tmp_path / "run" / ".ckpt-resumes.json").read_text())
    assert list(record["attempts"].values()) == [1]


def test_false_is_a_fresh_start_and_auto_an_argument(tmp_path: Path) -> None:
    trainer_for(tmp_path, max_steps=3).train()
    fresh = start(tmp_path, max_steps=4)
    fresh.train(resume_from_checkpoint=False)
    assert fresh.accelerator.resumed is None
    asked = trainer_for(tmp_path, max_steps=4)
    asked.train(resume_from_checkpoint="auto")
    assert asked.accelerator.resumed.step == 4


def test_the_interval_saves_beside_the_strategy_of_the_trainer(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, callback=False, max_steps=23, save_strategy="no", save_total_limit=2)
    ResumableCallback(trainer, interval="auto", mtbf=1e9)
    trainer.train()
    assert saved(tmp_path) == ["checkpoint-10", "checkpoint-20"]


STREAM = """
    import logging, os, signal
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from accelerate_ckpt.integrations.transformers import ResumableCallback

    class Stream(torch.utils.data.IterableDataset):
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            order = torch.randperm(20, generator=torch.Generator().manual_seed(self.epoch))
            return iter([{"inputs": rows[index], "labels": rows[index]} for index in order])

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 4))

        def forward(self, inputs, labels):
            return {"loss": (self.layers(inputs) - labels).pow(2).mean()}

    class Dies(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == kill:
                os.kill(os.getpid(), signal.SIGKILL)

    told = []
    hears = logging.Handler()
    hears.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("accelerate_ckpt").addHandler(hears)
    if moved:
        stock = Trainer._run_epoch
        Trainer._run_epoch = lambda self, **arguments: stock(self, **arguments)

    torch.manual_seed(1)
    rows = torch.rand(20, 4)
    arguments = TrainingArguments(
        folder, max_steps=15, per_device_train_batch_size=2, gradient_accumulation_steps=2, save_steps=2,
        logging_steps=1, learning_rate=0.1, use_cpu=True, report_to=[], disable_tqdm=True,
    )
    trainer = Trainer(Model(), arguments, train_dataset=Stream(), callbacks=[Dies()])
    ResumableCallback(trainer, resume="auto")
    trainer.train()
    tell(resumed=trainer.accelerator.resumed and trainer.accelerator.resumed.step)
    tell(logged=[(item["step"], item["epoch"], item["loss"]) for item in trainer.state.log_history if "loss" in item])
    tell(weights=[value.tolist() for value in trainer.model.parameters()])
    tell(inexact=[message for message in told if "to be exact" in message])
    if moved:
        Trainer._run_epoch = stock
"""


@pytest.mark.extended_cells("7-6", "9-8")
@pytest.mark.parametrize(("kill", "step"), [(7, 6), (9, 8), (11, 10)])
def test_a_stream_without_a_length_continues_in_the_pass_that_it_was_in(
    ranks: Ranks, tmp_path: Path, kill: int, step: int
) -> None:
    # five steps a pass; the Trainer treats its passes before a resume as one epoch
    (whole,) = ranks.run(STREAM, 1, folder=str(tmp_path / "whole"), kill=-1, moved=False)
    ranks.run(STREAM, 1, folder=str(tmp_path / "run"), kill=kill, moved=False)
    (resumed,) = ranks.run(STREAM, 1, folder=str(tmp_path / "run"), kill=-1, moved=False)
    assert resumed.told["resumed"] == step
    assert resumed.told["logged"] == whole.told["logged"]
    assert resumed.told["weights"] == whole.told["weights"]
    assert resumed.told["inexact"] == whole.told["inexact"] == []


def test_a_release_that_counts_passes_otherwise_is_said(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(STREAM, 1, folder=str(tmp_path / "run"), kill=9, moved=False)
    (resumed,) = ranks.run(STREAM, 1, folder=str(tmp_path / "run"), kill=-1, moved=True)
    assert resumed.told["resumed"] == 8
    assert len(resumed.told["inexact"]) == 1 and "passes over a stream" in resumed.told["inexact"][0]
