"""Directory checkpoints without the ranks' own connection, from tensors that are not all there at once.

Unlike in an ordinary save, ranks need not know what the others hold: each says which entries of the state it has
written, and the manifest puts them together. Whoever calls knows when all have written.
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
from ckpt_core._layouts.directory.file_names import digests_name, piece_name, shard_name
from ckpt_core._layouts.directory.manifest import Manifest, PartRecord, encode_manifest, encode_part
from ckpt_core._layouts.directory.safetensors_file import (
    DigestsImage,
    SafetensorsImage,
    file_layout,
    file_order,
)
from ckpt_core._layouts.directory.skeleton import Json, encode_plain
from ckpt_core._layouts.directory.writing import (
    NOT_TENSORS,
    describe_chunks,
    describe_digests,
    describe_shard,
    name_of_chunk,
)
from ckpt_core._layouts.safetensors import TensorInfo, dtype_name
from ckpt_core._pipeline.directory_commit import NOTHING, discard, errors_name, leave, previous_at, publish
from ckpt_core._pipeline.writer import write_image
from ckpt_core.buffers import ScratchBuffers
from ckpt_core.commit_time import Stamp, commit_time, step_in
from ckpt_core.errors import SerializationError
from ckpt_core.geometry import Box
from ckpt_core.interchange.flat_names import EntryPath, entry_name, nested
from ckpt_core.interchange.streaming import LazyTensors
from ckpt_core.storage import Storage, storage_for

Image = SafetensorsImage | DigestsImage
TensorId = tuple[EntryPath, int]  # of an entry, or of the tensors inside of a value
_REFERENCE = re.compile(r"\$[0-9]+")


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A box of a tensor that a rank writes."""

    path: EntryPath  # the entry's path below its part
    number: int  # which tensor of the entry, if that is a value that holds some
    info: TensorInfo  # type and shape of the whole tensor
    box: Box  # what of it
    load: Callable[[], torch.Tensor]  # returns the elements, in the box's shape

    def name_in_file(self, taken: set[str]) -> str:
        key = entry_name((*self.path, self.number) if self.number else self.path) or "tensor"
        return name_of_chunk(key, self.box, is_whole=self.box.shape == self.info.shape, taken=taken)


@dataclasses.dataclass(frozen=True)
class Value:
    """An entry that is not a tensor."""

    skeleton: Json  # from encode_plain
    tensors: tuple[TensorInfo, ...]  # what it refers to


@dataclasses.dataclass(frozen=True)
class RankShards:
    """What a rank has written; plain data."""

    rank: int  # its number
    save_id: str  # in which save
    tensors: dict[str, dict[TensorId, TensorInfo]]  # the tensors that it holds pieces of, by part
    values: dict[str, dict[EntryPath, Value]]  # the entries that are not tensors, by part
    files: list[list[Any]]  # for the manifest; chunks refer to tensors
    digests: list[Any] | None  # the file of digests
    sizes: dict[str, int]  # bytes of each file


class UnconnectedSave:
    """One process's part in the making of a checkpoint.

    ``token`` is the same for all who write it, and never used again: 1 to 64 letters, digits and dashes.
    """

    def __init__(self, storage: Storage, path: str, token: str) -> None:
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

        With ``one_by_one``, at most one tensor is loaded at any time. If not, several threads load them, and each is
        expected to be there already.
        """

        def write_file(name: str, image: Image) -> int:
            self._created.append(name)
            target = f"{self._directory}/{name}"
            return write_image(image, self._storage, target, scratch=scratch, one_by_one=one_by_one)

        with contextlib.closing(ScratchBuffers()) as scratch, errors_name(self.path, written_to=self._directory):
            files, images, sizes = [], [], {}
            tensors: dict[str, dict[TensorId, TensorInfo]] = {}
            for part, of_part in chunks.items():
                table = tensors[part] = {(chunk.path, chunk.number): chunk.info for chunk in of_part}
                if not of_part:
                    continue
                infos = [TensorInfo(chunk.info.dtype, chunk.box.shape) for chunk in of_part]
                order = file_order(infos)
                ordered = [of_part[index] for index in order]
                taken = set(NOT_TENSORS)
                named = tuple(
                    [(chunk.name_in_file(taken), infos[index]) for index, chunk in zip(order, ordered, strict=True)]
                )
                layout = file_layout(named, (("rank", str(rank)),))
                loads = [chunk.load for chunk in ordered]
                sources = LazyTensors(loads) if one_by_one else [load() for load in loads]
                image = SafetensorsImage(layout, layout.header(self.token), sources)
                name = (
                    shard_name(part, self._suffix)
                    if world_size == 1
                    else piece_name(part, rank, world_size, self._suffix)
                )
                sizes[name] = write_file(name, image)
                images.append(image)
                number_of = {tensor: number for number, tensor in enumerate(table)}
                numbers = [number_of[chunk.path, chunk.number] for chunk in ordered]
                held = describe_chunks(numbers, [chunk.box for chunk in ordered])
                files.append(describe_shard(name, part, layout, held))
            digests = None
            if images:
                name = digests_name(rank, world_size, self._suffix)
                written = DigestsImage(images)
                sizes[name] = write_file(name, written)
                digests = describe_digests(name, written)
            copied = {part: dict(of_part) for part, of_part in values.items()}
            return RankShards(rank, self.token, tensors, copied, files, digests, sizes)

    def commit(
        self,
        ranks: Sequence[RankShards],
        *,
        kind: str,
        metadata: Mapping[str, Any],
        order: Iterable[tuple[str, EntryPath]] = (),
    ) -> int:
        """Make it the checkpoint at its path, in the place of what was there; return its size in bytes.

        ``ranks`` is what all have written, in their order; ``order`` has part and path of entries, as they come in the
        state. Ranks that have not written one state are refused, and so are elements that are missing or there twice.
        """
        manifest = _join_ranks(ranks, kind=kind, metadata=metadata, order=order, path=self.path)
        sizes = {name: size for rank in ranks for name, size in rank.sizes.items()}
        publish(self._storage, self.path, self.token, manifest, sizes, written_to=self._directory)
        return sum(sizes.values()) + len(manifest)

    def leave(self) -> None:
        """End this process's part; what no other process works on and was not committed is deleted."""
        leave(self._storage, self.path, self.token)

    def give_up(self) -> None:
        """Delete what this process has written where it would not be found later."""
        if self._is_in_place:
            discard(self._storage, self.path, self.token, self._created)

    def abandon(self) -> None:
        """End the whole save: nothing is left of it."""
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
    save = UnconnectedSave(storage, path, f"import-{uuid.uuid4().hex[:16]}")
    try:
        shards = save.write(chunks, values, one_by_one=True)
        size = save.commit([shards], kind=kind, metadata={}, order=order)
    except BaseException:
        save.abandon()
        raise
    save.leave()
    return size


def _join_ranks(
    ranks: Sequence[RankShards],
    *,
    kind: str,
    metadata: Mapping[str, Any],
    order: Iterable[tuple[str, EntryPath]],
    path: str,
) -> bytes:
    """Return the manifest of what all ranks have written; arguments, errors as for :meth:`UnconnectedSave.commit`."""
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
    """Return a part, and the number that each of its tensors has in it."""
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
    # A tensor without elements stands for each entry, until it is known what is there.
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
    """Return the skeleton with every reference replaced; other text that begins with ``$`` has a second one there."""
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
