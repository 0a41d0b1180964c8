"""Pieces of records go from a file to where they belong, several at a time, each compared with its digest as it arrives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from ckpt_core.errors import CheckpointCorruptedError
from ckpt_core.layouts.torch_file.manifest import RecordDigests
from ckpt_core.parallel import run_parallel
from ckpt_core.storage.base import FileReader

__all__ = ["LONGEST_RUN", "RESUME_FROM_ANOTHER", "Piece", "compare", "read_pieces"]

LONGEST_RUN = 4 * 2**20  # bytes that are read together for several pieces
RESUME_FROM_ANOTHER = "resume from another checkpoint; this one cannot be repaired"
HashOf = Callable[[memoryview], str]


class Piece(NamedTuple):
    """Piece ``number`` of a record, from ``begin`` to ``end`` in the file, and the bytes of the tensor that it goes into, if any."""

    record: RecordDigests
    number: int
    begin: int
    end: int
    target: torch.Tensor | None


def read_pieces(reader: FileReader, hash_of: HashOf, pieces: Iterable[Piece]) -> None:
    """Read and verify pieces, and put each where it belongs.

    Raises:
        CheckpointCorruptedError: Bytes are missing or differ; the error names the record.
    """
    runs = _runs(pieces, reader.request_bytes)
    run_parallel(lambda run: _read_run(reader, hash_of, run), runs, threads=reader.threads)


def _runs(pieces: Iterable[Piece], request_bytes: int) -> Iterator[list[Piece]]:
    """Yield small neighbours together, for which one request is better than several, and all others alone."""
    run: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece.begin):
        is_small = piece.end - piece.begin < request_bytes
        joins = run and piece.begin - run[-1].end <= request_bytes and piece.end - run[0].begin <= LONGEST_RUN
        if run and not (is_small and joins):
            yield run
            run = []
        run.append(piece)
        if not is_small:
            yield run
            run = []
    if run:
        yield run


def _read_run(reader: FileReader, hash_of: HashOf, run: list[Piece]) -> None:
    begin, end = run[0].begin, run[-1].end
    alone = _host_memory(run[0]) if len(run) == 1 else None
    data = torch.empty(end - begin, dtype=torch.uint8) if alone is None else alone
    reader.read_into(begin, data.numpy().data)
    for piece in run:
        found = data[piece.begin - begin : piece.end - begin]
        compare(hash_of, found.numpy().data, piece.record, piece.number, reader.path)
        if piece.target is not None and alone is None:
            _place(piece).copy_(found)


def _host_memory(piece: Piece) -> torch.Tensor | None:
    """Return the memory that the piece can be read into without a detour."""
    if piece.target is None or piece.target.device.type != "cpu":
        return None
    return _place(piece)


def _place(piece: Piece) -> torch.Tensor:
    assert piece.target is not None
    return piece.target[piece.begin - piece.record.offset : piece.end - piece.record.offset]


def compare(hash_of: HashOf, data: memoryview, record: RecordDigests, number: int, path: str) -> None:
    """Raise unless the bytes of a piece are those that were saved."""
    if hash_of(data) != record.digests[number]:
        raise CheckpointCorruptedError(
            f"the bytes of {record.name!r} differ from those that were saved",
            path=path,
            key=record.name,
            remedy=RESUME_FROM_ANOTHER,
        )
