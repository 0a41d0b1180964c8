"""Over how many batches gradients are accumulated after a resume: the user's setting wins, except in an open window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["Accumulation"]


class Accumulation:
    """What one Trainer was asked for, and what it goes on with.

    Args:
        trainer: A Trainer of either package.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._asked = int(trainer.accumulate_grad_batches)
        self._next: int | None = None

    def training_starts(self) -> None:
        """What the Trainer has now is what its user asked for; schedules change it later."""
        self._asked = int(self._trainer.accumulate_grad_batches)

    def capture(self) -> dict[str, Any]:
        """Return where the present value comes from."""
        waits = self._next is not None
        return {
            "asked": int(self._trainer.accumulate_grad_batches) if waits else self._asked,
            "scheduled": self._schedule() is not None,
        }

    def go_on(self, saved: Mapping[str, Any], *, in_epoch: bool) -> str | None:
        """Go on with what was saved as long as it has to be, then with what the user asks for now.

        Args:
            saved: The counters of the checkpoint.
            in_epoch: Whether an epoch goes on, and not the next one begins.

        Returns:
            What has changed, in words.
        """
        before, now = int(saved["accumulate_grad_batches"]), self._wanted(saved)
        self._trainer.accumulate_grad_batches = before if in_epoch else now
        if before == now:
            return None
        self._next = now if in_epoch else None
        return f"accumulate_grad_batches was {before} and is {now} now"

    def _wanted(self, saved: Mapping[str, Any]) -> int:
        schedule = self._schedule()
        if schedule is not None:
            return int(schedule.get_accumulate_grad_batches(self._trainer.current_epoch))
        before, origin = int(saved["accumulate_grad_batches"]), saved.get("accumulation")
        if origin is not None and not origin["scheduled"] and before != origin["asked"] == self._asked:
            return before  # a hook of the user's has changed it since
        return self._asked

    def window_closed(self) -> None:
        """A batch is about to be fetched and no gradients are accumulated."""
        if self._next is not None:
            self._trainer.accumulate_grad_batches, self._next = self._next, None

    def _schedule(self) -> Any:
        return next((cb for cb in self._trainer.callbacks if hasattr(cb, "get_accumulate_grad_batches")), None)
