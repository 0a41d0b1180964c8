"""The ``transformers.Trainer`` that is being made: it tells its callbacks everything but itself.

``Trainer.__init__`` calls ``on_init_end`` of its callbacks as its last act, with arguments, state and model. Which
Trainer that is can only be seen in the frame of ``__init__``, as it has been since callbacks exist; where it cannot,
the callback has to be given the Trainer, and says so.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from transformers import Trainer


def trainer_being_made(callback: Any) -> Any:
    """Return the Trainer whose ``__init__`` is calling this callback, one of its own; None outside of one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer) and callback in found.callback_handler.callbacks:
            return found
        frame = frame.f_back
    return None
