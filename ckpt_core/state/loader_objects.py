"""What the objects of one loader carry: random generators, and plain values that the run has changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_core.state.changed_values import PlainState
from ckpt_core.state.object_walk import reach
from ckpt_core.state.rng import capture_generator, find_generators, made_generator, restore_generator


class Carried:
    """The generators and, with ``plain``, the plain values of some objects by name; one without a name has no prefix.

    Generators are looked for when this is made and by :meth:`look`, because looking takes longer than reading them.
    """

    def __init__(self, owners: Mapping[str, object], *, plain: bool = True) -> None:
        self._owners = owners
        self._generators: dict[str, Any] = {}
        self._plain = {name: PlainState(owner) for name, owner in owners.items()} if plain else {}
        self.look()

    def look(self) -> None:
        """Look for generators again."""
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
        """Where the generators are."""
        return list(self._generators)

    def generators(self) -> dict[str, Any]:
        """Capture the generators, as tensors and plain numbers."""
        return {path: capture_generator(generator) for path, generator in self._generators.items()}

    def restore_generators(self, states: Mapping[str, Any]) -> None:
        """Set the generators that are there, and make those that an object makes when it first draws."""
        for path, generator in self._generators.items():
            if path in states:
                restore_generator(generator, states[path])
        missing = states.keys() - self._generators
        for name, owner in self._owners.items() if missing else ():
            for found in reach(owner):
                path = f"{name}:{found.path}" if name else found.path
                if found.value is None and path in missing:
                    found.put(made_generator(states[path]))
        if missing:
            self.look()

    def values(self) -> tuple[dict[str, Any], list[str]]:
        """Capture the plain values that have changed; also return the paths of those that cannot be captured."""
        captured, left_out = {}, []
        for name, plain in self._plain.items():
            captured[name], too_much = plain.capture()
            left_out += [f"{name}.{path}" if name else path for path in too_much]
        return captured, left_out

    def restore_values(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        """Put captured values back."""
        for name, saved in values.items():
            if name in self._plain:
                self._plain[name].restore(saved)
