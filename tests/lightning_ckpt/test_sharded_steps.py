"""Ranks that save at different steps do not write a checkpoint that mixes the steps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ckpt_core import CheckpointError, RankGroup
from lightning_ckpt import ShardedCheckpointIO


def save_on_two_ranks(path: Path, *steps: int) -> list[CheckpointError | None]:
    """Save together on two ranks, here threads, each at its step; return the error of each rank, or None."""
    store = torch.distributed.HashStore()

    def save(rank: int) -> CheckpointError | None:
        plugin = ShardedCheckpointIO(mode="sync", commit_timeout=60)
        plugin.connect(RankGroup(rank, 2, store, "session"))
        checkpoint = {"state_dict": {"weight": torch.ones(8)}, "global_step": steps[rank]}
        try:
            plugin.save_together(checkpoint, path)
        except CheckpointError as error:
            return error
        finally:
            plugin.teardown()
        return None

    with ThreadPoolExecutor(2) as ranks:
        return list(ranks.map(save, range(2)))


def test_the_same_step_is_saved(tmp_path: Path) -> None:
    assert save_on_two_ranks(tmp_path / "a.ckpt", 7, 7) == [None, None]
    assert (tmp_path / "a.ckpt" / "manifest.json").exists()


def test_two_steps_are_not_mixed(tmp_path: Path) -> None:
    errors = save_on_two_ranks(tmp_path / "a.ckpt", 7, 8)
    assert [type(error).__name__ for error in errors] == ["RankFailedError", "RankFailedError"]
    assert all("step" in str(error) for error in errors)
    assert not (tmp_path / "a.ckpt").exists()
