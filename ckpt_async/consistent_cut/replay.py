"""In which order to repeat a recorded run, so that it gives the same bits again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from ckpt_async.consistent_cut.types import InconsistentCutError, UpdateId


@dataclass(frozen=True, slots=True)
class ReadShard:
    """Keep the shard's parameters as they are now: the update is computed from them."""

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
    """Steps that repeat a run up to a cut, from what ``record_order`` kept of it.

    Args:
        orders: ``PersistShard.order`` of each shard.
        pulled: ``PersistWorker.pulled`` of all workers together.

    Yields:
        What to do next. The updates of a stream are computed in their order, so its random generators are repeated too.

    Raises:
        InconsistentCutError: The record is not that of a run: something was computed from what is not in the cut.
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
            # Version 0 is reached by doing nothing.
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
