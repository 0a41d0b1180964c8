"""Finds the ``transformers.Trainer`` that is being created, which is not passed to its callbacks.

``Trainer.__init__`` calls ``on_init_end`` of its callbacks as its last act, with arguments, state and model. The
Trainer itself can only be found in the frame of ``__init__``, as in all releases since callbacks exist. If it cannot,
the callback has to be given the Trainer, and raises an error that says so.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from transformers import Trainer


def trainer_being_made(callback: Any) -> Any:
    """Return the Trainer whose ``__init__`` is calling this callback of its own; None outside of ``__init__``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer) and callback in found.callback_handler.callbacks:
            return found
        frame = frame.f_back
    return None
