"""``memory_every_n_steps``: the last snapshots of a run in host memory, which survive a crash of its processes."""

from __future__ import annotations

import atexit
import dataclasses
import sys
from typing import Any

from ckpt_core import Catalog, CheckpointInfo
from ckpt_core.directory import DirectoryCheckpointer
from ckpt_core.errors import CheckpointError, RankFailedError
from ckpt_core.ranks import Agreement, RankGroup
from ckpt_core.tiers import MemoryTier


class MemorySnapshots:
    """The snapshots of one Accelerator in memory, and when one is due; created on all ranks together.

    ``settings`` are those of the checkpointer that saves and reads them.
    """

    def __init__(
        self, tier: MemoryTier, agreement: Agreement, ranks: RankGroup, strategy: str, **settings: Any
    ) -> None:
        self.tier = tier
        self._name = "snapshot-{}"  # not like a checkpoint's name, whose number may be something other than a step
        self._saves = True
        try:
            token = agreement.asked_of_rank_zero("memory", tier.begin)
            try:
                agreement.all_succeeded("memory", lambda: self._look(token))
            except RankFailedError:
                self._name = f"snapshot-{{}}-{ranks.session}"  # a machine may return with an old snapshot of that step
                tier.join_machines(agreement, ranks)
        except CheckpointError as error:
            self.stop(error if ranks.rank == 0 else None)
        self.checkpointer = DirectoryCheckpointer(ranks=ranks, **{**settings, **tier.settings(strategy)})
        if ranks.rank == 0 or tier.machines > 1:
            atexit.register(self._at_exit)

    def _look(self, token: str) -> None:
        if not self.tier.is_seen(token):
            raise RankFailedError("the ranks do not share one memory")

    def stop(self, reason: object) -> None:
        """Take no more snapshots; called on all ranks together, with ``reason`` None on ranks that do not warn."""
        if reason is not None:
            self.tier.fail(reason)
        self._saves = False

    def found(self) -> list[CheckpointInfo]:
        """Return the snapshots in memory, for look-ups; without their step, which may differ from names' numbers."""
        directory = self.tier.found() if self._saves else None  # snapshots that not all ranks see cannot be loaded
        found = [] if directory is None else Catalog(directory, suffix="", storage=self.tier.storage).checkpoints()
        return [dataclasses.replace(info, step=None) for info in found]

    def due(self, session: Any) -> str | None:
        """Return the path of a snapshot to save now, None if none is due; called by all ranks after each step."""
        step = session.step
        if not self._saves or not self.tier.due(step) or session.window_is_open:
            return None
        reason = path = None
        if session.step_of_all is None:
            reason = "the ranks may take different numbers of steps"
        elif session.accelerator._save_model_state_pre_hook:
            reason = "hooks of the script (register_save_state_pre_hook) write files into each checkpoint"
        if reason is not None:
            self.stop(reason if session.rank == 0 else None)
            return None
        if session.rank == 0:
            path = self.tier.next_path(step, self._name, is_busy=self.checkpointer.is_busy)
        found: str | None = session.agreement.announce("memory", path)
        if found is not None and self.tier.machines > 1:
            self.tier.make_room(found)
        return found

    # ---- the end -----------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Keep the snapshots for the next start."""
        atexit.unregister(self._at_exit)
        self.checkpointer.close(raises=False)
        self.tier.leave()

    def end(self, session: Any) -> None:
        """Delete the snapshots: the run has ended without a crash, and its checkpoints are durable."""
        atexit.unregister(self._at_exit)
        self.checkpointer.close(raises=False)
        if words := self.tier.in_words():
            session.announce(words)
        self.tier.end()

    def _at_exit(self) -> None:
        self.checkpointer.close(raises=False)
        if getattr(sys, "last_value", None) is None:
            self.tier.end()
        else:  # an exception has ended the program
            self.tier.leave()
