"""Maps the parts of a manifest to file offsets: structure, tensors, and the chunks of each tensor, all validated.

There can be a million chunks, so they stay in NumPy arrays; only the requested ones become objects.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ckpt_core._layouts.directory.manifest import Kind, Manifest, PartRecord, ShardFile
from ckpt_core._layouts.directory.matching import Reference, key_of, tensor_paths
from ckpt_core._layouts.directory.safetensors_file import IntArray, block_begins, file_order
from ckpt_core._layouts.directory.skeleton import Unresolved, decode_structure
from ckpt_core._layouts.safetensors import TensorInfo, UnknownTypeError
from ckpt_core.errors import CheckpointCorruptedError, CheckpointNotFoundError, StateMismatchError
from ckpt_core.geometry import Box
from ckpt_core.storage.base import MANIFEST_NAME

_FEW = 8  # up to so many chunks of a tensor, a loop is faster than array operations
_MOST_CELLS = 2**22  # cells of the grid used to find overlaps


# ---- where elements are ----------------------------------------------------------------------------------------------


class TensorTable:
    """The tensors that the chunks belong to, as arrays: number of dimensions, number of elements, and itemsize."""

    def __init__(self, infos: Sequence[TensorInfo]) -> None:
        self.infos = infos
        self.dimensions = np.array([len(info.shape) for info in infos], dtype=np.int64)
        self.itemsizes = np.array([info.dtype.itemsize for info in infos], dtype=np.int64)
        self._shapes = np.array([size for info in infos for size in info.shape], dtype=np.int64)
        self._pointers = np.cumsum(self.dimensions) - self.dimensions
        self.numels = _products(self._shapes, self.dimensions)

    def shapes_of(self, tensors: IntArray) -> IntArray:
        """Return the shapes of tensors, concatenated."""
        counts = self.dimensions[tensors]
        pointers = np.cumsum(counts) - counts
        places: IntArray = np.arange(counts.sum()) + np.repeat(self._pointers[tensors] - pointers, counts)
        return self._shapes.take(places)


class Shard:
    """A safetensors file of the checkpoint, with the positions of its chunks and blocks.

    ``tensors`` has the number of each chunk's tensor, in file order; ``offsets`` and ``shapes`` are the concatenated
    ones of all chunks; ``begins`` has the offset of each chunk in the file. ``first_digest`` is the number of the first
    block's digest in the rank's file of digests. Raises a ``ValueError`` for chunks that are not inside their tensors
    or do not fill the file.
    """

    def __init__(self, file: ShardFile, *, rank: int, first_digest: int, table: TensorTable) -> None:
        self.file = file
        self.rank = rank
        self.first_digest = first_digest
        self.key_of: Callable[[int], str] = str
        if file.chunks is None:
            self.tensors = np.array(file_order(table.infos), dtype=np.int64)
            self.shapes = table.shapes_of(self.tensors)
            self.offsets = np.zeros_like(self.shapes)
        else:
            self.tensors, self.offsets, self.shapes = map(_numbers, file.chunks)
            self._check_chunks(table)
        self.numels = _products(self.shapes, table.dimensions[self.tensors])
        self._sizes = self.numels * table.itemsizes[self.tensors]
        if file.header_size + sum(self._sizes.tolist()) != file.size:
            raise ValueError(f"the tensors in {file.name!r} do not fill its {file.size} bytes")
        self.begins = file.header_size + np.cumsum(self._sizes) - self._sizes
        if (self.begins % table.itemsizes[self.tensors]).any():
            raise ValueError(f"the elements of a tensor in {file.name!r} are not aligned")

    def _check_chunks(self, table: TensorTable) -> None:
        name = self.file.name
        if self.tensors.max(initial=-1) >= len(table.infos):
            raise ValueError(f"{name!r} holds a tensor that is not in its part")
        wholes = table.shapes_of(self.tensors)
        if not len(wholes) == len(self.offsets) == len(self.shapes):
            raise ValueError(f"{name!r} holds pieces with another number of dimensions than their tensors")
        if ((self.shapes > wholes) | (self.offsets > wholes - self.shapes)).any():
            raise ValueError(f"{name!r} holds pieces that lie outside of their tensors")

    @functools.cached_property
    def blocks(self) -> list[int]:
        """The offsets of the blocks, and the file's size as the last entry."""
        return list(map(int, block_begins(self.file.header_size, self._sizes.tolist())))

    def tensor_at(self, offset: int) -> int | None:
        """Return the number of the tensor that the byte at ``offset`` belongs to; None for the header."""
        index = int(np.searchsorted(self.begins, offset, side="right")) - 1
        return None if index < 0 else int(self.tensors[index])


def _products(shapes: IntArray, dimensions: IntArray) -> IntArray:
    """Return the number of elements of each shape; ``shapes`` are concatenated, with so many ``dimensions`` each."""
    begins = np.cumsum(dimensions) - dimensions
    # For a scalar, which has no sizes, reduceat returns the next number (replaced below) and needs one at the end.
    products: IntArray = np.multiply.reduceat(np.append(shapes, 1), begins) if len(begins) else begins
    return np.where(dimensions == 0, 1, products)


def _numbers(values: Any) -> IntArray:
    if type(values) is not list or not set(map(type, values)) <= {int}:
        raise ValueError("chunks are not lists of numbers")
    if min(values, default=0) < 0 or max(values, default=0) >= 2**63:
        raise ValueError("a chunk has a number that is neither a size nor an index")
    return np.array(values, dtype=np.int64)


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """A chunk of a tensor, and where it is stored."""

    shard: Shard  # the file that holds it
    box: Box  # its place in the whole tensor
    begin: int  # its offset in the file


class ChunkTable:
    """The chunks of all tensors in a table, looked up by tensor."""

    def __init__(self, shards: Sequence[Shard], table: TensorTable) -> None:
        self.shards = shards
        self._table = table
        tensors = _joined([shard.tensors for shard in shards])
        self._offsets = _joined([shard.offsets for shard in shards])
        self._shapes = _joined([shard.shapes for shard in shards])
        self._begins = _joined([shard.begins for shard in shards])
        self._shard_numbers = np.repeat(np.arange(len(shards)), [len(shard.tensors) for shard in shards])
        dimensions = table.dimensions[tensors]
        self._pointers = np.cumsum(dimensions) - dimensions
        self._order = np.argsort(tensors, kind="stable")
        starts = np.searchsorted(tensors[self._order], np.arange(len(table.infos) + 1))
        self._starts: list[int] = starts.tolist()
        # Most tensors are one chunk that holds them whole; for those, no search is needed.
        lonely = np.flatnonzero(np.diff(starts) == 1)
        rows = self._order[starts[lonely]]
        numels = _joined([shard.numels for shard in shards])
        whole = numels[rows] == table.numels[lonely]
        self._whole = dict(zip(lonely[whole].tolist(), rows[whole].tolist(), strict=True))

    def is_whole(self, tensor: int) -> bool:
        """Return whether one chunk holds the whole tensor."""
        return tensor in self._whole

    def overlapping(self, tensor: int, box: Box) -> list[Placed]:
        """Return the chunks that have elements of ``box`` of a tensor."""
        row = self._whole.get(tensor)
        if row is not None:
            whole = Box.whole(self._table.infos[tensor].shape)
            found = [Placed(self.shards[int(self._shard_numbers[row])], whole, int(self._begins[row]))]
            return found if box.numel else []
        rows = self._rows(tensor)
        if len(rows) > _FEW:
            begins, ends = self._corners(tensor, rows)
            low, high = np.maximum(begins, box.offset), np.minimum(ends, box.end)
            rows = rows[(low < high).all(axis=1)]
        placed = (self._placed(int(row), len(box.shape)) for row in rows)
        return [chunk for chunk in placed if chunk.box.intersection(box) is not None]

    def check_cover(self, tensor: int) -> None:
        """Raise a ``ValueError`` unless the chunks of a tensor hold each of its elements exactly once."""
        if self.is_whole(tensor):
            return
        begins, ends = self._corners(tensor, self._rows(tensor))
        used = (ends > begins).all(axis=1)
        found = sum(map(math.prod, (ends - begins).tolist()))
        wanted = math.prod(self._table.infos[tensor].shape)
        if found != wanted:
            raise ValueError(f"{found} of {wanted} elements are in the files")
        # The counts are equal, so an element can only be missing if another one is stored twice.
        if _overlap(begins[used], ends[used]):
            raise ValueError("two chunks hold the same elements")

    def _rows(self, tensor: int) -> IntArray:
        return self._order[self._starts[tensor] : self._starts[tensor + 1]]

    def _corners(self, tensor: int, rows: IntArray) -> tuple[IntArray, IntArray]:
        places = self._pointers[rows][:, None] + np.arange(len(self._table.infos[tensor].shape))
        begins = self._offsets[places]
        return begins, begins + self._shapes[places]

    def _placed(self, row: int, dimensions: int) -> Placed:
        place = slice(self._pointers[row], self._pointers[row] + dimensions)
        box = Box(tuple(self._offsets[place].tolist()), tuple(self._shapes[place].tolist()))
        return Placed(self.shards[self._shard_numbers[row]], box, int(self._begins[row]))


def _joined(arrays: Sequence[IntArray]) -> IntArray:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)


def _overlap(begins: IntArray, ends: IntArray) -> bool:
    """Return whether any two of the boxes, none of them empty, have an element in common."""
    count, dimensions = begins.shape
    if count < 2:
        return False
    if dimensions == 0:
        return True
    # Between neighbouring corners nothing changes, so a coarse grid of cells represents all elements. Each chunk adds 1
    # to the cells that it covers: put +1 and -1 at its corners, then take the cumulative sum along every dimension.
    marks = [np.unique(np.concatenate([begins[:, d], ends[:, d]])) for d in range(dimensions)]
    cells = [len(mark) for mark in marks]
    if math.prod(cells) > _MOST_CELLS:
        return any(_overlaps_another(begins, ends, row) for row in range(count))
    grid = np.zeros(cells, dtype=np.int64)
    for corner in itertools.product((0, 1), repeat=dimensions):
        places = tuple(np.searchsorted(marks[d], (begins, ends)[far][:, d]) for d, far in enumerate(corner))
        np.add.at(grid, places, (-1) ** sum(corner))
    for dimension in range(dimensions):
        np.cumsum(grid, axis=dimension, out=grid)
    return bool((grid > 1).any())


def _overlaps_another(begins: IntArray, ends: IntArray, row: int) -> bool:
    low, high = np.maximum(begins, begins[row]), np.minimum(ends, ends[row])
    return int((low < high).all(axis=1).sum()) > 1


# ---- parts -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PartContents:
    """A part of the state as it is stored in the files."""

    name: str
    record: PartRecord  # its structure and its tensors
    references: list[Reference]  # the tensors' places in the structure, in the order in which they are decoded
    keys: list[str]  # a name for each tensor
    table: ChunkTable  # the chunks of the tensors
    first: int  # number of the part's first tensor in the table

    def __post_init__(self) -> None:
        for shard in self.shards:
            shard.key_of = self._key_of

    @property
    def shards(self) -> Sequence[Shard]:
        """The files that hold the part; they may hold other parts, too."""
        return self.table.shards

    def _key_of(self, tensor: int) -> str:
        number = tensor - self.first
        return f"{self.name}.{self.keys[number]}" if 0 <= number < len(self.keys) else self.name

    def overlapping(self, index: int, box: Box) -> list[Placed]:
        """Return the chunks that have elements of ``box`` of a tensor."""
        return self.table.overlapping(self.first + index, box)

    def tensors(self) -> dict[str, TensorInfo]:
        """Return the tensors by key; tied tensors are listed under each of their keys."""
        return {reference.key: self.record.tensors[reference.index] for reference in self.references}


class Contents:
    """The parts of a checkpoint."""

    def __init__(self, manifest: Manifest, path: str) -> None:
        self.kinds = manifest.kinds
        self._manifest = manifest
        self._path = path
        self._known: dict[tuple[str, int], PartContents] = {}

    @contextlib.contextmanager
    def sense(self, key: str | None = None) -> Iterator[None]:
        """Turn a ``ValueError`` about the manifest into a ``CheckpointCorruptedError`` that names the checkpoint."""
        try:
            yield
        except UnknownTypeError as error:
            raise error.refusal(self._path, key) from error
        except ValueError as error:
            raise CheckpointCorruptedError(
                f"the checkpoint's manifest is invalid: {error}",
                path=f"{self._path}/{MANIFEST_NAME}",
                key=key,
                remedy="resume from another checkpoint; this one cannot be repaired",
            ) from error

    def holders(self, name: str) -> list[int]:
        """Return the ranks that saved a per-rank part; for any other part, rank 0, which stands for all."""
        if self.kinds[name] != "per-rank":
            return [0]
        return [rank for rank, record in enumerate(self._manifest.ranks) if name in record.parts]

    def part(self, name: str, rank: int) -> PartContents:
        """Return a part; if it is per-rank, that of ``rank``."""
        if name not in self.kinds:
            raise CheckpointNotFoundError(
                f"the checkpoint has no part {name!r}; it has {', '.join(sorted(self.kinds)) or 'none'}",
                path=self._path,
            )
        kind = self.kinds[name]
        if kind == "per-rank" and rank not in self.holders(name):
            raise StateMismatchError(
                f"the checkpoint holds no part {name!r} of rank {rank}: {len(self._manifest.ranks)} ranks saved it",
                path=self._path,
                key=name,
                remedy="resume with as many ranks as have saved it, or without that part",
            )
        known = (name, rank if kind == "per-rank" else 0)
        if known not in self._known:
            with self.sense(name):
                self._known[known] = self._read(name, kind, rank)
        return self._known[known]

    def _read(self, name: str, kind: Kind, rank: int) -> PartContents:
        if kind != "per-rank":
            record, first = self._manifest.parts[name], 0
            table = TensorTable(record.tensors)
            shards = [s for number in range(len(self._manifest.ranks)) for s in self._shards(number, name, table)]
        else:
            own = self._manifest.ranks[rank].parts
            record = own[name]
            first = sum(len(own[other].tensors) for other in itertools.takewhile(lambda other: other != name, own))
            table = TensorTable([info for part in own.values() for info in part.tensors])
            shards = self._shards(rank, None, table)
        references = _references(record)
        return PartContents(name, record, references, _keys(record, references), ChunkTable(shards, table), first)

    def _shards(self, rank: int, part: str | None, table: TensorTable) -> list[Shard]:
        found, first_digest = [], 0
        for file in self._manifest.ranks[rank].files:
            if file.part == part:
                found.append(Shard(file, rank=rank, first_digest=first_digest, table=table))
            first_digest += file.blocks
        return found

    def check(self) -> list[Shard]:
        """Validate everything in the manifest, and return all files."""
        shards: dict[str, Shard] = {}
        for name in self.kinds:
            for rank in self.holders(name):
                part = self.part(name, rank)
                for index in range(len(part.keys)):
                    self.check_tensor(part, index)
                shards.update({shard.file.name: shard for shard in part.shards})
        self.check_blocks(list(shards.values()))
        return list(shards.values())

    def check_tensor(self, part: PartContents, index: int) -> None:
        """Check that every element of a tensor is in the files exactly once."""
        with self.sense(f"{part.name}.{part.keys[index]}"):
            part.table.check_cover(part.first + index)

    def check_blocks(self, shards: Iterable[Shard]) -> None:
        """Check that there is one digest for each block of the files."""
        with self.sense():
            for shard in shards:
                if len(shard.blocks) != shard.file.blocks + 1:
                    raise ValueError(f"{shard.file.name!r} cannot have {shard.file.blocks} blocks")


def _references(record: PartRecord) -> list[Reference]:
    tree, in_order = decode_structure(record.skeleton)
    found = list(tensor_paths(tree, Unresolved))
    if len(found) != len(in_order) or any(a is not b for (_, a), b in zip(found, in_order, strict=True)):
        raise ValueError("a tensor is where none can be")
    references = []
    for where, unresolved in found:
        key = key_of(where)
        if unresolved.index >= len(record.tensors):
            raise ValueError(f"{key} refers to a tensor that is not in its part")
        is_array = unresolved.nbytes is not None
        info = record.tensors[unresolved.index]
        if is_array and (info.dtype is not torch.uint8 or info.nbytes != unresolved.nbytes):
            raise ValueError(f"{key} is not the memory of an array")
        references.append(Reference(where, key, unresolved.index, is_array))
    if len({reference.index for reference in references}) != len(record.tensors):
        raise ValueError(f"of {len(record.tensors)} tensors, some are not part of the state")
    return references


def _keys(record: PartRecord, references: Sequence[Reference]) -> list[str]:
    keys = [f"tensor {number}" for number in range(len(record.tensors))]
    for reference in reversed(references):
        keys[reference.index] = reference.key
    return keys
