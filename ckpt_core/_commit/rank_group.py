"""Rank groups: the ranks that save checkpoints together, and the store that connects them."""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Callable
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from ckpt_core._commit.tcp_store import TimedStore, connect_store, derived_key
from ckpt_core.storage.lease import is_alive, this_process

_ANSWER_SECONDS = 5.0


class RankGroup:
    """The ranks that save together.

    Args:
        rank: This process's rank.
        world_size: Number of ranks.
        store: Shared by all of them, and opened for checkpointing only; None for a single process.
        session: Text that is the same on all ranks and different for every run; letters, digits and dashes.

    Examples:
        >>> from ckpt_core._commit.rank_group import RankGroup
        >>> group = RankGroup.alone()
        >>> group.rank, group.world_size
        (0, 1)
    """

    def __init__(self, rank: int, world_size: int, store: Store | None, session: str) -> None:
        if store is None and world_size > 1:
            raise ValueError("a group of several ranks needs a store")
        self.rank = rank
        self.world_size = world_size
        self.store = store
        self.session = session
        self._series = itertools.count()
        self._processes = ""  # store key under which this machine's processes are listed, one per line

    @classmethod
    def alone(cls) -> RankGroup:
        """Return the group of a single process, which saves on its own."""
        return cls(0, 1, None, uuid.uuid4().hex[:12])

    @classmethod
    def connect(
        cls, rank: int, world_size: int, broadcast: Callable[[Any], Any], *, timeout_seconds: float = 300.0
    ) -> RankGroup:
        """Connect the ranks; called on all of them together.

        Args:
            rank: This process's rank; rank 0 serves the store.
            world_size: Number of ranks.
            broadcast: Sends an object from rank 0 to all ranks and returns it.
            timeout_seconds: How long connecting may take.
        """
        if world_size == 1:
            return cls.alone()
        store = connect_store(rank, world_size, broadcast, timeout_seconds=timeout_seconds)
        group = cls(rank, world_size, store, broadcast(uuid.uuid4().hex[:12]))
        process = this_process()
        if process["machine"]:
            group._processes = f"processes/{process['machine']}"
            TimedStore(store, answer_within=timeout_seconds).append(group._processes, json.dumps([rank, process]))
        return group

    def find_dead(self) -> list[int]:
        """Return the other ranks that have connected from this machine and whose processes have ended."""
        if self.store is None or not self._processes:
            return []
        lines = TimedStore(self.store, answer_within=_ANSWER_SECONDS).lines(self._processes)
        return [rank for rank, process in map(json.loads, lines) if is_alive(process) is False]

    def key(self, purpose: str) -> bytes:
        """Return a secret key for a purpose, which only the ranks know; needs a group of several ranks."""
        assert self.store is not None
        return derived_key(self.store, purpose)

    def next_series(self) -> str:
        """Return the name of a new series of saves; all ranks must call this in the same order."""
        return f"{self.session}-{next(self._series)}"

    def close(self) -> None:
        """Drop the store, which ends with rank 0's reference to it; called on all ranks after their last save."""
        self.store = None
