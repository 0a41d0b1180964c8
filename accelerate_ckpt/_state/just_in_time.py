"""Just-in-time saves: when a rank dies under DDP, another one saves the state of all (:mod:`ckpt_core.survivors`)."""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch
from accelerate.utils import DistributedType

from accelerate_ckpt import _termination
from accelerate_ckpt._state.parts import FORMAT, RANK, is_sharded, model_parts, optimizer_parts, sharded_parts
from accelerate_ckpt._state.preemption import target_of_run
from accelerate_ckpt._state.resume import directory_of_run
from accelerate_ckpt._state.save import metadata_of, rank_state
from accelerate_ckpt._state.session import Session, live_sessions
from ckpt_core.errors import RankFailedError
from ckpt_core.paths import is_remote
from ckpt_core.process.at_exit import call_after_threads
from ckpt_core.separate import RescueSave
from ckpt_core.state.kinds import Kind, Part, indexed, saved_buffers
from ckpt_core.state.rng import RngState
from ckpt_core.survivors import (
    NO_PLACE,
    LiveWeights,
    Rescue,
    Survivors,
    ignoring_signals,
    no_rescue,
    shards_of,
    wait_seconds_of,
    why_not_replicas,
)

log = logging.getLogger(__name__)

_REPLICAS = (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
_DRAIN_SECONDS = 5.0  # enough for a pending save that only waits for the disk
_CUT = (
    "a rank was lost between an optimizer's step and the next batch, and what the script had left to do there, "
    "such as a scheduler's step, is skipped"
)
_hooked: list[bool] = []
_kept: list[Any] = []  # keeps the Accelerator alive until training is over, if it is a local of a function that raises


def note_start(session: Session) -> None:
    """Note this rank's own state before it trains, when the script begins to iterate over a loader.

    Not if the ranks would have to meet first (a remote directory), because they may be at different loaders.
    """
    if not _is_wanted(session) or session.work_done[0]:
        return
    if session.just_in_time is None:
        is_ready = session.accelerator._models and session.accelerator._optimizers and torch.is_grad_enabled()
        if not is_ready or is_remote(directory_of_run(session)) or _problem_of(session) is not None:
            return  # after the first step, note_step warns about a problem
        session.just_in_time = JustInTime(session)
    session.just_in_time.note_start()


def _is_wanted(session: Session) -> bool:
    # the notes are next to the checkpoints of the run, which a rehearsal leaves alone
    is_asked_for = wait_seconds_of(session.config.just_in_time) is not None
    return is_asked_for and session.world_size > 1 and session.rehearsal is None


def note_step(session: Session) -> None:
    """Note this rank's own state after the body of the training loop."""
    if not _is_wanted(session):
        return
    is_first = session.just_in_time is None or not session.just_in_time.survivors.last
    problem = _problem_of(session) if is_first else None
    if problem is not None:
        session.tell_once("just-in-time", no_rescue(problem))
        just_in_time, session.just_in_time = session.just_in_time, None
        if just_in_time is not None:
            just_in_time.close(remove=True)
        return
    if session.just_in_time is None:
        just_in_time = JustInTime(session)
        if not just_in_time.meets():
            just_in_time.close(remove=True)
            session.tell_once("just-in-time", no_rescue(NO_PLACE))
            session.note_step = lambda _: None
            return
        session.just_in_time = just_in_time
    session.just_in_time.step_is_done()


def save_if_rank_was_lost(error: BaseException) -> None:
    """Make a just-in-time save if ``error`` is due to the loss of another rank."""
    for session in live_sessions():
        if session.just_in_time is not None:
            session.just_in_time.rescue(error)


def _problem_of(session: Session) -> str | None:
    accelerator = session.accelerator
    kind, optimizers = accelerator.distributed_type, [item.optimizer for item in accelerator._optimizers]
    problem = (
        None
        if _shards_of(session)
        else why_not_replicas(kind.value, accelerator._models, optimizers, are_replicas=kind in _REPLICAS)
    )
    if problem is not None:
        return problem
    if session.uneven or session.local_sgd.moments_differ:
        return "the ranks may take different numbers of steps, or have weights of their own"
    if len(accelerator._save_model_state_pre_hook) > (session.saves_alone is not None):
        return "hooks of the script write files into checkpoints, which needs all ranks"
    return None


def _shards_of(session: Session) -> list[int] | None:
    """Return which shard each rank holds if other ranks hold copies of it (HSDP); None otherwise."""
    is_candidate = is_sharded(session.accelerator) and session.saves_alone is None
    return shards_of(session.accelerator._models, session.world_size) if is_candidate else None


def _hook_exceptions() -> None:
    # for exceptions outside of accelerator.backward: in other collectives, in a forward pass
    if _hooked:
        return
    _hooked.append(True)
    before = sys.excepthook

    def hook(kind: Any, error: Any, trace: Any) -> None:
        save_if_rank_was_lost(error)
        before(kind, error, trace)

    sys.excepthook = hook
    call_after_threads(_save_at_end)  # for programs that catch the exception and end


def _save_at_end() -> None:
    for session in live_sessions():
        if session.just_in_time is not None:
            session.just_in_time.at_end()


class JustInTime:
    """Notes this rank's own state during training, and saves a checkpoint when another rank dies."""

    def __init__(self, session: Session) -> None:
        self._session = session
        wait = wait_seconds_of(session.config.just_in_time)
        assert wait is not None
        self._directory = directory_of_run(session) if session.saves_alone is None else session.saves_alone.directory
        shards = _shards_of(session)
        self.survivors = Survivors(self._directory, session.rank, session.world_size, session.run_id, wait, shards)
        self._weights = LiveWeights(session.accelerator._models)
        self._step = 0
        self._is_over = False
        self._not_exact: list[str] = []
        _kept[:] = [session.accelerator]
        _termination.protect()
        _hook_exceptions()
        session.data.before_leaving = self._loop_is_left
        session.checkpointer.wait_for_no_dead(self.survivors.find_dead)
        before = session.agreement.find_dead
        session.agreement.find_dead = lambda: {*before(), *self.survivors.find_dead()}

    def _loop_is_left(self) -> None:
        if self.survivors.is_rank_gone():
            self.rescue(RankFailedError("another rank is gone"))

    def note_start(self) -> None:
        """Note the state before this rank trains."""
        session = self._session
        if not session.data.is_settled:
            return
        state = self._state()
        state["own"] |= {"gradients": None, "window_open": False}  # as after a step, outside of a window
        self.survivors.note_start(state)

    def step_is_done(self) -> None:
        """Note the state after a step; if an exception was raised in it, the script has caught it."""
        self._is_over = False
        self.note()

    def note(self) -> None:
        """Note the state after a step, unless it is inside of an accumulation window."""
        session = self._session
        if session.window_is_open or session.local_sgd.active or session.uneven:
            return
        self.survivors.note(self._state())
        self._weights.note(self.survivors.last)
        self._step = session.step

    def _state(self) -> dict[str, Any]:
        session = self._session
        accelerator = session.accelerator
        return {
            "own": rank_state(session, variables=False),
            "schedulers": [item.state_dict() for item in accelerator._schedulers],
            "scaler": None if accelerator.scaler is None else accelerator.scaler.state_dict(),
            "custom": [session.note_object(item) for item in accelerator._custom_objects],
            "step": session.step,
        }

    def backward_begins(self, loss: Any) -> None:
        """Note the generators and buffers (BatchNorm's statistics) of this step, before gradients are exchanged."""
        session = self._session
        session.data.uses.note()  # the batch is used
        if not session.accelerator.sync_gradients or session.local_sgd.active or session.uneven:
            return
        own: dict[str, Any] = {"data": {"rng": RngState.capture().encode()}}
        if not is_sharded(session.accelerator):
            own["buffers"] = [saved_buffers(model) for model in session.accelerator._models]
        self.survivors.note_exchange(
            {"own": own, **session.note_ahead(loss)}, {"own": {"data": {"loaders": session.data.capture_ahead()}}}
        )

    def meets(self) -> bool:
        """Return whether survivors could meet; called on all ranks together."""
        if not is_remote(self._directory):
            return True

        def look() -> None:
            if not self.survivors.sees_all:
                raise RankFailedError(NO_PLACE)

        try:
            self._session.agreement.all_succeeded("just_in_time", lambda: None)  # now each rank has created its file
            self._session.agreement.all_succeeded("just_in_time", look)
        except RankFailedError:
            return False
        return True

    def close(self, *, remove: bool) -> None:
        """Stop taking part; ``remove`` this rank's file if training came to its end."""
        _kept.clear()
        self.survivors.close(remove=remove)

    def at_end(self) -> None:
        """Save if another rank is dead, otherwise tell the others that this one leaves; at the end of the program."""
        if self.survivors.is_rank_gone():
            self.rescue(RankFailedError("another rank is gone"))
        elif not self._is_over:
            self._is_over = True
            self.survivors.leave()

    def rescue(self, error: BaseException) -> None:
        """Save if ``error`` is due to the loss of another rank and the survivors choose this rank."""
        if self._is_over:
            return
        self._is_over = True
        with ignoring_signals():
            try:
                if not self.survivors.is_loss(error):
                    self.survivors.leave()
                    return
                self._session.checkpointer.drain(timeout=_DRAIN_SECONDS)
                self.survivors.rescue(self._held(), self._save, self._write, self._weights.since)
            except Exception:
                log.exception("could not save a checkpoint after a rank had died: resume from the last one")

    def _held(self) -> int | None:
        noted = self.survivors.last
        if self._session.step != self._step:  # the script has done part of what it does after an optimizer's step
            self.note()
            self._not_exact = [_CUT]
            return self.survivors.last if self.survivors.last > noted else None
        return noted if self._weights.are_noted and self._weights.put_back() else None

    def _place(self, rescue: Rescue) -> tuple[str, RescueSave]:
        session, alone = self._session, self._session.saves_alone
        target = target_of_run(session) if alone is None else alone.target()
        options = session.config.storage_options
        return target, RescueSave(rescue, target, rank=session.rank, session=session.run_id, storage_options=options)

    def _write(self, rescue: Rescue) -> dict[str, Any]:
        """Write the files of the ranks on whose behalf this one writes; return where, and what is in them."""
        session, alone = self._session, self._session.saves_alone
        target, together = self._place(rescue)
        if alone is not None and session.checkpointer.exists(target):
            return {}  # it was saved already, at the end of this step
        return together.write(
            lambda rank: self._parts(rescue, rank), write_files=None if alone is None else alone.write_files
        )

    def _save(self, rescue: Rescue) -> None:
        session = self._session
        target, together = self._place(rescue)
        if not rescue.written[0]:
            return
        metadata = metadata_of(session, target)
        metadata[FORMAT]["not_exact"] += rescue.notes(session.rank, "own", "custom")
        metadata[FORMAT]["not_exact"] += [*self._not_exact, *session.not_noted()]
        together.commit(metadata=metadata, step=session.step)
        log.warning("a rank was lost: rank %d saved step %d in %s", session.rank, session.step, target)

    def _parts(self, rescue: Rescue, rank: int) -> list[Part]:
        accelerator, shared = self._session.accelerator, rescue.ranks[self._session.rank]
        if is_sharded(accelerator):
            parts = sharded_parts(accelerator)
        else:
            weights = [model.state_dict() for model in accelerator._models]
            parts = model_parts(accelerator._models, weights, Kind.REPLICATED)
            parts += optimizer_parts(accelerator._optimizers, Kind.REPLICATED)
        schedulers = enumerate(shared["schedulers"])
        parts += [Part(indexed("scheduler", index), item, Kind.REPLICATED) for index, item in schedulers]
        if shared["scaler"] is not None:
            parts.append(Part("scaler", shared["scaler"], Kind.REPLICATED))
        custom = enumerate(rescue.ranks[rank]["custom"])
        parts += [Part(f"custom_{index}", item, Kind.PER_RANK) for index, item in custom]
        return [*parts, Part(RANK, rescue.per_rank_state_of(rank, "own"), Kind.PER_RANK)]
