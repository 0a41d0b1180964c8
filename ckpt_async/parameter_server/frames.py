"""What goes over a wire: a JSON message and tensors, as one safetensors text. Reading one runs no code from it."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt_core._layouts.sharded.dtypes import DTYPES, bits_of, bytes_in, dtype_name, stored_as

__all__ = ["Frame", "decode_frame", "encode_frame"]

_ALIGNMENT = 64
_LONGEST_HEADER = 100_000_000  # bytes, as in safetensors
_INDICES, _VALUES = "#indices", "#values"


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
    """The frame as bytes that any safetensors reader can read; the tensors are copied.

    Raises:
        TypeError: The content is not JSON data.
    """
    dense, sparse = _without_sparse(frame.tensors)
    ordered = sorted(dense.items(), key=lambda item: -item[1].dtype.itemsize)
    dtypes = {name: dtype_name(tensor.dtype) for name, tensor in ordered}
    shapes = {name: list(tensor.shape) for name, tensor in ordered}
    about = json.dumps({"content": frame.content, "dtypes": dtypes, "shapes": shapes, "sparse": sparse})
    header: dict[str, Any] = {"__metadata__": {"frame": about}}
    position = 0
    for name, tensor in ordered:
        stored_dtype, stored_shape = stored_as(tensor.dtype, tuple(tensor.shape))
        end = position + tensor.numel() * tensor.dtype.itemsize
        header[name] = {"dtype": stored_dtype, "shape": list(stored_shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-(8 + len(text)) // _ALIGNMENT) * _ALIGNMENT - 8)
    data = bytearray(8 + len(text) + position)
    data[:8] = struct.pack("<Q", len(text))
    data[8 : 8 + len(text)] = text
    if position:
        target = torch.frombuffer(data, dtype=torch.uint8, offset=8 + len(text))
        begin = 0
        for _, tensor in ordered:
            source = bytes_in(bits_of(tensor.detach().cpu().contiguous()))
            assert source is not None
            target[begin : begin + source.numel()] = source
            begin += source.numel()
    return data


def decode_frame(data: bytearray) -> Frame:
    """The way back from :func:`encode_frame`; the tensors are views of ``data``.

    Raises:
        ValueError: The bytes are not those of a frame.
    """
    try:
        (length,) = struct.unpack_from("<Q", data)
        if not 2 <= length <= min(_LONGEST_HEADER, len(data) - 8):
            raise ValueError(f"a header of {length} bytes in {len(data)}")
        header = json.loads(bytes(data[8 : 8 + length]))
        about = json.loads(header.pop("__metadata__")["frame"])
        dense = {name: _tensor(data, 8 + length, header[name], about, name) for name in about["shapes"]}
        tensors = {name: tensor for name, tensor in dense.items() if not name.endswith((_INDICES, _VALUES))}
        for name, shape in about["sparse"].items():
            indices, values = dense[name + _INDICES], dense[name + _VALUES]
            tensors[name] = torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True, check_invariants=True)
        content = dict(about["content"].items())
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError(f"not a frame: {error!r}") from error
    return Frame(content, tensors)


def _without_sparse(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, list[int]]]:
    dense: dict[str, torch.Tensor] = {}
    sparse: dict[str, list[int]] = {}
    for name, tensor in tensors.items():
        if tensor.is_sparse:
            whole = tensor.detach().coalesce()
            dense[name + _INDICES], dense[name + _VALUES] = whole.indices(), whole.values()
            sparse[name] = list(tensor.shape)
        else:
            dense[name] = tensor
    return dense, sparse


def _tensor(data: bytearray, base: int, place: Mapping[str, Any], about: Mapping[str, Any], name: str) -> torch.Tensor:
    dtype, shape = DTYPES[about["dtypes"][name]], tuple(about["shapes"][name])
    begin, end = place["data_offsets"]
    count = 1
    for extent in shape:
        if not isinstance(extent, int) or extent < 0:
            raise ValueError(f"{name} has the extent {extent!r}")
        count *= extent
    if not 0 <= begin <= end <= len(data) - base or end - begin != count * dtype.itemsize:
        raise ValueError(f"{name} does not fit")
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    raw = torch.frombuffer(data, dtype=torch.uint8, count=end - begin, offset=base + begin)
    return raw.view(dtype).view(shape)
