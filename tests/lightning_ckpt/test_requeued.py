"""``ckpt_path="last"`` and the checkpoint that Lightning saves when SLURM requeues the job."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint
from tests.lightning_ckpt.reliable_cases import BATCHES, Callback, model_of, trainer_of
from tests.support.damage import flip_bit

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
]


class Requeues(Callback):
    """Saves after a number of batches as Lightning's SLURM handler does."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.batches -= 1
        if self.batches == 0:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "hpc_ckpt_1.ckpt")


def fit(root: Path, *callbacks: Any, every: int = 50, steps: int = 5, saved: str = "saved", **options: Any) -> Any:
    keeps = ResumableCheckpoint(root / saved, every_n_train_steps=every, save_top_k=-1, filename="{step}")
    trainer = trainer_of(root, [*callbacks, keeps], plugins=[AsyncCheckpointIO()], max_epochs=1, max_steps=steps)
    trainer.fit(model_of(), **options)
    return trainer


def taken(root: Path, **options: Any) -> tuple[str | None, int]:
    """Return the name of the checkpoint that a new run resumes from, and how many batches it trains."""
    trainer = fit(root, steps=BATCHES, ckpt_path="last", **options)
    return trainer.ckpt_path and os.path.basename(trainer.ckpt_path), trainer.model.batches


def test_it_is_the_last_where_it_is_the_only_one(tmp_path: Path) -> None:
    fit(tmp_path, Requeues(3))
    assert taken(tmp_path) == ("hpc_ckpt_1.ckpt", BATCHES - 3)


@pytest.mark.parametrize(("every", "name", "left"), [(2, "step=4.ckpt", 2), (3, "hpc_ckpt_1.ckpt", 2)])
def test_the_one_that_is_further_is_the_last(tmp_path: Path, every: int, name: str, left: int) -> None:
    fit(tmp_path, Requeues(3 if every == 2 else 4), every=every, steps=4 if every == 2 else 5)
    os.utime(tmp_path / "hpc_ckpt_1.ckpt", (1e9, 1e9))
    assert taken(tmp_path) == (name, left)


def test_a_damaged_one_is_passed_over(tmp_path: Path) -> None:
    fit(tmp_path, Requeues(5), every=2)
    flip_bit(tmp_path / "hpc_ckpt_1.ckpt")
    assert taken(tmp_path) == ("step=4.ckpt", BATCHES - 4)


def test_that_of_another_experiment_is_not_taken(tmp_path: Path) -> None:
    fit(tmp_path, Requeues(3), saved="other")
    assert taken(tmp_path) == (None, BATCHES)


def test_it_is_found_where_everything_was_moved(tmp_path: Path) -> None:
    fit(tmp_path / "old", Requeues(3))
    shutil.move(tmp_path / "old", tmp_path / "new")
    assert taken(tmp_path / "new") == ("hpc_ckpt_1.ckpt", BATCHES - 3)
