"""Symbolic links: one to a checkpoint is followed, one inside a checkpoint only if the user allows it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ckpt_core.errors import CheckpointCorruptedError
from lightning_ckpt import AsyncCheckpointIO, ResumableCheckpoint, ShardedCheckpointIO
from tests.lightning_ckpt.reliable_cases import model_of, names, trainer_of

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning")]


def fit(plugin: Any, directory: Path, ckpt_path: Any = None, steps: int = 2) -> int:
    callback = ResumableCheckpoint(directory, every_n_train_steps=2, filename="{step}")
    trainer = trainer_of(directory, [callback], plugins=[plugin], max_steps=steps)
    trainer.fit(model_of(), ckpt_path=ckpt_path)
    return int(trainer.strategy.model.batches)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("plugin", [AsyncCheckpointIO, ShardedCheckpointIO])
def test_links_to_a_whole_checkpoint_are_followed(tmp_path: Path, plugin: Any) -> None:
    fit(plugin(), tmp_path / "saved")
    (tmp_path / "latest.ckpt").symlink_to(tmp_path / "saved" / "step=2.ckpt")
    (tmp_path / "alias").symlink_to("saved")
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "step=2.ckpt").symlink_to("../saved/step=2.ckpt")
    assert fit(plugin(), tmp_path / "new", tmp_path / "latest.ckpt", 3) == 1
    assert fit(plugin(), tmp_path / "alias", "last", 3) == 1
    assert fit(plugin(), tmp_path / "only", "last", 3) == 1


def test_a_directory_whose_files_are_links_is_loaded_if_the_user_says_so(tmp_path: Path) -> None:
    fit(ShardedCheckpointIO(), tmp_path / "saved")
    whole, cache = tmp_path / "saved" / "step=2.ckpt", tmp_path / "cache"
    shutil.copytree(whole, cache)
    for name in names(cache):
        (whole / name).unlink()
        (whole / name).symlink_to(cache / name)
    with pytest.raises(CheckpointCorruptedError, match="follow_links"):
        fit(ShardedCheckpointIO(), tmp_path / "new", whole, 3)
    options = {"follow_links": True}
    assert fit(ShardedCheckpointIO(storage_options=options), tmp_path / "new", whole, 3) == 1
    assert fit(ShardedCheckpointIO(storage_options=options), tmp_path / "saved", "last", 4) == 2
    assert fit(ShardedCheckpointIO(), tmp_path / "saved", "last", 6) == 2, "what was saved since has no links"
