"""The choices a user has about consistent cuts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["CutOptions"]


@dataclass(frozen=True)
class CutOptions:
    """How the snapshots of an asynchronous training are taken.

    Args:
        alignment: ``"unaligned"`` copies a shard's state at the first sign of a snapshot and adds the updates that were
            under way as they arrive: nobody waits. ``"aligned"`` copies when all of them have arrived and holds back
            later updates until then, for at most ``aligned_timeout``.
        aligned_timeout: Seconds after which an aligned snapshot goes on as an unaligned one. It cannot be switched off:
            without it, one frozen worker stops all the others.
        snapshot_timeout: Seconds after which a snapshot that is not complete is aborted.
        channel_state: What an unaligned snapshot does with updates that were under way: ``"fold"`` applies them to
            the copy, ``"record"`` saves them beside it, to be applied after loading. Use ``"record"`` where an update
            cannot be applied to a copy.
        max_inflight_updates: How many updates of a stream may be under way at a time; None for no limit. A worker
            that rejoins a sparse training without a limit may have to repeat all batches.
        on_worker_failure: ``"rollback"`` restarts everything from the last checkpoint. ``"rejoin"`` starts only the
            lost worker again; each batch is still applied once on each shard, but the pieces of the updates that were
            under way may come from two different gradients.
        record_order: Keep the order of all updates and what each was computed from, so that the run can be replayed
            bit for bit. Memory and checkpoints grow with each update.
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
