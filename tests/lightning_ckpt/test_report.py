"""What a run reports of its checkpoints, in its log and to its loggers: where it resumed, and what they cost."""

from __future__ import annotations

import logging
import re
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import TensorBoardLogger

from ckpt_core.events import TrainingStarted
from ckpt_core.process import console
from ckpt_core.report import interruptions_of, read_events
from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint, ShardedCheckpointIO, SyncCheckpointIO
from tests.lightning_ckpt.exact_cases import MemoryLogger
from tests.lightning_ckpt.features import needs_save_on_exception
from tests.lightning_ckpt.reliable_cases import BATCHES, model_of, trainer_of
from tests.support.event_files import scalars_of

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning:lightning")]


class StopAfter(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise ValueError("stop")


PLUGINS = [SyncCheckpointIO, AsyncCheckpointIO, ShardedCheckpointIO]


@pytest.fixture
def lines() -> Iterator[list[str]]:
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler, logger = Handler(), logging.getLogger("lightning.pytorch.lightning_ckpt")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def saver(folder: Path, every: int = 2, **options: Any) -> ResumableCheckpoint:
    return ResumableCheckpoint(folder, every_n_train_steps=every, save_top_k=-1, save_last=True, **options)


def model_that_keeps_its_count() -> Any:
    model = model_of()
    kind = type(model)
    kind.on_save_checkpoint = lambda self, checkpoint: checkpoint.update(batches=self.batches)
    kind.on_load_checkpoint = lambda self, checkpoint: setattr(self, "batches", checkpoint["batches"])
    return model


@pytest.mark.sampled(1)
@pytest.mark.extended_cells("SyncCheckpointIO")
@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.__name__)
def test_it_says_where_it_resumes_and_what_its_saves_cost(plugin: Any, tmp_path: Path, lines: list[str]) -> None:
    callbacks = [saver(tmp_path), saver(tmp_path / "more", every=4)]
    trainer_of(tmp_path, callbacks, plugins=[plugin()], max_steps=8).fit(model_that_keeps_its_count())
    (line,) = lines
    assert re.fullmatch(
        r"[67] checkpoints saved \((\d{3}\.\d kB each|\d\.\d MB in all)\); training stood still for \d+\.\d\d s, \d+\.\d\d s at most, "
        r"\d+\.\d\d % of the run",
        line,
    ), (
        "two callbacks save four states and two; last.ckpt is no save; Lightning 2.5 saves once more at the end, which is larger"
    )

    lines.clear()
    trainer_of(tmp_path, [saver(tmp_path)], plugins=[plugin()]).fit(model_that_keeps_its_count(), ckpt_path="last")
    resumed, ended = lines
    read = r"\d{3}\.\d kB read and verified in \d+\.\d s"
    assert re.fullmatch(rf"resuming from \S+: epoch 1, batch 2, step 8; {read}; exact", resumed)
    assert ended.startswith("2 checkpoints saved")


def test_a_resume_with_nothing_left_to_train_says_so(tmp_path: Path, lines: list[str]) -> None:
    for _ in range(2):
        lines.clear()
        callback = saver(tmp_path, resume="auto")
        trainer_of(tmp_path, [callback], plugins=[AsyncCheckpointIO()], max_steps=4).fit(model_of())
    (line,) = lines
    assert line.startswith(f"resuming from {tmp_path}") and ", step 4; " in line
    assert re.search(r" read and verified in \d+\.\d s; nothing is left to train$", line)


def test_a_resume_from_a_stock_checkpoint_has_its_line(tmp_path: Path, lines: list[str]) -> None:
    stock = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_last=True)
    trainer_of(tmp_path, [stock], max_steps=4).fit(model_of())
    trainer = trainer_of(tmp_path, [saver(tmp_path / "ours")], plugins=[AsyncCheckpointIO()], max_steps=8)
    with pytest.warns(UserWarning, match="saved without ResumableCheckpoint, so it holds no exact state"):
        trainer.fit(model_of(), ckpt_path=str(tmp_path / "last.ckpt"))
    assert re.fullmatch(r"resuming from \S+: epoch 0, batch 4, step 4; .*; not exact, see the warning", lines[0])


class Warms(Callback):
    """Keeps a factor that the training needs and no state contains."""

    def __init__(self) -> None:
        self.factor = 1.0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.factor *= 0.9
        trainer.optimizers[0].param_groups[0]["lr"] = 0.1 * self.factor


@pytest.mark.sampled(1)
@pytest.mark.parametrize("step", [4, BATCHES])
def test_the_line_agrees_with_the_warning_about_what_a_resume_has_lost(
    tmp_path: Path, lines: list[str], step: int
) -> None:
    first = trainer_of(tmp_path, [saver(tmp_path, every=step), Warms()], plugins=[AsyncCheckpointIO()], max_steps=step)
    first.fit(model_of())
    lines.clear()
    second = trainer_of(tmp_path, [saver(tmp_path), Warms()], plugins=[AsyncCheckpointIO()], max_steps=step + 2)
    with pytest.warns(UserWarning, match="callback `Warms`"):
        second.fit(model_of(), ckpt_path="last")
    resumed, _ = lines
    assert re.fullmatch(
        rf"resuming from \S+: epoch \d, batch \d+, step {step}; .*; not exact, see the warning", resumed
    )


def test_a_directory_that_is_not_empty_is_warned_of_unless_the_run_resumes(tmp_path: Path) -> None:
    (tmp_path / "other").touch()

    def warned(steps: int) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            callback = saver(tmp_path, resume="auto")
            trainer_of(tmp_path, [callback], plugins=[SyncCheckpointIO()], max_steps=steps).fit(model_of())
        return [str(each.message) for each in caught if "not empty" in str(each.message)]

    assert warned(4) == [f"Checkpoint directory {tmp_path} exists and is not empty."]
    assert warned(8) == []


def test_a_resume_that_is_not_exact_says_so(tmp_path: Path, lines: list[str]) -> None:
    trainer_of(tmp_path, [saver(tmp_path)], plugins=[SyncCheckpointIO()], max_steps=4).fit(model_of())
    lines.clear()
    trainer = trainer_of(tmp_path, [saver(tmp_path)], plugins=[SyncCheckpointIO()], accumulate_grad_batches=2)
    with pytest.warns(UserWarning, match="is not guaranteed to be exact"):
        trainer.fit(model_of(), ckpt_path="last")
    assert lines[0].endswith("; not exact, see the warning")


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.__name__)
def test_loggers_get_the_figures_of_each_save(plugin: Any, tmp_path: Path) -> None:
    logger = MemoryLogger()
    callbacks = [saver(tmp_path, log_metrics=True)]
    trainer_of(tmp_path, callbacks, plugins=[plugin()], logger=logger, max_epochs=1).fit(model_of())
    rows = [(step, row) for step, row in logger.rows if "checkpoint/saves" in row]
    assert rows[-1][0] == BATCHES
    assert [row["checkpoint/saves"] for _, row in rows] == sorted({row["checkpoint/saves"] for _, row in rows})
    assert rows[-1][1]["checkpoint/saves"] == len(list(tmp_path.glob("epoch*"))), "also what the end has saved"
    for _, row in rows:
        assert row["checkpoint/bytes"] > 200_000
        assert row["checkpoint/failures"] == 0
        assert 0 < row["checkpoint/share_of_run"] <= 1
        assert row["checkpoint/stall_seconds_total"] > 0


def test_a_run_is_counted_from_the_start_of_its_training(tmp_path: Path) -> None:
    begun: list[float] = []
    logged: list[tuple[float, dict[str, float]]] = []

    class Logger(MemoryLogger):
        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            if "checkpoint/share_of_run" in metrics:
                logged.append((time.monotonic(), metrics))

    plugin = SyncCheckpointIO(listeners=[lambda e: begun.append(time.monotonic()) if type(e) is TrainingStarted else 0])
    callbacks = [saver(tmp_path, log_metrics=True)]
    trainer_of(tmp_path, callbacks, plugins=[plugin], logger=Logger(), max_epochs=1).fit(model_of())
    for moment, row in logged:
        seconds = row["checkpoint/stall_seconds_total"] / row["checkpoint/share_of_run"]
        assert seconds <= moment - begun[0] + 1e-6
    assert logged


def test_tensorboard_shows_the_figures(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path / "logs")
    callbacks = [saver(tmp_path, log_metrics=True)]
    trainer_of(tmp_path, callbacks, plugins=[AsyncCheckpointIO()], logger=logger, max_epochs=1).fit(model_of())
    shown = scalars_of(tmp_path / "logs")
    names = ("bytes", "commit_seconds", "stall_seconds", "stall_seconds_total", "share_of_run", "saves", "pending")
    for name in (*names, "failures"):
        assert shown[f"checkpoint/{name}"], name
    steps = [step for step, _ in shown["checkpoint/saves"]]
    assert steps == sorted(steps) and steps[-1] == BATCHES
    assert shown["checkpoint/saves"][-1][1] == len(list(tmp_path.glob("epoch*"))), "also what the end has saved"
    stalls = [value for _, value in shown["checkpoint/stall_seconds"]]
    assert sum(stalls) == pytest.approx(shown["checkpoint/stall_seconds_total"][-1][1], rel=1e-5)


def test_tensorboard_shows_what_an_exception_has_saved(tmp_path: Path) -> None:
    needs_save_on_exception()
    callbacks = [saver(tmp_path, every=100, save_on_exception=True, log_metrics=True), StopAfter(5)]
    logger = TensorBoardLogger(tmp_path / "logs")
    with pytest.raises(ValueError, match="stop"):
        trainer_of(tmp_path, callbacks, plugins=[AsyncCheckpointIO()], logger=logger).fit(model_of())
    assert scalars_of(tmp_path / "logs")["checkpoint/saves"] == [(5, 1)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.__name__)
def test_the_page_of_a_run_is_written_at_its_end(plugin: Any, tmp_path: Path) -> None:
    heard: list[str] = []
    page = tmp_path / "report.html"
    options: dict[str, Any] = {"report": str(page), "listeners": [lambda event: heard.append(type(event).__name__)]}
    with pytest.raises(ValueError, match="stop"):
        trainer_of(tmp_path, [saver(tmp_path / "c"), StopAfter(5)], plugins=[plugin(**options)]).fit(model_of())
    assert not page.exists() and "TrainingEnded" not in heard
    trainer_of(tmp_path, [saver(tmp_path / "c")], plugins=[plugin(**options)]).fit(model_of(), ckpt_path="last")
    (interruption,) = interruptions_of(read_events([f"{page}.jsonl"]))
    assert interruption.step == 4
    assert interruption.path == str(tmp_path / "c" / "last.ckpt")
    assert interruption.seconds > 0
    assert "Interruptions" in page.read_text()
    assert heard.count("TrainingStarted") == 2 and heard[-1] == "TrainingEnded"


def test_loggers_get_nothing_unless_asked(tmp_path: Path) -> None:
    logger = MemoryLogger()
    trainer_of(tmp_path, [saver(tmp_path)], plugins=[SyncCheckpointIO()], logger=logger, max_epochs=1).fit(model_of())
    assert not [row for _, row in logger.rows if any(name.startswith("checkpoint/") for name in row)]


def test_nothing_is_said_of_saves_that_are_not_ours(tmp_path: Path, lines: list[str]) -> None:
    trainer_of(tmp_path, [saver(tmp_path)], max_steps=4).fit(model_of())
    trainer_of(tmp_path, [ModelCheckpoint(tmp_path / "stock")], plugins=[SyncCheckpointIO()], max_steps=2).fit(
        model_of()
    )
    assert lines == []


def test_reading_again_says_how_far_it_is(tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.randn(64, 32, generator=torch.Generator().manual_seed(0)))

    def fit(steps: int) -> None:
        callback = ResumableCheckpoint(tmp_path, every_n_train_steps=6, resume="auto")
        options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = Trainer(max_steps=steps, callbacks=[callback], plugins=[AsyncCheckpointIO()], **options)
        trainer.fit(BoringModel(), torch.utils.data.DataLoader(Stream(), batch_size=2))

    fit(6)
    monkeypatch.setattr(console, "_SILENT", 0.0)
    fit(7)
    said = [line for line in lines if line.startswith("reading batches again")]
    assert said and "state_dict would avoid it): 1 of 6, about" in said[0]
