"""``LocalSGD``: between two averages every rank has weights and moments of its own, and a count of its own steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_core.errors import StateMismatchError


class LocalSgdState:
    """Follows the ``LocalSGD`` contexts of one Accelerator, in which every rank has weights and moments of its own.

    ``active`` are the contexts that are open, in the order in which they were entered. Averaging is for the weights
    alone, so that ``moments_differ``, the optimizers' states between ranks, stays so after the context.
    """

    def __init__(self) -> None:
        self.active: list[Any] = []
        self.moments_differ = False
        self._resumed_steps: list[int] = []

    @property
    def weights_differ(self) -> bool:
        """Whether each rank's weights are its own now."""
        return bool(self.active)

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
        """Refuse another number of ranks where each has a state of its own."""
        if (state["num_steps"] or state["moments_differ"]) and saved_world_size != world_size:
            raise StateMismatchError(
                f"under LocalSGD, {saved_world_size} ranks saved their own weights or moments, but now there are "
                f"{world_size} ranks",
                path=path,
                key="local_sgd",
                remedy=f"resume with {saved_world_size} processes",
            )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue the open contexts; what is left over is for contexts that are entered later."""
        steps = list(state["num_steps"])
        self.moments_differ = bool(state["moments_differ"])
        for context in self.active:
            if steps:
                context.num_steps = steps.pop(0)
        self._resumed_steps = steps
