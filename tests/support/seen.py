"""Lists of what a test's objects have seen, kept where a resume does not look for state that it has not restored."""

from __future__ import annotations

import types
import weakref
from typing import Any

_kept: Any = types.ModuleType("kept")
_kept.lists = weakref.WeakKeyDictionary()


def seen_by(owner: object) -> list[Any]:
    """Return the list kept for one object, which is not an attribute of that object."""
    found: list[Any] = _kept.lists.setdefault(owner, [])
    return found
