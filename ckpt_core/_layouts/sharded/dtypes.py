"""Names of torch's element types: torch's own in the manifest, and those that safetensors has in the files."""

from __future__ import annotations

import torch

__all__ = ["DTYPES", "bits_of", "bytes_in", "dtype_name", "is_memory", "stored_as"]

# Quantised types are missing on purpose: such a tensor is more than its elements.
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.qint", "torch.quint"))
}

# What safetensors 0.4 reads already: a program with an unknown name in the header could not open the file at all.
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
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name without the prefix: ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def stored_as(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return the type and the shape under which a tensor stands in a safetensors header.

    Complex numbers are pairs of real ones, and what safetensors has no name for is bytes; both in one more dimension.
    """
    name = _SAFETENSORS.get(dtype)
    if name is not None:
        return name, shape
    if dtype in _PARTS_OF_COMPLEX:
        return _PARTS_OF_COMPLEX[dtype], (*shape, 2)
    return "U8", shape if dtype.itemsize == 1 else (*shape, dtype.itemsize)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` without gradient, as elements that every copy can move bit by bit, where it lies.

    torch cannot copy some of its types. A tensor that is the conjugate or the negative of its memory stays what it is: it
    is the copy that makes it so.
    """
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        return tensor
    return tensor.view(_BITS[tensor.dtype.itemsize])


def is_memory(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor are its memory, in one piece and in their order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def bytes_in(bits: torch.Tensor) -> torch.Tensor | None:
    """Return the memory of what :func:`bits_of` gave, as flat bytes; None if it does not lie in one piece, in order."""
    if not is_memory(bits):
        return None
    # Not reshape: where a dimension has one element, its stride can be anything, and stays so.
    return bits.as_strided((bits.numel(),), (1,)).view(torch.uint8)
