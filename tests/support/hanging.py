"""Runs calls that might hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def returns(act: Callable[[], Any], within: float) -> bool:
    """Return whether ``act`` returns within so many seconds, on a thread of its own; raise what it raises."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(within)
    for error in errors:
        raise error
    return not thread.is_alive()
