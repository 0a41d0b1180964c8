"""What a checkpointer says once, in the log, about the way in which it is used."""

from __future__ import annotations

import contextlib
import logging

from ckpt_core._layouts.torch_file import FileImage
from ckpt_core.errors import OutOfMemoryError

__all__ = ["Advice"]

logger = logging.getLogger(__name__)

_MOST_SHOWN = 5  # keys


class Advice:
    """Each warning is given once."""

    def __init__(self) -> None:
        self._has_told_of_memory = False
        self._has_looked = False

    def no_copy(self, error: OutOfMemoryError) -> None:
        """Warn that a save in the background became one in the foreground."""
        if not self._has_told_of_memory:
            self._has_told_of_memory = True
            logger.warning(
                "training waits while the checkpoint is written, because a copy of the state does not fit into memory: %s; %s",
                error.message,
                error.remedy,
            )

    def refused_by_default(self, image: FileImage, path: str) -> None:
        """Warn, of the first checkpoint, of what only a resume would show: that the default way of reading refuses it.

        Args:
            image: The file, sealed and committed.
            path: The checkpoint.
        """
        if self._has_looked:
            return
        self._has_looked = True
        refused: dict[str, str] = {}
        with contextlib.suppress(MemoryError):  # the checkpoint is committed, whatever becomes of this
            refused = image.refused_by_default()
        if not refused:
            return
        shown = "; ".join(f"{key or 'somewhere'}: {what}" for key, what in list(refused.items())[:_MOST_SHOWN])
        more = f"; and {len(refused) - _MOST_SHOWN} more" if len(refused) > _MOST_SHOWN else ""
        logger.warning(
            "the checkpoint %s is saved, and a load with the default weights_only=True will refuse it: %s%s. "
            "Save plain data in their place (numbers, strings, lists, dictionaries, tensors; float(x), x.tolist()), or "
            "allow the types with torch.serialization.add_safe_globals, or load with weights_only=False, which runs "
            "code from the file",
            path,
            shown,
            more,
        )
