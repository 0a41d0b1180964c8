"""What only a resume would show, said at the first save: the default way of reading refuses some of the state."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)

_MOST_SHOWN = 5  # keys


class RefusedKeys:
    """Warns, of the first checkpoint that a checkpointer commits, of the keys that a load will refuse."""

    def __init__(self) -> None:
        self._has_looked = False

    def warn_of(self, path: str, find: Callable[[], Mapping[str, str]]) -> None:
        """Warn of what is in a committed checkpoint; ``find`` returns what is refused, by key the name of its type."""
        if self._has_looked:
            return
        self._has_looked = True
        refused: Mapping[str, str] = {}
        with contextlib.suppress(MemoryError):  # the checkpoint is committed, whatever becomes of this
            refused = find()
        if not refused:
            return
        shown = "; ".join(f"{key or 'somewhere'}: {what}" for key, what in list(refused.items())[:_MOST_SHOWN])
        more = f"; and {len(refused) - _MOST_SHOWN} more" if len(refused) > _MOST_SHOWN else ""
        logger.warning(
            "the checkpoint %s is saved, and a load with the default weights_only=True will refuse it: %s%s. "
            "Save plain data in their place (numbers, strings, lists, dictionaries, tensors; float(x), x.tolist()), or "
            "allow the types with torch.serialization.add_safe_globals, or load with weights_only=False "
            "(with Accelerate: allow_pickle=True), which runs code from the checkpoint",
            path,
            shown,
            more,
        )
