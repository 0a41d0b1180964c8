"""Reads pieces of records from a torch file into tensors, in parallel, and compares each with its digest."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from ckpt_core._devices.streams import on_current_streams
from ckpt_core._layouts.torch_file.manifest import RecordDigests
from ckpt_core.buffers import StagingBuffer, buffers_for, copy_late
from ckpt_core.errors import CheckpointCorruptedError
from ckpt_core.process.threads import run_parallel
from ckpt_core.storage.base import FileReader

_LONGEST_RUN = 8 * 2**20  # bytes: the longest read for several pieces together
RESUME_FROM_ANOTHER = "resume from another checkpoint; this one cannot be repaired"
HashOf = Callable[[memoryview], str]


class Piece(NamedTuple):
    """Piece ``number`` of a record, at ``begin`` to ``end`` in the file, and the target (the record's tensor as bytes).

    The bytes from ``gap`` to ``begin`` belong to no record, and are read together with the piece.
    """

    record: RecordDigests
    number: int
    begin: int
    end: int
    gap: int
    target: torch.Tensor | None


def read_pieces(reader: FileReader, hash_of: HashOf, pieces: Iterable[Piece]) -> dict[str, bytes]:
    """Read and verify pieces, and write each into its target.

    Returns the unverified bytes of the gaps before the pieces, by name of the record.
    """
    gaps: dict[str, bytes] = {}
    pieces = list(pieces)
    targets = [_place(piece) for piece in pieces if piece.target is not None]
    runs = list(_runs(pieces, reader.request_bytes))
    largest = max((sum(piece.end - piece.begin for piece in run if _is_on_device(piece)) for run in runs), default=0)

    def read(run: list[Piece]) -> None:
        if not any(map(_is_on_device, run)):
            _read_run(reader, hash_of, run, gaps, None)
            return
        with buffers.lent(largest, [piece.target for piece in run if piece.target is not None]) as buffer:
            _read_run(reader, hash_of, run, gaps, buffer)

    with contextlib.closing(buffers_for(targets)) as buffers:
        run_parallel(on_current_streams(read, targets), runs, threads=reader.threads)
    return gaps


def _runs(pieces: Iterable[Piece], request_bytes: int) -> Iterator[list[Piece]]:
    """Group neighbours that are best read by one request to a store; yield every other piece alone."""
    run: list[Piece] = []
    is_empty = False  # whether the run so far has only gaps, because its pieces are empty
    for piece in sorted(pieces, key=lambda piece: piece.begin):
        is_near = run and request_bytes > 0 and piece.gap - run[-1].end <= request_bytes
        if run and not (is_near and (is_empty or piece.end - run[0].gap <= _LONGEST_RUN)):
            yield run
            run = []
        is_empty = piece.begin == piece.end and (is_empty or not run)
        run.append(piece)
    if run:
        yield run


def _read_run(
    reader: FileReader, hash_of: HashOf, run: list[Piece], gaps: dict[str, bytes], buffer: StagingBuffer | None
) -> None:
    position, used = run[0].gap, 0
    between: list[bytearray] = []
    memories: list[torch.Tensor] = []
    parts: list[memoryview] = []
    for piece in run:
        between.append(bytearray(piece.begin - position))
        if buffer is not None and _is_on_device(piece):
            memories.append(buffer.tensor[used : used + piece.end - piece.begin])
            used += piece.end - piece.begin
        else:
            memories.append(_host_memory(piece))
        parts += [memoryview(between[-1]), memories[-1].numpy().data]
        position = piece.end
    reader.read_parts(run[0].gap, [part for part in parts if len(part)])
    for piece, before, memory in zip(run, between, memories, strict=True):
        if piece.gap < piece.begin:
            gaps[piece.record.name] = bytes(before[len(before) - (piece.begin - piece.gap) :])
        if piece.begin == piece.end:
            continue
        compare(hash_of, memory.numpy().data, piece.record, piece.number, reader.path)
        if buffer is not None and _is_on_device(piece):
            copy_late(_place(piece), memory, buffer)


def _is_on_device(piece: Piece) -> bool:
    return piece.target is not None and piece.target.device.type != "cpu" and piece.begin < piece.end


def _host_memory(piece: Piece) -> torch.Tensor:
    """Return the memory to read the piece into: its target on the CPU, or new memory if it is only compared."""
    if piece.target is not None and piece.target.device.type == "cpu":
        return _place(piece)
    return torch.empty(piece.end - piece.begin, dtype=torch.uint8)


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
