"""Whether a rank that is gone has ended on a signal or crashed: after a crash, launchers send SIGTERM to the others."""

from __future__ import annotations

import contextlib
import json
import time

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from ckpt_core._commit.tcp_store import TimedStore
from ckpt_core.errors import RankFailedError
from ckpt_core.storage.lease import is_alive, this_process

_ANSWER_SECONDS = 5.0
_WAVE_SECONDS = 3.0  # a signal to a job reaches its last rank at most this long after its first


class Endings:
    """Tells a rank how other ranks have ended; constructed on all ranks.

    Args:
        store: The store that rank 0 serves.
        rank: This process's rank.
        world_size: Number of ranks.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = TimedStore(PrefixStore("endings", store), answer_within=_ANSWER_SECONDS)
        self._rank = rank
        self._others = [other for other in range(world_size) if other != rank]
        self._store.set(f"process/{rank}", json.dumps(this_process()))

    def told(self) -> bool:
        """Record that this rank was told to end; return whether another rank is gone that was not. From any thread."""
        crashed: list[int] = []
        with contextlib.suppress(RankFailedError):  # rank 0, which serves the store, is gone
            self._store.set(f"told/{self._rank}", "")
            deadline = time.monotonic() + _WAVE_SECONDS
            while crashed := [other for other in self._others if not self._is_accounted_for(other)]:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
        return bool(crashed)

    def is_rank_gone(self) -> bool:
        """Return whether another rank's process on this machine has ended; other machines are not seen. Any thread."""
        keys = [f"process/{other}" for other in self._others]
        return any(is_alive(json.loads(self._store.get(key))) is False for key in keys if self._store.has(key))

    def _is_accounted_for(self, rank: int) -> bool:
        if self._store.has(f"told/{rank}"):
            return True
        # On another machine it may be alive, which cannot be seen from here; a signal to the job reaches it, too.
        return self._store.has(f"process/{rank}") and bool(is_alive(json.loads(self._store.get(f"process/{rank}"))))
