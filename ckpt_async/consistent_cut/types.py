"""Types of consistent cuts: updates, tags, vector clocks and cuts; the options of snapshots; and errors.

The data is divided into a fixed number of *streams*, each a sequence of batches numbered 1, 2, 3, ... A worker owns
some streams; an *update* is what it computes from one batch. A *cut* is the number of updates of each stream that are
in a checkpoint. A *generation* is one start of the whole run, an *incarnation* one start of a worker within it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ckpt_core.errors import CheckpointError


class InconsistentCutError(CheckpointError):
    """The saved states do not belong to one cut, or a rule of the protocol that ensures this was violated."""


class SnapshotAbortedError(CheckpointError):
    """A snapshot was given up, or cannot begin. Training continues, and the previous checkpoint stays valid."""


class StaleGenerationError(CheckpointError):
    """A message is from another generation, or another incarnation of a worker, and must not be processed.

    Attributes:
        receiver_is_stale: Whether the *receiver* is the older one and has to stop; otherwise the sender is.
    """

    def __init__(self, message: str, *, receiver_is_stale: bool = False) -> None:
        remedy = "stop this process: a newer one has taken its place" if receiver_is_stale else None
        super().__init__(message, remedy=remedy)
        self.receiver_is_stale = receiver_is_stale


@dataclass(frozen=True)
class CutOptions:
    """How the snapshots of an asynchronous training are taken.

    Args:
        alignment: ``"unaligned"`` copies a shard's state at the first sign of a snapshot and adds the updates that were
            under way as they arrive: no process waits. ``"aligned"`` copies when all of these have arrived, and holds
            back later updates until then, for at most ``aligned_timeout``.
        aligned_timeout: Seconds after which an aligned snapshot becomes an unaligned one. It cannot be switched off,
            because without it, one frozen worker would stop all the others.
        snapshot_timeout: Seconds after which a snapshot that is not complete is aborted.
        channel_state: What an unaligned snapshot does with updates that were under way: ``"fold"`` applies them to
            the copy, ``"record"`` saves them with it, to be applied after loading. Use ``"record"`` if an update
            cannot be applied to a copy.
        max_inflight_updates: How many updates of a stream may be under way at a time; None for no limit. A worker
            that rejoins a sparse training without a limit may have to repeat all batches.
        on_worker_failure: ``"rollback"`` restarts everything from the last checkpoint. ``"rejoin"`` starts only the
            lost worker again; each batch is still applied once on each shard, but the pieces of the updates that were
            under way may come from two different gradients.
        record_order: Record the order of all updates, and the parameter versions from which each was computed, so that
            the run can be replayed bit for bit. Memory and checkpoints grow with each update.
    """

    alignment: Literal["unaligned", "aligned"] = "unaligned"
    aligned_timeout: float = 0.1
    snapshot_timeout: float = 60.0
    channel_state: Literal["fold", "record"] = "fold"
    max_inflight_updates: int | None = 2
    on_worker_failure: Literal["rollback", "rejoin"] = "rollback"
    record_order: bool = False

    def __post_init__(self) -> None:
        choices = {
            "alignment": ("unaligned", "aligned"),
            "channel_state": ("fold", "record"),
            "on_worker_failure": ("rollback", "rejoin"),
        }
        for option, allowed in choices.items():
            if getattr(self, option) not in allowed:
                raise ValueError(f"{option}={getattr(self, option)!r} is not one of {', '.join(allowed)}")
        for option in ("aligned_timeout", "snapshot_timeout"):
            if not 0 < getattr(self, option) < float("inf"):
                raise ValueError(f"{option}={getattr(self, option)!r} must be a positive number of seconds")
        if self.max_inflight_updates is not None and self.max_inflight_updates < 1:
            raise ValueError(f"max_inflight_updates={self.max_inflight_updates} must be at least 1, or None")


class UpdateId(NamedTuple):
    """The update computed from batch ``seq`` (1, 2, ...) of a stream."""

    stream: int
    seq: int


class MessageTag(NamedTuple):
    """The tag that every message carries.

    Attributes:
        generation: Counts the starts of the whole run; a message from another generation is refused.
        snapshot_id: The newest snapshot that the sender takes part in; the *colour* of the message.
    """

    generation: int
    snapshot_id: int

    def check_generation(self, other: MessageTag) -> None:
        """Refuse a message, with the tag ``other``, of a generation other than this one, the receiver's.

        Raises:
            StaleGenerationError: The generations differ.
        """
        if other.generation != self.generation:
            raise StaleGenerationError(
                f"a message of generation {other.generation} reached a process of generation {self.generation}",
                receiver_is_stale=other.generation > self.generation,
            )


class VectorClock(Mapping[int, int]):
    """An immutable count per stream.

    Args:
        counts: Count of each stream, as a mapping or as pairs.

    Examples:
        >>> clock = VectorClock({0: 12, 3: 811})
        >>> clock.includes(UpdateId(0, 12)), clock.includes(UpdateId(0, 13))
        (True, False)
        >>> clock.in_words()
        'stream 0 resumes at batch 13, stream 3 resumes at batch 812'
    """

    __slots__ = ("_counts",)

    def __init__(self, counts: Mapping[int, int] | Iterable[Sequence[int]] = ()) -> None:
        pairs = counts.items() if isinstance(counts, Mapping) else counts
        self._counts = dict(sorted((int(stream), int(count)) for stream, count in pairs))
        for stream, count in self._counts.items():
            if count < 0:
                raise ValueError(f"stream {stream} has a negative count, {count}")

    def __getitem__(self, stream: int) -> int:
        return self._counts[stream]

    def __iter__(self) -> Iterator[int]:
        return iter(self._counts)

    def __len__(self) -> int:
        return len(self._counts)

    def __hash__(self) -> int:
        return hash(tuple(self._counts.items()))

    def __repr__(self) -> str:
        return f"VectorClock({self._counts})"

    def includes(self, update: UpdateId) -> bool:
        """Return whether the update is one of those counted."""
        return 1 <= update.seq <= self._counts.get(update.stream, 0)

    def updates(self) -> Iterator[UpdateId]:
        """Return all updates counted."""
        return (UpdateId(stream, seq) for stream, count in self.items() for seq in range(1, count + 1))

    def restricted_to(self, streams: Iterable[int]) -> VectorClock:
        """Return the counts of some of the streams."""
        return VectorClock({stream: self._counts[stream] for stream in streams})

    def joined_with(self, *others: Mapping[int, int]) -> VectorClock:
        """Return the union of this clock and others.

        Raises:
            InconsistentCutError: A stream has different counts in two of them.
        """
        counts = dict(self._counts)
        for stream, count in itertools.chain.from_iterable(other.items() for other in others):
            if (known := counts.setdefault(stream, count)) != count:
                raise InconsistentCutError(
                    f"stream {stream} is said to stand at {known} and at {count}", key=f"stream {stream}"
                )
        return VectorClock(counts)

    def differences(self, other: Mapping[int, int]) -> dict[int, tuple[int | None, int | None]]:
        """Return both counts of each stream in which the clocks differ; None if one lacks the stream."""
        streams = sorted({*self, *other})
        both = {stream: (self.get(stream), other.get(stream)) for stream in streams}
        return {stream: counts for stream, counts in both.items() if counts[0] != counts[1]}

    def in_words(self) -> str:
        """Return a text for logs: at which batch each stream resumes after this cut is loaded."""
        return ", ".join(f"stream {stream} resumes at batch {count + 1}" for stream, count in self.items())

    def to_pairs(self) -> list[list[int]]:
        """Return the clock as plain JSON data, from which ``VectorClock(pairs)`` rebuilds it."""
        return [[stream, count] for stream, count in self.items()]


@dataclass(frozen=True)
class ConsistentCut:
    """The cut at which a checkpoint of asynchronous training was taken, as recorded in its manifest.

    Args:
        snapshot_id: Number of the snapshot; grows from one to the next.
        generation: Generation of the run in which it was taken.
        vector: How many updates of each stream are in the saved state of *every* shard.
        workers: Names of the workers whose state was saved; from a coordinator, in the order in which they said hello.
        shards: Names of the shards whose state was saved, in the order in which they hold the parameters.
    """

    snapshot_id: int
    generation: int
    vector: VectorClock
    workers: tuple[str, ...]
    shards: tuple[str, ...]

    def to_metadata(self) -> dict[str, Any]:
        """Return the cut as plain JSON data."""
        return {
            "snapshot_id": self.snapshot_id,
            "generation": self.generation,
            "vector": self.vector.to_pairs(),
            "workers": list(self.workers),
            "shards": list(self.shards),
        }

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> ConsistentCut:
        """Rebuild a cut from the data of :meth:`to_metadata`.

        Raises:
            InconsistentCutError: The data is not that of a cut.
        """
        try:
            return cls(
                snapshot_id=int(metadata["snapshot_id"]),
                generation=int(metadata["generation"]),
                vector=VectorClock(metadata["vector"]),
                workers=tuple(map(str, metadata["workers"])),
                shards=tuple(map(str, metadata["shards"])),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InconsistentCutError(f"the manifest does not describe a cut: {error!r}") from error


def deal_streams(streams: Iterable[int], workers: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Assign every stream to one worker, as evenly as possible; also when a run resumes with another number of workers.

    Examples:
        >>> deal_streams(range(5), ["w0", "w1"])
        {'w0': (0, 2, 4), 'w1': (1, 3)}
    """
    ordered = sorted(streams)
    return {worker: tuple(ordered[index :: len(workers)]) for index, worker in enumerate(workers)}


def next_update(positions: Mapping[int, int], batches: int | None) -> UpdateId | None:
    """Return the update after ``positions``; None when all streams have used ``batches`` of them.

    It is of the least advanced stream, so that all streams advance evenly.
    """
    stream = min(positions, key=lambda stream: (positions[stream], stream), default=None)
    if stream is None or (batches is not None and positions[stream] >= batches):
        return None
    return UpdateId(stream, positions[stream] + 1)
