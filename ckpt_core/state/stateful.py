"""Objects with a state: what has ``state_dict`` and ``load_state_dict``."""

from __future__ import annotations

import functools
from typing import Any


def is_stateful(value: object) -> bool:
    """Return whether an object has both methods."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def stay_stateful(wrapper: Any) -> None:
    """Give a wrapper the methods of its inner object's state, if that has one, in its class.

    Since Python 3.12, ``isinstance(wrapper, Stateful)`` of a protocol looks for methods in the class: what
    ``__getattr__`` forwards does not count, and torchdata's loaders would leave the object out of their state.
    """
    kind: Any = type(wrapper)
    shows_another = any("__class__" in vars(base) for base in kind.__mro__[:-1])  # and is taken for one of those
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
    """Stands in front of an object: what is not among its own attributes is read from, and set on, that one."""

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
