"""Directory checkpoints stay readable, and today's writer still writes the same bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core._layouts.directory.manifest import FORMAT_VERSION, MANIFEST_NAME
from ckpt_core._layouts.directory.safetensors_file import DIGEST_BYTES
from ckpt_core._layouts.directory.writing import RankFiles, build_manifest
from ckpt_core._pipeline.writer import write_image
from ckpt_core.buffers import ScratchBuffers
from ckpt_core.geometry import Box
from ckpt_core.storage import LocalStorage
from tests.support.sharded import Local, Piece, cut, open_directory, part_of, save_directory
from tests.support.states import assert_same_state

GOLDEN = Path(__file__).parents[2] / "golden"
RANKS = 2
CUTS = {
    "layers.0.weight": [[Box((0, 0), (3, 2))], [Box((0, 2), (3, 3))]],
    "bias": [[Box((0,), (1,)), Box((3,), (1,))], [Box((1,), (2,))]],
    "step": [[], [Box((), ())]],
}


def golden_state(rank: int) -> dict[str, tuple[str, Any]]:
    weight = torch.arange(15, dtype=torch.float32).reshape(3, 5)
    model = {
        "layers": [{"weight": weight, "tied": weight}],
        "bias": torch.tensor([1.5, -2.0, 0.25, 8.0], dtype=torch.bfloat16),
        "empty": torch.empty(0, 7, dtype=torch.int64),
        "step": torch.tensor(3),
        "half": torch.arange(4, dtype=torch.uint8).view(torch.float8_e4m3fnuz),
        7: {"lr": 0.1, "name": "$x", "betas": (0.9, 0.999), "nothing": None, "many": 2**70},
        "line": torch.arange(32, dtype=torch.int16),  # fills a cache line, so it comes first in its file
    }
    own = {"seed": torch.tensor([rank, 5]), "position": {"epoch": rank, "limit": float("inf")}}
    return {"model": ("sharded", model), "data": ("per-rank", own)}


def write(path: Path) -> Path:
    states = [golden_state(rank) for rank in range(RANKS)]
    return save_directory(path, states, spread=True, cuts=CUTS, metadata={"step": 3, "tags": ["a"]}, save_id="golden")


def write_linked(path: Path) -> Path:
    """Write the same state; of each rank, the file of the frozen, tied weight is that of the save before."""
    path.mkdir()
    storage, scratch, reports = LocalStorage(), ScratchBuffers(), []
    for rank in range(RANKS):
        parts = [
            part_of(name, kind, tree, rank=rank, world_size=RANKS, cuts=CUTS, spread=kind != "per-rank")
            for name, (kind, tree) in golden_state(rank).items()
        ]
        parts[0] = dataclasses.replace(parts[0], frozen=("layers.0.weight",), apart=True)
        older = RankFiles(parts, rank=rank, world_size=RANKS, save_id="older")
        newer = RankFiles(parts, rank=rank, world_size=RANKS, save_id="golden")
        older_images, newer_images = dict(older.live_files()), dict(newer.live_files())
        for name in newer.names:
            image = newer_images[name]
            if "unchanged" in name:
                with scratch.lent(2**24) as window:
                    image.digested_window(0, window)  # computes the digests of its blocks
                image.tail()
                image = older_images[name]
            write_image(image, storage, str(path / name), scratch=scratch)
            if "unchanged" in name:
                (digests,) = (file.digests for file in older.written() if file.name == name)
                newer.take_over(name, save_id="older", header_digest=digests[:DIGEST_BYTES])
        reports.append(newer.report())
    scratch.close()
    (path / MANIFEST_NAME).write_bytes(build_manifest(reports, metadata={"step": 3, "tags": ["a"]}))
    return path


@pytest.mark.parametrize("name", ["sharded_v3", "sharded_v3_linked"])
def test_every_released_version_is_readable(name: str) -> None:
    with open_directory(GOLDEN / name) as checkpoint:
        checkpoint.verify()
        assert checkpoint.metadata == {"step": 3, "tags": ["a"]}
        assert (checkpoint.world_size, checkpoint.save_id) == (2, "golden")
        loaded = checkpoint.load("model")
        assert_same_state(loaded, golden_state(0)["model"][1])
        assert loaded["layers"][0]["weight"] is loaded["layers"][0]["tied"]
        for rank in range(RANKS):
            assert_same_state(checkpoint.load("data", rank=rank), golden_state(rank)["data"][1])
        target = {key: Local(value.dtype, value.shape, ()) for key, value in checkpoint.parts["model"].tensors.items()}
        piece = Piece(Box((1, 1), (2, 3)), torch.zeros(2, 3))
        target["layers.0.weight"] = target["layers.0.tied"] = Local(torch.float32, (3, 5), (piece,))
        checkpoint.load("model", into=loaded, local=lambda key, _: target[key])
        assert torch.equal(piece.tensor, cut(golden_state(0)["model"][1]["layers"][0]["weight"], piece.box))


@pytest.mark.parametrize(("kind", "write"), [("", write), ("_linked", write_linked)])
def test_the_version_that_is_written_has_golden_directories(
    kind: str, write: Callable[[Path], Path], tmp_path: Path
) -> None:
    golden = GOLDEN / f"sharded_v{FORMAT_VERSION}{kind}"
    now = write(tmp_path / "now")
    assert {file.name: file.read_bytes() for file in now.iterdir()} == {
        file.name: file.read_bytes() for file in golden.iterdir()
    }
