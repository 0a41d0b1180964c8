"""What the objects of a test have seen, kept where no resume looks for state that it has lost."""

from __future__ import annotations

import types
import weakref
from typing import Any

_kept: Any = types.ModuleType("kept")
_kept.lists = weakref.WeakKeyDictionary()


def seen_by(owner: object) -> list[Any]:
    """Return the list of one object, which is no attribute of it."""
    found: list[Any] = _kept.lists.setdefault(owner, [])
    return found
