"""A save fails while training continues: what the user sees, what is left on the disk, and what is freed."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_core.checkpointer as checkpointer_module
from ckpt_core import StorageError, verify
from ckpt_core.preemption import NOT_SAVED
from ckpt_core.process import awaited_paths
from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint, SyncCheckpointIO
from tests.lightning_ckpt.features import needs_save_on_exception
from tests.lightning_ckpt.reliable_cases import (
    NUMBERS,
    Callback,
    FillsDisk,
    GatedStorage,
    model_of,
    names,
    trainer_of,
)
from tests.support.fork_server import LIGHTNING, ForkServers
from tests.support.ports import free_port
from tests.support.script_server import ScriptServer

SCRIPT = Path(__file__).with_name("failure_script.py")
ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 200.0

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning:lightning")]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Return an event; all writes wait until it is set."""
    monkeypatch.setattr(GatedStorage, "opened", threading.Event())
    monkeypatch.setattr(checkpointer_module, "storage_for", lambda *_: GatedStorage())
    yield GatedStorage.opened
    GatedStorage.opened.set()


def each_second_step(directory: Path, **options: Any) -> ResumableCheckpoint:
    if options.get("save_on_exception"):
        needs_save_on_exception()
    settings = {"every_n_train_steps": 2, "save_top_k": -1, "filename": "{step}", **options}
    return ResumableCheckpoint(directory, **settings)


def assert_tells_of_full_disk(error: StorageError, path: Path) -> None:
    assert error.errno == errno.ENOSPC
    assert error.path == str(path)
    assert str(path) in str(error)
    found = re.search(r"(\d+) bytes needed, (\d+) free", str(error))
    assert found is not None
    assert 4 * NUMBERS < int(found[1]) < 9 * NUMBERS  # with gradients of an open window, twice the weights
    assert int(found[2]) == 0
    assert error.remedy is not None
    assert "free some space" in error.remedy
    assert error.remedy in str(error)


def assert_freed(plugin: AsyncCheckpointIO) -> None:
    assert plugin.checkpointer.pending == ()
    assert plugin.checkpointer._pipeline.buffers._lent == 0
    assert plugin.checkpointer._pipeline.buffers._idle == []


def test_a_full_disk_ends_training_at_the_next_batch(
    gate: threading.Event, small_filesystem: Path, tmp_path: Path
) -> None:
    saved = small_filesystem / "saved"
    plugin, disk = AsyncCheckpointIO(), FillsDisk(small_filesystem, full_at=6)
    trainer = trainer_of(tmp_path, [each_second_step(saved), disk], plugins=[plugin])
    with pytest.raises(StorageError) as caught:
        trainer.fit(model_of())
    assert trainer.global_step == 7
    assert_tells_of_full_disk(caught.value, saved / "step=6.ckpt")
    assert plugin.checkpointer.failures == 1
    assert_freed(plugin)
    assert names(saved) == ["step=2.ckpt", "step=4.ckpt"]
    for step in (2, 4):
        assert verify(saved / f"step={step}.ckpt")
        state = torch.load(saved / f"step={step}.ckpt")
        assert torch.equal(state["state_dict"]["weight"], torch.full((NUMBERS,), float(step)))

    assert disk.filler is not None
    disk.filler.unlink()
    model, again = model_of(), trainer_of(tmp_path, [each_second_step(saved)], plugins=[AsyncCheckpointIO()])
    gate.set()
    again.fit(model, ckpt_path="last")
    assert (model.batches, again.global_step) == (8, 12)
    assert torch.equal(model.weight, torch.full((NUMBERS,), 12.0))
    assert names(saved) == sorted(f"step={step}.ckpt" for step in (2, 4, 6, 8, 10, 12))


def test_the_same_trainer_can_go_on_after_a_failure(small_filesystem: Path, tmp_path: Path) -> None:
    saved = small_filesystem / "saved"
    plugin, disk = AsyncCheckpointIO(), FillsDisk(small_filesystem, full_at=4, free_at=0)
    trainer = trainer_of(tmp_path, [each_second_step(saved), disk], plugins=[plugin])
    with pytest.raises(StorageError):
        trainer.fit(model_of())
    assert disk.filler is not None
    disk.filler.unlink()
    model = model_of()
    trainer.fit(model, ckpt_path="last")
    assert torch.equal(model.weight, torch.full((NUMBERS,), 12.0))
    assert plugin.checkpointer.failures == 1
    assert verify(saved / "step=12.ckpt")


@pytest.mark.parametrize("save_last", [False, True])
def test_with_warn_training_goes_on_and_saves_again(
    small_filesystem: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, save_last: bool
) -> None:
    saved = small_filesystem / "saved"
    plugin, disk = AsyncCheckpointIO(on_error="warn"), FillsDisk(small_filesystem, full_at=4, free_at=8)
    trainer = trainer_of(tmp_path, [each_second_step(saved, save_last=save_last), disk], plugins=[plugin])
    trainer.fit(model_of())
    assert trainer.global_step == 12
    last = ["last.ckpt"] if save_last else []
    assert plugin.checkpointer.failures == 2 * (1 + len(last))
    assert names(saved) == sorted([*last, *(f"step={step}.ckpt" for step in (2, 8, 10, 12))])
    for path in saved.iterdir():
        assert verify(path)
    if save_last:
        assert torch.load(saved / "last.ckpt")["global_step"] == 12
    told = [record for record in caplog.records if "bytes needed" in record.getMessage()]
    assert [record.levelname for record in told] == ["WARNING"] * 2
    assert str(saved / "step=4.ckpt") in told[0].getMessage()
    assert_freed(plugin)


def test_the_last_good_checkpoint_outlives_a_failed_successor(small_filesystem: Path, tmp_path: Path) -> None:
    saved = small_filesystem / "saved"
    callback = each_second_step(saved, save_top_k=1, save_last=True)
    trainer = trainer_of(tmp_path, [callback, FillsDisk(small_filesystem, full_at=6)], plugins=[AsyncCheckpointIO()])
    with pytest.raises(StorageError):
        trainer.fit(model_of())
    assert names(saved) == ["last.ckpt", "step=4.ckpt"]
    for path in saved.iterdir():
        assert verify(path)
        assert torch.load(path)["global_step"] == 4


def test_the_failure_of_the_last_save_is_raised_by_fit(small_filesystem: Path, tmp_path: Path) -> None:
    saved = small_filesystem / "saved"
    plugin = AsyncCheckpointIO()
    trainer = trainer_of(tmp_path, [each_second_step(saved), FillsDisk(small_filesystem, full_at=12)], plugins=[plugin])
    with pytest.raises(StorageError) as caught:
        trainer.fit(model_of())
    assert trainer.global_step == 12
    assert trainer.state.status == "interrupted"
    assert_tells_of_full_disk(caught.value, saved / "step=12.ckpt")
    assert names(saved) == sorted(f"step={step}.ckpt" for step in (2, 4, 6, 8, 10))
    assert_freed(plugin)


def test_a_failure_inside_an_accumulation_window(gate: threading.Event, small_filesystem: Path, tmp_path: Path) -> None:
    saved = small_filesystem / "saved"

    class SavesInside(Callback):
        def on_train_batch_end(self, trainer: Any, _: Any, __: Any, ___: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                trainer.save_checkpoint(saved / "inside.ckpt")

    disk, model = FillsDisk(small_filesystem, full_at=0), model_of()
    trainer = trainer_of(
        tmp_path,
        [disk, SavesInside(), each_second_step(saved)],
        plugins=[AsyncCheckpointIO()],
        accumulate_grad_batches=4,
    )
    with pytest.raises(StorageError) as caught:
        trainer.fit(model)
    assert_tells_of_full_disk(caught.value, saved / "inside.ckpt")
    assert (model.batches, trainer.global_step) == (3, 0)
    assert names(saved) == []


@pytest.mark.parametrize("save_last", [False, True])
def test_a_sync_save_on_a_full_disk_raises_at_once(small_filesystem: Path, tmp_path: Path, save_last: bool) -> None:
    saved = small_filesystem / "saved"
    callback = each_second_step(saved, save_top_k=1, save_last=save_last, save_on_exception=True)
    trainer = trainer_of(tmp_path, [callback, FillsDisk(small_filesystem, full_at=6)], plugins=[SyncCheckpointIO()])
    with pytest.raises(StorageError) as caught:
        trainer.fit(model_of())
    assert trainer.global_step == 6
    assert_tells_of_full_disk(caught.value, saved / "step=6.ckpt")
    assert names(saved) == [*(["last.ckpt"] if save_last else []), "step=4.ckpt"]
    for path in saved.iterdir():
        assert verify(path)
        assert torch.load(path)["global_step"] == 4


def test_an_exception_of_the_user_surfaces_and_the_save_under_way_is_finished(
    gate: threading.Event, tmp_path: Path
) -> None:
    under_way: list[Any] = []

    class Opens(Callback):
        def on_exception(self, *_: Any) -> None:
            with awaited_paths.without_waiting():
                under_way.append((plugin.checkpointer.pending, names(tmp_path / "saved")))
            threading.Timer(0.2, gate.set).start()

    (tmp_path / "saved").mkdir()
    plugin = AsyncCheckpointIO()
    trainer = trainer_of(tmp_path, [each_second_step(tmp_path / "saved"), Opens()], plugins=[plugin])
    with pytest.raises(ValueError, match="the model is on fire") as caught:
        trainer.fit(model_of(raise_at=4))
    assert caught.value.__context__ is None
    path = tmp_path / "saved" / "step=2.ckpt"
    assert under_way == [((str(path),), [])]
    assert verify(path)
    assert torch.load(path)["global_step"] == 2
    assert_freed(plugin)


@pytest.mark.parametrize("save_on_exception", [False, True])
def test_an_exception_of_the_user_is_not_hidden_by_a_failed_save(
    gate: threading.Event,
    small_filesystem: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    save_on_exception: bool,
) -> None:
    saved = small_filesystem / "saved"
    plugin = AsyncCheckpointIO()
    callback = each_second_step(saved, every_n_train_steps=1, save_on_exception=save_on_exception)
    trainer = trainer_of(tmp_path, [callback, FillsDisk(small_filesystem, full_at=3)], plugins=[plugin])
    with pytest.raises(ValueError, match="the model is on fire"):
        trainer.fit(model_of(raise_at=4))
    assert trainer.global_step == 3
    assert plugin.checkpointer.failures == 1
    assert str(saved / "step=3.ckpt") in caplog.text
    assert names(saved) == ["step=1.ckpt", "step=2.ckpt"]
    assert_freed(plugin)


def test_an_exception_of_the_user_is_not_hidden_by_a_save_of_another_callback(
    small_filesystem: Path, tmp_path: Path
) -> None:
    saved, plugin = small_filesystem / "saved", AsyncCheckpointIO()
    first = each_second_step(saved, every_n_train_steps=50)
    second = each_second_step(saved, every_n_train_steps=60, save_on_exception=True)
    disk = FillsDisk(small_filesystem, full_at=3)
    with pytest.raises(ValueError, match="the model is on fire"):
        trainer_of(tmp_path, [first, second, disk], plugins=[plugin]).fit(model_of(raise_at=4))
    assert plugin.checkpointer.failures == 1
    assert_freed(plugin)


def test_the_save_on_an_exception_is_made_after_a_failed_save(
    gate: threading.Event, small_filesystem: Path, tmp_path: Path
) -> None:
    class SavesAndFrees(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(saved / "other.ckpt")

        def on_exception(self, *_: Any) -> None:
            assert disk.filler is not None
            disk.filler.unlink()

    saved, disk, plugin = small_filesystem / "saved", FillsDisk(small_filesystem, full_at=3), AsyncCheckpointIO()
    callback = each_second_step(saved, save_on_exception=True)
    trainer = trainer_of(tmp_path, [disk, SavesAndFrees(), callback], plugins=[plugin])
    with pytest.raises(ValueError, match="the model is on fire"):
        trainer.fit(model_of(raise_at=4))
    assert plugin.checkpointer.failures == 1
    assert names(saved) == ["step=2.ckpt", "step=3.ckpt"]
    assert verify(saved / "step=3.ckpt")


def test_an_exception_of_the_user_is_not_hidden_by_a_failing_sync_save_on_exception(
    small_filesystem: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = small_filesystem / "saved"
    callback = each_second_step(saved, save_on_exception=True)
    trainer = trainer_of(tmp_path, [callback, FillsDisk(small_filesystem, full_at=3)], plugins=[SyncCheckpointIO()])
    with pytest.raises(ValueError, match="the model is on fire"):
        trainer.fit(model_of(raise_at=4))
    assert names(saved) == ["step=2.ckpt"]
    assert "bytes needed" in caplog.text


@pytest.mark.parametrize("is_ours", [False, True])
def test_a_run_ends_as_told_on_a_full_disk(
    small_filesystem: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_ours: bool
) -> None:
    class TellsToEnd(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    callback = each_second_step(small_filesystem / "saved")
    callbacks = [callback, TellsToEnd(), FillsDisk(small_filesystem, full_at=3)]
    plugins = [AsyncCheckpointIO(on_error="warn")] if is_ours else []
    trainer = trainer_of(tmp_path, callbacks, plugins=plugins)
    with pytest.raises(SystemExit) as ended:
        trainer.fit(model_of())
    assert ended.value.code == 143
    assert NOT_SAVED in caplog.text
    assert "No space left on device" in caplog.text
    assert torch.load(small_filesystem / "saved" / "step=2.ckpt")["global_step"] == 2


def test_nothing_is_left_after_fit(tmp_path: Path) -> None:
    plugin = AsyncCheckpointIO(max_pending=2)
    trainer = trainer_of(tmp_path, [each_second_step(tmp_path / "saved", save_last=True)], plugins=[plugin])
    trainer.fit(model_of())
    assert_freed(plugin)
    assert trainer.state.status == "finished"


# ---- several processes -----------------------------------------------------------------------------------------------


class Ranks(ScriptServer):
    """Trains on several ranks, each a fresh process (see ``failure_script.py``)."""

    def run(self, directory: Path, **spec: Any) -> list[dict[str, Any]]:
        port = free_port()
        results = [directory / f"rank{rank}.json" for rank in range(2)]
        whole = {"directory": str(directory), "results": [str(path) for path in results], "port": port, **spec}
        outcome = self.ask({**whole, "limit_seconds": LIMIT_SECONDS})
        logs = "\n".join(Path(f"{path}.log").read_text() for path in results)
        assert outcome == "ended", f"{outcome}\n{logs}"
        assert all(path.exists() for path in results), logs
        return [json.loads(path.read_text()) for path in results]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, fork_servers: ForkServers) -> Iterator[Ranks]:
    started = Ranks(fork_servers(LIGHTNING), SCRIPT, tmp_path_factory.mktemp("ranks"))
    yield started
    started.close()


def assert_all_raised(results: list[dict[str, Any]], path: Path, *, step: int) -> None:
    for result in results:
        assert result["type"] == "StorageError", result["message"]
        assert result["errno"] == errno.ENOSPC
        assert result["path"] == str(path)
        assert re.search(r"\d+ bytes needed, \d+ free", result["message"])
        assert "free some space" in result["message"]
    assert [result["step"] for result in results] == [step, step]
    assert [result["left"] for result in results] == [[], []]


@pytest.mark.sampled(2)
@pytest.mark.extended_cells("save_last", "weights only", "sync save_last")
@pytest.mark.parametrize(
    ("settings", "full_at", "step"),
    [
        ({}, 4, 6),  # found at the end of step 5, announced for the end of step 6
        ({"callback": {"save_last": True, "save_top_k": 1}}, 4, 6),
        ({"trainer": {"accumulate_grad_batches": 4}}, 2, 4),
        ({"callback": {"save_weights_only": True}}, 4, 6),
        ({"callback": {"every_n_train_steps": 1}}, 4, 5),  # found by the save of step 5
        ({}, 12, 12),  # the last save
        ({"callback": {"every_n_train_steps": 11}}, 11, 12),  # announced for a step that does not come
        ({"io": "SyncCheckpointIO"}, 4, 4),
        ({"io": "SyncCheckpointIO", "callback": {"save_last": True, "save_on_exception": True}}, 4, 4),
    ],
    ids=[
        "batch end",
        "save_last",
        "accumulation",
        "weights only",
        "every step",
        "last save",
        "last but one",
        "sync",
        "sync save_last",
    ],
)
def test_every_rank_raises_the_same_at_the_same_step(
    ranks: Ranks, small_filesystem: Path, tmp_path: Path, settings: dict[str, Any], full_at: int, step: int
) -> None:
    if "save_on_exception" in settings.get("callback", {}):
        needs_save_on_exception()
    saved = small_filesystem / "saved"
    results = ranks.run(tmp_path, saved=str(saved), full_at=full_at, **settings)
    assert_all_raised(results, saved / f"step={full_at}.ckpt", step=step)
    interval = settings.get("callback", {}).get("every_n_train_steps", 2)
    kept = [f"step={step}.ckpt" for step in range(interval, full_at, interval)]
    if "save_last" in settings.get("callback", {}):
        kept.append("last.ckpt")
    assert names(saved) == sorted(kept)
    for path in saved.iterdir():
        assert verify(path)


@pytest.mark.extended
def test_with_warn_all_ranks_train_to_the_end(ranks: Ranks, small_filesystem: Path, tmp_path: Path) -> None:
    saved = small_filesystem / "saved"
    results = ranks.run(tmp_path, saved=str(saved), full_at=4, free_at=8, on_error="warn")
    assert [result["type"] for result in results] == [None, None]
    assert [result["step"] for result in results] == [12, 12]
    assert [result["failures"] for result in results] == [2, 0]
    assert names(saved) == sorted(f"step={step}.ckpt" for step in (2, 8, 10, 12))


def test_an_exception_of_the_user_surfaces_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks.run(tmp_path, saved=str(tmp_path / "saved"), raise_at=4)
    assert [result["type"] for result in results] == ["ValueError", "ValueError"]
    assert [result["message"] for result in results] == ["the model is on fire"] * 2
    assert [result["left"] for result in results] == [[], []]
    assert results[0]["at_exception"] == [[str(tmp_path / "saved" / "step=2.ckpt")], []]
    assert verify(tmp_path / "saved" / "step=2.ckpt")


def test_a_strategy_that_never_tears_its_plugin_down(ranks: Ranks, small_filesystem: Path, tmp_path: Path) -> None:
    saved = small_filesystem / "saved"
    results = ranks.run(tmp_path, saved=str(saved), full_at=12, strategy="model_parallel")
    assert_all_raised(results, saved / "step=12.ckpt", step=12)
    assert names(saved) == sorted(f"step={step}.ckpt" for step in (2, 4, 6, 8, 10))
    for path in saved.iterdir():
        assert verify(path)


def test_nothing_is_left_where_the_strategy_never_tears_its_plugin_down(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks.run(
        tmp_path, saved=str(tmp_path / "saved"), strategy="model_parallel", callback={"save_last": True}
    )
    assert [(result["type"], result["left"]) for result in results] == [(None, [])] * 2
    assert names(tmp_path / "saved") == ["last.ckpt", *sorted(f"step={step}.ckpt" for step in (2, 4, 6, 8, 10, 12))]


@pytest.mark.extended
def test_two_callbacks_gather_the_exact_state_once_for_each_save(ranks: Ranks, tmp_path: Path) -> None:
    first, second = tmp_path / "saved", tmp_path / "second"
    results = ranks.run(tmp_path, saved=str(first), second=str(second))
    assert [result["type"] for result in results] == [None, None]
    assert [result["step"] for result in results] == [12, 12]
    for path in (first / "step=12.ckpt", second / "step=12.ckpt"):
        assert verify(path)
        assert len(torch.load(path, weights_only=True)["lightning_ckpt"]["per-rank"]) == 2
