"""Reports of what a script's saves cost: in its trackers, in the Trainer's logs, and as a page."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker

from accelerate_ckpt import CheckpointConfig, _report, attach
from accelerate_ckpt.config import OptionError
from ckpt_core import small_states
from ckpt_core.events import Event, TrainingStarted
from ckpt_core.process import console
from ckpt_core.report import interruptions_of, read_events
from tests.accelerate_ckpt.training import Run
from tests.support.event_files import scalars_of

NAMES = ("bytes", "commit_seconds", "stall_seconds", "stall_seconds_total", "share_of_run", "saves", "pending")


@pytest.fixture(autouse=True)
def _in_the_background(fresh_accelerate: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_states, "SMALL_STATE_BYTES", 0)


def train(folder: Path, *, log: bool = True, resume: bool = False, **settings: Any) -> Any:
    """Train three steps with a save after each; log when it is durable, under a step number of its own (0, 10, 20)."""
    accelerator = attach(Accelerator(log_with="tensorboard" if log else None, project_dir=folder), **settings)
    accelerator.init_trackers("run")
    run = Run(accelerator)
    if resume:
        accelerator.load_state(os.path.relpath(folder / "2"))
    for step in range(3 * resume, 3 * resume + 3):
        run.train(1)
        accelerator.save_state(str(folder / str(step)))
        assert (folder / str(step)).is_dir()  # waits for it
        accelerator.log({"loss": 0.5}, step=10 * step)
        accelerator.log({"other": 0.5}, step=10 * step)
    return accelerator


def test_tensorboard_shows_the_figures_at_the_steps_of_the_script(tmp_path: Path) -> None:
    train(tmp_path, log_metrics=True, strategy="async").end_training()
    shown = scalars_of(tmp_path)
    assert [step for step, _ in shown["loss"]] == [0, 10, 20]
    for name in (*NAMES, "failures"):
        assert [step for step, _ in shown[f"checkpoint/{name}"]] == [0, 10, 20], name
    assert [value for _, value in shown["checkpoint/saves"]] == [1, 2, 3]
    assert shown["checkpoint/pending"][-1][1] == 0
    stalls = [value for _, value in shown["checkpoint/stall_seconds"]]
    assert min(stalls) > 0
    assert sum(stalls) == pytest.approx(shown["checkpoint/stall_seconds_total"][-1][1], rel=1e-5)


def test_a_run_is_counted_from_the_start_of_its_training(tmp_path: Path) -> None:
    begun: list[float] = []
    train(tmp_path, log_metrics=True, listeners=[lambda e: begun.append(e.time) if type(e) is TrainingStarted else 0])
    now, shown = time.time(), scalars_of(tmp_path)
    stall, share = (shown[f"checkpoint/{name}"][-1][1] for name in ("stall_seconds_total", "share_of_run"))
    assert stall / share <= now - begun[0]


def test_the_last_save_reaches_the_trackers(tmp_path: Path) -> None:
    accelerator = attach(Accelerator(log_with="tensorboard", project_dir=tmp_path), log_metrics=True, strategy="async")
    accelerator.init_trackers("run")
    run = Run(accelerator)
    for step in range(3):
        run.train(1)
        accelerator.log({"loss": 0.5}, step=10 * step)
        accelerator.save_state(str(tmp_path / str(step)))
    accelerator.end_training()
    shown = scalars_of(tmp_path)
    assert shown["checkpoint/saves"][-1] == (20, 3)
    assert shown["checkpoint/pending"][-1] == (20, 0)
    assert [step for step, _ in shown["loss"]] == [0, 10, 20]


def test_the_last_save_of_a_preempted_run_reaches_the_trackers(tmp_path: Path) -> None:
    accelerator = Accelerator(log_with="tensorboard", project_dir=tmp_path)
    accelerator = attach(accelerator, log_metrics=True, preempt="SIGUSR2", strategy="async")
    accelerator.init_trackers("run")
    run = Run(accelerator)
    run.train(1)
    accelerator.log({"loss": 0.5}, step=10)
    os.kill(os.getpid(), signal.SIGUSR2)
    with pytest.raises(SystemExit):
        run.train(2)
    accelerator.end_training()
    assert [value for _, value in scalars_of(tmp_path)["checkpoint/saves"]] == [1]


def test_a_tracker_that_fails_changes_nothing_of_how_a_preempted_run_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Tracker(GeneralTracker):  # type: ignore[misc]  # Accelerate publishes no types
        name, requires_logging_directory, tracker = "own", False, None

        def log(self, values: Any, step: int | None = None, **_: Any) -> None:
            raise ConnectionError("the server of the tracker is gone")

    accelerator = attach(Accelerator(log_with=[Tracker()], project_dir=tmp_path), log_metrics=True, preempt="SIGUSR2")
    accelerator.init_trackers("run")
    run = Run(accelerator)
    run.train(1)
    os.kill(os.getpid(), signal.SIGUSR2)
    with pytest.raises(SystemExit) as ended:
        run.train(2)
    assert ended.value.code == 128 + signal.SIGUSR2
    assert "the server of the tracker is gone" in caplog.text
    assert any(tmp_path.rglob("model.safetensors"))


def test_a_tracker_of_the_scripts_gets_what_the_script_gives(tmp_path: Path) -> None:
    class Tracker(GeneralTracker):  # type: ignore[misc]  # Accelerate publishes no types
        name, requires_logging_directory, tracker = "own", False, None

        def __init__(self) -> None:
            super().__init__()
            self.got: list[Any] = []

        def log(self, values: Any, step: int | None = None, **_: Any) -> None:
            self.got.append(values)

    tracker = Tracker()
    accelerator = attach(Accelerator(log_with=[tracker]), log_metrics=True)
    accelerator.init_trackers("run")
    Run(accelerator).train(1)
    accelerator.save_state(str(tmp_path / "0"))
    assert (tmp_path / "0").is_dir()  # waits for it
    for values in ([1, 2], None, "text"):
        accelerator.log(values)
    accelerator.log({"large": 10**400, "loss": 0.5})
    accelerator.end_training()
    assert tracker.got[:3] == [[1, 2], None, "text"]
    assert (tracker.got[3]["large"], tracker.got[3]["loss"]) == (10**400, 0.5)
    assert tracker.got[3]["checkpoint/saves"] == 1


def test_trackers_get_nothing_unless_asked(tmp_path: Path) -> None:
    train(tmp_path).end_training()
    assert sorted(scalars_of(tmp_path)) == ["loss", "other"]


def test_the_page_counts_interruptions_and_listeners_hear_of_them(tmp_path: Path) -> None:
    page, heard = tmp_path / "report.html", list[Event]()
    wanted: dict[str, Any] = {"log": False, "report": page, "listeners": [heard.append]}
    train(tmp_path, **wanted)  # does not call end_training
    gc.collect()  # end_training is for all Accelerators that exist
    train(tmp_path, resume=True, **wanted).end_training()
    processes = read_events([f"{page}.jsonl"])
    (interruption,) = interruptions_of(processes)
    assert (interruption.path, interruption.step) == (str(tmp_path / "2"), 3)
    assert interruption.saved == next(save.started for save in processes[0].saves if save.name == "2")
    assert "Interruptions" in page.read_text()
    names = [type(event).__name__ for event in heard]
    assert names.count("TrainingStarted") == 2 and names.count("TrainingEnded") == 1


def test_listeners_have_names_in_flags() -> None:
    name = "ckpt_core.listeners.opentelemetry.OpenTelemetryListener"
    config = CheckpointConfig.from_sources({"listeners": f"{name},{name}"}, variables={})
    assert [type(listener).__name__ for listener in config.made_listeners()] == ["OpenTelemetryListener"] * 2
    for wrong in ("ckpt_core.listeners.prometeus.Listener", "ckpt_core.events.Listner", "listener"):
        with pytest.raises(OptionError, match=f"there is no '{wrong}'"):
            CheckpointConfig(listeners=[wrong]).made_listeners()
    with pytest.raises(OptionError, match="listeners must be a list of functions or of names"):
        CheckpointConfig(listeners=[3])


def test_the_logs_of_a_trainer_hold_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="the optional extra is not installed")
    from accelerate_ckpt.integrations.transformers import ResumableCallback
    from tests.accelerate_ckpt.test_transformers import trainer_for

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
    settings: dict[str, Any] = {"max_steps": 8, "save_steps": 2, "logging_steps": 5, "eval_strategy": "steps"}
    trainer = trainer_for(
        tmp_path,
        callback=False,
        report_to=["tensorboard"],
        eval_steps=4,
        **settings,
    )
    ResumableCallback(trainer, log_metrics=True)
    result = trainer.train()
    shown = scalars_of(tmp_path)
    assert "epoch" in result.metrics
    rows = [row for row in trainer.state.log_history if "checkpoint/saves" in row]
    assert rows and all("loss" in row or "train_runtime" in row for row in rows)
    assert rows[-1]["checkpoint/bytes"] > 1000
    assert (rows[-1]["checkpoint/saves"], rows[-1]["checkpoint/pending"]) == (4, 0)
    assert not any(name.startswith("checkpoint/") for name in trainer.evaluate())
    assert [value for _, value in shown["train/checkpoint/saves"]] == [row["checkpoint/saves"] for row in rows]


def test_the_last_save_of_a_preempted_trainer_reaches_the_trackers(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the optional extra is not installed")
    from accelerate_ckpt.integrations.transformers import ResumableCallback
    from tests.accelerate_ckpt.test_transformers import trainer_for
    from tests.accelerate_ckpt.test_transformers_unattended import Sends

    trainer = trainer_for(tmp_path, callback=False, max_steps=8, save_steps=2, logging_steps=100)
    ResumableCallback(trainer, log_metrics=True, preempt="SIGUSR2")
    trainer.add_callback(Sends(4, signal.SIGUSR2))
    with pytest.raises(SystemExit):
        trainer.train()
    rows = [row for row in trainer.state.log_history if "checkpoint/saves" in row]
    assert [(row["step"], row["checkpoint/saves"], row["checkpoint/pending"]) for row in rows] == [(5, 3, 0)]


def test_a_script_that_just_ends_has_its_line_and_its_page(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    page = tmp_path / "report.html"
    train(tmp_path, log=False, report=page)
    gc.collect()
    assert not page.exists()
    with monkeypatch.context() as fork:
        fork.setattr(os, "getpid", lambda: 1)
        fork.setattr(_report, "_open", _report._open[:])
        _report.close_reports()
        assert not page.exists()
    _report.close_reports()  # as at the end of the interpreter
    assert [line for line in caplog.messages if line.startswith("3 checkpoints saved")]
    assert "Checkpoints of a run" in page.read_text()
    caplog.clear()
    _report.close_reports()
    assert caplog.messages == []


def test_a_trainer_has_its_line_and_its_page_when_it_has_trained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    pytest.importorskip("transformers", reason="the optional extra is not installed")
    from accelerate_ckpt.integrations.transformers import ResumableCallback
    from tests.accelerate_ckpt.test_transformers import trainer_for

    trainer = trainer_for(tmp_path, callback=False, max_steps=4, save_steps=2)
    ResumableCallback(trainer, report=str(tmp_path / "report.html"))
    for length in (4, 6):
        trainer.args.max_steps = length
        trainer.train(resume_from_checkpoint=length > 4)
        said = [line for line in caplog.messages if "saved (" in line]
        caplog.clear()
        assert len(said) == 1 and said[0].startswith("2 checkpoints" if length == 4 else "1 checkpoint")
    assert "Checkpoints of a run" in (tmp_path / "report.html").read_text()


def test_reading_again_says_how_far_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.arange(64.0).view(32, 2))

    def session() -> tuple[Any, Any]:
        accelerator = attach(Accelerator())
        return accelerator, accelerator.prepare(torch.utils.data.DataLoader(Stream(), batch_size=2))

    accelerator, loader = session()
    for number, _ in enumerate(loader):
        if number == 5:
            accelerator.save_state(str(tmp_path / "saved"))
            break
    accelerator.end_training()
    monkeypatch.setattr(console, "_SILENT", 0.0)
    caplog.set_level("INFO")
    accelerator, loader = session()
    accelerator.load_state(str(tmp_path / "saved"))
    assert next(iter(loader)).flatten()[0] == 24.0
    accelerator.end_training()
    said = [line for line in caplog.messages if line.startswith("reading batches again")]
    assert said and ": 1 of 6, about" in said[0]
