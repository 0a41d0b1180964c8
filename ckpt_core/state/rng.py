"""Capture and restore random generators (RNGs): the global ones of Python, NumPy and torch, and those in objects.

A capture is cheap (no encoding); :meth:`RngState.encode` turns it into tensors, integers, floats and texts only, so
that a checkpoint with it loads with ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand

from ckpt_core._devices.generators import (
    DeviceGenerators,
    capture_device_generators,
    new_generator,
    restore_device_generators,
)
from ckpt_core.errors import SerializationError
from ckpt_core.process.console import warn
from ckpt_core.state.object_walk import reach

_PYTHON_WORDS = 625
_NUMPY_WORDS = 624


def _numpy_state() -> tuple[Any, ...]:
    """Return ``numpy.random.get_state()``, in some 60 us, because NumPy makes a Python number of each word.

    Raises:
        SerializationError: NumPy's global generator has been replaced by one of another kind.
    """
    generator = mtrand.get_bit_generator()
    if type(generator) is not np.random.MT19937:
        raise SerializationError(
            f"NumPy's global random generator was replaced by {type(generator).__name__}, whose state cannot be saved",
            key="numpy.random",
            remedy="do without numpy.random.set_bit_generator: for other kinds, use a numpy.random.Generator of your "
            "own",
        )
    return tuple(np.random.get_state(legacy=True))


def _bytes_to_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _tensor_to_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.to("cpu", torch.uint8).numpy().tobytes()


@dataclasses.dataclass(frozen=True)
class RngState:
    """The global random generators of this process at one moment: Python's, NumPy's, torch's, and accelerators'.

    Examples:
        >>> import random, torch
        >>> from ckpt_core.state.rng import RngState
        >>> saved = RngState.capture().encode()  # goes into a checkpoint
        >>> drawn = random.random(), torch.rand(1)
        >>> RngState.decode(saved).restore()
        >>> (random.random(), torch.rand(1)) == drawn
        True
    """

    python: tuple[Any, ...]  # random.getstate()
    numpy: tuple[Any, ...]  # numpy.random.get_state()
    torch_cpu: torch.Tensor  # state of torch's default CPU generator
    # The generators of accelerators in use, by device type.
    devices: Mapping[str, DeviceGenerators] = dataclasses.field(default_factory=dict)

    @classmethod
    def capture(cls) -> RngState:
        """Read the global generators.

        Raises:
            SerializationError: NumPy's has been replaced by one of another kind.
        """
        return cls(random.getstate(), _numpy_state(), torch.get_rng_state(), capture_device_generators())

    def restore(self) -> None:
        """Set the global generators; those of accelerators only for devices that both runs have.

        The current device continues with the generator of the device that was current in the saved run, even if their
        device numbers differ.
        """
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch_cpu)
        restore_device_generators(self.devices)

    @functools.cached_property
    def _words(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The words of Python's and NumPy's generators as bytes, cached because they take most of the encoding time."""
        python, numpy = self.python[1], np.asarray(self.numpy[1], dtype="<u4").tobytes()
        return _bytes_to_tensor(struct.pack(f"<{len(python)}I", *python)), _bytes_to_tensor(numpy)

    def encode(self) -> dict[str, Any]:
        """Return the state as tensors, integers, floats and texts, which ``weights_only=True`` loads."""
        version, _, gauss = self.python
        name, _, position, has_gauss, cached = self.numpy
        devices = {kind: [[s.clone() for s in states], current] for kind, (states, current) in self.devices.items()}
        cuda, cuda_device = devices.pop("cuda", ([], 0))  # under its own keys, as in files of earlier versions
        encoded: dict[str, Any] = {
            "python": self._words[0].clone(),
            "python_version": int(version),
            "python_gauss": gauss,
            "numpy": str(name),
            "numpy_keys": self._words[1].clone(),
            "numpy_position": int(position),
            "numpy_has_gauss": int(has_gauss),
            "numpy_gauss": float(cached),
            "torch": self.torch_cpu.clone(),
            "cuda": cuda,
            "cuda_device": cuda_device,
        }
        return {**encoded, "devices": devices} if devices else encoded

    @classmethod
    def decode(cls, state: Mapping[str, Any]) -> RngState:
        """Undo :meth:`encode`."""
        words = _tensor_to_bytes(state["python"])
        keys = np.frombuffer(_tensor_to_bytes(state["numpy_keys"]), dtype="<u4").astype(np.uint32)
        python = (state["python_version"], struct.unpack(f"<{len(words) // 4}I", words), state["python_gauss"])
        numpy = (state["numpy"], keys, state["numpy_position"], state["numpy_has_gauss"], state["numpy_gauss"])
        found = {"cuda": (state["cuda"], state.get("cuda_device", 0)), **state.get("devices", {})}
        # torch.load may have put the tensors on an accelerator, but generators accept host tensors only
        devices = {
            kind: DeviceGenerators(tuple(s.cpu() for s in states), int(current))
            for kind, (states, current) in found.items()
            if states
        }
        return cls(python, numpy, state["torch"].cpu(), devices)

    def same_as(self, other: RngState) -> bool:
        """Return whether no global CPU generator moved between the two captures."""
        return (
            torch.equal(self.torch_cpu, other.torch_cpu)
            and self.python == other.python
            and self.numpy[2:] == other.numpy[2:]
            and np.array_equal(self.numpy[1], other.numpy[1])
        )


# CPU generators only, in a fixed number of bytes, so that a data loading worker can write them to shared memory
_PACKED = struct.Struct(f"<{_PYTHON_WORDS}I?d{_NUMPY_WORDS}IqqdI")
_TORCH_BYTES = torch.get_rng_state().numel()
PACKED_RNG_BYTES = _PACKED.size + _TORCH_BYTES


def pack_rng() -> bytes:
    """Return the global CPU generators of this process in :data:`PACKED_RNG_BYTES` bytes."""
    _, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = _numpy_state()
    head = _PACKED.pack(
        *words, gauss is not None, gauss or 0.0, *np.asarray(keys).tolist(), position, has_gauss, cached, _TORCH_BYTES
    )
    return head + torch.get_rng_state().numpy().tobytes()


def unpack_rng(packed: bytes) -> RngState:
    """Undo :func:`pack_rng`; the result has no generators of accelerators."""
    fields = _PACKED.unpack_from(packed)
    words = fields[:_PYTHON_WORDS]
    has_python_gauss, python_gauss = fields[_PYTHON_WORDS : _PYTHON_WORDS + 2]
    keys = np.array(fields[_PYTHON_WORDS + 2 : _PYTHON_WORDS + 2 + _NUMPY_WORDS], dtype=np.uint32)
    position, has_gauss, cached, size = fields[-4:]
    python = (3, tuple(words), python_gauss if has_python_gauss else None)
    torch_cpu = _bytes_to_tensor(packed[_PACKED.size : _PACKED.size + size])
    return RngState(python, ("MT19937", keys, position, has_gauss, cached), torch_cpu)


def find_generators(owner: object) -> Iterator[tuple[str, Any]]:
    """Yield path and generator for all that :func:`~ckpt_core.state.object_walk.reach` finds in an object."""
    for found in reach(owner, plain=False):
        yield found.path, found.value


def _encode_any(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "array": _bytes_to_tensor(value.tobytes())}
    if isinstance(value, dict):
        return {key: _encode_any(item) for key, item in value.items()}
    if isinstance(value, np.generic):
        return value.item()
    return value


def _decode_any(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"dtype", "array"}:
        return np.frombuffer(_tensor_to_bytes(value["array"]), dtype=value["dtype"]).copy()
    if isinstance(value, dict):
        return {key: _decode_any(item) for key, item in value.items()}
    return value


def capture_generator(generator: Any) -> Any:
    """Return the state of a generator as tensors and plain numbers."""
    if isinstance(generator, torch.Generator):
        state = generator.get_state()
        return state if generator.device.type == "cpu" else {"torch": state, "device": generator.device.type}
    generator = generator.bit_generator if isinstance(generator, np.random.Generator) else generator
    if isinstance(generator, np.random.BitGenerator):
        return _encode_any(dict(generator.state))
    if isinstance(generator, np.random.RandomState):
        return _encode_any(dict(generator.get_state(legacy=False)))
    version, words, gauss = generator.getstate()
    return [int(version), _bytes_to_tensor(struct.pack(f"<{len(words)}I", *words)), gauss]


def restore_generator(generator: Any, state: Any, path: str = "") -> None:
    """Set a generator to what :func:`capture_generator` returned; ``path`` is its place in its owner, for messages."""
    generator = generator.bit_generator if isinstance(generator, np.random.Generator) else generator
    if isinstance(generator, torch.Generator):
        saved: Any = state.get("torch") if isinstance(state, dict) else state
        device = state.get("device") if isinstance(state, dict) else None
        # earlier versions did not save the device
        is_there = device in (None, generator.device.type) and isinstance(saved, torch.Tensor)
        if not is_there or saved.numel() != generator.get_state().numel():
            warn(
                f"this resume is not exact: the random generator {path or 'of the script'} is torch's, on "
                f"{generator.device.type} now, and the one that was saved was on another kind of device, or another "
                "library's. It keeps the seed that the script gives it: resume on the same kind of device, or draw on "
                "the host",
                stacklevel=2,
            )
            return
        generator.set_state(saved.cpu())
    elif isinstance(generator, np.random.BitGenerator):
        generator.state = _decode_any(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_decode_any(state))
    else:
        version, words, gauss = state
        data = _tensor_to_bytes(words)
        generator.setstate((version, struct.unpack(f"<{len(data) // 4}I", data), gauss))


def made_generator(state: Any) -> Any:
    """Return a new generator with a state that :func:`capture_generator` returned."""
    generator: Any = torch.Generator() if isinstance(state, torch.Tensor) else random.Random()
    if isinstance(state, dict) and "torch" in state:
        generator = new_generator(state["device"])
    elif isinstance(state, dict) and "has_gauss" in state:
        generator = np.random.RandomState()
    elif isinstance(state, dict):
        generator = np.random.Generator(getattr(np.random, state["bit_generator"])())
    restore_generator(generator, state)
    return generator


def capture_generators(owner: object) -> dict[str, Any]:
    """Capture the generators that :func:`find_generators` finds, as tensors and plain numbers."""
    return {path: capture_generator(generator) for path, generator in find_generators(owner)}


def restore_generators(owner: object, states: Mapping[str, Any]) -> list[str]:
    """Set the generators of an object to captured states; return the paths of those that it no longer has."""
    missing = set(states)
    for path, generator in find_generators(owner):
        if path in states:
            missing.discard(path)
            restore_generator(generator, states[path], path)
    return sorted(missing)
