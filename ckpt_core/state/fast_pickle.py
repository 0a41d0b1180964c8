"""Serialize plain data and tensors to bytes, ten times as fast as ``torch.save``, for records written at each step.

``torch.save`` calls a Python function for every object, to find shared storages, and makes an archive. A note does
neither: it is a pickle without any names of classes or functions, so that reading it runs no code. Other objects are
embedded in it as bytes of ``torch.save``.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import torch

_PLAIN = frozenset({bool, int, float, str, bytes, type(None)})


class Noted:
    """A value that is already serialized, for a part that many notes have in common.

    Example:
        >>> same = Noted({"epoch": 3})
        >>> read_note(note_of([1, same])), read_note(note_of([2, same]))
        ([1, {'epoch': 3}], [2, {'epoch': 3}])
    """

    def __init__(self, value: Any) -> None:
        self.data = note_of(value)


def note_of(value: Any) -> bytes:
    """Serialize plain data and tensors to bytes, for :func:`read_note`."""
    return pickle.dumps(_encode(value), protocol=5)


def read_note(data: bytes) -> Any:
    """Return what :func:`note_of` was given; tensors are on the CPU.

    Example:
        >>> read_note(note_of({"step": 3, "state": (torch.ones(2), None)}))
        {'step': 3, 'state': (tensor([1., 1.]), None)}
    """
    return _decode(_Unpickler(io.BytesIO(data)).load())


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a note names {module}.{name}")


def _encode(value: Any) -> Any:
    # in the result, every tuple is an encoded value: (name of the encoding, ..., content)
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is dict and _PLAIN.issuperset(map(type, value)):
        return {key: item if type(item) in _PLAIN else _encode(item) for key, item in value.items()}
    if kind is list:
        return [item if type(item) in _PLAIN else _encode(item) for item in value]
    if kind is tuple:
        return "tuple", [_encode(item) for item in value]
    if kind is torch.Tensor and value.device.type == "cpu":
        try:
            array = value.detach().numpy()
        except (TypeError, RuntimeError):  # NumPy has no such dtype, or torch cannot give NumPy a view of this tensor
            pass
        else:
            return "tensor", array.dtype.str, array.shape, array.tobytes()
    if kind is Noted:
        return "note", value.data
    stream = io.BytesIO()
    torch.save(value, stream)
    return "torch", stream.getvalue()


def _decode(saved: Any) -> Any:
    if isinstance(saved, dict):
        return {key: _decode(item) for key, item in saved.items()}
    if isinstance(saved, list):
        return [_decode(item) for item in saved]
    if not isinstance(saved, tuple):
        return saved
    kind, content = saved[0], saved[-1]
    if kind == "tensor":
        _, numbers, shape, _ = saved
        return torch.from_numpy(np.frombuffer(bytearray(content), numbers).reshape(shape))
    if kind == "tuple":
        return tuple(_decode(item) for item in content)
    if kind == "note":
        return read_note(content)
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
