"""Walk users' objects (data sets, samplers, transforms, callbacks, modules) to find generators and values in them.

Only ``__dict__`` and ``__slots__`` are read, never a property, so that walking has no side effects. Objects of
libraries that hold no training state (files, locks, tables, storages of tensors, the frameworks' own) are not entered.
"""

from __future__ import annotations

import contextlib
import ctypes
import dis
import enum
import functools
import random
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any, NamedTuple

import numpy as np
import torch

from ckpt_core.state.code_origin import is_library

_DEPTH = 8
_OBJECTS = 10_000
_ITEMS = 256
_SAMPLE = 64
_MOST_SHARED = (1 << 18) + 1  # numbers in shared memory: one more than are captured

# libraries whose objects are entered: transformers' collators, which its Trainer wraps, draw masks from their own
# generator, and webdataset's stages shuffle with a generator or a count of epochs
_ENTERED = (
    *("torch.utils.data", "torch.nn", "webdataset."),
    *("transformers.data.data_collator", "transformers.trainer_utils"),
)
_AUGMENTATIONS = "kornia."  # its modules keep the last random values in attributes with an underscore
_SCALARS = (bool, int, float, complex, str, bytes, type(None), np.generic)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_NO_GENERATORS = frozenset({*_SCALARS, *_CONTAINERS, torch.Tensor, types.FunctionType, types.MethodType})
STORE_ATTR = dis.opmap["STORE_ATTR"]
#: The attributes that each module has, whatever its class.
OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))


class Found(NamedTuple):
    """A value that an object carries."""

    path: str  # the names that lead to it, joined by dots
    value: Any  # a generator, a plain value, or a container of plain values
    put: Callable[[Any], None]  # puts another value in its place

    @property
    def key(self) -> Any:
        """The key in :attr:`holder`."""
        return self.put.args[0] if self.holder is not None else None  # type: ignore[attr-defined]

    @property
    def holder(self) -> dict[Any, Any] | list[Any] | None:
        """The dictionary (such as an object's ``__dict__``) or list that contains it; None for other places."""
        into = getattr(getattr(self.put, "func", None), "__self__", None)
        return into if isinstance(into, (dict, list)) else None


def is_generator(value: object) -> bool:
    """Return whether a value is a random generator whose state can be read."""
    if type(value) in _NO_GENERATORS:  # a shortcut for most values: isinstance with torch's class is slow
        return False
    if isinstance(value, random.SystemRandom):
        return False
    kinds = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
    return isinstance(value, kinds)


def is_reader(value: object) -> bool:
    """Return whether a value is an iterator over data, whose position cannot be restored."""
    of_torch = type(value).__module__.startswith("torch.utils.data") and isinstance(value, Iterator)
    return of_torch or isinstance(value, types.GeneratorType)


@functools.lru_cache(maxsize=1024)
def slots_of(kind: Any) -> tuple[str, ...]:
    """Return the names in ``__slots__`` of a class and its bases, without those of libraries."""
    slots = [vars(base).get("__slots__", ()) for base in kind.__mro__ if not is_library(base)]
    return tuple(name for of in slots for name in ((of,) if isinstance(of, str) else of) if not name.startswith("__"))


@functools.lru_cache(maxsize=256)
def set_by_libraries(kind: Any) -> frozenset[str]:
    """Return the names of the attributes that a class's methods from libraries set."""
    return frozenset().union(*map(_set_by_methods, filter(is_library, kind.__mro__)))


@functools.lru_cache(maxsize=1024)  # by base, because most classes share the bases with the most methods
def _set_by_methods(base: Any) -> frozenset[str]:
    names = set[str]()
    for value in vars(base).values():
        function = getattr(value, "__func__", getattr(value, "fset", value))
        if isinstance(function, types.FunctionType):
            names |= stored_by(function.__code__, STORE_ATTR)
    return frozenset(names)


def stored_by(code: types.CodeType, opcode: int) -> set[str]:
    """Return the names that instructions of one opcode in a function's code refer to."""
    if opcode not in code.co_code[::2]:
        return set()
    return {step.argval for step in dis.get_instructions(code) if step.opcode == opcode}


def shared_value(value: Any, most: int = _SAMPLE) -> Any:
    """Return the number in an object of ``multiprocessing`` or ctypes, or the first ``most`` numbers of an array."""
    # read without its lock, which a dead process may still hold
    inner: Any = value.get_obj() if isinstance(value, SynchronizedBase) else value
    return list(inner[:most]) if isinstance(inner, ctypes.Array) else inner.value


def is_plain(value: object, depth: int = 4) -> bool:
    """Return whether a value is a number, text, tensor, array, or a container of these; long ones are sampled."""
    if isinstance(value, _SCALARS) or (isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)):
        return True
    if isinstance(value, np.ndarray):
        return not value.dtype.hasobject
    if not isinstance(value, _CONTAINERS) or depth == 0:
        return False
    items: Any = value
    if isinstance(value, dict):
        if not all(isinstance(key, _SCALARS) or is_plain(key, 1) for key in sample(value)):
            return False
        items = value.values()
    return all(is_plain(item, depth - 1) for item in sample(items))


def sample(items: Any) -> list[Any]:
    """Return all items of a container, or some of a long one: the first, the last, and some between."""
    if len(items) <= 3 * _SAMPLE:
        return list(items)
    if isinstance(items, (list, tuple)):
        return [*items[:_SAMPLE], *items[:: max(1, len(items) // (8 * _SAMPLE))], *items[-_SAMPLE:]]
    some = []
    for number, item in enumerate(items):
        if number == 3 * _SAMPLE:
            break
        some.append(item)
    return some


def reach(
    owner: object,
    *,
    ignore: frozenset[str] = frozenset(),
    plain: bool = True,
    readers: bool = False,
    skip: tuple[object, ...] = (),
    leave: tuple[type, ...] = (),
) -> Iterator[Found]:
    """Yield generators and values in an object's attributes and, recursively, in objects that it holds.

    The object may also be a function with a closure. Each generator is yielded once. Plain values (if ``plain``) and
    iterators over data (if ``readers``) are yielded in every place where they are. Attributes of ``owner`` itself that
    are in ``ignore`` are left out. Objects in ``skip``, and those of classes in ``leave``, are not entered.
    """
    seen = {id(value) for value in skip}
    left, least, in_functions = _OBJECTS, 0, 0

    def walk(value: Any, path: str, depth: int) -> Iterator[Found]:
        nonlocal left, in_functions
        if id(value) in seen or left <= least or depth < 0 or isinstance(value, leave):
            return
        seen.add(id(value))
        left -= 1
        if isinstance(value, (functools.partial, types.MethodType, types.FunctionType)):
            # a function may be bound to anything, such as the whole script, so only generators are taken from it
            in_functions += 1
            try:
                yield from walk_function(value, path, depth)
            finally:
                in_functions -= 1
        elif isinstance(value, _CONTAINERS):
            yield from walk_items(value, path, depth)
        elif _is_entered(value, owner):
            yield from walk_attributes(value, path, depth)

    def walk_function(value: Any, path: str, depth: int) -> Iterator[Found]:
        if isinstance(value, functools.partial):
            for name, child in (("func", value.func), ("args", value.args), ("keywords", value.keywords)):
                yield from visit(child, _join(path, name), _nowhere, depth)
        elif isinstance(value, types.MethodType):
            yield from visit(value.__self__, _join(path, "self"), _nowhere, depth)
            yield from from_code(_code_of(getattr(value.__func__, "__wrapped__", value.__func__)), path)
        else:
            yield from from_code(_code_of(value), path)
            for number, cell in enumerate(value.__closure__ or ()):
                yield from visit(_content(cell), _join(path, f"closure{number}"), _nowhere, depth)

    def walk_items(value: Any, path: str, depth: int) -> Iterator[Found]:
        nonlocal least
        if len(value) > _ITEMS:
            return
        before, least = least, max(least, left // 2)  # each container leaves half of the budget for later objects
        named: list[tuple[str, Any, Callable[[Any], None]]]
        if isinstance(value, dict):
            named = [(str(key), child, functools.partial(value.__setitem__, key)) for key, child in value.items()]
        elif isinstance(value, (list, deque)):
            named = [(str(i), child, functools.partial(value.__setitem__, i)) for i, child in enumerate(value)]
        else:
            named = [(str(i), child, _nowhere) for i, child in enumerate(value)]
        for name, child, put in named:
            yield from visit(child, _join(path, name), put, depth - 1)
        least = before

    def walk_attributes(value: Any, path: str, depth: int) -> Iterator[Found]:
        attributes, left_out = getattr(value, "__dict__", {}), ignore if value is owner else frozenset()
        if isinstance(value, torch.nn.Module):
            yield from walk_module(value, path, depth)
            left_out = left_out | OF_EVERY_MODULE
            if type(value).__module__.startswith("torch."):
                return
            if type(value).__module__.startswith(_AUGMENTATIONS):
                left_out = left_out | {name for name in attributes if name.startswith("_")}
        for name, child in list(attributes.items()):
            if name not in left_out:
                yield from visit(child, _join(path, name), _into(value, name), depth - 1)
        kind: Any = type(value)
        for name in slots_of(kind):
            if name not in left_out and hasattr(value, name):
                yield from visit(
                    getattr(value, name), _join(path, name), functools.partial(setattr, value, name), depth
                )
        of_class = _code_of_class(type(value))
        yield from from_code({name: where for name, where in of_class.items() if name not in attributes}, path)

    def walk_module(value: torch.nn.Module, path: str, depth: int) -> Iterator[Found]:
        for name, buffer in value._buffers.items():
            # persistent buffers are in the module's state_dict, but that of a transform is not saved
            unsaved = name in value._non_persistent_buffers_set or not isinstance(owner, torch.nn.Module)
            if plain and not in_functions and unsaved and buffer is not None:
                yield Found(_join(path, name), buffer, functools.partial(setattr, value, name))
        for name, child in value._modules.items():
            if child is not None:
                yield from walk(child, _join(path, name), depth)

    def from_code(found: Mapping[str, Any], path: str) -> Iterator[Found]:
        for name, where in found.items():
            child = where()
            if is_generator(child) and id(child) not in seen:
                seen.add(id(child))
                yield Found(_join(path, name), child, _nowhere)

    def visit(child: Any, path: str, put: Callable[[Any], None], depth: int) -> Iterator[Found]:
        # a user's object (a proxy, a lazy list) that raises when it is inspected is skipped and fails no save
        with contextlib.suppress(Exception):
            yield from look(child, path, put, depth)

    def look(child: Any, path: str, put: Callable[[Any], None], depth: int) -> Iterator[Found]:
        if is_generator(child):
            if id(child) not in seen:
                seen.add(id(child))
                yield Found(path, child, put)
        elif isinstance(child, (type, types.ModuleType)):
            return
        elif is_reader(child):
            if readers and not in_functions:
                yield Found(path, child, put)
        elif isinstance(child, enum.Enum):
            # a member is represented by its name, a flag by its value, because all users of a member share the object
            if plain and not in_functions:
                told = child.value if isinstance(child, enum.Flag) else child.name
                yield Found(path, told, functools.partial(_put_member, put, type(child)))
        elif is_plain(child):
            if plain and not in_functions:
                yield Found(path, child, put)
        elif isinstance(child, SynchronizedBase):
            if plain and not in_functions and is_plain(value := shared_value(child, _MOST_SHARED)):
                yield Found(path, value, functools.partial(_share, child))
        elif type(child).__name__ == "SharedScalar" and type(child).__module__.startswith("streaming."):
            if plain and not in_functions:  # mosaicml-streaming counts epochs in it
                yield Found(path, child.get().item(), child.set)
        else:
            yield from walk(child, path, depth)

    try:
        if is_generator(owner):
            yield Found("", owner, _nowhere)
        else:
            yield from walk(owner, "", _DEPTH)
    finally:
        owner = None  # these nested functions form a reference cycle, which would keep it alive until collected


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _nowhere(value: Any) -> None:
    """Do nothing: stands for :attr:`Found.put` of a value that cannot be replaced in its place."""


def _share(shared: Any, value: Any) -> None:
    inner = shared.get_obj()
    if isinstance(inner, ctypes.Array):
        inner[: len(value)] = value
    else:
        inner.value = value


def _put_member(put: Callable[[Any], None], kind: type[enum.Enum], told: Any) -> None:
    with contextlib.suppress(KeyError, ValueError):  # the script no longer has that member
        put(kind(told) if issubclass(kind, enum.Flag) else kind[told])


def _into(holder: Any, name: str) -> Callable[[Any], None]:
    # through __dict__, because the __setattr__ of samplers and loaders may refuse
    return functools.partial(vars(holder).__setitem__, name)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet filled
        return None


def _is_entered(value: object, owner: object) -> bool:
    kind: Any = type(value)
    if not isinstance(getattr(value, "__dict__", None), dict) and not slots_of(kind):
        return False
    if isinstance(value, torch.nn.Module):
        # a module with parameters is the model being trained, which a data set may refer to
        return isinstance(owner, torch.nn.Module) or next(value.parameters(), None) is None
    if isinstance(value, (torch.utils.data.Dataset, torch.utils.data.Sampler)):
        return True
    if kind.__module__.startswith(_ENTERED):
        return not kind.__name__.startswith("_")
    return not is_library(kind)


_known_classes: weakref.WeakKeyDictionary[type, dict[str, Callable[[], Any]]] = weakref.WeakKeyDictionary()


def _code_of_class(kind: type) -> Mapping[str, Callable[[], Any]]:
    """Return, by name, getters of generators that are class attributes or globals used by a class's methods."""
    if kind not in _known_classes:
        found: dict[str, Callable[[], Any]] = {}
        for base in kind.__mro__:
            if is_library(base):
                continue
            for name, value in list(vars(base).items()):
                if is_generator(value):
                    found.setdefault(name, functools.partial(vars(base).get, name))
                function = getattr(value, "__func__", getattr(value, "fget", value))
                if isinstance(function, types.FunctionType):
                    found.update(_code_of(function))
        _known_classes[kind] = found
    return _known_classes[kind]


def _code_of(function: Any) -> dict[str, Callable[[], Any]]:
    if not isinstance(function, types.FunctionType):
        return {}
    scope = function.__globals__
    found = [name for name in _names_in(function.__code__) if is_generator(scope.get(name))]
    return {f"globals.{name}": functools.partial(scope.get, name) for name in found}


@functools.lru_cache(maxsize=1024)
def _names_in(code: types.CodeType) -> list[str]:
    return sorted({name for each in codes_in(code) for name in each.co_names})


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object and those of functions and classes defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)
