"""Find plain values in users' objects that change during a run, by digests, and capture and restore the small ones.

A value that has not changed since the run began is left as the script sets it, so that a setting which the user changes
between two runs takes effect.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ckpt_core.digest import digest_of_parts
from ckpt_core.state.object_walk import Found, is_generator, is_plain, reach, sample

_WHOLE_BYTES = 1 << 18
_LOOKED_AT_BYTES = 1 << 22  # of all arrays in one value: that of a data set may be a list of a million arrays
_SAMPLED_ITEMS = 1 << 12
_FEWEST_ITEMS = 1 << 6
_CAPTURED_BYTES = 64 << 20
_CAPTURED_ITEMS = 1 << 18
_PACKED_ITEMS = 64
_COMPARED_DATA = 64  # values of one object
_FEW = (int, float)
_CONTAINERS = (list, dict, deque)
_COUNTS = (*_FEW, np.generic, np.ndarray, torch.Tensor, *_CONTAINERS)
_SMALL_ITEMS, _SMALL_BYTES = 1 << 10, 1 << 16
#: The suffix of an attribute that holds the id of the process that has made a generator.
OF_A_PROCESS = "_generator_pid"
# parts of names: caches, what a library keeps for a state_dict of its own, and what differs between processes
_NO_STATE = ("cache", "state_dict", OF_A_PROCESS)
_NOT_FILLED = ("scratch", "buf", "tmp", "temp", "workspace")  # perhaps uninitialized memory, which differs by process
_KEPT_ITEMS, _KEPT_BYTES = 1 << 14, 1 << 20
_FOR_ONE_OF_A_DEVICE = _KEPT_ITEMS >> 6  # a tensor on a device counts as so many items: copying it takes a wait
_EXACT = (list, tuple, set, frozenset, dict, deque)
_FILLED = (defaultdict, Counter, OrderedDict)  # only the script can create one; a restore fills it in place
_SCALARS = (bool, int, str, type(None))
# per tensor on a device, by ``most``: the tensor's version when it was read (None: torch counts none), and its digest
_read_before: MutableMapping[torch.Tensor, dict[int | None, tuple[int | None, str]]] = WeakTensorKeyDictionary()
_waits = contextvars.ContextVar("waits", default=True)
#: The fingerprint of a value that has changed on a device, taken while waiting for devices is not allowed.
UNREAD = "unread"
_KINDS = "biufcSU"  # of numpy's numbers and texts
_INT64 = range(-(1 << 63), 1 << 63)


def fingerprint(value: Any, most: int | None = None) -> str:
    """Return a digest of a plain value, the same in every process; long containers and arrays are sampled.

    About ``most`` elements of each tensor are read (None: no such limit). Reading a tensor on a device waits for the
    device, except in :func:`looks_without_waiting`.
    """
    try:
        return digest_of_parts(_parts(value, most))
    except _Unread:
        return UNREAD
    except Exception:  # noqa: BLE001 - whatever a user's repr raises: an inspection must not end a save
        return digest_of_parts([f"{type(value).__qualname__}, unreadable".encode()])


@contextlib.contextmanager
def looks_without_waiting(condition: bool = True) -> Iterator[None]:
    """Let fingerprints wait for no device: if a tensor has changed since it was last read, it is :data:`UNREAD`.

    Does nothing if the ``condition`` is false. Changes that a tensor's version counter does not count, such as those
    by the replay of a CUDA graph, are not seen.
    """
    token = _waits.set(_waits.get() and not condition)
    try:
        yield
    finally:
        _waits.reset(token)


def _parts(value: Any, most: int | None) -> Iterator[bytes]:
    on_devices: list[tuple[torch.Tensor, torch.Tensor]] = []
    yield from _parts_of_host(value, [_LOOKED_AT_BYTES], most, on_devices)
    if on_devices and _waits.get():
        _read(on_devices, most)
    for tensor, _ in on_devices:
        version, found = _read_before.get(tensor, {}).get(most, (-1, ""))
        if version not in (_version(tensor), None):
            raise _Unread
        yield found.encode()


def _read(tensors: list[tuple[torch.Tensor, torch.Tensor]], most: int | None) -> None:
    """Copy samples of tensors from devices and note their digests; all of one device at once, to wait for it once."""
    by_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for tensor, sample_ in tensors:
        flat = sample_.resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)
        by_device.setdefault(tensor.device, []).append((tensor, flat))
    for found in by_device.values():
        data = torch.cat([flat for _, flat in found]).cpu().numpy().data
        for tensor, flat in found:
            read = _version(tensor), digest_of_parts([data[: flat.numel()]])
            _read_before.setdefault(tensor, {})[most] = read
            data = data[flat.numel() :]


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _parts_of_host(
    value: Any, left: list[int], most: int | None, on_devices: list[tuple[torch.Tensor, torch.Tensor]]
) -> Iterator[bytes]:
    """Yield the bytes to digest of a value; tensors on devices are added to ``on_devices`` instead, with a sample."""
    if isinstance(value, torch.Tensor):
        tensor, value = value, value.detach()
        if most is not None:
            value = value.flatten()[:: max(1, value.numel() // most)]
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        if value.layout == torch.sparse_coo:
            yield from _parts_of_host([value._indices(), value._values()], left, most, on_devices)
            return
        if value.layout != torch.strided or value.is_meta:
            return
        if not _is_whole(value.numel() * value.element_size(), left):
            value = _thinned(value.flatten() if value.is_contiguous() else value, left)
        if not value.is_cpu:
            # a tensor subclass, such as a shard of a distributed tensor, could not be read without the other ranks
            on_devices += [(tensor, value)] if type(tensor) in (torch.Tensor, torch.nn.Parameter) else []
            return
        flat = value.reshape(-1)
        yield flat.contiguous().view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}".encode()
        if _is_file(value):
            return  # the file's content is no state of the run, and reading it would access the disk
        if not _is_whole(value.nbytes, left):
            value = _thinned(value.reshape(-1) if value.flags.c_contiguous else value, left)
        yield value.tobytes()
    elif isinstance(value, dict):
        yield f"{type(value).__name__}{len(value)}".encode()
        for key in sample(value):
            yield repr(key).encode()
            yield from _parts_of_host(value[key], left, most, on_devices)
    elif isinstance(value, (set, frozenset)):
        # sorted, because the order of a set's members differs between processes
        yield f"{type(value).__name__}{len(value)}".encode()
        yield "".join(sorted(map(repr, value)) if len(value) <= _SAMPLED_ITEMS else []).encode()
    elif isinstance(value, (list, tuple, deque)):
        yield f"{type(value).__name__}{len(value)}".encode()
        items = sample(value)
        if all(type(item) in (int, float, bool, str) for item in items):
            yield repr(items).encode()
        else:
            for item in items:
                yield from _parts_of_host(item, left, most, on_devices)
    else:
        yield f"{type(value).__name__}{value!r}".encode()


def _is_whole(size: int, left: list[int]) -> bool:
    left[0] -= size
    return size <= _WHOLE_BYTES and left[0] >= 0


def _thinned(array: Any, left: list[int]) -> Any:
    """Return some elements, spread over all axes, because flattening a non-contiguous array would copy it."""
    number = _SAMPLED_ITEMS if left[0] >= 0 else _FEWEST_ITEMS
    along = max(1, round(number ** (1 / max(1, array.ndim))))
    return array[tuple(slice(None, None, max(1, size // along)) for size in array.shape)]


def _reference(value: Any) -> Callable[[], Any] | None:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return weakref.ref(value)
    return (lambda: value) if isinstance(value, (list, set, dict, deque)) else None


def is_record(value: Any, depth: int = 4) -> bool:
    """Return whether a value is a whole number, or a list of numbers and texts: most of them are only logged."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return depth > 0 and all(isinstance(i, (int, float, str)) or is_record(i, depth - 1) for i in sample(value))
    return type(value) is int


def _is_data(value: Any, depth: int = 4) -> bool:
    if isinstance(value, dict):
        # a sample of data may contain whole numbers; a float may be a time, and a text the path of a local copy
        others = () if depth == 4 else (int, np.integer)
        items = [value[key] for key in sample(value)] if depth > 0 else []
        held = [one for one in items if not isinstance(one, others)]
        return len(held) > 0 and all(_is_data(one, depth - 1) for one in held)
    if isinstance(value, (list, tuple)):
        is_deep = depth > 0 and len(value) > 0
        return is_deep and all(isinstance(one, (int, float)) or _is_data(one, depth - 1) for one in sample(value))
    return isinstance(value, (np.ndarray, torch.Tensor))


def _is_no_state(path: str, *words: str) -> bool:
    return any(word in path.lower() for word in (*_NO_STATE, *words))


class _Unread(Exception):  # noqa: N818 - as below
    """A tensor has changed on a device, and waiting for the device is not allowed."""


class _TooMuch(Exception):  # noqa: N818 - it means 'no'; it is no error
    """A value is too large, or of a class that is not captured."""


class PlainState:
    """The plain values that an object carries, compared with those that it had when this was created.

    Attributes of the object itself that are in ``ignore`` are left out. Objects in ``skip``, and those of classes in
    ``leave``, are not inspected.
    """

    _TELLS_WHAT_IS_OPEN: tuple[type, ...] = (bool, str, type(None))

    def __init__(
        self,
        owner: object,
        *,
        ignore: frozenset[str] = frozenset(),
        skip: tuple[object, ...] = (),
        leave: tuple[type, ...] = (),
    ) -> None:
        self.owner = owner
        self._ignore, self._skip, self._leave = ignore, skip, leave
        self._known: dict[str, tuple[str, Callable[[], Any] | None]] = {}
        self._scalars: dict[str, Any] = {}
        self.begin()

    def begin(self) -> None:
        """Take the object's present values as its initial ones."""
        # references are kept, too, to recognize a list that was changed in place
        self._known = {f.path: (fingerprint(f.value), _reference(f.value)) for f in self._found()}
        self._scalars = {f.path: f.value for f in self._found() if type(f.value) in _SCALARS}
        self._types: dict[int, dict[Any, type]] = {}
        for holder in (f.holder for f in self._found()):
            if isinstance(holder, dict) and id(holder) not in self._types:
                self._types[id(holder)] = _types_in(holder)
        data = [f.path for f in self._found() if _is_data(f.value) and not _is_no_state(f.path, *_NOT_FILLED)]
        self._data = {path: self._known[path][0] for path in data[:_COMPARED_DATA]}

    def _found(self) -> Iterator[Found]:
        for found in reach(self.owner, ignore=self._ignore, skip=self._skip, leave=self._leave):
            if not is_generator(found.value):
                yield found

    def data(self, but: Collection[str] = ()) -> dict[str, str]:
        """Return the initial digests of arrays, tensors and lists of numbers, except those of the paths in ``but``."""
        return {path: digest for path, digest in self._data.items() if path not in but}

    def made(self, path: str) -> str:
        """Return the digest of the initial value at a path; empty if there was none."""
        return self._known.get(path, ("", None))[0]

    def has_opened(self, found: Found, *, kinds: tuple[type, ...] = ()) -> bool:
        """Return whether a flag or text, or a value of ``kinds``, may describe a resource that its object has opened.

        A resource is an open file or another object that is not plain, where there was none; other processes lack it.
        """
        return type(found.value) in (*self._TELLS_WHAT_IS_OPEN, *kinds) and self._has_opened(found.holder)

    def _has_opened(self, holder: Any) -> bool:
        # a list may have got the id of a dictionary that was freed
        known = self._types.get(id(holder)) if isinstance(holder, dict) else None
        return known is not None and any(
            type(one) is not known.get(name) and not _is_plain_or_draws(one) for name, one in [*holder.items()]
        )

    def _is_known(self, found: Found) -> bool:
        # most attributes are numbers that never change
        if found.path not in self._scalars or type(found.value) not in _SCALARS:
            return False
        known = self._scalars[found.path]
        return type(known) is type(found.value) and bool(known == found.value)

    def digests(self) -> dict[str, str]:
        """Return the digest of each plain value."""
        return {
            found.path: self._known[found.path][0] if self._is_known(found) else fingerprint(found.value)
            for found in self._found()
        }

    def values(self) -> dict[str, Any]:
        """Return each plain value."""
        return {found.path: found.value for found in self._found()}

    def changed(self) -> dict[str, tuple[str, Found]]:
        """Return the values that have changed since the beginning, with their digests."""
        changed = {
            found.path: (fingerprint(found.value), found) for found in self._found() if not self._is_known(found)
        }
        return {path: one for path, one in changed.items() if self._known.get(path, ("", None))[0] != one[0]}

    def in_attributes(self, kinds: tuple[type, ...]) -> list[Found]:
        """Return the values of some types that are attributes of objects, or items of dictionaries."""
        return [found for found in self._found() if isinstance(found.value, kinds) and isinstance(found.holder, dict)]

    def without_records(self, digests: Mapping[str, str]) -> dict[str, str]:
        """Leave out whole numbers, and lists of numbers and texts: most of them only record what has happened."""
        if not digests:
            return {}
        records = {found.path for found in self._found() if found.path in digests and is_record(found.value, 4)}
        return {path: digest for path, digest in digests.items() if path not in records}

    def capture(self) -> tuple[dict[str, Any], list[str]]:
        """Capture the values that have changed since the beginning; also return the paths of those that cannot be.

        Those are too large, or of an unknown class. Flags and texts of an object that is not captured completely are
        left out, too, because a new process begins without the rest. A number that went from 0 to 1 may be such a flag.
        """
        values, left_out, flags, incomplete = {}, [], [], set[int]()
        for found in self._found():
            if self._is_known(found):
                continue
            digest, before = self._known.get(found.path, ("", None))
            if _is_file(found.value) or _is_no_state(found.path) or digest == fingerprint(found.value):
                continue
            try:
                in_place = before is not None and found.value is before()
                values[found.path] = _encoded(found.value, [_CAPTURED_ITEMS, _CAPTURED_BYTES])
                values[found.path]["in_place"] = in_place
                is_first = type(found.value) is int and found.value == 1 and self._scalars.get(found.path) == 0
                flags += [found] if is_first or type(found.value) in self._TELLS_WHAT_IS_OPEN else []
            except _TooMuch:
                left_out.append(found.path)
                incomplete.add(id(found.holder))
        for found in flags:
            if id(found.holder) in incomplete or self._has_opened(found.holder):
                del values[found.path]
                left_out += [found.path] if type(found.value) is int else []  # it may be a count and no flag
        return values, left_out

    def copy(self, paths: Collection[str]) -> dict[str, Any]:
        """Copy some values for :meth:`restore`; those that are too large are left out."""
        values = {}
        for found in self._found():
            if found.path in paths:
                with contextlib.suppress(_TooMuch):
                    value = _encoded(found.value, [_CAPTURED_ITEMS, _CAPTURED_BYTES])
                    values[found.path] = {**value, "in_place": True}
        return values

    @contextlib.contextmanager
    def temporarily(self, values: Mapping[str, Any]) -> Iterator[None]:
        """Put captured values back for the duration of a ``with`` block."""
        before = self.copy(values)
        self.restore(values)
        try:
            yield
        finally:
            self.restore(before)

    def restore(self, values: Mapping[str, Any], but: tuple[str, ...] = ()) -> list[str]:
        """Put captured values back, except those of paths in ``but``; return paths that the object does not have."""
        places = {found.path: found for found in self._found()}
        missing = []
        for path, saved in values.items():
            if path in but:
                continue
            value = _decode(saved["value"], saved.get("device"))
            found = places.get(path)
            if found is not None:
                # a fingerprint need not reflect the numbers of a tensor on a device, so equal ones prove nothing
                if "device" not in saved and fingerprint(found.value) == fingerprint(value):
                    continue
                in_place = saved["in_place"] or saved.get("only_filled", False)
                if not (in_place and _fill(found.value, value)):
                    found.put(value)
            elif saved.get("only_filled", False):
                missing.append(path)
            elif isinstance(getattr(holder := holder_of(self.owner, path), "__dict__", None), dict):
                vars(holder)[path.rpartition(".")[2]] = value
            else:
                missing.append(path)
        return missing


class Counts(PlainState):
    """The small numbers, arrays and containers of them in an object's attributes, in a data loading worker.

    Those that may describe a resource that the worker has opened (:meth:`has_opened`) are left alone.
    """

    _TELLS_WHAT_IS_OPEN = _SCALARS

    def begin(self) -> None:
        """Take the object's present numbers as its initial ones."""
        self._places: dict[str, tuple[Found, Any, dict[str, Any]]] = {}
        self._types = {}
        for found in self.in_attributes(_COUNTS):
            is_shared = isinstance(found.value, torch.Tensor) and found.value.is_shared()  # with other processes
            items = len(found.value) if isinstance(found.value, _CONTAINERS) else 0
            is_small = getattr(found.value, "nbytes", 0) <= _SMALL_BYTES and items <= _SMALL_ITEMS
            is_count = is_small and type(found.value) is not bool and not is_shared and not _is_no_state(found.path)
            first = small(found.value, is_kept=True) if is_count and len(self._places) < _COMPARED_DATA else None
            if first is not None:
                known = found.value if isinstance(found.value, _FEW) else fingerprint(found.value)
                self._places[found.path] = found, known, {**first, "in_place": True}
                if isinstance(found.holder, dict) and id(found.holder) not in self._types:
                    self._types[id(found.holder)] = _types_in(found.holder)

    def numbers(self) -> dict[str, Any]:
        """Return the numbers that have changed since the beginning, for :meth:`restore`."""
        changed = {}
        for path, (found, known, _) in self._places.items():
            value = found.holder.get(found.key)  # type: ignore[union-attr]
            if known != (value if isinstance(value, _FEW) else fingerprint(value)) and not self.has_opened(found):
                changed[path] = small(value, is_kept=True)
        return {path: {**value, "in_place": True} for path, value in changed.items() if value is not None}

    def restore(self, values: Mapping[str, Any], but: tuple[str, ...] = ()) -> list[str]:
        """Put captured numbers back, and reset all others to their initial values."""
        known = {}
        for path, (found, _, first) in self._places.items():
            now = found.holder.get(found.key) if isinstance(found.holder, dict) else None
            # loading a batch may have replaced numbers by generators
            if not self.has_opened(found) and small(now, is_kept=True) is not None:
                known[path] = values.get(path, first)
        return super().restore(known, but)


def holder_of(owner: Any, path: str) -> Any:
    """Return the object that has the attribute at the end of a path; None if there is none, or it is in a container."""
    holder = owner
    with contextlib.suppress(Exception):  # a user's class may raise anything, which must not fail a save
        for name in path.split(".")[:-1]:
            if isinstance(holder, dict):
                holder = holder[name]
            else:
                holder = holder[int(name)] if isinstance(holder, list) else getattr(holder, name)
        return None if isinstance(holder, _CONTAINERS) else holder
    return None


def _types_in(holder: dict[Any, Any]) -> dict[Any, type]:
    return {name: type(one) for name, one in [*holder.items()]}


def _is_plain_or_draws(value: object) -> bool:
    try:
        # a transform of MONAI notes in a thread-local value whether it is traced
        of_thread = isinstance(value, threading.local) and is_plain(value.__dict__)
        return of_thread or is_plain(value) or is_generator(value)
    except Exception:  # noqa: BLE001 - whatever a user's class raises when it is inspected
        return False


def small(value: Any, *, is_kept: bool = False, waits: bool = True) -> dict[str, Any] | None:
    """Encode a number, or a container of numbers only, for :meth:`PlainState.restore`; None for other or large values.

    With ``is_kept``, the script is known to keep it for a while: larger tensors, arrays and more items are accepted,
    but containers of tensors on a device only with ``waits``.
    """
    devices = set[str]()
    if not _is_of_numbers(value, devices, is_kept=is_kept) or len(devices) > 1:
        return None
    is_inside = not isinstance(value, torch.Tensor) and bool(devices - {"cpu"})
    if is_inside and not (is_kept and waits):
        return None
    with contextlib.suppress(_TooMuch):
        left = [_KEPT_ITEMS, _KEPT_BYTES] if is_kept else [_SMALL_ITEMS, _SMALL_BYTES]
        return {**_encoded(value, left), "in_place": False}
    return None


def _is_of_numbers(value: Any, devices: set[str], *, is_kept: bool) -> bool:
    if isinstance(value, torch.Tensor):
        devices.add(value.device.type)
        return is_kept or value.dim() == 0  # a larger one may be a view of a weight
    if isinstance(value, (list, tuple, set, frozenset, dict, deque)):
        if not is_kept and (len(value) > _SMALL_ITEMS or type(value) not in _EXACT):
            return False
        items = value.values() if isinstance(value, dict) else value
        return len(value) <= _KEPT_ITEMS and all(_is_of_numbers(item, devices, is_kept=is_kept) for item in items)
    if isinstance(value, np.ndarray):
        return is_kept and not value.dtype.hasobject
    # no texts: one may be the name of a file of a process that has ended
    return isinstance(value, (bool, int, float, type(None), np.generic))


def _encoded(value: Any, left: list[int]) -> dict[str, Any]:
    is_filled = type(value) in _FILLED
    devices = set[str]()
    try:
        encoded = {"value": _encode(dict(value) if is_filled else value, left, devices)}
    except (ArithmeticError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise _TooMuch from error  # an unforeseen class must not fail a save
    if len(devices) > 1:
        raise _TooMuch  # a single device is noted for the whole value
    device = devices - {"cpu"}
    return {**encoded, **({"only_filled": True} if is_filled else {}), **({"device": device.pop()} if device else {})}


def _encode(value: Any, left: list[int], devices: set[str]) -> Any:
    if type(value) in (bool, int, float, complex, str, type(None)):
        return value
    if isinstance(value, torch.Tensor):
        if not _has_plain_numbers(value):
            raise _TooMuch
        devices.add(value.device.type)
        _spend(left, 1 if value.device.type == "cpu" else _FOR_ONE_OF_A_DEVICE, value.numel() * value.element_size())
        return value.detach().to("cpu", copy=True)
    if isinstance(value, np.ndarray):
        is_plain = type(value) is np.ndarray or (type(value) is np.memmap and not _is_file(value))
        if not is_plain or value.dtype.kind not in _KINDS + "mM":
            raise _TooMuch
        _spend(left, 1, value.nbytes)
        array = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8) if value.nbytes else torch.empty(0)
        return {"array": array, "dtype": str(value.dtype), "shape": list(value.shape)}
    if isinstance(value, np.generic) and value.dtype.kind in _KINDS and not isinstance(value.item(), np.generic):
        return {"scalar": value.item(), "dtype": str(value.dtype)}
    if type(value) is bytes:
        _spend(left, 1, len(value))
        return {"bytes": torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0)}
    if type(value) not in _EXACT:
        raise _TooMuch
    _spend(left, len(value), 0)
    inside = value.values() if isinstance(value, dict) else value
    if sum(len(item) for item in inside if type(item) in _EXACT) > left[0]:
        raise _TooMuch  # checked first, or each save would copy half of a data set to find that out
    if isinstance(value, dict):
        return {"dict": [[_encode(key, left, devices), _encode(item, left, devices)] for key, item in value.items()]}
    kind, items = type(value).__name__, list(value)
    kinds = set(map(type, items))
    if len(items) >= _PACKED_ITEMS:
        if kinds == {int} and all(item in _INT64 for item in items):
            return {kind: torch.tensor(items, dtype=torch.int64)}
        if kinds == {float}:
            return {kind: torch.tensor(items, dtype=torch.float64)}
    if (
        kinds == {torch.Tensor}
        and all(map(_has_plain_numbers, items))
        and len({(i.shape, i.dtype, i.device, i.layout) for i in items}) == 1
    ):
        devices.add(items[0].device.type)
        _spend(left, 0, len(items) * items[0].numel() * items[0].element_size())
        return {kind: {"stack": torch.stack([item.detach() for item in items]).to("cpu")}}
    return {kind: [_encode(item, left, devices) for item in items]}


def _is_file(value: Any) -> bool:
    """Return whether an array is mapped from a file; results computed from it have its class, but are in memory."""
    return isinstance(value, np.memmap) and getattr(value, "_mmap", None) is not None


def _has_plain_numbers(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided
    return is_plain and not (tensor.is_meta or tensor.is_quantized)


def _spend(left: list[int], items: int, size: int) -> None:
    left[0] -= items
    left[1] -= size
    if min(left) < 0:
        raise _TooMuch


def _decode(saved: Any, device: str | None = None) -> Any:
    if not isinstance(saved, dict):
        return saved.to(device, copy=True) if isinstance(saved, torch.Tensor) else saved
    if "array" in saved:
        data = saved["array"].cpu().numpy().tobytes()
        return np.frombuffer(data, dtype=saved["dtype"]).reshape(saved["shape"]).copy()
    if "scalar" in saved:
        return np.dtype(saved["dtype"]).type(saved["scalar"])
    if "bytes" in saved:
        return saved["bytes"].cpu().numpy().tobytes() if saved["bytes"].numel() else b""
    ((kind, items),) = saved.items()
    if kind == "dict":
        return {_decode(key): _decode(item, device) for key, item in items}
    makers: dict[str, Callable[[Any], Any]] = {made.__name__: made for made in _EXACT}
    if isinstance(items, dict):
        return makers[kind](one.clone() for one in _decode(items["stack"], device))
    is_packed = isinstance(items, torch.Tensor)
    return makers[kind](items.tolist() if is_packed else [_decode(item, device) for item in items])


def _fill(old: Any, new: Any) -> bool:
    """Replace the contents of an object, which others may refer to, in place; return whether that was possible."""
    if type(old) is not type(new) and not (type(old) in _FILLED and type(new) is dict):
        return False
    if isinstance(old, torch.Tensor):
        if old.shape != new.shape or old.dtype != new.dtype:
            return False
        # torch refuses to change inference tensors, and tensors whose elements share memory
        with torch.no_grad(), contextlib.suppress(RuntimeError):
            old.copy_(new)
            return True
        return False
    elif isinstance(old, np.ndarray):
        if old.shape != new.shape or old.dtype != new.dtype or not old.flags.writeable:
            return False
        np.copyto(old, new)
    elif isinstance(old, list):
        old[:] = new
    elif isinstance(old, (set, dict)):
        old.clear()
        old.update(new)
    elif isinstance(old, deque):
        old.clear()
        old.extend(new)
    else:
        return False
    return True
