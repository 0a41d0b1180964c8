"""Stateful objects, which have ``state_dict`` and ``load_state_dict``, and wrappers that forward to such an object."""

from __future__ import annotations

import functools
from typing import Any


def is_stateful(value: object) -> bool:
    """Return whether an object has ``state_dict`` and ``load_state_dict``."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def stay_stateful(wrapper: Any) -> None:
    """Give a wrapper a class with ``state_dict`` and ``load_state_dict`` if its inner object has them.

    Since Python 3.12, ``isinstance(wrapper, Stateful)`` with a protocol looks for methods in the class only, so those
    that ``__getattr__`` forwards do not count, and torchdata's loaders would leave the object out of their state.
    """
    kind: Any = type(wrapper)
    shows_another = any("__class__" in vars(base) for base in kind.__mro__[:-1])  # it passes for its inner class
    if is_stateful(wrapper.inner) and not shows_another:
        object.__setattr__(wrapper, "__class__", _with_state(kind))


@functools.cache
def _with_state(kind: Any) -> Any:
    return type(kind.__name__, (_ForwardedState, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


class _ForwardedState:
    inner: Any

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state)


class Forwarding:
    """A wrapper that reads and sets attributes on its ``inner`` object, except those named in ``_own``."""

    _own: frozenset[str]
    inner: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in type(self)._own:
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in type(self)._own:
            object.__setattr__(self, name, value)
        else:
            setattr(self.inner, name, value)

    def __len__(self) -> int:
        return len(self.inner)
