"""Writes and reads directory checkpoints without an engine: whole tensors, or boxes of them, go straight into files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ckpt_core._layouts.directory.loading import DirectoryReader
from ckpt_core._layouts.directory.manifest import ExtraFile
from ckpt_core._layouts.directory.skeleton import encode_plain
from ckpt_core._layouts.directory.writing import PartContent, RankFiles, build_manifest
from ckpt_core._pipeline.writer import write_image
from ckpt_core.buffers import ScratchBuffers, StagingBuffer
from ckpt_core.digest import digest
from ckpt_core.geometry import Box
from ckpt_core.storage import LocalStorage
from ckpt_core.storage.base import MANIFEST_NAME

Cuts = Mapping[str, Sequence[Sequence[Box]]]  # by tensor: the boxes that each rank writes


@dataclasses.dataclass(frozen=True)
class Piece:
    box: Box
    tensor: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Local:
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the elements of a box, as a view."""
    return tensor[tuple(slice(begin, end) for begin, end in zip(box.offset, box.end, strict=True))]


def rows(shape: Sequence[int], world_size: int) -> list[list[Box]]:
    """Return the boxes of each rank: equal shares of the rows; a scalar goes to rank 0."""
    whole = Box.whole(shape)
    if not shape:
        return [[whole]] + [[] for _ in range(world_size - 1)]
    size = shape[0]
    return [[whole.along(0, size * r // world_size, size * (r + 1) // world_size)] for r in range(world_size)]


def part_of(
    name: str,
    kind: Any,
    tree: Any,
    *,
    rank: int = 0,
    world_size: int = 1,
    cuts: Cuts | None = None,
    spread: bool = False,
) -> PartContent:
    """Return a part as the engine would make it; with ``spread``, cut by rows, or as ``cuts`` says."""
    skeleton, named = encode_plain(tree, key=name)
    tensors = dict(named)
    pieces: dict[str, list[Piece]] = {}
    for key, tensor in tensors.items():
        if spread:
            boxes = (cuts or {}).get(key, rows(tensor.shape, world_size))[rank]
            pieces[key] = [Piece(box, cut(tensor, box)) for box in boxes]
        elif kind == "per-rank" or rank == 0:
            pieces[key] = [Piece(Box.whole(tuple(tensor.shape)), tensor)]
    infos = {key: Local(tensor.dtype, tuple(tensor.shape), ()) for key, tensor in tensors.items()}
    return PartContent(name, kind, skeleton, infos, pieces, spread)


Reports = list[str]


def save_ranks(
    path: Path,
    parts_of_ranks: Sequence[Sequence[PartContent]],
    *,
    save_id: str = "save-1",
    staged: bool = True,
    extra_files: Sequence[ExtraFile] = (),
) -> Reports:
    """Write all files except the manifest; return the reports of the ranks."""
    path.mkdir(parents=True, exist_ok=True)
    storage, scratch = LocalStorage(), ScratchBuffers()
    reports = []
    for rank, parts in enumerate(parts_of_ranks):
        files = RankFiles(parts, rank=rank, world_size=len(parts_of_ranks), save_id=save_id)
        buffer = StagingBuffer(files.staged_size)
        if staged:
            for _, target, source in files.pieces_in(buffer, 2**20):
                target.copy_(source)
        for name, image in files.staged_files(buffer) if staged else files.live_files():
            write_image(image, storage, str(path / name), scratch=scratch)
        reports.append(files.report(extra_files if rank == 0 else ()))
        buffer.close()
    scratch.close()
    return reports


def save_directory(
    path: Path,
    states: Sequence[Mapping[str, tuple[str, Any]]],
    *,
    spread: bool = False,
    cuts: Cuts | None = None,
    metadata: Mapping[str, Any] | None = None,
    **options: Any,
) -> Path:
    """Save a state ``{part: (kind, tree)}`` for each rank; with ``spread``, cut all parts except per-rank ones."""
    world_size = len(states)
    parts = [
        [
            part_of(
                name,
                kind,
                tree,
                rank=rank,
                world_size=world_size,
                cuts=cuts,
                spread=spread and kind != "per-rank",
            )
            for name, (kind, tree) in state.items()
        ]
        for rank, state in enumerate(states)
    ]
    reports = save_ranks(path, parts, **options)
    (path / MANIFEST_NAME).write_bytes(build_manifest(reports, metadata=metadata or {}))
    return path


def open_directory(path: Path) -> DirectoryReader:
    return DirectoryReader(str(path), LocalStorage())


def rewrite(path: Path, old: bytes, new: bytes) -> None:
    """Replace ``old`` in a manifest and correct its checksum, as someone who knows the format would."""
    manifest = path / MANIFEST_NAME
    body, _, _ = manifest.read_bytes().rpartition(b'"check"')
    assert old in body
    body = body.replace(old, new)
    manifest.write_bytes(body + f'"check":"{digest(body)}"}}\n'.encode())
