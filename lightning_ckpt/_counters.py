"""The counters of Lightning's loops, as plain data."""

from __future__ import annotations

from typing import Any

__all__ = ["undo_unfinished"]


def undo_unfinished(progress: dict[str, Any]) -> None:
    """Count what was begun and not completed as not begun, in place."""
    for value in progress.values():
        if isinstance(value, dict):
            undo_unfinished(value)
    if "completed" in progress:
        progress.update({name: progress["completed"] for name in ("ready", "started", "processed") if name in progress})
