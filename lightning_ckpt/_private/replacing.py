"""Replaces methods on one object, and keeps the state of a running fit out of pickles and copies.

A Trainer can be pickled and copied in the middle of a fit. With our replacements it still can: the copy has its own
original methods.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Live:
    """Base of objects that belong to a run in this process: pickles and copies hold None in their place."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class _Replacement:
    """Replaces a method on one object; on a copy of the object, it calls the original method."""

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
    """Replace a method of one object with ``around(method, *arguments)``; return a function that undoes it."""
    return replace(owner, name, functools.partial(around, getattr(owner, name)))


def replace(owner: Any, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Replace a method of one object with ``function``; return a function that undoes it."""
    attributes = vars(owner)
    before = attributes.get(name)
    ours = attributes[name] = _Replacement(owner, name, function, before)

    def undo() -> None:
        if attributes.get(name) is not ours:
            return  # it has been replaced again since
        if before is not None:
            attributes[name] = before
        else:
            attributes.pop(name)

    return undo


def replace_once(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Replace a method of one object with ``function`` for its next call only."""

    def once(*args: Any, **kwargs: Any) -> Any:
        vars(owner).pop(name, None)
        return function(*args, **kwargs)

    replace(owner, name, once)
