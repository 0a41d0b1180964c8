"""How methods of Accelerate's classes are replaced, once, and put back; which they are, ``_attach`` says."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_MISSING = object()


class Patches:
    """Replaced attributes, and what they were."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._before)

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Replace a method of a class, or a function of a module, by ``around(original, *arguments)``."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        self._before.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, method)

    def undo(self) -> None:
        """Put everything back, the last first."""
        while self._before:
            owner, name, before = self._before.pop()
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
