"""Reads and writes ``manifest.json``, the commit record of a directory checkpoint.

It is written from the ranks' reports, which are joined as text without being parsed. When it is read, every number is
validated, because a manifest may come from an untrusted source. Its last line holds the digest of all lines before.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn

from ckpt_core._layouts.directory.file_names import check_extra_name, check_part_name, check_save_id, check_shard_name
from ckpt_core._layouts.directory.safetensors_file import ALIGNMENT, DIGEST_BYTES
from ckpt_core._layouts.directory.skeleton import Form, Json, decode_plain, fills_memory
from ckpt_core._layouts.safetensors import (
    DTYPES,
    LARGEST_HEADER,
    TensorInfo,
    UnknownTypeError,
    check_known,
    dtype_name,
    unique,
)
from ckpt_core.commit_time import NO_STAMP, Stamp
from ckpt_core.digest import ALGORITHM, digest
from ckpt_core.errors import CheckpointCorruptedError, CheckpointFormatError
from ckpt_core.storage.base import MANIFEST_NAME, FileReader

FORMAT_VERSION = 3

Kind = Literal["replicated", "sharded", "per-rank"]
KINDS = ("replicated", "sharded", "per-rank")

_FORMAT = "ckpt_core.sharded"
_BEGINNING = re.compile(rb'\{"format":"ckpt_core\.sharded","version":(\d{1,9}),')
_BEGINNING_SIZE = 64  # bytes, at most
_LAST_LINE = re.compile(rb'"check":"([0-9a-f]{16})"\}\n')
_LAST_LINE_SIZE = len(b'"check":"0123456789abcdef"}\n')
_LARGEST_NUMBER = 2**63 - 1
_MOST_RANKS = 1_000_000
_REMEDY = "resume from another checkpoint; this one cannot be repaired"


@dataclasses.dataclass(frozen=True)
class ExtraFile:
    """A file that the caller added to the checkpoint, stored unchanged, with its digest."""

    name: str  # relative to the checkpoint's directory, with / between folders
    size: int  # length in bytes
    digest: str  # digest of all bytes


@dataclasses.dataclass(frozen=True)
class PartRecord:
    """A part of the state, without its tensors' values."""

    skeleton: Json  # its structure, for decode_plain
    tensors: tuple[TensorInfo, ...]  # the tensors that the skeleton refers to
    forms: Mapping[int, Form] = dataclasses.field(default_factory=dict)  # unusual forms, by number of the tensor


@dataclasses.dataclass(frozen=True)
class ShardFile:
    """A safetensors file of the checkpoint."""

    name: str  # its name in the checkpoint's directory
    part: str | None  # the part that it belongs to; None for the file with all per-rank parts of a rank
    header_size: int  # offset of its first tensor
    size: int  # length in bytes
    blocks: int  # number of its blocks, each of which has a digest
    # The chunks in file order, not validated yet: the numbers of their tensors, the chunks' offsets, and the chunks'
    # shapes, each as a flat list. None: all tensors of the part, whole.
    chunks: list[Any] | None
    save_id: str | None = None  # the earlier save that wrote the file; None: the save of the manifest


@dataclasses.dataclass(frozen=True)
class RankRecord:
    """What one rank wrote."""

    files: tuple[ShardFile, ...]  # its safetensors files
    digests: ExtraFile | None  # the file with the digests of their blocks; None if there are none
    parts: Mapping[str, PartRecord]  # its per-rank parts
    extra_files: tuple[ExtraFile, ...]  # files that the caller added


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A decoded and validated manifest."""

    save_id: str  # the save that wrote it
    metadata: dict[str, Any]  # the caller's metadata
    kinds: Mapping[str, Kind]  # kind of each part
    parts: Mapping[str, PartRecord]  # the replicated and sharded parts
    ranks: tuple[RankRecord, ...]  # what each rank wrote
    stamp: Stamp = NO_STAMP  # commit time and training step

    @classmethod
    def decode(cls, data: bytes, *, path: str) -> Manifest:
        """Decode and validate a manifest.

        Raises:
            CheckpointFormatError: Another program wrote it, or a newer version of ckpt_core or torch.
            CheckpointCorruptedError: A byte differs from what was saved, or the content is invalid.
        """
        _check_bytes(data, path)
        try:
            known = json.loads(data, object_pairs_hook=unique, parse_float=_finite, parse_constant=_no_constant)
            return dataclasses.replace(_manifest(known), stamp=Stamp.read(data))
        except UnknownTypeError as error:
            raise error.refusal(path) from error
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise CheckpointCorruptedError(
                f"the checkpoint's manifest is invalid: {error}", path=path, remedy=_REMEDY
            ) from error


def encode_part(record: PartRecord) -> dict[str, Json]:
    """Return a part as a value for :func:`json.dumps`."""
    types = list(dict.fromkeys(record.tensors))
    number_of = {info: number for number, info in enumerate(types)}
    return {
        "state": record.skeleton,
        "types": [[dtype_name(info.dtype), list(info.shape)] for info in types],
        "tensors": [number_of[info] for info in record.tensors],
        **({"forms": [[number, *form] for number, form in record.forms.items()]} if record.forms else {}),
    }


def encode_manifest(
    *,
    save_id: str,
    metadata: Json,
    kinds: Mapping[str, str],
    parts: str,
    ranks: Sequence[str],
    stamp: Stamp = NO_STAMP,
) -> bytes:
    """Return the bytes of a manifest.

    ``parts`` is the JSON text of the replicated and sharded parts; ``ranks`` has each rank's record, as a line of JSON.
    """
    head = json.dumps(
        {
            "format": _FORMAT,
            "version": FORMAT_VERSION,
            **stamp.fields(),
            "digest": ALGORITHM,
            "save": save_id,
            "metadata": metadata,
            "kinds": kinds,
        },
        separators=(",", ":"),
    )
    body = f'{head[:-1]},\n"parts":{parts},\n"ranks":[\n' + ",\n".join(ranks) + "\n],\n"
    data = body.encode("ascii")
    return data + f'"check":"{digest(data)}"}}\n'.encode()


def read_stamp(data: bytes, *, path: str) -> Stamp:
    """Return the commit time and step in a manifest, after comparing its digest, without parsing all of it."""
    _check_bytes(data, path)
    return Stamp.read(data)


def is_other_programs(file: FileReader) -> bool:
    """Return whether another program, and no version of this package, wrote a file that is named like a manifest."""
    begin, end = (
        file.read(0, min(_BEGINNING_SIZE, file.size)),
        file.read(max(0, file.size - _LAST_LINE_SIZE), file.size),
    )
    return bool(begin) and _BEGINNING.match(begin) is None and _LAST_LINE.fullmatch(end) is None


def _check_bytes(data: bytes, path: str) -> None:
    if not data:  # left by a copy to a full disk, for example
        raise CheckpointCorruptedError("the checkpoint's manifest is empty", path=path, remedy=_REMEDY)
    found = _BEGINNING.match(data)
    end = _LAST_LINE.fullmatch(data[-_LAST_LINE_SIZE:])
    if found is None and end is None:
        raise CheckpointFormatError(
            "this is not the manifest of a checkpoint: another program wrote it, or it is damaged at both ends",
            path=path,
            remedy="check that the path is a checkpoint",
        )
    if found is not None and int(found[1]) != FORMAT_VERSION:
        _refuse_version(int(found[1]), path)
    if found is None or end is None or digest(memoryview(data)[:-_LAST_LINE_SIZE]) != end[1].decode():
        raise CheckpointCorruptedError(
            "the checkpoint's manifest is truncated or differs from what was saved", path=path, remedy=_REMEDY
        )


def _refuse_version(version: int, path: str) -> NoReturn:
    message = f"the checkpoint has format version {version}; this version of ckpt_core reads version {FORMAT_VERSION}"
    if version < FORMAT_VERSION:
        raise CheckpointFormatError(
            f"{message}, and the older ones were written by unreleased versions only",
            path=path,
            remedy="load it with the unreleased version of ckpt_core that wrote it, and save it again with this one",
        )
    raise CheckpointFormatError(message, path=path, remedy="upgrade ckpt_core to the version that wrote the checkpoint")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large for a number")
    return value


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


def _manifest(document: dict[str, Any]) -> Manifest:
    if document["digest"] != ALGORITHM:
        raise ValueError(f"unknown digest algorithm {document['digest']!r}")
    save_id = _text(document["save"])
    check_save_id(save_id)
    metadata = decode_plain(document["metadata"], [])
    if type(metadata) is not dict:
        raise ValueError("the metadata are not a dictionary")
    kinds = _mapping(document["kinds"])
    for name, kind in kinds.items():
        check_part_name(name)
        if kind not in KINDS:
            raise ValueError(f"part {name!r} has the unknown kind {kind!r}")
    parts = {name: _part(part) for name, part in _mapping(document["parts"]).items()}
    if parts.keys() != {name for name, kind in kinds.items() if kind != "per-rank"}:
        raise ValueError("kinds and parts disagree")
    ranks = _list(document["ranks"])
    if not 0 < len(ranks) <= _MOST_RANKS:
        raise ValueError(f"there cannot be {len(ranks)} ranks")
    records = tuple(_rank(number, record, kinds) for number, record in enumerate(ranks))
    _check_unique(records)
    return Manifest(save_id, metadata, kinds, parts, records)


def _rank(number: int, record: Any, kinds: Mapping[str, str]) -> RankRecord:
    if _number(record["rank"]) != number:
        raise ValueError(f"the record of rank {number} is missing or out of order")
    files = tuple(map(_shard_file, _list(record["files"])))
    for file in files:
        if file.part is not None and kinds.get(file.part, "per-rank") == "per-rank":
            raise ValueError(f"file {file.name!r} is of no part")
        if file.part is None and file.chunks is not None:
            raise ValueError(f"file {file.name!r} holds pieces of per-rank tensors")
    digests = None if record["digests"] is None else _extra_file(record["digests"], check_shard_name)
    if (digests is None) == bool(files):
        raise ValueError(f"rank {number} has files without digests, or digests without files")
    if digests is not None and digests.size != sum(file.blocks for file in files) * DIGEST_BYTES:
        raise ValueError(f"rank {number} does not have one digest for each block")
    parts = {name: _part(part) for name, part in _mapping(record["parts"]).items()}
    if any(kinds.get(name) != "per-rank" for name in parts):
        raise ValueError(f"rank {number} has parts of its own that are not per-rank")
    if sum(file.part is None for file in files) > 1:
        raise ValueError(f"rank {number} has two files of per-rank tensors")
    extra = tuple(_extra_file(file, check_extra_name) for file in _list(record["extra"]))
    return RankRecord(files, digests, parts, extra)


def _check_unique(records: Sequence[RankRecord]) -> None:
    names = [MANIFEST_NAME]
    for record in records:
        names += [file.name for file in record.files]
        names += [file.name for file in record.extra_files]
        if record.digests is not None:
            names.append(record.digests.name)
    if len(set(names)) != len(names):
        raise ValueError("two files have the same name")


def _part(document: Any) -> PartRecord:
    types = [_type(*entry) for entry in _list(document["types"])]
    tensors = tuple(types[_number(number)] for number in _list(document["tensors"]))
    forms = {_number(number): _form(tensors[number], *form) for number, *form in _list(document.get("forms", []))}
    return PartRecord(document["state"], tensors, forms)


def _form(info: TensorInfo, strides: Any, is_parameter: Any, requires_grad: Any) -> Form:
    found = None if strides is None else tuple(map(_number, _list(strides)))
    if found is not None and not fills_memory(info.shape, found):
        raise ValueError(f"no tensor of shape {list(info.shape)} has the strides {strides}")
    if type(is_parameter) is not bool or type(requires_grad) is not bool:
        raise TypeError("a tensor is a parameter, or has a gradient, or not")
    if requires_grad and not (info.dtype.is_floating_point or info.dtype.is_complex):
        raise ValueError(f"a {dtype_name(info.dtype)} has no gradient")
    return Form(found, is_parameter, requires_grad)


def _type(dtype: Any, shape: Any) -> TensorInfo:
    if dtype not in DTYPES:
        check_known(dtype)
        raise ValueError(f"{dtype!r} is not the type of a tensor")
    extent = tuple(map(_number, _list(shape)))
    if math.prod(max(1, size) for size in extent) * DTYPES[dtype].itemsize > _LARGEST_NUMBER:
        raise ValueError(f"no tensor can have the shape {list(extent)}")
    return TensorInfo(DTYPES[dtype], extent)


def _shard_file(entry: Any) -> ShardFile:
    name, part, header_size, size, blocks, chunks, *linked = entry
    check_shard_name(_text(name))
    header_size, size = _number(header_size), _number(size)
    if not 0 < header_size <= min(size, LARGEST_HEADER) or header_size % ALIGNMENT:
        raise ValueError(f"file {name!r} cannot be of {size} bytes with a header of {header_size}")
    part = None if part is None else _text(part)
    if len(linked) > 1:
        raise ValueError(f"file {name!r} names {len(linked)} saves that wrote it")
    if linked:
        check_save_id(_text(linked[0]))
    return ShardFile(name, part, header_size, size, _number(blocks), None if chunks is None else _list(chunks), *linked)


def _extra_file(entry: Any, check: Callable[[str], None]) -> ExtraFile:
    name, size, digest_text = entry
    check(_text(name))
    return ExtraFile(name, _number(size), _text(digest_text))


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST_NUMBER:
        raise ValueError(f"{str(value)[:40]!r} is neither a size nor an index")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{str(value)[:40]!r} is not text")
    return value


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError(f"{str(value)[:40]!r} is not a list")
    return value


def _mapping(value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise TypeError(f"{str(value)[:40]!r} is not an object")
    return value
