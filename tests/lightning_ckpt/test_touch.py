"""A script finds what it has just saved in mid-fit, as without us; a save is awaited only when the script looks."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import ckpt_core.checkpointer as checkpointer_module
from ckpt_core.storage import FileWriter, LocalStorage
from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint, ShardedCheckpointIO
from tests.conftest import LIGHTNING
from tests.lightning_ckpt.reliable_cases import Callback, GatedStorage, model_of, trainer_of

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning:lightning")]

A_MOMENT = 0.05


class SlowStorage(LocalStorage):
    """Takes longer for each file or directory than a batch."""

    def create(self, path: str, expected_size: int) -> FileWriter:
        time.sleep(A_MOMENT)
        return super().create(path, expected_size)

    def remove(self, path: str) -> None:
        time.sleep(A_MOMENT)
        super().remove(path)


class FailingStorage(SlowStorage):
    def create(self, path: str, expected_size: int) -> FileWriter:
        super().create(path, expected_size).abort()
        raise OSError(28, "No space left on device")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointer_module, "storage_for", lambda *_: SlowStorage())


def load(path: Path) -> Any:
    return torch.load(path, weights_only=False)["global_step"]


def link(path: Path) -> Any:
    os.symlink(path.name, path.with_name("link"))
    return load(path.with_name("link"))


TOUCHES: dict[str, Callable[[Path], Any]] = {
    "copy": lambda path: load(Path(shutil.copy(path, path.with_name("copy")))),
    "torch.load": load,
    "mmap": lambda path: torch.load(path, weights_only=False, mmap=True)["global_step"],
    "getsize": lambda path: os.path.getsize(path) > 0,
    "rename": lambda path: load(path.rename(path.with_name("renamed"))),
    "link": link,
    "hard link": lambda path: load(path.with_name("hard")) if os.link(path, path.with_name("hard")) is None else None,
    "listing": lambda path: path.name in os.listdir(path.parent),
    "program": lambda path: subprocess.run(["test", "-e", str(path)], check=False).returncode,
    "removal": lambda path: [path.unlink(), path.exists()],
}


class Touches(Callback):
    def __init__(self, saves: Callable[[Any, Path], Any], folder: Path) -> None:
        self.saves, self.folder, self.found = saves, folder, {}  # type: ignore[var-annotated]

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        for name, touch in TOUCHES.items():
            path = self.folder / f"{trainer.global_step}-{name}" / "a.ckpt"
            path = Path(self.saves(trainer, path))
            try:
                found = touch(path)
            except OSError as error:
                found = type(error)
            self.found[trainer.global_step, name] = found


def save(trainer: Any, path: Path) -> Path:
    trainer.save_checkpoint(path)
    return path


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [ModelCheckpoint, ResumableCheckpoint])
def test_what_was_saved_in_mid_fit_is_there(slow: None, tmp_path: Path, kind: type[Any]) -> None:
    found = []
    for plugins in ([], [AsyncCheckpointIO(max_pending=2)]):
        folder = tmp_path / str(len(plugins))
        callback = Touches(save, folder)
        trainer_of(folder, [callback, kind(folder)], plugins=plugins, max_steps=2).fit(model_of())
        found.append(callback.found)
    assert found[1] == found[0]
    assert len(found[0]) == 2 * len(TOUCHES)
    assert FileNotFoundError not in found[0].values()


def test_a_directory_that_was_saved_in_mid_fit_is_there(tmp_path: Path) -> None:
    found = []

    class Looks(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            path = save(trainer, tmp_path / "a.ckpt")
            found.append("manifest.json" in os.listdir(path))
            shutil.rmtree(path)
            found.append(path.exists())

    trainer_of(tmp_path, [Looks()], plugins=[ShardedCheckpointIO()], max_steps=2).fit(model_of())
    assert found == [True, False] * 2
    assert not (tmp_path / "a.ckpt").exists()


def test_a_directory_looks_as_if_checkpoints_were_deleted_at_once(slow: None, tmp_path: Path) -> None:
    found = []
    for plugins in ([], [AsyncCheckpointIO(max_pending=3)]):
        seen: list[Any] = []

        class Looks(Callback):
            def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
                if trainer.global_step:
                    seen.append(sorted(os.listdir(trainer.checkpoint_callback.dirpath)))  # noqa: B023

        callback = ModelCheckpoint(tmp_path / str(len(plugins)), every_n_train_steps=1, filename="{step}")
        trainer_of(tmp_path, [Looks(), callback], plugins=plugins, max_steps=4).fit(model_of())
        found.append(seen)
    assert found[1] == found[0]


def test_a_failed_save_is_not_there_and_says_so_at_the_next_boundary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointer_module, "storage_for", lambda *_: FailingStorage())
    callback = Touches(save, tmp_path)
    plugin = AsyncCheckpointIO(on_error="warn")
    trainer_of(tmp_path, [callback], plugins=[plugin], max_steps=1, enable_checkpointing=False).fit(model_of())
    assert callback.found == {
        (1, name): {"program": 1, "listing": False}.get(name, FileNotFoundError) for name in TOUCHES
    }
    assert plugin.checkpointer.failures == len(TOUCHES)


def test_paths_of_a_callback_are_read_without_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GatedStorage, "opened", threading.Event())
    monkeypatch.setattr(checkpointer_module, "storage_for", lambda *_: GatedStorage())
    pending = []

    class Reads(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            callback = trainer.checkpoint_callback
            pending.append(trainer.strategy.checkpoint_io.checkpointer.is_pending(callback.best_model_path))
            assert callback.last_model_path
            pending.append(trainer.strategy.checkpoint_io.checkpointer.is_pending(callback.best_model_path))
            GatedStorage.opened.set()
            assert load(callback.best_model_path) == trainer.global_step
            assert load(callback.last_model_path) == trainer.global_step
            if trainer.global_step == 1:
                GatedStorage.opened.clear()

    callback = ResumableCheckpoint(tmp_path, every_n_train_steps=1, save_last=True)
    callbacks: list[Any] = [callback, Reads()]
    trainer = trainer_of(tmp_path, callbacks, plugins=[AsyncCheckpointIO()], max_steps=2)
    trainer.callbacks[:] = callbacks  # undo Lightning's order, in which callbacks that save come last
    trainer.fit(model_of())
    assert pending == [True] * 4


def test_a_synchronous_run_keeps_the_functions_of_the_standard_library(fork_script: Any, tmp_path: Path) -> None:
    fork_script(
        """
        import os, posix, sys
        from pathlib import Path
        from lightning_ckpt import ResumableCheckpoint, SyncCheckpointIO
        from tests.lightning_ckpt.reliable_cases import model_of, trainer_of
        folder = Path(sys.argv[1])
        callback = ResumableCheckpoint(folder, every_n_train_steps=1)
        trainer_of(folder, [callback], plugins=[SyncCheckpointIO()], max_steps=2).fit(model_of())
        assert os.stat is posix.stat
        """,
        tmp_path,
        modules=LIGHTNING,
    )
