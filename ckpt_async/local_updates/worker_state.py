"""What a worker that steps for itself has of its own."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ckpt_async.local_updates.cursor import StreamCursor
from ckpt_core.errors import StateMismatchError
from ckpt_core.state.elastic import derive_rng
from ckpt_core.state.rng import RngState

__all__ = ["WorkerState"]

logger = logging.getLogger(__name__)


class _Stateful(Protocol):
    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


class WorkerState:
    """A worker's random generators, its place in the data, and its own objects.

    Args:
        cursor: Its place in the data.
        objects: What else it has of its own, such as ``optimizer=...``: anything with ``state_dict`` and
            ``load_state_dict``.
    """

    def __init__(self, cursor: StreamCursor, **objects: _Stateful) -> None:
        self.cursor = cursor
        self._objects = objects

    def state_dict(self) -> dict[str, Any]:
        """All of it as plain data and tensors."""
        return {
            "rng": RngState.capture().encode(),
            "cursor": self.cursor.state_dict(),
            "objects": {name: stateful.state_dict() for name, stateful in self._objects.items()},
        }

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on from what all workers, of this or another number, had.

        As many workers as saved it get back what was theirs, bit for bit. Otherwise the streams are dealt anew, and worker
        ``i`` begins with the objects that worker ``i % saved`` had; one that was not there gets random generators derived
        from those of worker 0.

        Args:
            states: The :meth:`state_dict` of each, in their order.

        Raises:
            StateMismatchError: They are of other objects or other streams.
        """
        number, saved = self.cursor.worker, len(states)
        own = states[number % saved]
        if own["objects"].keys() != self._objects.keys():
            raise StateMismatchError(
                f"the worker that was saved had {sorted(own['objects'])} of its own, and this one has {sorted(self._objects)}",
                key="objects",
                remedy="register the same objects",
            )
        self.cursor.load_state_dicts([state["cursor"] for state in states])
        for name, stateful in self._objects.items():
            stateful.load_state_dict(own["objects"][name])
        rng = RngState.decode(own["rng"])
        (rng if number < saved else derive_rng(RngState.decode(states[0]["rng"]), number)).restore()
        elsewhere = (
            "" if saved == self.cursor.workers else f" (saved by {saved} workers, which are {self.cursor.workers} now)"
        )
        logger.info("worker %d: %s%s", number, self.cursor.position.in_words(), elsewhere)
