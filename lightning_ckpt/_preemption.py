"""Acts between two batches on signals and notices that the run is to end, and on background saves that are durable.

Handlers of SIGTERM and of SLURM's requeue signal only note the signal. A handler that saved, or notified the other
ranks, would wait for ranks that are in the gradient exchange of the batch that the signal interrupted. Instead, all
ranks save, requeue or end at the same boundary, even if only one was signalled. Other notices are treated alike.

Memory for the copies of asynchronous saves is reserved once the optimizers have their state.

Loggers that upload checkpoints are called once a checkpoint is durable (:mod:`lightning_ckpt._observers`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import signal
import threading
from typing import Any

import torch.distributed as dist

from ckpt_core import Checkpointer
from ckpt_core.preemption import Notices, Preemption, SignalNotes, exit_status
from ckpt_core.process.signal_thread import SignalThread, die_of
from ckpt_core.ranks import Call, Endings, Meeting, connect_store
from lightning_ckpt._observers import Observers
from lightning_ckpt._plugin_base import ReliableCheckpointIO
from lightning_ckpt._private.boundaries import TrainerBoundaries
from lightning_ckpt._private.guard import missing_boundaries
from lightning_ckpt._private.replacing import Live

logger = logging.getLogger(__name__)

_ATTRIBUTE = "_lightning_ckpt_boundaries"
_REQUEUE = "save and requeue"
_TERMINATE = "SIGTERM"


def watch_boundaries(trainer: Any) -> None:
    """Make a Trainer act on signals, and notify its loggers of checkpoints, between batches until it is torn down.

    Called on all ranks together, in ``setup``, if a plugin or callback of ours is used. Does nothing if called again,
    or if ``setup`` is called without a run, as in tests, because nothing would tear it down.
    """
    if vars(trainer).get(_ATTRIBUTE) is not None or trainer.state.status != "running":
        return
    missing = missing_boundaries(trainer)
    if missing:
        logger.warning(
            "this release of Lightning has no %s: signals are handled inside their handlers, and loggers learn of "
            "checkpoints before they are durable",
            ", ".join(missing),
        )
        return
    setattr(trainer, _ATTRIBUTE, _Between(trainer))


class _Between(Live):
    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._open = contextlib.ExitStack()  # what _close has to undo, also if the rest of __init__ fails
        self._observers = Observers(trainer)
        self._open.callback(self._observers.close)
        self._start = _Start(trainer)
        self._open.callback(self._start.close)
        self._boundaries = TrainerBoundaries(
            trainer,
            registering=self._start.close,
            reached=self._reached,
            ending=self._observers.tell_all,
            closing=self._close,
        )
        is_connected = trainer.world_size > 1 and dist.is_available() and dist.is_initialized()
        store, rank, world_size = None, 0, 1
        if is_connected:
            rank, world_size = trainer.global_rank, trainer.world_size
            store = connect_store(rank, world_size, trainer.strategy.broadcast)
            self._start.endings = Endings(store, rank, world_size)
        self._meeting = Meeting(store, rank, world_size, is_rank_gone=self._is_rank_gone)
        self._open.callback(self._meeting.close)
        self._told: set[str] = set()  # reasons to end that this rank has noted and not yet acted on
        self._requeue = self._terminate = None
        if is_connected or trainer.world_size == 1:
            self._requeue = self._boundaries.instead_of_requeue(lambda: self._meeting.ask(_REQUEUE))
        # With one process, Lightning's handler also only notes SIGTERM, but the run would end before we save or requeue
        self._saver = next((cb for cb in trainer.callbacks if getattr(cb, "preemption", None) is not None), None)
        is_ours = self._saver is not None or self._boundaries.requeue_signal is not None
        if is_connected or (is_ours and trainer.world_size == 1):
            self._terminate = self._boundaries.instead_of_terminate(lambda: self._note(_TERMINATE))
        preemption = Preemption(signals=()) if self._saver is None else self._saver.preemption
        others = [name for name in preemption.signals if name not in (_TERMINATE, self._boundaries.requeue_signal)]
        self._open.callback(Notices(preemption, self._note).close)
        self._open.callback(SignalNotes(others, self._note).close)
        self._has_reserved = False

    def _note(self, reason: str) -> None:
        self._told.add(reason)
        self._meeting.ask(reason)

    def _reached(self, position: tuple[int, int]) -> None:
        self._observers.tell_ended()
        is_end, is_training = position[1] == TrainerBoundaries.END, self._trainer.state.fn == "fit"
        is_last = is_end and not (is_training and self._trainer.evaluating)
        if is_training and not self._has_reserved and not is_end and self._trainer.global_step > 0:
            self._has_reserved = True
            _reserve_memory(self._trainer)
        call = self._meeting.at_last(position) if is_last else self._meeting.at(position)
        if call.requests:
            self._act(call)

    def _act(self, call: Call) -> None:
        if _REQUEUE in call.requests and self._requeue is not None:
            if call.together:
                self._requeue()
            else:
                logger.error("the job is not requeued: the other ranks do not answer, and cannot save")
        reasons = sorted(call.requests - {_REQUEUE})
        if reasons and self._terminate is not None:
            self._told.clear()
            if not call.together:
                logger.warning("%s ends this rank alone: the other ranks do not answer", " and ".join(reasons))
                for auto_resume in _auto_resumes(self._trainer):
                    auto_resume.crashed()  # launchers send SIGTERM to the others when a rank has crashed
            elif self._saver is not None and self._trainer.state.fn == "fit":
                self._saver.save_before_end(self._trainer, " and ".join(reasons))
            self._terminate(exit_status(reasons))

    def _is_rank_gone(self) -> bool:
        endings = self._start.endings
        is_over = endings is not None and endings.is_rank_gone()
        return is_over or any(getattr(callback, "is_rank_gone", False) for callback in self._trainer.callbacks)

    def _close(self) -> None:
        vars(self._trainer).pop(_ATTRIBUTE, None)
        self._open.close()
        # Signals after the last boundary: all saves are durable by now, and the sender waits for this process to end.
        if self._told and self._terminate is not None and self._trainer.state.status != "interrupted":
            self._terminate(exit_status(self._told))


class _Start:
    """Handles SIGTERM until Lightning has registered its handlers: it has its usual effect, but is not a crash.

    ``resume="auto"`` does count the start as a crash if another rank died without having been signalled.
    """

    def __init__(self, trainer: Any) -> None:
        self.endings: Endings | None = None
        self._trainer = trainer
        self._begun = itertools.count()
        self._is_default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        self._notes = SignalNotes([_TERMINATE], self._told)
        self._threads: list[SignalThread] = []  # one, or none if the program has its own handler
        if self._is_default and threading.current_thread() is threading.main_thread():
            self._threads.append(SignalThread(self._heard, self._in_child))

    def _heard(self, number: int) -> None:
        if self._threads and number == signal.SIGTERM:
            self._told(_TERMINATE)

    def _told(self, name: str) -> None:
        if next(self._begun):  # the thread and the handler both call this; the first one acts
            return
        if self.endings is None or not self.endings.told():
            for auto_resume in _auto_resumes(self._trainer):
                auto_resume.end(self._trainer)
        if self._is_default:
            die_of(getattr(signal, name))

    def _in_child(self) -> None:
        self._notes.close()
        self._threads.clear()

    def close(self) -> None:
        self._notes.close()
        while self._threads:
            self._threads.pop().close()


def _auto_resumes(trainer: Any) -> list[Any]:
    found = (getattr(callback, "auto_resume", None) for callback in trainer.callbacks)
    return [auto_resume for auto_resume in found if auto_resume is not None]


def _reserve_memory(trainer: Any) -> None:
    """Make the Trainer's plugin allocate memory for asynchronous saves; called once the optimizers have their state."""
    strategy, plugin = trainer.strategy, trainer.strategy.checkpoint_io
    callbacks = trainer.checkpoint_callbacks
    if not isinstance(plugin, ReliableCheckpointIO) or plugin.options.strategy == "sync" or not callbacks:
        return
    if isinstance(plugin.checkpointer, Checkpointer) and (
        not trainer.is_global_zero or strategy.restore_checkpoint_after_setup
    ):
        return  # one rank writes the file; how much it gathers from sharded strategies is not known here
    weights_only = all(getattr(callback, "save_weights_only", False) for callback in callbacks)
    plugin.checkpointer.reserve([trainer.lightning_module], [] if weights_only else trainer.optimizers)
