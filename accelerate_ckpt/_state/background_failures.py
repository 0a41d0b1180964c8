"""Raises failures of background saves in training, on every rank at the same call."""

from __future__ import annotations

import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable, Collection
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from ckpt_core.directory import DirectoryCheckpointer
from ckpt_core.errors import CheckpointError
from ckpt_core.ranks import Agreement, RunOutcome, decode_error, encode_error

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class AgreedSave:
    """What the ranks have agreed on before a save."""

    path: str
    step: int | None  # at which step rank 0 saves; None if the ranks may be at different ones
    number: int | None  # of the save, among those of this run
    left_out: frozenset[int]  # ranks that are known not to take part, at the time of the agreement
    absent: Callable[[], Collection[int]]  # returns all such ranks later; called on rank 0, by any thread


class OutcomeWatch:
    """Watches the background saves of one Accelerator; the store is shared by all ranks, None for a single process."""

    def __init__(self, checkpointer: DirectoryCheckpointer, agreement: Agreement, store: Store | None) -> None:
        self._checkpointer = checkpointer
        self._agreement = agreement
        self._outcome = RunOutcome(checkpointer, store, agreement.rank, agreement.world_size)
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()  # not by id(), which a later optimizer may get again
        self._under_way = False

    def save_begun(self) -> None:
        """Note that a save runs in the background; called on every rank."""
        self._under_way = True
        self._outcome.save_begun()

    def optimizer_stepped(self, optimizer: Any) -> None:
        """Raise a failure that all ranks know of, if gradients were exchanged between the last boundary and this step.

        They were if this optimizer steps for the second time; with several optimizers, not every step exchanges any.
        """
        if not self._under_way:
            return
        if optimizer in self._stepped:
            self._stepped.clear()
            self.at_boundary()
        self._stepped.add(optimizer)

    def at_boundary(self) -> None:
        """Raise a failure that all ranks know of, as the same class on all; called after the ranks exchanged data."""
        try:
            self._outcome.at_boundary()
        except CheckpointError:
            self._stepped.clear()
            raise
        saves = self._checkpointer
        self._under_way = self._agreement.world_size > 1 or saves.is_busy or saves.failure is not None

    def before_save(
        self,
        path: str,
        refuse: Callable[[str], Exception | None],
        *,
        step: int | None,
        waits: bool,
        may_be_absent: bool,
    ) -> AgreedSave:
        """Raise on all ranks a failure that rank 0 knows of; return the path and the step at which rank 0 saves.

        Rank 0's path is used: in scripts that put the time or a temporary directory into it, it differs on every rank.
        So are its step, and the ``ValueError`` or ``FileExistsError`` that ``refuse`` returns for the path. With
        ``waits``, it waits for all ranks, but with ``may_be_absent`` not for ranks that are known to have continued
        without this save. Without ``waits``, a rank that does not call is found when the save is committed.
        """
        failure, reason = None, None
        if self._agreement.rank == 0:
            failure = self._outcome.unraised
            error = refuse(path)
            reason = None if error is None else [isinstance(error, OSError), str(error)]
        encoded = None if failure is None else encode_error(failure)
        agreement = self._agreement
        value = [path, encoded, reason, step, self._checkpointer.next_number if agreement.world_size > 1 else None]
        if waits:
            answer = agreement.from_rank_zero("save_state", value, may_be_absent=may_be_absent)
        else:
            answer = agreement.announce("save_state", value)
        agreed, encoded, reason, step_of_rank_0, number = answer
        if encoded is not None:
            self._after_raise()
            raise failure or decode_error(encoded)
        if reason is not None:
            is_file, text = reason
            raise FileExistsError(text) if is_file else ValueError(text)
        if agreed != path:
            log.warning("rank %d saves to %s, the path of rank 0, and not to %s", self._agreement.rank, agreed, path)
        absent = functools.partial(agreement.absent_from, agreement.meeting, agreement.place)
        return AgreedSave(str(agreed), step_of_rank_0, number, frozenset(agreement.left_out), absent)

    def after_training(self) -> None:
        """Wait for pending saves and raise, on all ranks together, a failure that no rank has raised yet."""
        self._checkpointer.drain()
        failure = self._outcome.unraised
        if failure is not None:
            self._after_raise()
            raise failure

    def _after_raise(self) -> None:
        self._outcome.was_raised()
        self._stepped.clear()
