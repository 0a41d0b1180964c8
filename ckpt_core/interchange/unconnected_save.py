"""Write a directory checkpoint without communication between ranks, from tensors that are loaded one at a time.

Unlike in an ordinary save, ranks need not know what the others hold: each reports which entries of the state it has
written, and the manifest joins the reports. The caller must know when all ranks have written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ckpt_core._layouts.directory.contents import Contents
from ckpt_core._layouts.directory.manifest import Manifest, PartRecord, encode_manifest, encode_part
from ckpt_core._layouts.directory.skeleton import Json, encode_plain
from ckpt_core._layouts.directory.writing import PartContent, RankFiles
from ckpt_core._layouts.safetensors import TensorInfo, dtype_name
from ckpt_core._pipeline.directory_commit import NOTHING, discard, errors_name, leave, previous_at, publish
from ckpt_core._pipeline.writer import write_image
from ckpt_core._plan import Piece
from ckpt_core.buffers import ScratchBuffers
from ckpt_core.commit_time import Stamp, commit_time, step_in
from ckpt_core.errors import SerializationError
from ckpt_core.geometry import Box
from ckpt_core.interchange.flat_names import EntryPath, entry_name, nested
from ckpt_core.interchange.streaming import LazyTensors
from ckpt_core.storage import Storage, storage_for

TensorId = tuple[EntryPath, int]  # path of the entry, and number of the tensor in it (0 if the entry is a tensor)
_REFERENCE = re.compile(r"\$[0-9]+")


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A box of a tensor that a rank writes."""

    path: EntryPath  # the entry's path below its part
    number: int  # which tensor of the entry, if the entry is a value that contains tensors
    info: TensorInfo  # type and shape of the whole tensor
    box: Box  # which part of the tensor
    load: Callable[[], torch.Tensor]  # returns the elements, in the box's shape


@dataclasses.dataclass(frozen=True)
class Value:
    """An entry that is not a tensor."""

    skeleton: Json  # from encode_plain
    tensors: tuple[TensorInfo, ...]  # the tensors to which the skeleton refers


@dataclasses.dataclass(frozen=True)
class RankShards:
    """Report of what a rank has written; plain data."""

    rank: int
    save_id: str
    tensors: dict[str, dict[TensorId, TensorInfo]]  # the tensors of which it has written chunks, by part
    values: dict[str, dict[EntryPath, Value]]  # the entries that are not tensors, by part
    files: list[Any]  # records for the manifest; chunks refer to ``tensors`` by position
    digests: Any  # record of the file of digests
    sizes: dict[str, int]  # bytes of each file


class UnconnectedSave:
    """One process's part in the save of a checkpoint.

    ``token`` is the same for all processes that write it, and never used again: 1 to 64 letters, digits and dashes.
    """

    def __init__(self, path: str, storage: Storage, token: str) -> None:
        self.path = path
        self.token = token
        self._storage = storage
        self._created: list[str] = []
        self._directory = storage.begin_directory(path, token)
        self._is_in_place = self._directory == path
        previous = previous_at(storage, path) if self._is_in_place else NOTHING
        self._suffix = f"-{token}" if previous.exists else ""

    def write(
        self,
        chunks: Mapping[str, Sequence[Chunk]],
        values: Mapping[str, Mapping[EntryPath, Value]],
        *,
        rank: int = 0,
        world_size: int = 1,
        one_by_one: bool = False,
    ) -> RankShards:
        """Write a rank's files: chunks, by part, and the entries that are not tensors.

        With ``one_by_one``, at most one tensor is loaded at any time. Otherwise all are loaded first, so they should be
        in memory already.
        """
        tables: dict[str, dict[TensorId, TensorInfo]] = {}
        contents, loads, sizes = [], list[Callable[[], torch.Tensor]](), dict[str, int]()
        for part, of_part in chunks.items():
            of_tensor: dict[TensorId, list[Chunk]] = {}
            for chunk in of_part:
                of_tensor.setdefault((chunk.path, chunk.number), []).append(chunk)
            tables[part] = {tensor: found[0].info for tensor, found in of_tensor.items()}
            loads += [chunk.load for found in of_tensor.values() for chunk in found]
            names = _names_of(of_tensor)
            pieces = {
                names[tensor]: [Piece(chunk.box, _shape_of(chunk) if one_by_one else chunk.load()) for chunk in found]
                for tensor, found in of_tensor.items()
            }
            named = {names[tensor]: info for tensor, info in tables[part].items()}
            contents.append(PartContent(part, "sharded", None, named, pieces, spread=True))
        laid_out = RankFiles(contents, rank=rank, world_size=world_size, save_id=self.token, suffix=self._suffix)
        files = laid_out.live_files((lambda some: LazyTensors([loads[n] for n in some])) if one_by_one else None)
        with contextlib.closing(ScratchBuffers()) as scratch, errors_name(self.path, written_to=self._directory):
            for name, image in files:
                self._created.append(name)
                target = f"{self._directory}/{name}"
                sizes[name] = write_image(image, self._storage, target, scratch=scratch, one_by_one=one_by_one)
        copied = {part: dict(of_part) for part, of_part in values.items()}
        return RankShards(rank, self.token, tables, copied, *laid_out.described(), sizes)

    def commit(
        self,
        ranks: Sequence[RankShards],
        *,
        kind: str,
        metadata: Mapping[str, Any],
        order: Iterable[tuple[str, EntryPath]] = (),
    ) -> int:
        """Commit the checkpoint at its path, replacing an earlier one; return its size in bytes.

        ``ranks`` are the reports of all ranks, in rank order; ``order`` has part and path of the entries in the order
        of the state. Ranks that have written different states, and missing or duplicate elements, are refused.
        """
        manifest = _join_ranks(ranks, kind=kind, metadata=metadata, order=order, path=self.path)
        sizes = {name: size for rank in ranks for name, size in rank.sizes.items()}
        publish(self._storage, self.path, self.token, manifest, sizes, written_to=self._directory)
        return sum(sizes.values()) + len(manifest)

    def leave(self) -> None:
        """End this process's part; delete the unfinished save if no other process is working on it."""
        leave(self._storage, self.path, self.token)

    def give_up(self) -> None:
        """Delete what this process has written, if it is in the final directory, where clean-up would not find it."""
        if self._is_in_place:
            discard(self._storage, self.path, self.token, self._created)

    def abandon(self) -> None:
        """End the whole save and delete its files."""
        discard(self._storage, self.path, self.token, self._created)
        self.leave()


def save_alone(
    path: str,
    chunks: dict[str, list[Chunk]],
    values: dict[str, dict[EntryPath, Value]],
    *,
    kind: str,
    storage_options: dict[str, Any] | None,
    order: Iterable[tuple[str, EntryPath]] = (),
) -> int:
    """Write a checkpoint by this process alone, one tensor in memory at a time; return its size in bytes."""
    storage = storage_for(path, storage_options)
    save = UnconnectedSave(path, storage, f"import-{uuid.uuid4().hex[:16]}")
    try:
        shards = save.write(chunks, values, one_by_one=True)
        size = save.commit([shards], kind=kind, metadata={}, order=order)
    except BaseException:
        save.abandon()
        raise
    save.leave()
    return size


def _shape_of(chunk: Chunk) -> torch.Tensor:
    return torch.empty(chunk.box.shape, dtype=chunk.info.dtype, device="meta")


def _names_of(tensors: Iterable[TensorId]) -> dict[TensorId, str]:
    """Return a unique name for each tensor of a part."""
    names: dict[TensorId, str] = {}
    taken = set[str]()
    for path, number in tensors:
        name = entry_name((*path, number) if number else path) or "tensor"
        while name in taken:
            name += "~"
        taken.add(name)
        names[path, number] = name
    return names


def _join_ranks(
    ranks: Sequence[RankShards],
    *,
    kind: str,
    metadata: Mapping[str, Any],
    order: Iterable[tuple[str, EntryPath]],
    path: str,
) -> bytes:
    """Join the ranks' reports into a manifest; arguments and errors as for :meth:`UnconnectedSave.commit`."""
    encoded, tensors = encode_plain(dict(metadata), key="metadata")
    if tensors:
        raise SerializationError("the metadata hold a tensor", key=f"metadata.{tensors[0][0]}", remedy="save it")
    paths: dict[str, list[EntryPath]] = {}
    for name, below in order:
        paths.setdefault(name, []).append(below)
    found = dict.fromkeys(name for rank in ranks for name in (*rank.tensors, *rank.values))
    names = [*(name for name in paths if name in found), *(name for name in found if name not in paths)]
    parts, numbers = {}, {}
    for name in names:
        record, numbers[name] = _join_part(name, ranks, paths.get(name, ()))
        parts[name] = encode_part(record)
    data = encode_manifest(
        save_id=ranks[0].save_id,
        metadata=encoded,
        kinds=dict.fromkeys(names, kind),
        parts=json.dumps(parts, separators=(",", ":"), allow_nan=False),
        ranks=[_record(rank, numbers) for rank in ranks],
        stamp=Stamp(commit_time(), step_in(metadata)),
    )
    Contents(Manifest.decode(data, path=path), path).check()
    return data


def _join_part(
    name: str, ranks: Sequence[RankShards], order: Iterable[EntryPath]
) -> tuple[PartRecord, dict[TensorId, int]]:
    """Join a part of all ranks into a record; return it and the number of each tensor in it."""
    tensors: dict[TensorId, TensorInfo] = {}
    values: dict[EntryPath, Value] = {}
    for rank in ranks:
        values.update(rank.values.get(name, {}))
        for tensor, info in rank.tensors.get(name, {}).items():
            if tensors.setdefault(tensor, info) != info:
                key = entry_name((name, *tensor[0]))
                raise SerializationError(
                    f"rank {rank.rank} has {_text(info)} at {key}, and another rank {_text(tensors[tensor])}",
                    key=key,
                    remedy="save the same state on all ranks",
                )
    # An empty tensor is a placeholder for each entry in the skeleton, until its value replaces it below.
    paths = {path for path, _ in tensors} | values.keys()
    in_order = dict.fromkeys(path for path in (*order, *(path for path, _ in tensors), *values) if path in paths)
    marks = {path: torch.empty(0, device="meta") for path in in_order}
    try:
        skeleton, found = encode_plain(nested(marks), key=name)
    except ValueError as error:
        raise SerializationError(
            f"the ranks have saved parts {name!r} that are not one state: {error}", key=name, remedy="rename an entry"
        ) from error
    path_of = {id(mark): path for path, mark in marks.items()}
    infos: list[TensorInfo] = []
    numbers: dict[TensorId, int] = {}
    replacements: list[Json] = []
    for _, mark in found:
        path = path_of[id(mark)]
        value = values.get(path)
        first = len(infos)
        infos += [tensors[path, 0]] if value is None else value.tensors
        numbers.update({(path, index - first): index for index in range(first, len(infos))})
        shifted = functools.partial(_shifted, first)
        replacements.append(shifted(0) if value is None else _mapped(value.skeleton, shifted))
    return PartRecord(_mapped(skeleton, replacements.__getitem__), tuple(infos)), numbers


def _shifted(first: int, number: int) -> Json:
    return f"${first + number}"


def _text(info: TensorInfo) -> str:
    return f"{dtype_name(info.dtype)}{list(info.shape)}"


def _mapped(skeleton: Json, replace: Callable[[int], Json]) -> Json:
    """Return the skeleton with every reference replaced; other text that begins with ``$`` is escaped as ``$$``."""
    if isinstance(skeleton, str) and _REFERENCE.fullmatch(skeleton):
        return replace(int(skeleton[1:]))
    if isinstance(skeleton, list):
        return [_mapped(item, replace) for item in skeleton]
    if isinstance(skeleton, dict):
        return {key: _mapped(item, replace) for key, item in skeleton.items()}
    return skeleton


def _record(rank: RankShards, numbers: Mapping[str, Mapping[TensorId, int]]) -> str:
    files = []
    for name, part, header_size, size, blocks, (own, *places) in rank.files:
        joint = [numbers[part][tensor] for tensor in rank.tensors[part]]
        files.append([name, part, header_size, size, blocks, [[joint[number] for number in own], *places]])
    record = {"rank": rank.rank, "files": files, "digests": rank.digests, "parts": {}, "extra": []}
    return json.dumps(record, separators=(",", ":"))
