"""The header of a safetensors file that another program wrote, checked before anything in it is believed."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from typing import Any

import torch

from ckpt_core._layouts.sharded.dtypes import DTYPES, stored_as
from ckpt_core._layouts.sharded.safetensors_file import TensorInfo
from ckpt_core.errors import CheckpointCorruptedError, CheckpointFormatError
from ckpt_core.storage import FileReader

__all__ = ["StoredTensor", "can_store", "read_header"]

_LARGEST_HEADER = 100_000_000  # bytes: what safetensors reads
_REMEDY = "download the model again: this file is damaged, or no safetensors file"


def can_store(info: TensorInfo) -> bool:
    """Return whether safetensors has a name for the type of a tensor."""
    name, shape = stored_as(info.dtype, (1,))
    return shape == (1,) and (name != "U8" or info.dtype is torch.uint8)


# Later releases of safetensors know two more, which older ones cannot read.
_DTYPES = {
    **{stored_as(dtype, ())[0]: dtype for dtype in DTYPES.values() if can_store(TensorInfo(dtype, ()))},
    "C64": torch.complex64,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        info: Its type and shape.
        begin: Offset of its bytes in the file.
    """

    info: TensorInfo
    begin: int


def read_header(reader: FileReader) -> dict[str, StoredTensor]:
    """Return the tensors in a safetensors file.

    Args:
        reader: The open file.

    Raises:
        CheckpointCorruptedError: The file is truncated, or its header makes no sense.
        CheckpointFormatError: A tensor has a type that is not known here.
    """
    try:
        length = struct.unpack("<Q", _read(reader, 0, 8))[0]
        if not 2 <= length <= min(_LARGEST_HEADER, reader.size - 8):
            raise ValueError(f"it cannot be {length} bytes long in a file of {reader.size}")
        header = json.loads(_read(reader, 8, length), object_pairs_hook=_unique)
        header.pop("__metadata__", None)
        found = {name: _tensor(name, entry, 8 + length, reader) for name, entry in header.items()}
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, struct.error) as error:
        raise CheckpointCorruptedError(
            f"the header of a safetensors file makes no sense: {error}", path=reader.path, remedy=_REMEDY
        ) from error
    end = 8 + length
    for name, tensor in sorted(found.items(), key=lambda item: (item[1].begin, item[1].info.nbytes)):
        if tensor.begin != end:
            raise CheckpointCorruptedError(
                f"the bytes of {name} do not begin where those before it end",
                path=reader.path,
                key=name,
                remedy=_REMEDY,
            )
        end += tensor.info.nbytes
    if end != reader.size:
        raise CheckpointCorruptedError(
            f"a safetensors file has {reader.size} bytes and not {end}", path=reader.path, remedy=_REMEDY
        )
    return found


def _read(reader: FileReader, begin: int, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    reader.read_into(begin, memoryview(data))
    return bytes(data)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is there twice")
    return found


def _tensor(name: str, entry: dict[str, Any], data: int, reader: FileReader) -> StoredTensor:
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    if any(type(number) is not int or number < 0 for number in (*shape, begin, end)):
        raise TypeError(f"{name} has a size that is none")
    if entry["dtype"] not in _DTYPES:
        raise CheckpointFormatError(
            f"{name} has the type {entry['dtype']!r}, which is not known here",
            path=reader.path,
            key=name,
            remedy="convert the model to a type that torch has",
        )
    info = TensorInfo(_DTYPES[entry["dtype"]], shape)
    if math.prod(shape) * info.dtype.itemsize != end - begin:
        raise ValueError(f"{name} has {end - begin} bytes, which is not its size")
    return StoredTensor(info, data + begin)
