"""Lays out the files that a rank writes in a directory save, reports them, and builds the manifest from all reports."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ckpt_core._layouts.directory.file_names import (
    check_extra_name,
    check_part_name,
    check_save_id,
    check_shard_name,
    digests_name,
    frozen_name,
    per_rank_name,
    piece_name,
    shard_name,
    with_suffix,
)
from ckpt_core._layouts.directory.manifest import ExtraFile, Kind, PartRecord, encode_manifest, encode_part
from ckpt_core._layouts.directory.safetensors_file import (
    ALIGNMENT,
    DigestsImage,
    FileLayout,
    SafetensorsImage,
    byte_pieces,
    copy_now,
    file_layout,
    file_order,
)
from ckpt_core._layouts.directory.skeleton import Form, Json, encode_plain
from ckpt_core._layouts.image import Image
from ckpt_core._layouts.safetensors import TensorInfo
from ckpt_core._plan import LocalTensor, Piece
from ckpt_core.buffers import Move, StagingBuffer, move_of
from ckpt_core.commit_time import NO_STAMP, Stamp
from ckpt_core.digest import digest
from ckpt_core.errors import CheckpointError, SerializationError
from ckpt_core.geometry import Box
from ckpt_core.storage.base import MANIFEST_NAME

_NOT_TENSORS = frozenset({"__metadata__"})  # reserved names in a safetensors header
_SMALL = 16 * 2**10  # bytes: handing less to another thread takes longer than copying it
_REMEDY = "save the same state on all ranks: the same keys, shapes and types, in the same order"


@dataclasses.dataclass(frozen=True)
class PartContent:
    """A part of the state, ready to be written."""

    name: str  # letters, digits and underscores; beginning of the file's name
    kind: Kind
    skeleton: Json  # its structure, from encode_plain
    # All of its tensors, in the order of encode_plain; the same on all ranks, except for a per-rank part.
    tensors: Mapping[str, LocalTensor | TensorInfo]
    # The pieces of each tensor that this rank writes; tensors of which it writes nothing may be missing.
    pieces: Mapping[str, Sequence[Piece]]
    spread: bool = False  # whether several ranks write the part; if not, rank 0 writes it whole
    frozen: Collection[str] = ()  # keys of tensors that do not change between saves
    apart: bool = False  # whether the frozen tensors go into a separate file
    forms: Mapping[int, Form] = dataclasses.field(default_factory=dict)  # unusual forms of tensors, by number


class _Chunk(NamedTuple):
    tensor: int  # number of the tensor in its part; in a file of per-rank parts, in the file
    key: str
    name: str
    info: TensorInfo
    box: Box
    is_whole: bool
    source: int  # index of the live tensor; not the tensor itself, which must not be kept as long as the chunk


@dataclasses.dataclass(frozen=True)
class _File:
    name: str
    part: str | None
    layout: FileLayout
    header: bytes
    chunks: tuple[_Chunk, ...]
    holds_all: bool  # whether it has every tensor of the part, whole: then the manifest need not list its chunks
    save_id: str | None = None  # id of the earlier save that wrote it, if one did


@dataclasses.dataclass(frozen=True)
class WrittenFile:
    """A safetensors file that a rank writes."""

    name: str
    part: str | None  # the part that it belongs to; None for the file with all per-rank parts
    save_id: str  # the save that wrote the file: this one, or an earlier one if the file was taken over
    layout: FileLayout
    keys: tuple[str, ...]  # the key of each chunk's tensor, in file order
    digests: bytes  # digests of its blocks, concatenated, without those of blocks that were not taken yet


class RankFiles:
    """The files that one rank writes in one save.

    ``parts`` must be the same on all ranks. ``save_id``, unique to the save and the same on all ranks, is stored in
    every file; if it is not known yet, :meth:`identify` sets it. ``suffix`` is inserted before the extension of the
    files' names if an older checkpoint has the plain names. ``names`` are in the order in which the files are written;
    ``staged_size`` is the size in bytes of a buffer for all of them.
    """

    def __init__(
        self, parts: Sequence[PartContent], *, rank: int, world_size: int, save_id: str = "0", suffix: str = ""
    ) -> None:
        check_save_id(save_id)
        for part in parts:
            check_part_name(part.name)
        if len({part.name for part in parts}) != len(parts):
            raise ValueError("two parts have the same name")
        self._parts = list(parts)
        self._sources: list[torch.Tensor] = []
        self._rank = rank
        self._world_size = world_size
        self._save_id = save_id
        self._files = list(self._lay_out(suffix))
        self._digests_name = digests_name(rank, world_size, suffix)
        self._bases: list[int] = []
        self._images: list[SafetensorsImage] = []
        self.staged_size = 0
        for file in self._files:
            self._bases.append(self.staged_size)
            self.staged_size += -(-file.layout.size // ALIGNMENT) * ALIGNMENT
        self.names = [file.name for file in self._files] + ([self._digests_name] if self._files else [])
        for name in self.names:
            check_shard_name(name)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The live tensors to save."""
        return self._sources

    def forget_parts(self) -> None:
        """Release the parts' tensors, except those that this rank writes; called on the thread that writes them."""
        self._parts = [
            dataclasses.replace(
                part,
                pieces={},
                tensors={key: TensorInfo(tensor.dtype, tuple(tensor.shape)) for key, tensor in part.tensors.items()},
            )
            for part in self._parts
        ]

    def forget_tensors(self) -> None:
        """Release the tensors that this rank writes, once they are staged."""
        self._sources = []

    def _lay_out(self, suffix: str) -> Iterator[_File]:
        own: list[_Chunk] = []
        count = 0
        for part in self._parts:
            if part.kind == "per-rank":
                own += _chunks(part, self._sources, first=count, prefix=f"{part.name}.")
                count += len(part.tensors)
                continue
            chunks = _chunks(part, self._sources)
            spread = part.spread and self._world_size > 1
            if not spread and self._rank > 0 and chunks:
                raise ValueError(f"part {part.name!r} is written by rank 0 alone")
            if part.apart:
                frozen = [chunk for chunk in chunks if chunk.key in part.frozen]
                chunks = [chunk for chunk in chunks if chunk.key not in part.frozen]
            if chunks:
                name = (
                    piece_name(part.name, self._rank, self._world_size, suffix)
                    if spread or part.apart
                    else shard_name(part.name, suffix)
                )
                yield self._file(name, part.name, chunks, len(part.tensors))
            if part.apart:
                name = frozen_name(part.name, self._rank, self._world_size, suffix)
                yield self._file(name, part.name, frozen, len(part.tensors))
        if count:
            if not _is_all(own, count):
                raise SerializationError(
                    "a per-rank part holds distributed tensors",
                    remedy="save them in a sharded part, or their local tensors in the per-rank part",
                )
            yield self._file(per_rank_name(self._rank, self._world_size, suffix), None, own, count)

    def _file(self, name: str, part: str | None, chunks: list[_Chunk], count: int) -> _File:
        ordered = tuple(chunks[index] for index in file_order([chunk.info for chunk in chunks]))
        layout = file_layout(tuple((chunk.name, chunk.info) for chunk in ordered), (("rank", str(self._rank)),))
        return _File(name, part, layout, layout.header(self._save_id), ordered, _is_all(chunks, count))

    def identify(self, save_id: str, suffix: str) -> None:
        """Set the id of the save and the suffix of the files' names, which were not known when this was made."""
        check_save_id(save_id)
        self._save_id = save_id
        self._files = [
            dataclasses.replace(file, name=with_suffix(file.name, suffix), header=file.layout.header(save_id))
            for file in self._files
        ]
        self._digests_name = with_suffix(self._digests_name, suffix)
        self.names = [with_suffix(name, suffix) for name in self.names]
        for name in self.names:
            check_shard_name(name)

    def pieces_in(self, buffer: StagingBuffer, nbytes: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Copy small tensors into ``buffer``, and yield what else to copy as ``(end, target, source)``, in order.

        Where a device has to gather the bytes first, a piece has at most ``nbytes``: that is the memory it needs there.
        """
        for base, file in zip(self._bases, self._files, strict=True):
            for chunk, begin, size in zip(file.chunks, file.layout.begins, file.layout.sizes, strict=True):
                tensor = self._sources[chunk.source]
                if size <= _SMALL and copy_now(tensor, 0, size, buffer.tensor, base + begin):
                    continue
                most = nbytes if tensor.is_cpu or not _is_as_saved(tensor) else max(size, 1)
                for first in range(0, size, most):
                    last = min(first + most, size)
                    end = base + begin + last
                    target = buffer.tensor[base + begin + first : end]
                    for into, source in byte_pieces(tensor, first, last, target):
                        yield end, into, source

    def moves_in(self, buffer: StagingBuffer, nbytes: int) -> Iterator[Move]:
        """Do the same as :meth:`pieces_in`, for tensors that are all in host memory."""
        return (move_of(target, source) for _, target, source in self.pieces_in(buffer, nbytes))

    def staged_files(
        self, buffer: StagingBuffer, wait_staged: Callable[[int], None] | None = None
    ) -> list[tuple[str, Image]]:
        """Return names and images of the files whose tensors are in ``buffer``, or are being copied there.

        They must be written in this order. ``wait_staged(offset)`` returns when the buffer is filled up to an offset.
        """
        for base, file in zip(self._bases, self._files, strict=True):
            buffer.memory[base : base + file.layout.header_size] = file.header
        return self._with_digests(
            SafetensorsImage(file.layout, file.header, staged=buffer, base=base, wait_staged=wait_staged)
            for base, file in zip(self._bases, self._files, strict=True)
        )

    def live_files(
        self, lazy: Callable[[Sequence[int]], Sequence[torch.Tensor]] | None = None
    ) -> list[tuple[str, Image]]:
        """Return names and images, in order, of the files; the images read the live tensors when they are written.

        With ``lazy``, :attr:`tensors` have only types and shapes; ``lazy(numbers)`` returns those tensors with data.
        """
        numbers = [[chunk.source for chunk in file.chunks] for file in self._files]
        return self._with_digests(
            SafetensorsImage(file.layout, file.header, [self._sources[n] for n in of] if lazy is None else lazy(of))
            for file, of in zip(self._files, numbers, strict=True)
        )

    def _with_digests(self, images: Iterable[SafetensorsImage]) -> list[tuple[str, Image]]:
        self._images = list(images)
        if not self._images:
            return []
        return list(zip(self.names, [*self._images, DigestsImage(self._images)], strict=True))

    def written(self) -> Iterator[WrittenFile]:
        """Yield the safetensors files, once their images were made, with the digests known so far."""
        for file, image in zip(self._files, self._images, strict=True):
            yield WrittenFile(
                file.name,
                file.part,
                file.save_id or self._save_id,
                file.layout,
                tuple([chunk.key for chunk in file.chunks]),
                b"".join(image.digests),
            )

    def take_over(self, name: str, *, save_id: str, header_digest: bytes) -> None:
        """Note that a file was taken over from an earlier save: all of its digests match, except that of the header."""
        index = [file.name for file in self._files].index(name)
        self._files[index] = dataclasses.replace(self._files[index], save_id=save_id)
        self._images[index].digests[0] = header_digest

    @property
    def is_spread(self) -> bool:
        """Whether other ranks write pieces of a part, so that this rank's files alone are not complete."""
        return self._world_size > 1 and any(part.spread for part in self._parts)

    def report(self, extra_files: Sequence[ExtraFile] = ()) -> str:
        """Return this rank's report for :func:`build_manifest`; called when its files are written."""
        for file in extra_files:
            check_extra_name(file.name)
        record = {
            "rank": self._rank,
            "files": [self._describe(file) for file in self._files],
            "digests": self._describe_digests(),
            "parts": {part.name: _encode(part) for part in self._parts if part.kind == "per-rank"},
            "extra": [[file.name, file.size, file.digest] for file in extra_files],
        }
        summary = {
            "rank": self._rank,
            "world_size": self._world_size,
            "save": self._save_id,
            "kinds": {part.name: part.kind for part in self._parts},
            "names": [*self.names, *(file.name for file in extra_files)],
            "written": self._written(self._common),
            "tables": self._tables,
            "totals": {part.name: _total(part) for part in self._parts if part.name in self._common},
        }
        return "\n".join([_text(summary), _text(record), _text(self._common) if self._rank == 0 else "{}"])

    @functools.cached_property
    def _common(self) -> dict[str, dict[str, Json]]:
        """The parts that are the same on all ranks."""
        return {part.name: _encode(part) for part in self._parts if part.kind != "per-rank"}

    @functools.cached_property
    def _tables(self) -> dict[str, str]:
        """Digests of the tables of tensors of the parts that are the same on all ranks, by part."""
        parts = [part for part in self._parts if part.name in self._common]
        return {part.name: _table_digest(part, self._common[part.name]) for part in parts}

    def described(self) -> tuple[list[Json], Json]:
        """Return the entries in the manifest of the files, with all chunks listed, and of the file of digests."""
        return [self._describe(file, says_all=True) for file in self._files], self._describe_digests()

    def _describe(self, file: _File, *, says_all: bool = False) -> Json:
        chunks: Json = None  # all tensors of the part
        if says_all or not file.holds_all:
            offsets = [begin for chunk in file.chunks for begin in chunk.box.offset]
            extents = [extent for chunk in file.chunks for extent in chunk.box.shape]
            chunks = [[chunk.tensor for chunk in file.chunks], offsets, extents]
        layout, earlier = file.layout, [] if file.save_id is None else [file.save_id]
        return [file.name, file.part, layout.header_size, layout.size, len(layout.blocks) - 1, chunks, *earlier]

    def _describe_digests(self) -> Json:
        if not self._files:
            return None
        data = DigestsImage(self._images).tail()
        return [self._digests_name, len(data), digest(data)]

    def _written(self, parts: Iterable[str]) -> dict[str, int]:
        written = dict.fromkeys(parts, 0)
        for file in self._files:
            if file.part is not None:
                written[file.part] += sum(file.layout.sizes)
        return written


def _is_as_saved(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _is_all(chunks: Sequence[_Chunk], count: int) -> bool:
    """Return whether the chunks are all of ``count`` tensors, whole and in order."""
    return len(chunks) == count and all(chunk.tensor == index and chunk.is_whole for index, chunk in enumerate(chunks))


def _chunks(part: PartContent, sources: list[torch.Tensor], *, first: int = 0, prefix: str = "") -> list[_Chunk]:
    """Return the chunks of a part that this rank writes, and append their tensors to ``sources``."""
    unknown = part.pieces.keys() - part.tensors.keys()
    if unknown:
        raise ValueError(f"part {part.name!r} has pieces of tensors that are not in it: {sorted(unknown)[:5]}")
    chunks: list[_Chunk] = []
    names = set(_NOT_TENSORS)
    for index, (key, tensor) in enumerate(part.tensors.items(), start=first):
        for piece in part.pieces.get(key, ()):
            shape = piece.box.shape
            if piece.tensor.dtype != tensor.dtype or piece.tensor.shape != shape:
                raise ValueError(f"a piece of {key!r} is not of its tensor's type, or not of its box's shape")
            is_whole = shape == tensor.shape
            name = prefix + key
            if not is_whole:
                name = f"{name}@{','.join(map(str, piece.box.offset))}"
            while name in names:
                name += "~"
            names.add(name)
            info = TensorInfo(tensor.dtype, shape)
            chunks.append(_Chunk(index, key, name, info, piece.box, is_whole, len(sources)))
            sources.append(piece.tensor)
    return chunks


def _encode(part: PartContent) -> dict[str, Json]:
    infos = tuple([TensorInfo(tensor.dtype, tuple(tensor.shape)) for tensor in part.tensors.values()])
    unusual = {number: form for number, form in part.forms.items() if any(form)}
    return encode_part(PartRecord(part.skeleton, infos, unusual))


def _table_digest(part: PartContent, encoded: dict[str, Json]) -> str:
    return digest(_text([list(part.tensors), encoded["types"], encoded["tensors"]]).encode())


def _total(part: PartContent) -> int:
    return sum([math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in part.tensors.values()])


def _text(document: Json) -> str:
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


# ---- the manifest of all ranks ---------------------------------------------------------------------------------------


def build_manifest(
    reports: Sequence[str | None], *, metadata: Mapping[str, Any], path: str = "", stamp: Stamp = NO_STAMP
) -> bytes:
    """Return the bytes of the manifest; the checkpoint is committed when they are in place under ``MANIFEST_NAME``.

    ``reports`` are the results of :meth:`RankFiles.report` in rank order; None for a rank that has written nothing.
    Raises if they are not of the same state and save.
    """
    encoded = encode_metadata(metadata, path)
    first = json.loads(str(reports[0]).partition("\n")[0])
    complete = [_nothing(rank, first) if report is None else report for rank, report in enumerate(reports)]
    summaries, records, commons = zip(*(report.split("\n") for report in complete), strict=True)
    found = [json.loads(summary) for summary in summaries]
    _check_reports(found, path or None)
    return encode_manifest(
        save_id=found[0]["save"],
        metadata=encoded,
        kinds=found[0]["kinds"],
        parts=commons[0],
        ranks=records,
        stamp=stamp,
    )


def encode_metadata(metadata: Mapping[str, Any], path: str = "") -> Json:
    """Return metadata encoded for a manifest; raise, with the key, for anything that is not plain data."""
    encoded, tensors = encode_plain(dict(metadata), key="metadata")
    if tensors:
        raise SerializationError(
            "the metadata hold a tensor", path=path or None, key=f"metadata.{tensors[0][0]}", remedy="save it in a part"
        )
    return encoded


def _nothing(rank: int, first: dict[str, Any]) -> str:
    """Return the report of a rank that has written nothing; ``first`` is the summary of rank 0."""
    summary = {**first, "rank": rank, "names": [], "written": dict.fromkeys(first["written"], 0)}
    record = {"rank": rank, "files": [], "digests": None, "parts": {}, "extra": []}
    return "\n".join([json.dumps(summary), json.dumps(record), "{}"])


def _check_reports(summaries: Sequence[dict[str, Any]], path: str | None) -> None:
    first = summaries[0]
    names: dict[str, int] = {MANIFEST_NAME: 0}
    for rank, summary in enumerate(summaries):
        if (summary["rank"], summary["world_size"], summary["save"]) != (rank, len(summaries), first["save"]):
            raise CheckpointError(
                f"the report of rank {rank} belongs to another save: rank {summary['rank']} of "
                f"{summary['world_size']}, save {summary['save']} and not {first['save']}",
                path=path,
                remedy="save on all ranks, the same number of times",
            )
        if summary["kinds"] != first["kinds"]:
            differing = sorted(map(repr, dict(summary["kinds"].items() ^ first["kinds"].items())))
            raise SerializationError(
                f"rank {rank} saves other parts than rank 0: they differ in {', '.join(differing[:5])}",
                path=path,
                remedy=_REMEDY,
            )
        for name, table in summary["tables"].items():
            if table != first["tables"][name]:
                raise SerializationError(
                    f"rank {rank} has other tensors in the part {name!r} than rank 0",
                    path=path,
                    key=name,
                    remedy=_REMEDY,
                )
        for name in summary["names"]:
            if name in names:
                raise SerializationError(
                    f"ranks {names[name]} and {rank} have both written a file {name!r}",
                    path=path,
                    key=name,
                    remedy="give every rank's file its own name, or write it on one rank only",
                )
            names[name] = rank
    for name, total in first["totals"].items():
        written = sum(summary["written"][name] for summary in summaries)
        if written != total:
            raise SerializationError(
                f"the ranks have written {written} bytes of the part {name!r}, which has {total}",
                path=path,
                key=name,
                remedy=_REMEDY,
            )
