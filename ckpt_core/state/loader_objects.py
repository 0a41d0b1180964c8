"""Capture and restore the generators and changed plain values in the objects of one loader (data set, collate_fn)."""

from __future__ import annotations

import ast
import contextlib
import os
import weakref
from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import Any

from ckpt_core.state.changed_values import OF_A_PROCESS, PlainState
from ckpt_core.state.object_walk import Found, is_reader, reach
from ckpt_core.state.rng import capture_generator, find_generators, made_generator, restore_generator
from ckpt_core.state.samplers import handed_out


class Carried:
    """The generators and, with ``plain``, the plain values of named objects. An object named "" gives paths no prefix.

    Generators are searched for at construction and by :meth:`look` only, because this takes longer than reading them.
    """

    def __init__(self, owners: Mapping[str, object], *, plain: bool = True) -> None:
        self._owners = owners
        self._generators: dict[str, Any] = {}
        self._plain = {name: PlainState(owner) for name, owner in owners.items()} if plain else {}
        self._begun = {path: (weakref.ref(one), _place_of(one)) for path, one in self._readers()}
        self.look()

    def look(self) -> None:
        """Search for generators again."""
        self._generators = {}
        known: set[int] = set()
        for name, owner in self._owners.items():
            for path, generator in find_generators(owner):
                if id(generator) not in known:
                    known.add(id(generator))
                    self._generators[f"{name}:{path}" if name else path] = generator

    @property
    def has_generators(self) -> bool:
        """Whether there are generators."""
        return bool(self._generators)

    @property
    def paths(self) -> list[str]:
        """The paths of the generators."""
        return list(self._generators)

    def generators(self) -> dict[str, Any]:
        """Capture the generators, as tensors and plain numbers."""
        return {path: capture_generator(generator) for path, generator in self._generators.items()}

    def restore_generators(self, states: Mapping[str, Any]) -> None:
        """Set the generators that exist, and create those that an object creates only when it first draws."""
        for path, generator in self._generators.items():
            if path in states:
                restore_generator(generator, states[path], path)
        missing = [path for path in states if path not in self._generators]
        for name, owner in self._owners.items() if missing else ():
            prefix = f"{name}:" if name else ""
            known, holders = _places_in(owner)
            for path in missing:
                own = path.removeprefix(prefix)
                holder, _, key = own.rpartition(".")
                if own in known and known[own].value is None:
                    known[own].put(made_generator(states[path]))
                elif path.startswith(prefix) and own not in known and holder in holders:
                    _add(holders[holder], key, made_generator(states[path]))
        if missing:
            self.look()
        for name, owner in self._owners.items() if states else ():
            for found in reach(owner):
                # by this pid, a collator of transformers (5.24) sees that its generator is of the current process
                of = found.path.removesuffix(OF_A_PROCESS)
                if of != found.path and f"{name}:{of}generator".removeprefix(":") in states:
                    found.put(os.getpid())

    def _readers(self) -> Iterator[tuple[str, Any]]:
        for name in self._plain:
            for found in reach(self._owners[name], plain=False, readers=True):
                if is_reader(found.value):
                    yield f"{name}.{found.path}" if name else found.path, found.value

    def moved(self, *, new: bool = False, others: bool = True) -> dict[str, Any]:
        """Return, by path, unfinished iterators that have advanced since this was created, or have replaced another.

        With ``new``, also those at paths where there was none. Without ``others``, only those that existed then.
        """
        found = {}
        for path, one in self._readers():
            before, was = self._begun.get(path, (None, None))
            place = _place_of(one)
            is_known = before is not None and before() is one
            has_moved = place != was if is_known else others and (new or before is not None)
            if has_moved and place is not None:
                found[path] = one
        return found

    def values(self) -> tuple[dict[str, Any], list[str]]:
        """Capture the plain values that have changed; also return the paths of those that cannot be captured."""
        captured, left_out = {}, []
        for name, plain in self._plain.items():
            captured[name], too_much = plain.capture()
            left_out += [f"{name}.{path}" if name else path for path in too_much]
        return captured, left_out

    def data(self, changed: Mapping[str, Mapping[str, Any]], left_out: Collection[str]) -> dict[str, dict[str, str]]:
        """Return the initial digests of data that :meth:`values` returns neither as ``changed`` nor as ``left_out``."""
        prefixes = {name: f"{name}." if name else "" for name in self._plain}
        return {
            name: plain.data({*changed[name], *(path.removeprefix(prefixes[name]) for path in left_out)})
            for name, plain in self._plain.items()
        }

    @contextlib.contextmanager
    def temporarily(self, values: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
        """Put captured values back for the duration of a ``with`` block."""
        with contextlib.ExitStack() as stack:
            for name in values.keys() & self._plain.keys():
                stack.enter_context(self._plain[name].temporarily(values[name]))
            yield

    def restore_values(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        """Put captured values back."""
        for name, saved in values.items():
            if name in self._plain:
                self._plain[name].restore(saved)


def _place_of(reader: Any) -> int | None:
    """Return the position of an iterator, for a generator the one in its code; None if it is exhausted or unknown."""
    frame = getattr(reader, "gi_frame", None)
    return handed_out(reader) if frame is None else frame.f_lasti


def _places_in(owner: object) -> tuple[dict[str, Found], dict[str, Any]]:
    """Return what an object carries, by path, and the dictionaries (also ``__dict__``) and lists that hold it."""
    known, holders = dict[str, Found](), dict[str, Any]()
    for found in reach(owner):
        known[found.path] = found
        if isinstance(found.value, (dict, list)):
            holders[found.path] = found.value  # an empty one holds nothing that would show it
        if found.holder is not None:
            holders[found.path.rpartition(".")[0]] = found.holder
    return known, holders


def _add(holder: Any, name: str, generator: Any) -> None:
    if isinstance(holder, list):
        holder += [generator] if name == str(len(holder)) else []
        return
    key: Any = name  # the key's text
    if not any(isinstance(one, str) for one in holder):
        with contextlib.suppress(ValueError, SyntaxError):
            key = ast.literal_eval(name)
    if isinstance(key, Hashable):
        holder[key] = generator
