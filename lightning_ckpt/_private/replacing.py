"""What is put in the place of methods of one object, and what belongs to a run under way; neither goes into copies.

A Trainer in the middle of a fit can be pickled and copied, and so can one with our parts: the copy has its own methods.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Live:
    """Belongs to a run under way in this process: copies, also those for other processes, hold None."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class _Replacement:
    """What stands on an object in the place of its method; on a copy of the object it calls that."""

    def __init__(self, owner: Any, name: str, function: Callable[..., Any], before: Any) -> None:
        self._owner, self._name, self._before = owner, name, before
        self._function: Callable[..., Any] | None = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._function is not None:
            return self._function(*args, **kwargs)
        method = self._before or getattr(type(self._owner), self._name).__get__(self._owner)
        return method(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_function": None}


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Let a method of one object be ``around(method, *arguments)``; return what takes that out again."""
    return replace(owner, name, functools.partial(around, getattr(owner, name)))


def replace(owner: Any, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Put a function in the place of a method of one object; return what takes it out again."""
    attributes = vars(owner)
    before = attributes.get(name)
    ours = attributes[name] = _Replacement(owner, name, function, before)

    def undo() -> None:
        if attributes.get(name) is not ours:
            return  # somebody has replaced it since
        if before is not None:
            attributes[name] = before
        else:
            attributes.pop(name)

    return undo


def replace_once(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Let the next call of a method do something else; the call after it is the method again."""

    def once(*args: Any, **kwargs: Any) -> Any:
        vars(owner).pop(name, None)
        return function(*args, **kwargs)

    replace(owner, name, once)
