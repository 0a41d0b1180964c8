"""What a manifest says is in each part: structure, tensors, and where their bytes are; everything checked."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch

from ckpt_core._layouts.sharded.manifest import MANIFEST_NAME, Kind, Manifest, PartRecord
from ckpt_core._layouts.sharded.matching import Reference, key_of, tensor_paths
from ckpt_core._layouts.sharded.plain import Unresolved, decode_structure
from ckpt_core._layouts.sharded.safetensors_file import TensorInfo
from ckpt_core._layouts.sharded.shards import ChunkTable, Placed, Shard, TensorTable
from ckpt_core.errors import CheckpointCorruptedError, CheckpointNotFoundError, StateMismatchError
from ckpt_core.geometry import Box

__all__ = ["Contents", "PartContents"]


@dataclasses.dataclass(frozen=True)
class PartContents:
    """A part of the state as it is in the files.

    Attributes:
        name: Its name.
        record: Its structure and its tensors.
        references: Where in the structure tensors stand, in the order in which they are decoded.
        keys: A name for each tensor.
        table: Where the elements of tensors are.
        first: Number of the part's first tensor in ``table``.
    """

    name: str
    record: PartRecord
    references: list[Reference]
    keys: list[str]
    table: ChunkTable
    first: int

    def __post_init__(self) -> None:
        for shard in self.shards:
            shard.key_of = self._key_of

    @property
    def shards(self) -> Sequence[Shard]:
        """The files, which may hold other parts too."""
        return self.table.shards

    def _key_of(self, tensor: int) -> str:
        number = tensor - self.first
        return f"{self.name}.{self.keys[number]}" if 0 <= number < len(self.keys) else self.name

    def overlapping(self, index: int, box: Box) -> list[Placed]:
        """Return the chunks that have elements of a box of a tensor."""
        return self.table.overlapping(self.first + index, box)

    def tensors(self) -> dict[str, TensorInfo]:
        """Return the tensors by key; tied ones under each of their keys."""
        return {reference.key: self.record.tensors[reference.index] for reference in self.references}


class Contents:
    """The parts of a checkpoint.

    Args:
        manifest: What was read.
        path: The checkpoint, for messages.
    """

    def __init__(self, manifest: Manifest, path: str) -> None:
        self.kinds = manifest.kinds
        self._manifest = manifest
        self._path = path
        self._known: dict[tuple[str, int], PartContents] = {}

    @contextlib.contextmanager
    def sense(self, key: str | None = None) -> Iterator[None]:
        """Turn a ``ValueError`` about the manifest into an error that names the checkpoint.

        Raises:
            CheckpointCorruptedError: The body raised one.
        """
        try:
            yield
        except ValueError as error:
            raise CheckpointCorruptedError(
                f"the checkpoint's manifest makes no sense: {error}",
                path=f"{self._path}/{MANIFEST_NAME}",
                key=key,
                remedy="resume from another checkpoint; this one cannot be repaired",
            ) from error

    def holders(self, name: str) -> list[int]:
        """Return the ranks that saved a per-rank part; rank 0 alone stands for the others."""
        if self.kinds[name] != "per-rank":
            return [0]
        return [rank for rank, record in enumerate(self._manifest.ranks) if name in record.parts]

    def part(self, name: str, rank: int) -> PartContents:
        """Return a part.

        Args:
            name: Its name.
            rank: Whose, if it is per-rank.

        Raises:
            CheckpointNotFoundError: There is no such part.
            StateMismatchError: The rank has not saved it.
            CheckpointCorruptedError: The manifest makes no sense.
        """
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
        """Check everything that the manifest says; return all files.

        Raises:
            CheckpointCorruptedError: Something makes no sense.
        """
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
        """Check that every element of a tensor is in the files once.

        Raises:
            CheckpointCorruptedError: One is not.
        """
        with self.sense(f"{part.name}.{part.keys[index]}"):
            part.table.check_cover(part.first + index)

    def check_blocks(self, shards: Iterable[Shard]) -> None:
        """Check that there is one digest for each block of files.

        Raises:
            CheckpointCorruptedError: There is not.
        """
        with self.sense():
            for shard in shards:
                shard.check_blocks()


def _references(record: PartRecord) -> list[Reference]:
    tree, in_order = decode_structure(record.skeleton)
    found = list(tensor_paths(tree, Unresolved))
    if len(found) != len(in_order) or any(a is not b for (_, a), b in zip(found, in_order, strict=True)):
        raise ValueError("a tensor stands where there can be none")
    references = []
    for where, unresolved in found:
        key = key_of(where)
        if unresolved.index >= len(record.tensors):
            raise ValueError(f"{key} is a tensor that there is not")
        is_array = unresolved.nbytes is not None
        info = record.tensors[unresolved.index]
        if is_array and (info.dtype is not torch.uint8 or info.nbytes != unresolved.nbytes):
            raise ValueError(f"{key} is no memory of an array")
        references.append(Reference(where, key, unresolved.index, is_array))
    if len({reference.index for reference in references}) != len(record.tensors):
        raise ValueError(f"of {len(record.tensors)} tensors, some are no part of the state")
    return references


def _keys(record: PartRecord, references: Sequence[Reference]) -> list[str]:
    keys = [f"tensor {number}" for number in range(len(record.tensors))]
    for reference in reversed(references):
        keys[reference.index] = reference.key
    return keys
