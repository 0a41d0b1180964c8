"""Tracks ``LocalSGD``, in which each rank has its own weights and moments between two averages, and its step count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_core.errors import StateMismatchError


class LocalSgdState:
    """The ``LocalSGD`` contexts of one Accelerator.

    ``active`` are the open contexts, in the order in which they were entered; while there are any, the ranks' weights
    differ. Only weights are averaged, so ``moments_differ`` (the optimizers' states differ between ranks) stays true
    after the context.
    """

    def __init__(self) -> None:
        self.active: list[Any] = []
        self.moments_differ = False
        self._resumed_steps: list[int] = []

    def entered(self, context: Any) -> None:
        """Note that training under LocalSGD begins; continue with the count of a resumed context."""
        self.active.append(context)
        self.moments_differ = True
        if self._resumed_steps:
            context.num_steps = self._resumed_steps.pop(0)

    def left(self, context: Any) -> None:
        """Note that the weights were averaged for the last time."""
        self.active = [other for other in self.active if other is not context]

    def capture(self) -> dict[str, Any]:
        """Return the counts as plain data."""
        return {"num_steps": [context.num_steps for context in self.active], "moments_differ": self.moments_differ}

    def check(self, state: Mapping[str, Any], saved_world_size: int, world_size: int, path: str) -> None:
        """Raise for another number of ranks if each rank has its own state."""
        if (state["num_steps"] or state["moments_differ"]) and saved_world_size != world_size:
            raise StateMismatchError(
                f"under LocalSGD, {saved_world_size} ranks saved their own weights or moments, but now there are "
                f"{world_size} ranks",
                path=path,
                key="local_sgd",
                remedy=f"resume with {saved_world_size} processes",
            )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the counts of the open contexts; the rest are for contexts that are entered later."""
        steps = list(state["num_steps"])
        self.moments_differ = bool(state["moments_differ"])
        for context in self.active:
            if steps:
                context.num_steps = steps.pop(0)
        self._resumed_steps = steps
