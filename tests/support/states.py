"""Nested states for tests, and their comparison bit by bit."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    *(torch.complex32, torch.complex64, torch.complex128),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    torch.bool,
    *([torch.bcomplex32] if hasattr(torch, "bcomplex32") else []),  # since torch 2.14
)


def tensor_of(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Return a tensor whose bytes are random (0 and 1 for bool)."""
    count = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).reshape(shape)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """Return the elements as bytes, in the order of the indices; so NaN equals NaN, and -0.0 differs from 0.0."""
    dense = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    dense.copy_(tensor.detach())
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same_state(left: Any, right: Any, where: str = "state") -> None:
    """Fail unless both are equal in structure, types, order, strides and every bit of every tensor."""
    assert type(left) is type(right), where
    if isinstance(left, torch.Tensor):
        assert (left.dtype, left.shape, left.layout) == (right.dtype, right.shape, right.layout), where
        assert left.requires_grad == right.requires_grad, where
        if left.layout is not torch.strided or left.is_quantized:
            assert torch.equal(left, right), where
            return
        assert left.stride() == right.stride(), where
        assert raw_bytes(left) == raw_bytes(right), where
    elif isinstance(left, dict):
        assert list(left) == list(right), where
        for key in left:
            assert_same_state(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), where
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_same_state(one, other, f"{where}.{index}")
    else:
        assert repr(left) == repr(right), where


def _tensors() -> st.SearchStrategy[torch.Tensor]:
    return st.builds(
        lambda dtype, shape, seed: tensor_of(dtype, *shape, seed=seed),
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 5), max_size=3),
        st.integers(0, 1000),
    )


def states() -> st.SearchStrategy[Any]:
    """Generate nested dictionaries of tensors and everything else that loads with ``weights_only=True``."""
    keys = st.text(max_size=5) | st.integers(-5, 5)
    plain = (
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=8)
        | st.binary(min_size=1, max_size=8)
    )
    leaves = plain | _tensors()
    nested = st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(keys, inner, max_size=4)
        ),
        max_leaves=12,
    )
    return st.dictionaries(keys, nested, max_size=6)
