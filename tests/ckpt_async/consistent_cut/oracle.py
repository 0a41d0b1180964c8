"""Judges a checkpoint by ledgers inside the model's state, never by the protocol's own counters.

Each block of parameters keeps the list of updates that were applied to it, written by the update itself. An update also
remembers what was in the ledgers of everything it was computed from.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Applied(NamedTuple):
    """One computation of an update; computing the same batch again gives another serial number."""

    stream: int
    seq: int
    serial: int


Ledger = list[Applied]
# The part of a ledger that a pull has shown: ledgers only grow.
Seen = tuple[Ledger, int]


class Violation(NamedTuple):
    kind: str
    text: str


def touched_blocks(stream: int, seq: int, blocks: int, sparse: bool) -> frozenset[int]:
    """Return which blocks the update of a batch changes; this depends on the batch alone."""
    if not sparse:
        return frozenset(range(blocks))
    dice = random.Random(f"{stream}/{seq}")
    return frozenset(block for block in range(blocks) if dice.random() < 0.4)


@dataclass
class Oracle:
    """Judges saved states against the truth.

    Args:
        blocks: Number of blocks of parameters.
        sparse: Whether updates touch only some blocks.
        one_gradient: Whether all pieces of an update must come from one computation.
        staleness: How many updates a stream may be ahead of the slowest; None for no bound.
    """

    blocks: int
    sparse: bool = False
    one_gradient: bool = True
    staleness: int | None = None
    seen: dict[Applied, list[Seen]] = field(default_factory=dict)

    def judge(self, positions: Mapping[int, int], ledgers: Mapping[int, Sequence[Applied]]) -> list[Violation]:
        """Return what is wrong with a checkpoint.

        Args:
            positions: How many batches of each stream the workers have consumed, by their own saved cursors.
            ledgers: The saved ledger of each block.
        """
        return [
            *self._lost_or_repeated(positions, ledgers),
            *self._torn(ledgers),
            *self._orphans(ledgers),
            *self._too_stale(positions),
        ]

    def _lost_or_repeated(
        self, positions: Mapping[int, int], ledgers: Mapping[int, Sequence[Applied]]
    ) -> list[Violation]:
        found = []
        for block in range(self.blocks):
            expected = Counter(
                (stream, seq)
                for stream, count in positions.items()
                for seq in range(1, count + 1)
                if block in touched_blocks(stream, seq, self.blocks, self.sparse)
            )
            actual = Counter((entry.stream, entry.seq) for entry in ledgers.get(block, ()))
            if expected != actual:
                lost, extra = sorted((expected - actual).elements()), sorted((actual - expected).elements())
                found.append(Violation("ledger", f"block {block}: missing {lost}, too much {extra}"))
        return found

    def _torn(self, ledgers: Mapping[int, Sequence[Applied]]) -> list[Violation]:
        serials: dict[tuple[int, int], set[int]] = {}
        for ledger in ledgers.values():
            for entry in ledger:
                serials.setdefault((entry.stream, entry.seq), set()).add(entry.serial)
        torn = sorted(update for update, numbers in serials.items() if len(numbers) > 1)
        return [Violation("torn", f"from two gradients: {torn}")] if torn and self.one_gradient else []

    def _orphans(self, ledgers: Mapping[int, Sequence[Applied]]) -> list[Violation]:
        """Return the saved updates that were computed from something that is not saved."""
        saved = {entry for ledger in ledgers.values() for entry in ledger}
        beginning: dict[int, int] = {}
        orphans = []
        for entry in sorted(saved):
            for ledger, length in self.seen[entry]:
                if id(ledger) not in beginning:
                    outside = (place for place, other in enumerate(ledger) if other not in saved)
                    beginning[id(ledger)] = next(outside, len(ledger))
                if length > beginning[id(ledger)]:
                    orphans.append(entry)
                    break
        return [Violation("orphan", f"computed from what is not saved: {orphans}")] if orphans else []

    def _too_stale(self, positions: Mapping[int, int]) -> list[Violation]:
        if self.staleness is None or max(positions.values()) - min(positions.values()) <= self.staleness:
            return []
        return [Violation("staleness", f"{dict(positions)} with a bound of {self.staleness}")]
