"""Frames: what is sent over the wire is received as it was, and rubbish is refused."""

from __future__ import annotations

import random

import pytest
import torch

from ckpt_async.parameter_server.frames import Frame, decode_frame, encode_frame

TENSORS = {
    "float": torch.randn(3, 5),
    "half": torch.randn(7).half(),
    "bfloat": torch.randn(2, 2).bfloat16(),
    "double": torch.randn(2, 3, dtype=torch.float64),
    "integer": torch.arange(4),
    "bool": torch.tensor([True, False, True]),
    "complex": torch.randn(3, dtype=torch.complex64),
    "scalar": torch.tensor(1.5),
    "empty": torch.empty(0, 4),
    "transposed": torch.randn(4, 3).t(),
    "conjugate": torch.randn(2, 3, dtype=torch.complex128).conj(),
    "float8": torch.randn(5).to(torch.float8_e4m3fn),
}


def test_content_and_tensors_come_back() -> None:
    content = {"kind": "push", "text": "ä\n", "numbers": [1, 2.5, None]}
    frame = decode_frame(encode_frame(Frame(content, TENSORS)))
    assert frame.content == content
    assert frame.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert frame.tensors[name].dtype == tensor.dtype
        assert torch.equal(frame.tensors[name], tensor), name


def test_sparse_tensors_stay_sparse() -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 4, 1]]), torch.ones(3, 2), (6, 2), check_invariants=True)
    found = decode_frame(encode_frame(Frame({}, {"table": sparse}))).tensors["table"]
    assert found.is_sparse
    assert found.indices().tolist() == [[1, 4]]
    assert torch.equal(found.to_dense(), sparse.to_dense())


def test_a_frame_does_not_change_with_the_tensor() -> None:
    tensor = torch.zeros(3)
    data = encode_frame(Frame({}, {"a": tensor}))
    tensor.fill_(1)
    assert decode_frame(data).tensors["a"].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("seed", range(200))
def test_damaged_bytes_are_refused_or_harmless(seed: int) -> None:
    chance = random.Random(seed)
    data = encode_frame(Frame({"kind": "push"}, {"a": torch.arange(30), "s": torch.eye(3).to_sparse()}))
    if seed % 2:
        del data[chance.randrange(len(data)) :]
    else:
        for _ in range(5):
            data[chance.randrange(len(data))] = chance.randrange(256)
    try:
        found = decode_frame(data)
    except ValueError as error:
        assert "not a frame" in str(error)  # noqa: PT017 - either outcome is right
    else:
        assert all(tensor.to_dense().sum().isfinite() for tensor in found.tensors.values())


@pytest.mark.parametrize("data", [b"", b"\0" * 7, b"\xff" * 64, b"\2\0\0\0\0\0\0\0{}"])
def test_rubbish_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a frame"):
        decode_frame(bytearray(data))
