"""Replaces methods of classes and functions of modules, and restores them; used by ``_attach`` for Accelerate."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_MISSING = object()


class Patches:
    """Replaced attributes and their original values."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._before)

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Replace a method of a class, or a function of a module, with ``around(original, *arguments)``."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        self._before.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, method)

    def undo(self) -> None:
        """Restore all originals, the last replaced first."""
        while self._before:
            owner, name, before = self._before.pop()
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
