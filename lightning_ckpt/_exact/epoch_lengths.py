"""How many batches the epochs of a fit have: fewer after a resume than before show that data has lost its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# of one epoch alone nobody knows whether all have as many batches
_ALIKE = 2
_MUCH = 0.9


class EpochLengths:
    """The numbers of batches of whole epochs, of the interrupted run and of this one."""

    def __init__(self) -> None:
        self._number, self._least, self._most = 0, 0, 0
        self._is_watched = False

    def capture(self) -> dict[str, int]:
        """Return them as plain data."""
        return {"number": self._number, "least": self._least, "most": self._most}

    def resume(self, saved: Mapping[str, int]) -> None:
        """Compare those to come with what :meth:`capture` returned."""
        self._number, self._least, self._most = saved["number"], saved["least"], saved["most"]
        self._is_watched = True

    def ended(self, batches: int, epoch: int) -> str | None:
        """Count a whole epoch, by its number; return why the resume was not exact, in words, or ``None``; once."""
        number, least, most = self._number, self._least, self._most
        self._least = min(least, batches) if number else batches
        self._most = max(most, batches)
        self._number += 1
        are_alike = number >= _ALIKE and least == most
        if not self._is_watched or batches >= (least if are_alike else least * _MUCH):
            return None
        self._is_watched = False
        return (
            f"epoch {epoch} had {batches} batches, and those before it had {least} or more: a loader or a data set has "
            "lost its place (as a stateful loader does whose data set begins each pass where its state was)"
        )


def has_all(trainer: Any) -> bool:
    """Return whether the last epoch of a fit that ends was not cut short."""
    steps = trainer.max_steps
    is_over = trainer.max_epochs is not None and 0 <= trainer.max_epochs <= trainer.current_epoch
    return bool(is_over and not trainer.should_stop and not 0 <= steps <= trainer.global_step)
