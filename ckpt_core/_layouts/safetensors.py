"""Reads and writes the headers of safetensors files, and converts between torch's dtypes and theirs.

A file is eight bytes with the length of the header (little-endian), the header (JSON, padded with spaces), and the
tensors without gaps between them. Everything in a header that another program wrote is validated.
"""

from __future__ import annotations

import functools
import json
import math
import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ckpt_core._plan import QUANTIZED_TYPES
from ckpt_core.errors import CheckpointCorruptedError, CheckpointFormatError
from ckpt_core.storage.base import FileReader

LARGEST_HEADER = 100_000_000  # bytes: the limit of the safetensors library
_LENGTH = struct.Struct("<Q")
_REMEDY = "download the model again: this file is damaged, or it is not a safetensors file"

# ---- element types ---------------------------------------------------------------------------------------------------

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype not in QUANTIZED_TYPES
}

# The names that safetensors 0.4 knows: a program that finds an unknown name in the header cannot open the file at all.
_SAFETENSORS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_PARTS_OF_COMPLEX = {torch.complex32: "F16", torch.complex64: "F32", torch.complex128: "F64"}
if hasattr(torch, "bcomplex32"):  # since torch 2.14
    _PARTS_OF_COMPLEX[torch.bcomplex32] = "BF16"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class UnknownTypeError(ValueError):
    """A checkpoint has a dtype that this version of torch does not have, but a newer one may."""

    def refusal(self, path: str, key: str | None = None) -> CheckpointFormatError:
        """Return the error to raise for the checkpoint at ``path``."""
        return CheckpointFormatError(
            f"the checkpoint was saved with a newer version of torch: {self}",
            path=path,
            key=key,
            remedy="update torch",
        )


def check_known(name: object) -> None:
    """Raise an ``UnknownTypeError`` if ``name`` may be a dtype of another version of torch, and is none of this one."""
    if isinstance(name, str) and name.isidentifier() and not hasattr(torch, name):
        raise UnknownTypeError(f"{torch.__version__} has no type {name!r}")


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without the prefix ``torch.``: ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def stored_as(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return the type and the shape that a tensor has in a safetensors header.

    Complex numbers are stored as pairs of real ones, and dtypes that safetensors has no name for as bytes, both with
    one more dimension.
    """
    name = _SAFETENSORS.get(dtype)
    if name is not None:
        return name, shape
    if dtype in _PARTS_OF_COMPLEX:
        return _PARTS_OF_COMPLEX[dtype], (*shape, 2)
    return "U8", shape if dtype.itemsize == 1 else (*shape, dtype.itemsize)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of ``tensor`` without gradient, with a dtype that torch can copy bit by bit.

    torch cannot copy some of its dtypes. A lazily conjugated or negated tensor is returned as is: the copy resolves it.
    """
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        return tensor
    return tensor.view(_BITS[tensor.dtype.itemsize])


def resolved(bits: torch.Tensor) -> torch.Tensor:
    """Return the tensor from which to copy a result of :func:`bits_of` from a device to the host.

    Copies from CUDA leave the sign of a strided negative view as it is in memory
    (https://github.com/pytorch/pytorch/issues/146286).
    """
    return bits.resolve_conj().resolve_neg() if not bits.is_cpu and (bits.is_conj() or bits.is_neg()) else bits


def is_memory(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor are exactly its memory, contiguous and in row-major order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def bytes_in(bits: torch.Tensor) -> torch.Tensor | None:
    """Return the memory of a result of :func:`bits_of` as flat bytes; None if it is not contiguous."""
    if not is_memory(bits):
        return None
    # Not reshape, which would keep the stride of a dimension of size 1, and that can be anything.
    return bits.as_strided((bits.numel(),), (1,)).view(torch.uint8)


class TensorInfo(NamedTuple):
    """The dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return functools.reduce(int.__mul__, self.shape, self.dtype.itemsize)

    def empty(self, device: str | torch.device | None = None) -> torch.Tensor:
        """Return a new tensor of this dtype and shape; its values are undefined."""
        with torch.inference_mode(False):
            if not self.dtype.is_complex or self.dtype.itemsize > 4:
                return torch.empty(self.shape, dtype=self.dtype, device=device)
            # torch.empty warns about the experimental half-precision complex dtypes.
            return torch.empty(self.nbytes, dtype=torch.uint8, device=device).view(self.dtype).view(self.shape)


def can_store(info: TensorInfo) -> bool:
    """Return whether safetensors has a name for the dtype of a tensor."""
    name, shape = stored_as(info.dtype, (1,))
    return shape == (1,) and (name != "U8" or info.dtype is torch.uint8)


# Later releases of safetensors have two more, which older ones cannot read; they are read here, but not written.
_DTYPE_OF_NAME = {
    **{stored_as(dtype, ())[0]: dtype for dtype in DTYPES.values() if can_store(TensorInfo(dtype, ()))},
    "C64": torch.complex64,
    "F8_E8M0": torch.float8_e8m0fnu,
}

# ---- headers that are written ----------------------------------------------------------------------------------------


def header_text(tensors: Iterable[tuple[str, TensorInfo]], metadata: Mapping[str, str]) -> bytes:
    """Return the JSON text of a header, without padding."""
    entries = [f'"__metadata__":{json.dumps(metadata, separators=(",", ":"))}']
    position = 0
    for name, info in tensors:
        dtype, shape = stored_as(info.dtype, info.shape)
        extent = ",".join(map(str, shape))
        end = position + info.nbytes
        entries.append(f'{json.dumps(name)}:{{"dtype":"{dtype}","shape":[{extent}],"data_offsets":[{position},{end}]}}')
        position = end
    return ("{" + ",".join(entries) + "}").encode()


def header_size(text: bytes, alignment: int) -> int:
    """Return the offset of the first tensor: after the text, at a multiple of ``alignment`` bytes."""
    return -(-(_LENGTH.size + len(text)) // alignment) * alignment


def packed_header(text: bytes, size: int) -> bytes:
    """Return the first ``size`` bytes of a file: the length, the text, and spaces as padding."""
    return _LENGTH.pack(size - _LENGTH.size) + text.ljust(size - _LENGTH.size)


# ---- headers that are read -------------------------------------------------------------------------------------------


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file."""

    info: TensorInfo  # its dtype and shape
    begin: int  # offset of its bytes in the file


def read_header(reader: FileReader) -> dict[str, StoredTensor]:
    """Return the tensors in a safetensors file.

    Raises:
        CheckpointCorruptedError: The file is truncated, or its header is invalid.
        CheckpointFormatError: A tensor has an unknown dtype.
    """
    try:
        length: int = _LENGTH.unpack(reader.read(0, _LENGTH.size))[0] if reader.size >= _LENGTH.size else 0
        if not 2 <= length <= min(LARGEST_HEADER, reader.size - _LENGTH.size):
            raise ValueError(f"it cannot be {length} bytes long in a file of {reader.size}")
        entries = json.loads(reader.read(_LENGTH.size, _LENGTH.size + length), object_pairs_hook=unique)
        entries.pop("__metadata__", None)
        begin = _LENGTH.size + length
        found = {name: _stored_tensor(name, entry, begin, reader.path) for name, entry in entries.items()}
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise CheckpointCorruptedError(
            f"the header of a safetensors file is invalid: {error}", path=reader.path, remedy=_REMEDY
        ) from error
    end = begin
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
            f"a safetensors file has {reader.size} bytes instead of {end}", path=reader.path, remedy=_REMEDY
        )
    return found


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dictionary; raise a ``ValueError`` if a key is there twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _stored_tensor(name: str, entry: dict[str, Any], data: int, path: str) -> StoredTensor:
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    if any(type(number) is not int or number < 0 for number in (*shape, begin, end)):
        raise TypeError(f"{name} has an invalid size")
    if entry["dtype"] not in _DTYPE_OF_NAME:
        raise CheckpointFormatError(
            f"{name} has the type {entry['dtype']!r}, which is not known here",
            path=path,
            key=name,
            remedy="convert the model to a type that torch has",
        )
    info = TensorInfo(_DTYPE_OF_NAME[entry["dtype"]], shape)
    if math.prod(shape) * info.dtype.itemsize != end - begin:
        raise ValueError(f"{name} has {end - begin} bytes, which is not its size")
    return StoredTensor(info, data + begin)
