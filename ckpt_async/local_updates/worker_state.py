"""What a worker that steps for itself has of its own: its place in the data, its random generators, its objects."""

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
    """Which batch of which stream comes next for a worker.

    Data is a fixed number of streams of batches numbered 1, 2, ...; what a batch is must depend on its stream and
    number alone. Streams are dealt to the workers, and again where their number changes, so each batch is used once.

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
        """How many batches of each of this worker's streams were used."""
        return VectorClock(self._own(self.worker))

    @property
    def upcoming(self) -> UpdateId | None:
        """The batch that comes next: of the stream that is least advanced; None when all were used."""
        return next_update(self.position, self.batches)

    def take(self, count: int | None = None) -> Iterator[UpdateId]:
        """The next batches; each counts as used when the one after it is asked for.

        Args:
            count: How many at most; all that are left by default.
        """
        for _ in itertools.count() if count is None else range(count):
            update = self.upcoming
            if update is None:
                return
            yield update
            self._everywhere[update.stream] = update.seq

    def windows(self, steps: int) -> int:
        """How many windows of so many steps it takes until *every* worker has used all of its batches.

        Meaningful where all workers are at the end of a window: at the start, and after :meth:`load_state_dicts`.

        Args:
            steps: Batches of a worker in a window.
        """
        if self.batches is None:
            raise ValueError("streams without end have no last window: give the cursor batches=")
        left = [sum(self.batches - count for count in self._own(worker).values()) for worker in range(self.workers)]
        return -(-max(left) // steps)

    def state_dict(self) -> dict[str, Any]:
        """This worker's place, as plain data."""
        return {"streams": self.streams, "position": self.position.to_pairs()}

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Resume from what all workers, of this or another number, had used.

        Args:
            states: The :meth:`state_dict` of each.

        Raises:
            StateMismatchError: They are not of the same streams, or not of all of them.
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
    """A worker's random generators, its place in the data, and its own objects.

    Args:
        cursor: Its place in the data.
        objects: What else it has of its own, such as ``optimizer=...``: anything with ``state_dict`` and
            ``load_state_dict``.
    """

    def __init__(self, cursor: StreamCursor, **objects: Stateful) -> None:
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
        """Resume from what all workers, of this or another number, had.

        As many workers as saved it get back what was theirs, bit for bit. Otherwise the streams are dealt again, and
        worker ``i`` begins with the objects that worker ``i % saved`` had; one that was not there gets random
        generators derived from those of worker 0.

        Args:
            states: The :meth:`state_dict` of each, in their order.

        Raises:
            StateMismatchError: They are of other objects or other streams.
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
