"""The wire format: a frame is a JSON message and tensors, encoded as bytes. Decoding a frame runs no code from it."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

_ALIGNMENT = 64
_LONGEST_TEXT = 100_000_000  # bytes
_INDICES, _VALUES = "#indices", "#values"
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


@dataclass(frozen=True)
class Frame:
    """A message between processes.

    Attributes:
        content: Plain JSON data.
        tensors: By name; dense, or sparse in COO form.
    """

    content: dict[str, Any]
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


def encode_frame(frame: Frame) -> bytearray:
    """Return the frame as bytes: the length of a JSON text, 8 bytes little-endian; the text; copies of the tensors."""
    dense: dict[str, torch.Tensor] = {}
    sparse: dict[str, list[int]] = {}
    for name, tensor in frame.tensors.items():
        if tensor.is_sparse:
            whole = tensor.detach().coalesce()
            dense[name + _INDICES], dense[name + _VALUES] = whole.indices(), whole.values()
            sparse[name] = list(tensor.shape)
        else:
            dense[name] = tensor
    # The widest element type first, so that the elements of each tensor are aligned.
    ordered = sorted(dense.items(), key=lambda item: -item[1].dtype.itemsize)
    described = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in ordered]
    text = json.dumps({"content": frame.content, "tensors": described, "sparse": sparse}).encode()
    begin = _first_byte(len(text))
    data = bytearray(begin + sum(tensor.numel() * tensor.dtype.itemsize for _, tensor in ordered))
    data[: 8 + len(text)] = struct.pack("<Q", len(text)) + text
    for _, tensor in ordered:
        count = tensor.numel() * tensor.dtype.itemsize
        if count:
            plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
            target = torch.frombuffer(data, dtype=torch.uint8, count=count, offset=begin)
            target.copy_(plain.reshape(-1).view(torch.uint8))
        begin += count
    return data


def decode_frame(data: bytearray) -> Frame:
    """Decode the bytes of :func:`encode_frame`; the tensors are views of ``data``. Raise ``ValueError`` if invalid."""
    try:
        (length,) = struct.unpack_from("<Q", data)
        if not 2 <= length <= min(_LONGEST_TEXT, len(data) - 8):
            raise ValueError(f"a text of {length} bytes in {len(data)}")
        found = json.loads(bytes(data[8 : 8 + length]))
        tensors: dict[str, torch.Tensor] = {}
        begin = _first_byte(length)
        for name, dtype, shape in found["tensors"]:
            tensors[name], begin = _tensor(data, begin, _DTYPES[dtype], shape)
        for name, shape in found["sparse"].items():
            indices, values = tensors.pop(name + _INDICES), tensors.pop(name + _VALUES)
            tensors[name] = torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True, check_invariants=True)
        content = dict(found["content"].items())
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError(f"not a frame: {error!r}") from error
    return Frame(content, tensors)


def _first_byte(text_bytes: int) -> int:
    """Return the offset at which the tensors begin after a text of that length."""
    return -(-(8 + text_bytes) // _ALIGNMENT) * _ALIGNMENT


def _tensor(data: bytearray, begin: int, dtype: torch.dtype, shape: list[Any]) -> tuple[torch.Tensor, int]:
    """Return the tensor at offset ``begin``, and the offset of the next one."""
    if not all(isinstance(extent, int) and extent >= 0 for extent in shape):
        raise ValueError(f"the shape {shape!r}")
    count = math.prod(shape) * dtype.itemsize
    if count > len(data) - begin:
        raise ValueError(f"a tensor of {count} bytes at {begin} in {len(data)}")
    if count == 0:
        return torch.empty(shape, dtype=dtype), begin
    raw = torch.frombuffer(data, dtype=torch.uint8, count=count, offset=begin)
    return raw.view(dtype).view(shape), begin + count
