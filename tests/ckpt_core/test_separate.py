"""Checkpoints of processes that are not ranks of one group: only what the committer sees is committed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ckpt_core import DirectoryCheckpointer, Kind, Part, StorageError
from ckpt_core._pipeline import directory_commit
from ckpt_core.geometry import Box
from ckpt_core.separate import LocalTensor, Piece, SeparateSaves, local_tensor


def whole(key: str, tensor: torch.Tensor) -> LocalTensor:
    return local_tensor(tensor, key=key, rank=0, world_size=1, replicated=True)


def write(saves: SeparateSaves, path: str, rank: int) -> str:
    parts = [Part("mine", {"rank": torch.tensor(rank)}, Kind.PER_RANK)]
    return saves.write(parts, path, "save-1", rank=rank, world_size=2, suffix="", local=whole)


def test_a_file_of_another_process_is_waited_for_and_its_loss_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves, path = SeparateSaves(tmp_path), str(tmp_path / "a")
    saves.begin(path, "save-1")
    reports = [write(saves, path, rank) for rank in range(2)]
    (file,) = tmp_path.glob(".a*/rank-00002-of-00002.safetensors")
    os.rename(file, tmp_path / "elsewhere")  # as if on another machine's disk, or on a server that is late
    with monkeypatch.context() as patch:
        patch.setattr(directory_commit, "_LISTING_SECONDS", 0.0)
        with pytest.raises(StorageError, match="does not see 1 of 4 files") as caught:
            saves.commit(reports, path, "save-1", metadata={})
    assert "rank-00002-of-00002.safetensors" in str(caught.value)
    assert not os.path.exists(path)

    monkeypatch.setattr(directory_commit.time, "sleep", lambda _: os.rename(tmp_path / "elsewhere", file))
    saves.commit(reports, path, "save-1", metadata={})
    with DirectoryCheckpointer().load(path) as checkpoint:
        checkpoint.verify()
        assert [checkpoint.load("mine", rank=rank)["rank"] for rank in range(2)] == [0, 1]


def test_a_piece_may_lie_in_memory_in_another_order_than_its_tensor(tmp_path: Path) -> None:
    values = torch.arange(24.0).reshape(6, 4)
    saves, path, reports = SeparateSaves(tmp_path), str(tmp_path / "a"), []
    saves.begin(path, "save-1")
    for rank in range(2):
        box = Box((3 * rank, 0), (3, 4))

        def local(_: str, piece: torch.Tensor, box: Box = box, rank: int = rank) -> LocalTensor:
            return LocalTensor(piece.dtype, (6, 4), (Piece(box, piece),), (rank,))

        state = {"weight": values[3 * rank : 3 * rank + 3].t().contiguous().t()}
        parts = [Part("model", state, Kind.SHARDED)]
        reports.append(saves.write(parts, path, "save-1", rank=rank, world_size=2, suffix="", local=local))
    saves.commit(reports, path, "save-1", metadata={})
    with DirectoryCheckpointer().load(path) as checkpoint:
        assert torch.equal(checkpoint.load("model")["weight"], values)
