"""Checks whether torch's default loading (``weights_only=True``) can read a file being written, and if not, which keys.

What torch allows depends on the program (``add_safe_globals``), so torch itself does the check. The refused keys are
then found by unpickling with stand-ins in place of every type and function, so that no code from the state runs.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from ckpt_core._layouts.torch_file.segments import SegmentIO, Segments
from ckpt_core._layouts.torch_file.storage_collector import without_data
from ckpt_core.tree import join_key

_LONGEST_INTEGER = 255 * 8 - 1  # bits: the largest integer that torch's restricted unpickler accepts
_REAL = {f"{kind.__module__}.{kind.__name__}": kind for kind in (Counter, OrderedDict, set)}
_GETATTR = "builtins.getattr"
_OLD_NAMES = {"builtins.xrange": "builtins.range", "builtins.long": "builtins.int", "builtins.unicode": "builtins.str"}


def refused_by_default(segments: Segments, size: int, pickled: bytes) -> dict[str, str]:
    """Return what ``torch.load(weights_only=True)`` would refuse, by key; nothing if it can read the file.

    ``segments`` are all of the file except its tensors.
    """
    try:
        with without_data():
            torch.load(io.BufferedReader(SegmentIO(segments, size)), map_location="meta", weights_only=True)
    except pickle.UnpicklingError:
        pass
    except Exception:  # noqa: BLE001 - its reconstruction needs the tensors, which are not loaded
        return {}
    else:
        return {}
    try:
        refused = set(get_unsafe_globals_in_checkpoint(io.BufferedReader(SegmentIO(segments, size))))
    except pickle.UnpicklingError:
        refused = set()  # no type is refused: an integer is too large
    try:
        found = dict(_blamed(_Unpickler(io.BytesIO(pickled)).load(), "", refused, set()))
    except Exception:  # noqa: BLE001 - stand-ins cannot do all that the real ones can
        found = {}
    return found or {"": ", ".join(sorted(refused)) or "an object"}


class _StandIn:
    name = ""
    globals: frozenset[str] = frozenset()  # the globals that the pickle needs to get the object

    def __new__(cls, *parts: Any, **more: Any) -> _StandIn:
        self = super().__new__(cls)
        self.parts = [*parts, *more.values()]
        return self

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *parts: Any) -> _StandIn:
        self.parts += parts
        return self

    def __setstate__(self, state: Any) -> None:
        self.parts.append(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.parts += [key, value]

    def append(self, value: Any) -> None:
        self.parts.append(value)

    def extend(self, values: Any) -> None:
        self.parts += values

    parts: list[Any]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        full = f"{'builtins' if module == '__builtin__' else module}.{name}"  # protocol 2 uses the names of Python 2
        full = _OLD_NAMES.get(full, full)
        if full == _GETATTR:
            return _attribute
        return _REAL.get(full) or type(name, (_StandIn,), {"name": full, "globals": frozenset({full})})

    def persistent_load(self, _: Any) -> Any:
        return None


def _attribute(owner: Any, name: str) -> type[_StandIn]:
    """Stand in for ``getattr``, with which protocol 2 refers to nested classes and methods."""
    parent, needed = getattr(owner, "name", owner), getattr(owner, "globals", _StandIn.globals)
    return type(name, (_StandIn,), {"name": f"{parent}.{name}", "globals": needed | {_GETATTR}})


def _blamed(node: Any, key: str, refused: set[str], seen: set[int]) -> Iterator[tuple[str, str]]:
    """Yield the refused keys, with the reason; a container that is in several places is reported for the first only."""
    if isinstance(node, (dict, list, tuple)):
        if id(node) in seen:
            return
        seen.add(id(node))
    if isinstance(node, dict):
        for name, value in node.items():
            for what in itertools.islice(_reasons(name, refused, set()), 1):
                yield f"a key in {key}" if key else "a key", what
            yield from _blamed(value, join_key(key, name), refused, seen)
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            yield from _blamed(value, join_key(key, index), refused, seen)
    else:
        for what in itertools.islice(_reasons(node, refused, set()), 1):
            yield key, what


def _reasons(node: Any, refused: set[str], seen: set[int]) -> Iterator[str]:
    if isinstance(node, int) and node.bit_length() > _LONGEST_INTEGER:
        yield f"an integer of {node.bit_length()} bits"
    elif isinstance(node, type) and issubclass(node, _StandIn):
        if node.globals & refused:
            yield node.name
    elif isinstance(node, (_StandIn, dict, list, tuple, set, frozenset)) and id(node) not in seen:
        seen.add(id(node))
        if isinstance(node, _StandIn):
            parts: Iterable[Any] = (type(node), *node.parts)
        else:
            parts = itertools.chain.from_iterable(node.items()) if isinstance(node, dict) else node
        for part in parts:
            yield from _reasons(part, refused, seen)
