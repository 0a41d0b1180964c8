"""Fingerprints of a step: 64-bit digests of its batch, of random generators (RNGs) and of a sample of the weights.

A digest must be the same in another process and must never wait for an accelerator. So tensors outside of host memory
count by dtype and shape alone, and objects of unknown classes by their class and the tensors in them: their other
contents (paths, times, ids) may differ in an exact resume. Long lists and large graphs of objects are sampled, so that
no batch takes long.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import random
import struct
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.random import mtrand

from ckpt_core._devices.generators import current_device_generators
from ckpt_core._devices.streams import LateCopy
from ckpt_core.state.rng import RngState

#: Larger tensors are represented by :data:`SAMPLED_WORDS` words of 8 bytes, spread evenly over them.
WHOLE_BYTES = 2**20
SAMPLED_WORDS = 2**13

_DEPTH = 8
_ITEMS = 2**10  # most items that are read in one batch: it may be a list of a million numbers, or a graph of objects
_MT19937_WORDS = 624  # the words of the state; the position follows as one more word
_WEIGHTS = 8
_BUFFERS = 2
_WEIGHT_BYTES = 1024
_WEIGHT_NUMBERS = _WEIGHT_BYTES // 4

_Update = Callable[[Any], None]


def digest_batch(batch: Any) -> int:
    """Return the digest of a batch: tensors, arrays, numbers and text in any nesting of containers.

    Example:
        >>> import torch
        >>> digest_batch({"x": torch.zeros(2), "names": ["a"]}) == digest_batch({"x": torch.zeros(2), "names": ["b"]})
        False
    """
    digest = xxhash.xxh3_64()
    _add(batch, digest.update, _DEPTH, _ITEMS, is_data=True)
    return digest.intdigest()


def _add(value: Any, update: _Update, depth: int, items: int, *, is_data: bool) -> None:
    try:
        _add_value(value, update, depth, items, is_data=is_data)
    except Exception:  # noqa: BLE001 - whatever a user's class raises: the batch is only inspected
        update(type(value).__qualname__.encode())


def _add_value(value: Any, update: _Update, depth: int, items: int, *, is_data: bool) -> None:
    if isinstance(value, torch.Tensor):
        _add_tensor(value, update)
    elif isinstance(value, np.ndarray):
        _add_array(value, update)
    elif value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.generic)):
        if is_data:
            update(value if isinstance(value, bytes) else repr(value).encode("utf-8", "replace"))
            update(b";")
    elif depth == 0:
        update(type(value).__qualname__.encode())
    else:
        _add_container(value, update, depth - 1, items, is_data=is_data)


def _add_container(value: Any, update: _Update, depth: int, items: int, *, is_data: bool) -> None:
    if isinstance(value, Mapping):
        share = max(1, items // max(1, len(value)))
        for key, item in itertools.islice(value.items(), items):
            _add(key if isinstance(key, (str, int)) else None, update, depth, 1, is_data=is_data)
            _add(item, update, depth, share, is_data=is_data)
    elif isinstance(value, (list, tuple)):
        update(b"[%d" % len(value))
        for item in _spread(value, items):
            _add(item, update, depth, max(1, items // len(value)), is_data=is_data)
    else:
        update(type(value).__qualname__.encode())
        fields = {f.name for f in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
        found = list(getattr(value, "__dict__", {}).items())[:items]
        for name, item in found:
            _add(item, update, depth, max(1, items // len(found)), is_data=is_data and name in fields)


def _add_tensor(tensor: torch.Tensor, update: _Update) -> None:
    update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    if _is_readable(tensor):
        has_gaps = not (tensor.is_contiguous() or any(_is_dense(tensor, *layout) for layout in _DENSE))
        _update_with(tensor.detach().contiguous() if has_gaps else tensor, update)


_DENSE = ((4, torch.channels_last), (5, torch.channels_last_3d))
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _is_dense(tensor: torch.Tensor, dim: int, memory_format: torch.memory_format) -> bool:
    return tensor.dim() == dim and tensor.is_contiguous(memory_format=memory_format)


def _is_readable(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor lie in host memory, neither quantized nor conjugated nor negated."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or type(tensor) not in _PLAIN:
        return False
    return not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def _is_on_device(tensor: torch.Tensor) -> bool:
    if type(tensor) not in _PLAIN:
        return False  # a parameter of a lazy module has no memory to ask about before the first pass
    is_dense = tensor.layout is torch.strided and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    return is_dense and not (tensor.is_cpu or tensor.is_meta or tensor.is_quantized)


def _update_with(tensor: torch.Tensor, update: _Update) -> None:
    # not Tensor.numpy(), which makes the tensor's storage non-resizable
    size = tensor.nbytes
    if size:
        _update_with_memory((ctypes.c_char * size).from_address(tensor.data_ptr()), size, update)


def _update_with_memory(memory: Any, size: int, update: _Update) -> None:
    if size > WHOLE_BYTES:
        words = np.frombuffer(memory, np.uint64, size // 8)
        # an odd stride, so that samples of a table do not all fall into one column
        memory = np.ascontiguousarray(words[:: (words.size // SAMPLED_WORDS) | 1]).data
    update(memory)


def _add_array(array: np.ndarray[Any, Any], update: _Update) -> None:
    update(f"{array.dtype}{array.shape}".encode())
    if array.dtype.hasobject:
        for item in array.reshape(-1)[:_ITEMS]:
            _add(item, update, 1, 1, is_data=True)
    elif array.size:
        memory = array.ravel(order="K")  # a view if the memory has no gaps
        _update_with_memory(memory.view(np.uint8).data, memory.nbytes, update)


def digest_bytes(tensor: torch.Tensor) -> int:
    """Return the digest of the bytes of a tensor in host memory."""
    return xxhash.xxh3_64_intdigest(tensor.numpy().data)


def digest_numbers(numbers: Iterable[float]) -> int:
    """Return the digest of some numbers, such as the learning rates of all parameter groups."""
    values = [float(number) for number in numbers]
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(values)}d", *values))


def digest_generators(rng: RngState | None = None) -> int:
    """Return the digest of the global generators of this process, or of a captured state ``rng``.

    The words of a Mersenne Twister all change together, so some of Python's and the position represent its state.
    Without ``rng``, the generators are read, which takes some 20 us.
    """
    python = random.getstate() if rng is None else rng.python
    words = python[1]
    digest = xxhash.xxh3_64(struct.pack("<5I", words[0], words[1], words[311], words[623], words[624]))
    if rng is None:
        digest.update(_numpy_words())
        torch_cpu = torch.get_rng_state()
        devices = current_device_generators()
    else:
        digest.update(np.asarray(rng.numpy[1], dtype=np.uint32).data)
        digest.update(struct.pack("<i", rng.numpy[2]))
        torch_cpu = rng.torch_cpu
        devices = [states[current] for states, current in rng.devices.values() if current < len(states)]
    for state in (torch_cpu, *devices):
        digest.update(state.numpy().data)
    return digest.intdigest()


def _numpy_words() -> bytes:
    # get_state() would make a Python number of each word; the state begins with these words since NumPy 1.17
    generator = mtrand.get_bit_generator()
    if type(generator) is not np.random.MT19937:
        return b""
    return ctypes.string_at(generator.ctypes.state_address, 4 * (_MT19937_WORDS + 1))


class WeightSample:
    """A sample of elements of parameters and buffers, spread over a module.

    After the first repeated step, it shows what a loss shows only in the second: an optimizer moment that was not
    loaded, or a parameter that is no longer trained. The tensors must remain the same objects, whose contents may
    change. The module is not kept alive.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        buffers = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
        chosen = [*_spread(list(module.parameters()), _WEIGHTS), *_spread(buffers, _BUFFERS)]
        self._tensors = [weakref.ref(tensor) for tensor in chosen if _is_readable(tensor) and tensor.numel()]
        self._on_devices = [weakref.ref(tensor) for tensor in chosen if _is_on_device(tensor) and tensor.numel()]

    def digest(self) -> int | LateCopy | None:
        """Return the digest of the present sample; None if none of it is whole and dense.

        For tensors on an accelerator, return a copy that is available later, and only with deterministic algorithms:
        otherwise the bits of two runs differ anyway.
        """
        found = _digest_of(reference() for reference in self._tensors)
        if found is not None or not self._on_devices or not torch.are_deterministic_algorithms_enabled():
            return found
        sample = [tensor for reference in self._on_devices if (tensor := reference()) is not None]
        with contextlib.suppress(RuntimeError, NotImplementedError, TypeError, ValueError), torch.no_grad():
            # suppressed: the device has no pinned memory or events, or the tensors are on several devices
            return LateCopy(
                torch.cat([tensor.detach().view(-1)[:_WEIGHT_NUMBERS].view(torch.uint8) for tensor in sample])
            )
        return None

    def digest_gradients(self, optimizers: Iterable[torch.optim.Optimizer]) -> int | None:
        """Return the digest of the sample's gradients that ``optimizers`` use; None if there are none.

        Gradients that no optimizer uses may be stale, because nothing clears them.
        """
        used = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        sampled = (reference() for reference in self._tensors)
        return _digest_of(tensor.grad for tensor in sampled if tensor is not None and id(tensor) in used)


def _digest_of(tensors: Iterable[torch.Tensor | None]) -> int | None:
    digest, found = xxhash.xxh3_64(), False
    for tensor in tensors:
        if tensor is not None and tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous():
            size = min(tensor.untyped_storage().nbytes(), tensor.nbytes, _WEIGHT_BYTES)
            digest.update((ctypes.c_char * size).from_address(tensor.data_ptr()))
            found = True
    return digest.intdigest() if found else None


def _spread(items: Sequence[Any], number: int) -> Sequence[Any]:
    if len(items) <= number:
        return items
    return [items[round(i * (len(items) - 1) / max(1, number - 1))] for i in range(number)]
