"""Notes of a step come back as they were written, and reading them runs no code."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch

from ckpt_core.state.fast_pickle import Noted, note_of, read_note

VALUES: dict[str, Any] = {
    "plain": {"a": [1, 2.5, None, True, "x", b"y", 2**80], 3: {}, None: float("inf")},
    "tuples": ("tensor", ("tuple", []), [("torch", b"")], ()),
    "not plain": OrderedDict(a=torch.Size([2])),
    "keys that are not plain": {(1, 2): "x"},
}
TENSORS = {
    "bytes": torch.arange(5, dtype=torch.uint8),
    "no dimension": torch.tensor(3.5, dtype=torch.float64),
    "none": torch.empty(0, 3),
    "strided": torch.arange(12).reshape(3, 4).T[1:],
    "with a gradient": torch.ones(2, requires_grad=True),
    "a parameter": torch.nn.Parameter(torch.ones(2)),
    "numpy has none": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "bool": torch.tensor([True, False]),
}


@pytest.mark.parametrize("name", VALUES)
def test_plain_data_comes_back(name: str) -> None:
    found = read_note(note_of(VALUES[name]))
    assert found == VALUES[name]
    assert type(found) is type(VALUES[name])


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_come_back(name: str) -> None:
    tensor = TENSORS[name]
    (found,) = read_note(note_of([tensor]))
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found, tensor)
    before = tensor.detach().clone()
    with torch.no_grad():
        found.zero_()
    assert torch.equal(tensor, before)  # the copy shares no memory


@pytest.mark.parametrize("name", VALUES)
def test_what_was_noted_before_comes_back_in_each_note(name: str) -> None:
    noted = Noted([VALUES[name], torch.ones(2)])
    for number in range(2):
        (found, (value, tensor)) = read_note(note_of([number, noted]))
        assert (found, value) == (number, VALUES[name])
        tensor += 1
        assert tensor.tolist() == [2, 2]  # the copies share no memory


def test_reading_runs_no_code() -> None:
    class Exploit:
        def __reduce__(self) -> Any:
            return print, ("run",)

    with pytest.raises(pickle.UnpicklingError, match=r"a note names builtins\.print"):
        read_note(pickle.dumps(Exploit()))
