"""The own state of a worker in Hogwild or DiLoCo: its position in the data, its random generators, its objects."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckpt_async.consistent_cut import UpdateId, VectorClock, deal_streams
from ckpt_async.consistent_cut.types import next_update
from ckpt_core.errors import StateMismatchError
from ckpt_core.state.elastic import derive_rng
from ckpt_core.state.rng import RngState

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

logger = logging.getLogger(__name__)


class StreamCursor:
    """A worker's position in the data: which batch of which stream comes next.

    Data is a fixed number of streams of batches numbered 1, 2, ...; the contents of a batch must depend on its stream
    and number only. Streams are assigned to workers, again when their number changes, so each batch is used once.

    Args:
        streams: Number of streams, the same for the whole training; at least as many as there will ever be workers.
        worker: Number of this worker, from 0.
        workers: Number of workers.
        batches: Number of batches in each stream; None for streams without end.

    Examples:
        >>> cursor = StreamCursor(4, worker=1, workers=2, batches=2)
        >>> [tuple(update) for update in cursor.take(3)]
        [(1, 1), (3, 1), (1, 2)]
        >>> cursor.position.in_words()
        'stream 1 resumes at batch 3, stream 3 resumes at batch 2'
    """

    def __init__(self, streams: int, *, worker: int = 0, workers: int = 1, batches: int | None = None) -> None:
        if not 0 <= worker < workers <= streams:
            raise ValueError(f"{streams} streams cannot be dealt to worker {worker} of {workers}: there must be enough")
        self.streams = streams
        self.worker = worker
        self.workers = workers
        self.batches = batches
        self._everywhere = dict.fromkeys(range(streams), 0)

    def _own(self, worker: int) -> dict[int, int]:
        dealt = deal_streams(range(self.streams), [str(number) for number in range(self.workers)])
        return {stream: self._everywhere[stream] for stream in dealt[str(worker)]}

    @property
    def position(self) -> VectorClock:
        """The number of batches used so far, for each of this worker's streams."""
        return VectorClock(self._own(self.worker))

    @property
    def upcoming(self) -> UpdateId | None:
        """The next batch, of the least advanced stream; None when all batches were used."""
        return next_update(self.position, self.batches)

    def take(self, count: int | None = None) -> Iterator[UpdateId]:
        """Yield the next batches; each counts as used when the next one is requested.

        Args:
            count: At most how many; by default all that are left.
        """
        for _ in itertools.count() if count is None else range(count):
            update = self.upcoming
            if update is None:
                return
            yield update
            self._everywhere[update.stream] = update.seq

    def windows(self, steps: int) -> int:
        """Return how many windows of ``steps`` steps it takes until *every* worker has used all of its batches.

        Valid only when all workers are at the end of a window: at the start, and after :meth:`load_state_dicts`.

        Args:
            steps: Batches of a worker in a window.
        """
        if self.batches is None:
            raise ValueError("streams without end have no last window: give the cursor batches=")
        left = [sum(self.batches - count for count in self._own(worker).values()) for worker in range(self.workers)]
        return -(-max(left) // steps)

    def state_dict(self) -> dict[str, Any]:
        """Return this worker's position, as plain data."""
        return {"streams": self.streams, "position": self.position.to_pairs()}

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Resume from the positions of all workers that saved, whose number may differ from the current one.

        Args:
            states: The :meth:`state_dict` of each of these workers.

        Raises:
            StateMismatchError: They are of another number of streams, or do not include all streams.
        """
        pairs = [pair for state in states for pair in state["position"]]
        if any(state["streams"] != self.streams for state in states) or len(pairs) != self.streams:
            raise StateMismatchError(
                f"what was used of {len(pairs)} streams is known, and there are {self.streams}",
                key="position",
                remedy="give the cursor as many streams as the training began with, and the states of all workers",
            )
        self._everywhere = dict(VectorClock(pairs))


class WorkerState:
    """A worker's random generators, its position in the data, and its own objects.

    Args:
        cursor: Its position in the data.
        objects: Other objects of this worker, such as ``optimizer=...``, with ``state_dict`` and ``load_state_dict``.
    """

    def __init__(self, cursor: StreamCursor, **objects: Stateful) -> None:
        self.cursor = cursor
        self._objects = objects

    def state_dict(self) -> dict[str, Any]:
        """Return all of it as plain data and tensors."""
        return {
            "rng": RngState.capture().encode(),
            "cursor": self.cursor.state_dict(),
            "objects": {name: stateful.state_dict() for name, stateful in self._objects.items()},
        }

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Resume from the states of all workers that saved, whose number may differ from the current one.

        With the same number, each worker gets its own state back, bit for bit. Otherwise the streams are assigned
        again, and worker ``i`` begins with the objects of worker ``i % saved``; a worker whose number did not exist
        before gets random generators derived from those of worker 0.

        Args:
            states: The :meth:`state_dict` of each of these workers, in the order of their numbers.

        Raises:
            StateMismatchError: They have other objects or other streams.
        """
        number, saved = self.cursor.worker, len(states)
        own = states[number % saved]
        if own["objects"].keys() != self._objects.keys():
            before, here = sorted(own["objects"]), sorted(self._objects)
            raise StateMismatchError(
                f"the worker that was saved had the objects {before}, and this one has {here}",
                key="objects",
                remedy="register the same objects",
            )
        self.cursor.load_state_dicts([state["cursor"] for state in states])
        for name, stateful in self._objects.items():
            stateful.load_state_dict(own["objects"][name])
        rng = RngState.decode(own["rng"])
        (rng if number < saved else derive_rng(RngState.decode(states[0]["rng"]), number)).restore()
        now = self.cursor.workers
        resharded = "" if saved == now else f" (saved by {saved} workers, which are {now} now)"
        logger.info("worker %d: %s%s", number, self.cursor.position.in_words(), resharded)
