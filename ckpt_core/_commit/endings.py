"""Whether a rank that is gone was told to end, or has crashed: launchers send SIGTERM to the others then."""

from __future__ import annotations

import contextlib
import json
import time

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from ckpt_core._commit.tcp_store import TimedStore
from ckpt_core.errors import RankFailedError
from ckpt_core.storage.lease import lives, this_process

_ANSWER_SECONDS = 5.0
_WAVE_SECONDS = 3.0  # a signal to a job reaches its last rank at most so long after its first


class Endings:
    """What a rank knows of the ends of the others; made on all of them.

    Args:
        store: That rank 0 serves.
        rank: This process's rank.
        world_size: Number of ranks.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = TimedStore(PrefixStore("endings", store), answer_within=_ANSWER_SECONDS)
        self._rank = rank
        self._others = [other for other in range(world_size) if other != rank]
        self._store.set(f"process/{rank}", json.dumps(this_process()))

    def told(self) -> bool:
        """Note that this rank is told to end; return whether another one is gone that was not. Any thread may ask."""
        crashed: list[int] = []
        with contextlib.suppress(RankFailedError):  # rank 0 is gone, and counts nothing more
            self._store.set(f"told/{self._rank}", "")
            deadline = time.monotonic() + _WAVE_SECONDS
            while crashed := [other for other in self._others if not self._is_accounted_for(other)]:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
        return bool(crashed)

    def is_rank_gone(self) -> bool:
        """Whether the process of another rank is over; of one on another machine, nobody knows. Any thread may ask."""
        keys = [f"process/{other}" for other in self._others]
        return any(lives(json.loads(self._store.get(key))) is False for key in keys if self._store.has(key))

    def _is_accounted_for(self, rank: int) -> bool:
        if self._store.has(f"told/{rank}"):
            return True
        # on another machine it may be alive: nobody knows, and a signal to the job comes there, too
        return self._store.has(f"process/{rank}") and bool(lives(json.loads(self._store.get(f"process/{rank}"))))
