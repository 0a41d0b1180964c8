"""Marks of user variables: short texts that identify values, and the search for values in the objects that hold them.

:class:`Look` inspects the contents of a variable and gives each value in it a mark, which is the same for an equal
value in another process. Inspection changes nothing: iterators are not advanced, and exceptions of a user's class are
ignored. What a mark is made from depends on the kind of the value (``WEIGHTS``, ``PLACE``), which a checkpoint notes.
"""

from __future__ import annotations

import array
import collections
import contextlib
import contextvars
import ctypes
import datetime
import decimal
import enum
import fractions
import functools
import gc
import inspect
import io
import itertools
import json
import operator
import pathlib
import queue
import re
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.parameter import UninitializedParameter
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from ckpt_core.process.threads import no_collections
from ckpt_core.state.changed_values import fingerprint
from ckpt_core.state.code_origin import is_library, is_users_file
from ckpt_core.state.object_walk import is_generator, is_plain, shared_value, slots_of
from ckpt_core.state.rng import capture_generator
from ckpt_core.state.samplers import RecordingSampler, handed_out
from ckpt_core.state.variable_use import CELL, CONTAINERS, is_live, mark

NUMBERS = (bool, int, float, type(None))
_MADE_OF: tuple[Any, ...] = ([], (), range(1), {}, {}.values(), {}.items(), "", set())
_POSITIONS = tuple({type(iter(one)) for one in _MADE_OF})
_ITERATORS = (enumerate, zip, map, itertools.accumulate, itertools.cycle, itertools.islice, itertools.chain)


def _in_file(file: io.BytesIO | io.StringIO) -> Any:
    return None if file.closed else [file.tell(), fingerprint(file.getvalue()[:_FILE])]


# classes of libraries whose objects hold a value, and functions that return it
_KEEPS: dict[type, Callable[[Any], Any]] = {
    array.array: lambda one: [len(one), memoryview(one)[:_BYTES].tobytes()],
    bytearray: lambda one: [len(one), bytes(one[:_BYTES])],
    collections.ChainMap: lambda one: dict(enumerate(one.maps)),
    collections.UserDict: operator.attrgetter("data"),
    collections.UserList: operator.attrgetter("data"),
    **dict.fromkeys((io.BytesIO, io.StringIO), _in_file),
    np.random.SeedSequence: lambda one: repr(one.state),
    threading.local: lambda one: dict(vars(one)),
    torch.quasirandom.SobolEngine: operator.attrgetter("num_generated"),
    types.MappingProxyType: dict,
    **dict.fromkeys((datetime.date, datetime.datetime, datetime.timedelta, decimal.Decimal, fractions.Fraction), repr),
    **dict.fromkeys((range, re.Pattern, slice, type(pathlib.Path())), repr),
    **dict.fromkeys((queue.Queue, queue.LifoQueue, queue.PriorityQueue), lambda one: list(one.queue)),
}
_SHARED = (SynchronizedBase, ctypes._SimpleCData, ctypes.Array)
_BYTES = 1 << 12
_FILE = 1 << 16
_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
# classes of libraries whose objects training may change
_CHANGEABLE = (
    itertools.count,
    types.GeneratorType,
    contextvars.ContextVar,
    torch.Tensor,
    np.ndarray,
    torch.nn.Module,
    torch.optim.Optimizer,
    LRScheduler,
    torch.amp.GradScaler,
    functools._lru_cache_wrapper,
    *_WEAK,
    *_ITERATORS,
    *_POSITIONS,
    *_KEEPS,
    *_SHARED,
)
NO_STATE = re.compile(r"cache|memo(?!r)", re.IGNORECASE)
_VARIABLES, MOST_VALUES, _OF_WEIGHTS, _DEPTH = 256, 64, 8, 5
_LONGEST = 80  # characters of a key
OF_CODE = "'def "  # prefix of the mark of a function or class
_LARGE_CACHE = 4096  # results; all those of a bounded cache have to be listed
# Kinds of values: a copy of the weights; an object that stays the same until training changes it; a position in
# something that may begin again; a plain value, about which only the source shows whether it matters.
WEIGHTS, STAYS, PLACE, VALUE = "weights", "stays", "place", "value"
CACHE = "cache"  # results of a function: lost if they are computed again and differ
CODE = "code"  # a function or class, which may be replaced by another one


class Known(NamedTuple):
    """Ids and shapes of the models and of their parts, by which a part or a copy of a model is recognized."""

    models: list[int]
    shapes: set[torch.Size]
    parameters: set[int]
    modules: set[int]

    @classmethod
    def of(cls, models: Sequence[torch.nn.Module]) -> Known:
        modules = [module for model in models for module in model.modules()]
        every = [one for module in modules for one in module._parameters.values() if one is not None]
        shapes = {one.shape for one in every if not isinstance(one, UninitializedParameter)}
        return cls(list(map(id, models)), shapes, set(map(id, every)), set(map(id, modules)))


class Look:
    """One inspection of all variables, in which each object is visited once."""

    def __init__(self, known: Known, held: Sequence[object]) -> None:
        self._shapes, self._parameters = known.shapes, known.parameters
        self._seen = {id(one) for one in held} | known.modules

    def has_seen(self, value: Any) -> bool:
        return id(value) in self._seen

    def into(self, name: str, value: Any) -> list[tuple[str, str, Any, type | None, str]]:
        """Return path, kind, value, class of the owner, and mark of each value in a variable."""
        found: list[tuple[str, str, Any, type | None, str]] = []
        with contextlib.suppress(Exception):  # whatever the user's classes raise when they are inspected
            for path, what, one, owner in itertools.islice(self._walk(name, value, None, _DEPTH), MOST_VALUES):
                found.append((path, what, one, owner, _mark(what, one)))
        return found

    def _walk(self, path: str, value: Any, owner: Any, depth: int) -> Iterator[tuple[str, str, Any, Any]]:
        if type(value) in NUMBERS or type(value) is str:
            yield path, VALUE, value, owner
            return
        if isinstance(value, dict) and NO_STATE.search(path.rpartition(".")[2]):
            yield path, CACHE, _marks_of(_newest(value)), owner
            return
        value = dict(enumerate(value.values())) if isinstance(value, _WEAK) else _kept_in(value)
        tensors = tensors_in(value)
        if len(tensors) >= len(self._shapes) > 0 and self._shapes <= {one.shape for one in tensors}:
            yield path, WEIGHTS, value, owner
            return
        is_small = isinstance(value, dict) and 0 < len(value) <= MOST_VALUES and not tensors
        is_small |= _is_named_tuple(value)
        if not is_small and not isinstance(value, type) and is_plain(value):
            yield path, VALUE, value, owner
            return
        if isinstance(value, (type, types.FunctionType)):
            yield path, CODE, _code_in_words(value), owner
        if id(value) in self._seen or depth == 0 or isinstance(value, (type, types.ModuleType)):
            return
        self._seen.add(id(value))
        if is_generator(value):
            yield path, STAYS, capture_generator(value), owner
        elif isinstance(value, (torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler)):
            yield path, STAYS, _state_of(value), owner
        elif isinstance(value, torch.nn.Parameter):
            if id(value) not in self._parameters:
                yield path, STAYS, value, owner
        elif isinstance(value, contextvars.ContextVar):
            kept = value.get(None)
            yield path, STAYS, kept if is_plain(kept) else None, owner
        elif isinstance(value, torch.nn.Module):
            yield from self._of_module(path, value, owner)
        elif isinstance(value, enum.Enum):
            yield path, VALUE, value.name, owner
        elif isinstance(value, functools._lru_cache_wrapper):
            yield path, CACHE, _cached_by(value), owner
        elif (place := _position_in(value)) is not None:
            yield path, PLACE, place, owner
        else:
            properties = _cached_properties(type(value))  # type: ignore[arg-type]  # a class has a hash
            for name in properties:
                kept = vars(value).get(name)
                yield (
                    f"{path}.{name}",
                    CACHE,
                    {"": mark(kept)} if kept is not None and is_plain(kept) else {},
                    type(value),
                )
            for name, child in children_of(value):
                if name in properties:
                    continue
                is_owner = not isinstance(value, CONTAINERS)
                yield from self._walk(f"{path}.{name}", child, type(value) if is_owner else owner, depth - 1)

    def _of_module(self, path: str, value: torch.nn.Module, owner: Any) -> Iterator[tuple[str, str, Any, Any]]:
        every = list(value.parameters())
        parameters = [one for one in every if id(one) not in self._parameters]  # an average may hold the model, too
        if every and not parameters:
            return  # it is a part of a saved model, or a wrapper without parameters of its own
        if isinstance(state := getattr(value, "metric_state", None), dict):
            yield path, PLACE, {**state, "": getattr(value, "_update_count", None)}, owner
        elif parameters and self._shapes <= {one.shape for one in parameters}:
            yield path, WEIGHTS, parameters, owner
        elif parameters or (buffers := list(value.buffers())):
            yield path, STAYS, mark_of(some(parameters) if parameters else buffers[:MOST_VALUES]), owner


def _kept_in(value: Any) -> Any:
    """Return the plain value that an object of a library holds; return any other object as it is."""
    if isinstance(value, _SHARED):
        return shared_value(value)
    keeps = _KEEPS.get(type(value))
    return value if keeps is None else keeps(value)


def _code_in_words(value: Any) -> str:
    line = value.__code__.co_firstlineno if isinstance(value, types.FunctionType) else 0
    return f"def {value.__module__}.{value.__qualname__}:{line}"


def own_attributes(value: Any) -> list[tuple[str, Any]]:
    """Return the attributes of an object, also those in slots, and those that it still has from its class."""
    kind: Any = type(value)
    own = getattr(value, "__dict__", {})
    elsewhere = [name for name in slots_of(kind) if hasattr(value, name)]
    elsewhere += [name for name in defaults_of(kind) if name not in own]
    return [*own.items(), *((name, getattr(value, name)) for name in elsewhere)]


@functools.lru_cache(maxsize=256)
def defaults_of(kind: Any) -> tuple[str, ...]:
    """Return the names of plain class attributes of a user's class, which an instance attribute may override."""
    bases = [] if is_library(kind) else [base for base in kind.__mro__ if not is_library(base)]
    names = {name: value for base in reversed(bases) for name, value in vars(base).items() if name[:2] != "__"}
    return tuple(name for name, value in names.items() if type(value) in (*NUMBERS, str))


def _is_named_tuple(value: Any) -> bool:
    # the class is asked, because dictionaries with keys as attributes may have any attribute, or raise
    return isinstance(value, tuple) and hasattr(type(value), "_fields")


def children_of(value: Any) -> list[tuple[str, Any]]:
    """Return the direct contents of an object, by name; none of most libraries' objects and of long containers."""
    if _is_named_tuple(value):
        return list(value._asdict().items())
    if isinstance(value, CONTAINERS):
        if len(value) > MOST_VALUES:
            return []
        return [(str(k)[:_LONGEST], one) for k, one in (value.items() if isinstance(value, dict) else enumerate(value))]
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, types.MethodType):
        return [("self", value.__self__)]
    if isinstance(value, types.FunctionType):
        if not is_users_file(value.__code__.co_filename):
            return []
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
        found = [(f"{CELL}{name}", cell.cell_contents) for name, cell in cells if _is_filled(cell)]
        return [*found, *vars(value).items()]
    if isinstance(value, DataLoader):
        return [(name, getattr(value, name, None)) for name in ("dataset", "sampler", "batch_sampler")]
    if is_library(type(value)) and not isinstance(value, (types.SimpleNamespace, Dataset)):
        return []
    librarys = _private_names_of_libraries(type(value))  # type: ignore[arg-type]
    found = [(name, one) for name, one in own_attributes(value) if name not in librarys]
    if isinstance(value, Dataset):  # its data is no state, and large
        return [
            (name, one)
            for name, one in found
            if not isinstance(one, (*CONTAINERS, torch.Tensor)) or (isinstance(one, dict) and NO_STATE.search(name))
        ]
    return found


@functools.cache
def _cached_properties(kind: type) -> frozenset[str]:
    mro = kind.__mro__ if not is_library(kind) else ()
    return frozenset(n for of in mro for n, one in vars(of).items() if isinstance(one, functools.cached_property))


@functools.lru_cache(maxsize=256)
def _private_names_of_libraries(kind: type) -> frozenset[str]:
    """Return the names with an underscore that a class's bases from libraries use, and those of the user do not."""
    names: dict[bool, set[str]] = {True: set(), False: set()}
    for base in kind.__mro__:
        codes = (getattr(one, "__code__", None) for one in vars(base).values())
        names[is_library(base)].update(name for code in codes if code is not None for name in code.co_names)
    return frozenset(name for name in names[True] - names[False] if name.startswith("_"))


def _is_filled(cell: Any) -> bool:
    with contextlib.suppress(ValueError):
        return cell.cell_contents is not None
    return False


def _position_in(value: Any) -> Any:
    """Return the position of an iterator, without advancing it; None if it is no iterator or this is unknown."""
    if isinstance(value, _POSITIONS):
        return operator.length_hint(value)
    if isinstance(value, itertools.count):
        return repr(value)
    if type(value).__module__.startswith(("torch.utils.data", "torchdata")):
        is_followed = isinstance(getattr(value, "_index_sampler", None), RecordingSampler)
        return None if is_followed else handed_out(value)
    if isinstance(value, _ITERATORS):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parts: Any = value.__reduce__()[1:]
        return [_position_in(one) if not is_plain(one) else one for part in parts if part for one in _flat(part)]
    if isinstance(value, types.GeneratorType) and value.gi_frame is not None and not value.gi_running:
        frame = value.gi_frame
        if is_users_file(frame.f_code.co_filename):
            return {n: v for n, v in variables_of(frame) if type(v) in NUMBERS and is_live(n, frame)}
    return None


def _flat(part: Any) -> tuple[Any, ...]:
    return part if isinstance(part, tuple) else (part,)


def _cached_by(function: Any) -> dict[str, str]:
    """Return the contents of a ``functools.cache`` as marks of arguments and results, if nothing was computed twice."""
    code, info = getattr(inspect.unwrap(function), "__code__", None), function.cache_info()
    is_large = info.maxsize is not None and info.currsize > _LARGE_CACHE
    if code is None or not is_users_file(code.co_filename) or info.misses != info.currsize > 0 or is_large:
        return {}
    parts = gc.get_referents(function)  # the cache is implemented in C and has no attribute for this
    cache = next(one for one in parts if isinstance(one, dict) and one is not vars(function))
    results = {id(one): after for one, after in itertools.pairwise(parts)}  # a bounded cache lists key, result, key...
    return _marks_of((key, kept if info.maxsize is None else results.get(id(key))) for key, kept in _newest(cache))


def _newest(cache: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
    return itertools.islice(reversed(cache.items()), MOST_VALUES)


def _marks_of(cached: Iterator[tuple[Any, Any]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, result in cached:
        if is_plain(result):
            arguments = key if isinstance(key, (tuple, list)) else [key]
            called = repr([mark(one) if is_plain(one) else type(one).__name__ for one in arguments])
            found[called] = mark(result) if called not in found else ""  # arguments that have the same marks
    return found


def is_other(saved: str, now: str) -> bool:
    """Return whether two marks of caches have different results for the same arguments."""
    before, after = json.loads(saved or "{}"), json.loads(now or "{}")
    return any(before[key] != after[key] for key in before.keys() & after if before[key] and after[key])


def _mark(kind: str, value: Any) -> str:
    if kind == CACHE:
        return json.dumps(value)
    return mark_of(some(tensors_in(value))) if kind == WEIGHTS else mark(value)


def mark_of(tensors: Sequence[torch.Tensor]) -> str:
    """Return the mark of tensors, made from a sample of their elements."""
    return fingerprint([*tensors], MOST_VALUES)


def some(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return a few of many tensors that all change together."""
    return tensors[:: max(1, len(tensors) // _OF_WEIGHTS)]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a list or dictionary whose first item is a tensor."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    if not isinstance(next(iter(items), None), torch.Tensor):
        return []
    return [one for one in items if isinstance(one, torch.Tensor) and type(one) is not UninitializedParameter]


def _state_of(value: Any) -> list[Any]:
    """Return a sample of the state of an optimizer, or all plain attributes of a scheduler or gradient scaler."""
    if isinstance(value, (LRScheduler, torch.amp.GradScaler)):
        return [{name: one for name, one in vars(value).items() if is_plain(one)}]
    rates = [{name: one for name, one in group.items() if name != "params"} for group in value.param_groups]
    states = list(value.state.values())
    tensors = [one for state in states for one in state.values() if isinstance(one, torch.Tensor)]
    return [rates, len(states), mark_of(some(tensors))]


def variables_of(frame: types.FrameType) -> list[tuple[str, Any]]:
    """Return the first ``_VARIABLES`` local variables of a running function, without keeping them alive."""
    # Up to Python 3.12, locals() and all other readers of a frame share one dictionary.
    is_shared = sys.version_info < (3, 13) and bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)
    if is_shared and "locals" in frame.f_code.co_names:
        return []  # the dictionary that the script got from locals() would change
    with no_collections():  # for the reason given at _frames_elsewhere in lost_variables
        variables = frame.f_locals
    found = list(variables.items())[:_VARIABLES]
    if is_shared:
        variables.clear()  # or it would keep objects alive that the script deletes
    return found


def may_change(value: Any) -> bool:
    """Return whether training may change what a global, attribute or default holds; False for functions, constants."""
    if isinstance(value, (dict, list, set, collections.deque)):
        return len(value) <= MOST_VALUES
    if isinstance(value, (type, types.ModuleType, types.FunctionType)):
        return False
    return is_generator(value) or isinstance(value, _CHANGEABLE) or not is_library(type(value))
