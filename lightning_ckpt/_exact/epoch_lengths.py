"""Counts the batches of a fit's epochs: fewer after a resume than before show that a loader has lost its position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# how many epochs of equal length show that all have that length
_ALIKE = 2
_MUCH = 0.9


class EpochLengths:
    """The numbers of batches of whole epochs, of the interrupted run and of this one."""

    def __init__(self) -> None:
        self._counts = {"number": 0, "least": 0, "most": 0}
        self._is_watched = False

    def capture(self, over: int | None) -> dict[str, int]:
        """Return the counts as plain data; ``over`` is the length of a whole epoch that is not counted yet, if any."""
        return self._counted(over) if over is not None else self._counts

    def resume(self, saved: Mapping[str, int]) -> None:
        """Compare the epochs to come with what :meth:`capture` returned."""
        self._counts = dict(saved)
        self._is_watched = True

    def ended(self, batches: int, epoch: int) -> str | None:
        """Count a whole epoch; return, once, why the resume was not exact, in words, or ``None``."""
        number, least, most = self._counts["number"], self._counts["least"], self._counts["most"]
        self._counts = self._counted(batches)
        are_alike = number >= _ALIKE and least == most
        if not self._is_watched or batches >= (least if are_alike else least * _MUCH):
            return None
        self._is_watched = False
        return (
            f"epoch {epoch} had {batches} batches, but earlier ones had {least} or more: a loader or a dataset "
            "has lost its place (this happens with a stateful loader whose dataset begins each pass where its "
            "state was)"
        )

    def _counted(self, batches: int) -> dict[str, int]:
        number, least, most = self._counts["number"], self._counts["least"], self._counts["most"]
        return {
            "number": number + 1,
            "least": min(least, batches) if number else batches,
            "most": max(most, batches),
        }


def has_all(trainer: Any) -> bool:
    """Return whether the last epoch of a fit that ends was not cut short."""
    is_over = trainer.max_epochs is not None and 0 <= trainer.max_epochs <= trainer.current_epoch
    return is_over and not is_cut_short(trainer)


def is_cut_short(trainer: Any) -> bool:
    """Return whether an epoch that is over may have ended before its last batch."""
    return bool(trainer.should_stop or 0 <= trainer.max_steps <= trainer.global_step)
