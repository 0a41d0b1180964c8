"""The schedule for the bit-exact replay of a run that was recorded with ``record_order``."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from ckpt_async.consistent_cut.types import InconsistentCutError, UpdateId


@dataclass(frozen=True, slots=True)
class ReadShard:
    """Keep a copy of the shard's current parameters, from which the update is computed."""

    shard: str
    update: UpdateId


@dataclass(frozen=True, slots=True)
class ComputeUpdate:
    """Compute this update from the parameters kept for it."""

    update: UpdateId


@dataclass(frozen=True, slots=True)
class ApplyPiece:
    """Apply the shard's piece of this update."""

    shard: str
    update: UpdateId


def replay_schedule(
    orders: Mapping[str, Sequence[UpdateId]], pulled: Mapping[UpdateId, Mapping[str, int]]
) -> Iterator[ReadShard | ComputeUpdate | ApplyPiece]:
    """Yield the steps that repeat a run up to a cut, from the records of ``record_order``.

    Args:
        orders: ``PersistShard.order`` of each shard.
        pulled: ``PersistWorker.pulled`` of all workers together.

    Yields:
        The next step. The updates of a stream are computed in order, so its random generators are repeated, too.

    Raises:
        InconsistentCutError: The record is not that of a run: an update was computed from one that is not in the cut.
    """
    readers: dict[tuple[str, int], list[UpdateId]] = {}
    for update, versions in pulled.items():
        for shard, version in versions.items():
            readers.setdefault((shard, version), []).append(update)
    unread = {update: set(versions) for update, versions in pulled.items()}
    streams = {stream: deque(updates) for stream, updates in groupby(sorted(pulled), key=lambda update: update.stream)}
    position = dict.fromkeys(orders, -1)
    computed: set[UpdateId] = set()
    progress = True
    while progress:
        progress = False
        for shard, order in orders.items():
            # Position -1 advances to version 0, the initial parameters, without applying a piece.
            while position[shard] < 0 or (position[shard] < len(order) and order[position[shard]] in computed):
                if position[shard] >= 0:
                    yield ApplyPiece(shard, order[position[shard]])
                position[shard] += 1
                progress = True
                for update in readers.pop((shard, position[shard]), ()):
                    unread[update].discard(shard)
                    yield ReadShard(shard, update)
        for updates in streams.values():
            while updates and not unread[updates[0]]:
                computed.add(updates[0])
                yield ComputeUpdate(updates.popleft())
                progress = True
    left = [updates[0] for updates in streams.values() if updates]
    left += [order[position[shard]] for shard, order in orders.items() if position[shard] < len(order)]
    if left:
        raise InconsistentCutError(f"the record cannot be replayed: nothing leads to {left[0]}")
