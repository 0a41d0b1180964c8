"""``ResumableCheckpoint``: the callback with which a Lightning run resumes bit for bit.

It is a ``ModelCheckpoint`` that also raises failures of background saves on all ranks, copies a checkpoint instead of
saving it twice, and resumes from the newest checkpoint that verifies.
"""

# Without "from __future__ import annotations", because parsers such as LightningCLI read annotations as types.
import contextlib
import functools
import inspect
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal
from weakref import proxy

import torch

from ckpt_core import CheckpointInfo
from ckpt_core.catalog import Catalog, newest_first
from ckpt_core.errors import CheckpointError, StateMismatchError
from ckpt_core.option_checks import check_count, check_options, check_path, check_switch, one_of, or_none
from ckpt_core.paths import is_remote
from ckpt_core.pins import pin_path
from ckpt_core.policies import RetentionHistory, RetentionPolicy, SaveInterval, numbers_in, policy_of_words
from ckpt_core.preemption import NOT_SAVED, Preemption
from ckpt_core.process.console import warn
from ckpt_core.resume import ResumeAttempts, ResumePoint
from ckpt_core.survivors import no_rescue, wait_seconds_of
from ckpt_core.tiers import MEMORY_ROOT, MemoryTier
from lightning_ckpt._bases import ModelCheckpointBase
from lightning_ckpt._callbacks.background_failures import OutcomeWatch, raise_as_rank_0
from lightning_ckpt._callbacks.interval import AutoInterval
from lightning_ckpt._callbacks.just_in_time import JustInTime
from lightning_ckpt._callbacks.lookup import (
    Lookup,
    follow,
    is_same_path,
    is_training_state,
    left_in_another_version,
    open_filesystem,
    stock_hint,
)
from lightning_ckpt._callbacks.memory import MemorySnapshots
from lightning_ckpt._callbacks.resume import AutoResume, find_resume, point_of, stable_directory
from lightning_ckpt._exact.mismatch import name_mismatches, unwrap
from lightning_ckpt._exact.state import KEY, ExactState
from lightning_ckpt._preemption import watch_boundaries
from lightning_ckpt._private.boundaries import NO_EXCEPTIONS, forks_or_spawns
from lightning_ckpt._private.guard import check_callback
from lightning_ckpt._private.hooks import before_launches, before_look_ups, find_path_when_none
from lightning_ckpt._private.loops import checkpoint_directory, resume_from, tell_of_checkpoint
from lightning_ckpt._recording import Recording
from lightning_ckpt._rehearsing import is_rehearsed, rehearse_if_asked, rehearse_this_script
from lightning_ckpt._report import RunReport, announce
from lightning_ckpt._routing.trainer import is_routed, raise_on_all_ranks
from lightning_ckpt.io import NO_STATE_KEY, TorchFileIO
from lightning_ckpt.sharded import ShardedCheckpointIO

logger = logging.getLogger(__name__)

_CHECKS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("exact", "log_metrics", "recorder"), check_switch),
    **dict.fromkeys(("resume_attempts", "memory_every_n_steps"), or_none(check_count)),
    "memory_dir": check_path,
    "data_resume": one_of("auto", "replay"),
    "rehearse": one_of(True, False, "strict"),
    "preempt": Preemption.of,
}
_PLUGINS = (TorchFileIO, ShardedCheckpointIO)
_PREEMPTED = "preempted-step="
_JUST_IN_TIME = "just-in-time-step="
_DRAIN_SECONDS = 5.0  # after a rank has died: enough for a pending sharded save that only waits for the disk
_NOT_EMPTY = "exists and is not empty"  # in Lightning's warning


class ResumableCheckpoint(ModelCheckpointBase):
    """A ``ModelCheckpoint`` with which a resumed run ends with the same bits as one that was never interrupted.

    While it is on the Trainer, *every* checkpoint saved through the Trainer (by this callback, by another one, by
    ``trainer.save_checkpoint``) holds the exact state of all ranks under the key ``"lightning_ckpt"``: random
    generators, data position, random generators of data loading workers, gradients of an open accumulation window, open
    metrics, and the position in the training loop. ``trainer.fit(ckpt_path=...)`` resumes from it. If a resume cannot
    be exact, one warning says why.

    Args:
        dirpath: Directory of the checkpoints, or its URL; by default the logger's directory (but see ``resume``).
        filename: Name pattern of the checkpoints, such as ``"{epoch}-{step}"``.
        monitor: Name of the logged quantity that ranks the checkpoints.
        verbose: Whether to report each saved checkpoint.
        save_last: Whether to keep a checkpoint ``last.ckpt`` as well. With our plugins, it is a second name (a hard
            link) of the newest one, also with ``"link"``, and costs no second write.
        save_top_k: Number of best checkpoints to keep; -1 keeps all.
        save_on_exception: Whether to save when training raises.
        save_weights_only: Whether to save only the weights; such a checkpoint cannot be resumed exactly.
        mode: ``"min"`` or ``"max"``: which ``monitor`` is better.
        auto_insert_metric_name: Whether to put names of quantities into the file name.
        every_n_train_steps: Save every N optimizer steps.
        train_time_interval: Save at this interval of training time; the time since the last save survives a resume.
        every_n_epochs: Save every N epochs.
        save_on_train_epoch_end: Whether to save at the end of the training epoch instead of after validation.
        enable_version_counter: Whether to add ``-v1`` and so on rather than replace a file.
        exact: Whether to capture and restore the exact state; without it, this is just a ``ModelCheckpoint``.
        data_resume: How loaders get back to their position. ``"auto"``: by skipping in the sampler, by the loader's own
            state if it has one, otherwise by reading again. ``"replay"``: always by reading again, which is slow but
            only requires a deterministic dataset.
        recorder: Whether each rank records its steps in a small file next to the checkpoints. A resumed run compares
            the steps that it repeats, and reports whether they are equal. There is no file for a directory on a store,
            or with ``exact=False``.
        retention: Which checkpoints of this callback to keep in addition to those of ``save_top_k``: a policy of
            :mod:`ckpt_core.policies`, or its text (``"latest=2,every_steps=1000"``). A checkpoint is deleted when
            neither wants it. With ``save_top_k=-1``, which keeps all, only the policy decides. The best, the last, the
            one that the run was resumed from, and those pinned by ``ckpt keep`` always stay.
        resume: With ``"auto"``, ``trainer.fit`` without ``ckpt_path`` continues from the newest checkpoint that
            verifies. If there is none, it starts from the beginning and logs one line. :attr:`resumed` is then None. A
            ``ckpt_path`` takes precedence. Without ``dirpath``, the checkpoints are then in ``checkpoints`` in the
            Trainer's ``default_root_dir``, so that each start finds those of the previous one.
        resume_attempts: After this many starts in a row that ended without a newer checkpoint, ``"auto"`` tries an
            older one first; None: never.
        log_metrics: Whether to send the figures of each save to the Trainer's loggers: ``checkpoint/bytes``,
            ``checkpoint/commit_seconds``, ``checkpoint/stall_seconds`` (since the last figures),
            ``checkpoint/stall_seconds_total``, ``checkpoint/share_of_run``, ``checkpoint/saves``,
            ``checkpoint/pending`` and ``checkpoint/failures``, as rank 0 sees them. Needs one of our plugins.
        preempt: What makes the run save ``preempted-step=N.ckpt``, on all ranks after the same batch, and end with
            ``SIGTERMException`` and exit status 143 when that is durable. True: SIGTERM. Names of signals
            (``"SIGTERM,SIGUSR1"``, or a list). A :class:`ckpt_core.preemption.Preemption`, or its arguments by name:
            also deadlines and notices, with exit status 75. False: SIGTERM ends the run without a save.
        interval: When to save for a restart. ``"auto"``: at the interval that loses the least time to saves and
            failures (Young/Daly), based on measured saves. ``"continuous"``: each as soon as the previous one is
            durable. It also saves at the end of training, and of epochs if ``every_n_epochs`` is set. Checkpoints
            ranked by a ``monitor`` need a second callback.
        mtbf: For ``"auto"``: mean time between failures of the whole job in seconds; by default as observed.
        max_overhead: For ``"auto"``: the share of the run that saves may take, such as 0.005. Without ``mtbf``, it is
            used in full.
        memory_every_n_steps: In addition to checkpoints, keep a snapshot in the machine's memory, outside this process,
            every N optimizer steps. After a crash, ``resume="auto"`` and ``ckpt_path="last"`` take the newer of both.
            The last two are kept, and deleted when the run has ended. Needs one of our plugins. None: no snapshots.
        memory_dir: The directory in memory for the snapshots.
        rehearse: Whether the first ``fit`` of a new run first runs the script again, in separate processes, and reports
            whether resumes are exact, as ``ckpt rehearse`` does. If one is not, it warns and trains. ``"strict"``: it
            raises instead.
        just_in_time: Whether, when a rank dies under DDP or HSDP, the others save ``just-in-time-step=N.ckpt``, so that
            the restart repeats at most one step. A number: for how many seconds survivors wait for each other (15).

    Raises:
        CheckpointError: At the start of a fit: this release of Lightning is not supported, or ``rehearse`` cannot run
            the script again, because it is not a script or a launcher has started its ranks.

    Examples:
        >>> from lightning_ckpt import ResumableCheckpoint
        >>> callback = ResumableCheckpoint(dirpath="checkpoints", every_n_train_steps=100, save_last=True)
        >>> # Trainer(callbacks=[callback]).fit(model, ckpt_path="last")
    """

    has_rehearsed = False  # in this process: a script that fits several times is rehearsed once

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | Literal["link"] | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
        *,
        exact: bool = True,
        data_resume: Literal["auto", "replay"] = "auto",
        retention: RetentionPolicy | str | None = None,
        resume: Literal["auto"] | None = None,
        resume_attempts: int | None = 3,
        log_metrics: bool = False,
        preempt: bool | str | Sequence[str] | Preemption | Mapping[str, Any] = True,
        recorder: bool = True,
        interval: Literal["auto", "continuous"] | None = None,
        mtbf: float | None = None,
        max_overhead: float | None = None,
        memory_every_n_steps: int | None = None,
        memory_dir: str | Path = MEMORY_ROOT,
        just_in_time: bool | float = False,
        rehearse: bool | Literal["strict"] = False,
    ) -> None:
        check_options(_CHECKS, locals())
        if resume not in (None, "auto"):
            raise ValueError(
                f"resume must be 'auto' or None, not {resume!r:.80}: a path is given to trainer.fit(ckpt_path=)"
            )
        self._interval = SaveInterval.of(interval, mtbf, max_overhead)
        if self._interval is not None:
            ranked = {"monitor": monitor, "every_n_train_steps": every_n_train_steps}
            _check_alone(interval, {**ranked, "train_time_interval": train_time_interval})
            every_n_epochs = every_n_epochs or 0
        self._auto_interval: AutoInterval | None = None
        self._memory_options = None if memory_every_n_steps is None else (memory_every_n_steps, memory_dir)
        if memory_every_n_steps is not None:
            MemoryTier("run", every=memory_every_n_steps, root=memory_dir)  # checks the options
            if resume is None and dirpath is None:
                raise ValueError(
                    "memory_every_n_steps needs dirpath or resume='auto': without them, each start uses another "
                    "directory, and the next start would not find the snapshots"
                )
        self._memory: MemorySnapshots | None = None
        self._known_of_failures: dict[str, Any] = {}
        if isinstance(retention, str):
            check_options({"retention": policy_of_words}, locals())
            retention = policy_of_words(retention)
        if retention is not None and (isinstance(retention, type) or not isinstance(retention, RetentionPolicy)):
            raise TypeError(
                f"retention must be a policy such as ckpt_core.policies.KeepLatest(2), not {retention!r:.80}"
            )
        self._retention = RetentionHistory(retention) if retention is not None else None
        self._metrics: dict[str, float] = {}  # of the checkpoint that is being saved
        self._best_model_path = self._last_model_path = ""
        self._plugin: TorchFileIO | ShardedCheckpointIO | None = None
        self._has_trained = False
        self._is_deciding = False
        self._lookup = Lookup(self.FILE_EXTENSION, self.CHECKPOINT_NAME_LAST)
        # since Lightning 2.5.6
        has_option = "save_on_exception" in inspect.signature(ModelCheckpointBase.__mro__[1]).parameters
        if save_on_exception and not has_option:
            raise ValueError("save_on_exception=True needs Lightning 2.5.6 or newer")
        self.save_on_exception = False  # older releases of Lightning do not set it
        newer: dict[str, Any] = {"save_on_exception": save_on_exception} if has_option else {}
        super().__init__(
            dirpath=dirpath,
            filename=filename,
            monitor=monitor,
            verbose=verbose,
            save_last=save_last,
            save_top_k=save_top_k,
            save_weights_only=save_weights_only,
            mode=mode,
            auto_insert_metric_name=auto_insert_metric_name,
            every_n_train_steps=every_n_train_steps,
            train_time_interval=train_time_interval,
            every_n_epochs=every_n_epochs,
            save_on_train_epoch_end=save_on_train_epoch_end,
            enable_version_counter=enable_version_counter,
            **newer,
        )
        check_callback(self)
        self._watch: OutcomeWatch | None = None
        self._not_empty: warnings.WarningMessage | None = None
        self._saved_by_this_trigger: str | None = None
        self._copy_of: str | None = None
        self._resumed: ResumePoint | None = None
        self._last_found: list[CheckpointInfo] | None = None  # for ckpt_path="last" of the fit that starts
        self._preemption = Preemption.of(preempt)
        self._is_ending = False
        self._auto = AutoResume(resume_attempts) if resume == "auto" else None
        self._given_dirpath = None if dirpath is None else os.fspath(dirpath)
        self.exact = exact
        self.data_resume = data_resume
        self.log_metrics = log_metrics
        self._report: RunReport | None = None
        self.recorder = recorder
        self.rehearse = rehearse
        self._survivors_wait = wait_seconds_of(just_in_time)
        self._just_in_time: JustInTime | None = None
        self._recording: Recording | None = None
        self._state: ExactState | None = None
        self._seconds_since_check: float | None = None
        self._being_saved: tuple[str, int] | None = None
        self._resumes = True
        self._has_moved = False  # whether the directory was moved since the checkpoint that the run resumes from
        self._listen()
        if rehearse and not is_rehearsed():
            before_launches(_rehearse_first)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._listen()  # a spawned process unpickles the callback, and has no hooks yet

    def _listen(self) -> None:
        before_look_ups(_introduce)
        if self._auto is not None:
            find_path_when_none(find_resume, ExactState.resumed_ahead)
        rehearse_if_asked()

    def meet(self, trainer: Any) -> None:
        """Take from the Trainer's plugin how to access the checkpoints: its storage options and tiers."""
        plugin = trainer.strategy.checkpoint_io
        self._plugin = plugin if isinstance(plugin, _PLUGINS) else None
        if self._auto is not None and self.dirpath is None:
            self.dirpath = stable_directory(trainer)  # the logger's directory is a new one at each start
        self._lookup.levels = self._levels_of_names()
        if self._plugin is None:
            self._lookup.set_access(None, None)
        else:
            self._lookup.set_access(self._plugin.storage_options, self._plugin.tiers)

    def _levels_of_names(self) -> int:
        """Return how many subdirectories of ``dirpath`` the filename pattern adds: one for ``{val/loss}``."""
        with contextlib.suppress(Exception):  # the pattern may fail without values; the save reports it
            name = self._format_checkpoint_name(self.filename, {}, auto_insert_metric_name=self.auto_insert_metric_name)
            return os.path.normpath(name).count("/")
        return 0

    # ---- background saves --------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        stock_hint(is_shown=True)
        watch_boundaries(trainer)
        self.meet(trainer)
        with warnings.catch_warnings(record=True) as caught:
            super().setup(trainer, pl_module, stage)
        for each in caught:  # held back until on_train_start: if the run resumes, the directory need not be empty
            if stage == "fit" and _NOT_EMPTY in str(each.message):
                self._not_empty = each
            else:
                _warn_again(each)
        if stage == "fit" and not trainer.fast_dev_run and (self.save_top_k or self.save_last):
            is_first = trainer.is_global_zero and bool(self.dirpath)
            raise_on_all_ranks(self._look_at_directory if is_first else _nothing, world_size=trainer.world_size)
        if self._auto is not None and stage == "fit":
            self._auto.begin(trainer)
        if stage != "fit":
            self._last_found = None  # only a fit uses it
            if self.exact and self._is_first(trainer):
                ExactState.evaluation_begins(trainer, getattr(stage, "value", stage), self._warn_inexact)
        if stage == "fit":
            self._is_ending = False
            self._has_trained = True
            # One watch per Trainer, so that a failure is reported once. The last callback owns it, because it must wait
            # for what all callbacks save on an exception.
            if _callbacks_of(trainer)[-1] is self:
                self._watch = OutcomeWatch(trainer)
            self._auto_interval = None if self._interval is None else AutoInterval(self._interval, trainer)
            self._begin_memory(trainer)
        name_mismatches(trainer)
        if stage == "fit" and _callbacks_of(trainer)[0] is self:
            self._report = RunReport(trainer, log_metrics=self.log_metrics)
        if self.exact and stage == "fit" and trainer.lightning_module is not None:  # a test may have no module
            self._state = ExactState.of(trainer, self.data_resume == "replay", self._warn_inexact)

    def _look_at_directory(self) -> None:
        """Raise if no checkpoint can be saved in ``dirpath``; on a store, note which names are in use."""
        directory = os.fspath(self.dirpath or "")
        catalog = self._lookup.catalog(directory)
        catalog.refuse_unwritable()
        if self._plugin is not None and is_remote(directory):
            self._plugin.names_in_use.update(catalog.paths())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._recording is not None:
            self._recording.batch_ended(outputs, batch_idx)
        save = functools.partial(self._after_batch, trainer, pl_module, outputs, batch, batch_idx)
        self._after_hooks("on_train_batch_end", save)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._after_hooks("on_validation_end", functools.partial(super().on_validation_end, trainer, pl_module))

    def _after_hooks(self, name: str, save: Callable[[], None]) -> None:
        # the module's hook runs after the callbacks' hooks, and the checkpoint must include what it changes and logs
        if self._state is not None:
            self._state.after_hooks(name, save)
        else:
            save()

    def _after_batch(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        # with manual optimization, Lightning 2.6 ignores train_time_interval, and may save weights from before the step
        module: Any = pl_module if pl_module.automatic_optimization else _WithAutomaticOptimization(pl_module)
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
        if self._auto_interval is not None:
            self._auto_interval.after_batch(lambda: self._save_for_restart(trainer))
        if self._memory is not None:
            self._memory.after_batch()
        if self._watch is not None:
            self._watch.after_batch(trainer)
        if self._report is not None:
            self._report.tell_loggers()

    def _save_for_restart(self, trainer: Any) -> None:
        if self._should_skip_saving_checkpoint(trainer):
            return
        candidates = self._monitor_candidates(trainer)
        self._save_topk_checkpoint(trainer, candidates)
        self._save_last_checkpoint(trainer, candidates)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._recording is not None:
            self._recording.finish()
        if self._auto_interval is not None:
            self._save_for_restart(trainer)
        super().on_train_end(trainer, pl_module)
        if self._watch is not None:
            self._watch.after_training(trainer)
        if self._state is not None:
            self._state.training_ended()
        if self._report is not None:
            self._report.training_ends(self.dirpath)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._just_in_time is not None and not self._is_ending:
            self._save_just_in_time(trainer, self._just_in_time, exception)
        plugin = trainer.strategy.checkpoint_io
        if isinstance(plugin, _PLUGINS):
            plugin.checkpointer.drain()  # so that all ranks know of a failure before the save below
            plugin.checkpointer.take_failure()  # already logged; raising it would hide the exception
        try:
            if self._is_ending:
                pass  # save_before_end or _save_just_in_time has saved
            # if only this rank has raised, the collectives in Lightning's save would wait for the others forever
            elif not self.save_on_exception or self._state is None or self._state.gathering.all_are_here():
                super().on_exception(trainer, pl_module, exception)
            else:
                logger.error("no checkpoint is saved after %r, because not all ranks have stopped", exception)
        except CheckpointError:
            logger.exception("could not save a checkpoint after the exception %r", exception)
        if self._watch is not None:
            self._watch.after_exception()
        if self._report is not None:
            self._report.tell_loggers()
        if self._recording is not None:
            self._recording.close()  # no teardown follows an exception, and in a search many trials may raise
        self._end_memory(keep=not self._is_ending)
        if self._auto is not None and _is_no_crash(exception):
            self._auto.end(trainer)

    # ---- the exact state ---------------------------------------------------------------------------------------------

    def _warn_inexact(self, causes: str) -> None:
        warn(f"this resume is not guaranteed to be exact: {causes}", stacklevel=2)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if self._state is not None and self._is_first(trainer):
            self._state.save(checkpoint)
        if KEY not in checkpoint:
            checkpoint[NO_STATE_KEY] = "outside of a fit" if self.exact else "by ResumableCheckpoint(exact=False)"

    def _is_first(self, trainer: Any) -> bool:
        # The callbacks on a Trainer share the exact state; all ranks take part in each gathering of it.
        return next(callback for callback in _callbacks_of(trainer) if callback.exact) is self

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self._state is not None:
            self._state.fit_started()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if self._state is not None and self._is_first(trainer):
            self._state.fit_ended()

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if self._state is not None:
            self._state.weights_averaged(True)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self._state is not None:
            self._state.weights_averaged(False)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        if self._state is not None:
            self._state.backward_begins()
        if self._just_in_time is not None:
            self._just_in_time.backward_begins()

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if self._state is not None:
            self._state.gradients_added(pl_module)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: torch.optim.Optimizer) -> None:
        if self._state is not None:
            self._state.optimizer_steps(optimizer)

    def _begin_just_in_time(self, trainer: Any) -> None:
        if self._survivors_wait is None or trainer.world_size == 1 or trainer.fast_dev_run:
            return
        if self._just_in_time is None and self._state is not None and self._state.at_moment is None:
            problem = JustInTime.problem_of(trainer)
            if problem is None:
                options = self._lookup.storage_options
                just_in_time = JustInTime(trainer, self._state, str(self.dirpath), options, self._survivors_wait)
                problem = just_in_time.problem_of_place()
                if problem is None:
                    self._just_in_time = just_in_time
                else:
                    just_in_time.close()
            if problem is not None and trainer.is_global_zero:
                warnings.warn(no_rescue(problem), stacklevel=2)

    def _begin_recording(self, trainer: Any) -> None:
        # one recording per Trainer, by the first callback that asks for it
        wants = (callback for callback in _callbacks_of(trainer) if callback.exact and callback.recorder)
        is_first = next(wants, None) is self
        if self._state is not None and self._recording is None and is_first and not trainer.fast_dev_run:
            self._recording = Recording(trainer, self.dirpath)
            self._state.record(self._recording)

    # ---- snapshots in memory -----------------------------------------------------------------------------------------

    def _memory_tier(self, trainer: Any) -> MemoryTier | None:
        if self._memory_options is None or is_rehearsed():  # the processes of a rehearsal end without a clean-up
            return None
        every, root = self._memory_options
        return MemoryTier(checkpoint_directory(self, trainer), every=every, root=root)

    def _begin_memory(self, trainer: Any) -> None:
        tier = self._memory_tier(trainer)
        if tier is None or trainer.fast_dev_run:
            return
        problem, plugin = None, trainer.strategy.checkpoint_io
        if not isinstance(plugin, _PLUGINS) or not _saves_through_plugin(trainer.strategy):
            problem = f"{type(plugin).__name__} does not save them: add AsyncCheckpointIO or ShardedCheckpointIO"
        elif plugin.memory is not None:
            problem = "another callback of this Trainer takes some already"
        self._memory = MemorySnapshots.begin(tier, trainer, problem, "step={}" + self.FILE_EXTENSION)
        last, self._last_found = self._last_found, None
        auto = self._auto if self._auto is not None and self._auto.asked else None
        if self._memory is None or (auto is None and last is None):
            return
        found = self._memory.newest(self.FILE_EXTENSION, is_training_state)
        if found is not None and (
            auto.is_newer(found) if auto is not None else newest_first([found, *(last or [])])[0] == found
        ):
            resume_from(trainer, found.path)

    def _end_memory(self, *, keep: bool) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close(keep=keep)

    def _forget_what_was_not_saved(self, trainer: Any) -> None:
        """Drop paths from the restored state if a crash ended their save, or they were not moved with the directory."""
        tier, directory = self._memory_tier(trainer), os.fspath(self.dirpath or "")
        resumed = os.fspath(trainer.ckpt_path or "")
        is_just_in_time = os.path.basename(resumed).startswith(_JUST_IN_TIME)
        if not self._has_moved and not is_just_in_time and (tier is None or not tier.covers(resumed)):
            return
        infos = self._lookup.catalog(directory).checkpoints()
        there = {info.name for info in infos}
        self._forget(lambda path: os.path.basename(path) not in there)
        if self.monitor is None and not self.best_model_path:  # so that the next save replaces this one
            own = (
                info.path
                for info in infos
                if not self._lookup.is_last(info.path) and not info.name.startswith(_PREEMPTED)
            )
            self.best_model_path = next(own, "")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        unwrap(trainer)
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.close()
        just_in_time, self._just_in_time = self._just_in_time, None
        if just_in_time is not None:
            just_in_time.close()
        super().teardown(trainer, pl_module, stage)
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()  # some strategies never call the plugin's teardown
        self._end_memory(keep=False)
        if self._auto is not None and stage == "fit":
            self._auto.end(trainer)
        report, self._report = self._report, None
        if report is not None:
            report.close()
        if self._state is not None:
            self._state.release()

    def file_exists(self, filepath: Any, trainer: Any) -> bool:
        plugin = trainer.strategy.checkpoint_io
        if isinstance(plugin, _PLUGINS) and is_remote(filepath) and self._lookup.tiers is None:
            # A query to a store that is down would stop training.
            is_taken = filepath in plugin.names_in_use and not plugin.checkpointer.has_failed(filepath)
            return bool(trainer.strategy.broadcast(is_taken))
        under_way = isinstance(plugin, _PLUGINS) and plugin.checkpointer.is_pending(filepath)
        if self._lookup.tiers is not None and isinstance(plugin, _PLUGINS) and trainer.is_global_zero:
            under_way = plugin.checkpointer.is_taken(filepath)  # also if only the uploaded copy is left
        found: bool = trainer.strategy.reduce_boolean_decision(under_way, all=False)
        return found or super().file_exists(filepath, trainer)

    # ---- directories on a store --------------------------------------------------------------------------------------

    @property
    def _fs(self) -> Any:
        """The filesystem in which ``ModelCheckpoint`` looks for files."""
        return self._filesystem

    @_fs.setter
    def _fs(self, filesystem: Any) -> None:
        directory = getattr(self, "dirpath", None)
        if directory is not None and is_remote(directory):
            filesystem = open_filesystem(os.fspath(directory or ""), self._lookup.storage_options)
        self._filesystem = filesystem

    # ---- save_last: the same state under a second name ---------------------------------------------------------------

    def _monitor_candidates(self, trainer: Any) -> Any:
        self._saved_by_this_trigger = None  # called at the beginning of each trigger
        return super()._monitor_candidates(trainer)

    def _save_last_checkpoint(self, trainer: Any, monitor_candidates: Any) -> None:
        if trainer.fast_dev_run:
            return  # ModelCheckpoint's on_train_end saves a trial run's weights, which the next start would go on from
        self._copy_of = self._saved_by_this_trigger if _saves_through_plugin(trainer.strategy) else None
        if self._last_checkpoint_saved == self._last_model_path:
            self._last_checkpoint_saved = ""  # Lightning 2.5.0 would replace the file with a link to itself
        try:
            with self._decides():
                super()._save_last_checkpoint(trainer, monitor_candidates)
        finally:
            self._copy_of = None

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        # state_dict is called during the save, before ModelCheckpoint counts it
        self._being_saved = (filepath, trainer.global_step)
        try:
            self._save_or_copy(trainer, filepath)
        finally:
            self._being_saved = None

    def _save_or_copy(self, trainer: Any, filepath: str) -> None:
        source, plugin = self._copy_of, trainer.strategy.checkpoint_io
        if isinstance(plugin, _PLUGINS):
            plugin.names_in_use.add(filepath)
        if source is None or source == filepath or not isinstance(plugin, _PLUGINS):
            self._save_and_record(trainer, filepath)
            self._saved_by_this_trigger = filepath
            return
        _copy(trainer, plugin, source, filepath)
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = filepath
        if trainer.is_global_zero:
            for logger_ in trainer.loggers:
                logger_.after_save_checkpoint(proxy(self))

    def _link_checkpoint(self, trainer: Any, filepath: str, linkpath: str) -> None:  # type: ignore[override]
        plugin = trainer.strategy.checkpoint_io
        if not isinstance(plugin, _PLUGINS) or not _saves_through_plugin(trainer.strategy):
            super()._link_checkpoint(trainer, filepath, linkpath)
        elif self.file_exists(filepath, trainer):
            # A symbolic link would dangle until the file is written, and Lightning deletes the old one first.
            _copy(trainer, plugin, filepath, linkpath)
        else:  # the file was deleted meanwhile
            self._save_checkpoint(trainer, linkpath)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        if self.save_on_exception and trainer.is_global_zero and forks_or_spawns(trainer.strategy):
            warnings.warn(f"save_on_exception will save nothing: {NO_EXCEPTIONS}", stacklevel=2)
        not_empty, self._not_empty = self._not_empty, None
        if not_empty is not None and trainer.ckpt_path is None:
            _warn_again(not_empty)
        if self._auto_interval is not None:
            self._auto_interval.begin()
            self._auto_interval.schedule.load_state_dict(self._known_of_failures)
            self._known_of_failures = {}
        # A copy holds the state of its original, which was saved before the name of the copy was known.
        resumed = os.path.basename(trainer.ckpt_path or "")
        if resumed.startswith(self.CHECKPOINT_NAME_LAST) and self._is_in_dirpath(trainer.ckpt_path):
            self.last_model_path = os.path.join(os.fspath(self.dirpath or ""), resumed)  # as Lightning spells it
        if not self._is_in_dirpath(self._last_checkpoint_saved):
            self._last_checkpoint_saved = ""  # it is in another directory, so nothing can link to it
        # Damaged checkpoints are not counted, so that they are not deleted.
        self._forget(self._lookup.was_passed_over)
        self._forget_what_was_not_saved(trainer)
        _forget_beyond_top_k(self)
        if self._memory is not None:
            self._memory.tier.begin_at(trainer.global_step)
        if self._preemption is not None:
            directory, root, resumed = (
                os.fspath(p or "") for p in (self.dirpath, trainer.default_root_dir, trainer.ckpt_path)
            )
            self._remove_on_rank_0(trainer, lambda: self._lookup.older_requeued(directory, root, resumed))
        self._remove_on_rank_0(trainer, lambda: self._older_of_losses(trainer))
        if self._seconds_since_check is not None:
            self._last_time_checked = time.monotonic() - self._seconds_since_check
            self._seconds_since_check = None
        if self._state is not None:
            self._begin_recording(trainer)
            self._state.training_starts()
            self._begin_just_in_time(trainer)
        if self._report is not None:
            self._report.training_starts(self.dirpath)

    def _forget(self, is_meant: Callable[[str], bool]) -> None:
        """Drop the paths for which ``is_meant`` is true from the callback's state; the files stay."""
        for path in [path for path in self.best_k_models if is_meant(path)]:
            del self.best_k_models[path]
        for name in ("best_model_path", "last_model_path", "kth_best_model_path"):
            if getattr(self, name) and is_meant(getattr(self, name)):
                setattr(self, name, "")

    # ---- retention ---------------------------------------------------------------------------------------------------

    def _save_and_record(self, trainer: Any, filepath: str) -> None:
        # before the save, so that the checkpoint includes its own metrics
        self._metrics = self._measured(trainer, filepath)
        is_chosen = self._retention is not None and not self._lookup.is_last(filepath)
        if self._retention is not None and is_chosen:
            self._retention.record(filepath, trainer.global_step, self._metrics)
        try:
            super()._save_checkpoint(trainer, filepath)
        except CheckpointError:
            if self._retention is not None and is_chosen:
                self._retention.forget(filepath)
            raise
        finally:
            self._metrics = {}

    def _measured(self, trainer: Any, filepath: str) -> dict[str, float]:
        """Return the metrics to store in a checkpoint.

        Without a retention policy, only the monitored one, and only if reading its value does not wait for a device.
        """
        if self._retention is not None:
            return numbers_in(trainer.callback_metrics)
        value = self.best_k_models.get(filepath)  # ModelCheckpoint has just compared it with the others
        if value is None and self.monitor is not None:
            value = trainer.callback_metrics.get(self.monitor)
            value = None if isinstance(value, torch.Tensor) and value.device.type != "cpu" else value
        return {} if value is None or self.monitor is None else numbers_in({self.monitor: value})

    def _save_topk_checkpoint(self, trainer: Any, monitor_candidates: Any) -> None:
        with self._decides():
            super()._save_topk_checkpoint(trainer, monitor_candidates)
        if self._retention is None:
            return
        protected = {self._best_model_path, self._last_model_path, os.fspath(trainer.ckpt_path or "")}
        if self.save_top_k != -1:
            protected |= self.best_k_models.keys()
        # rank 0 decides, because the clocks of the ranks differ
        for path in trainer.strategy.broadcast(self._retention.surplus(protected)):
            self.best_k_models.pop(path, None)
            self._remove_checkpoint(trainer, path)

    def _remove_checkpoint(self, trainer: Any, filepath: str) -> None:
        if self._lookup.was_passed_over(filepath):
            logger.warning("kept the checkpoint %s, which was passed over: check it, and delete it yourself", filepath)
            return
        if self._plugin is None and os.path.exists(pin_path(filepath)):
            logger.info("kept the checkpoint %s, which is pinned: ckpt drop unpins it", filepath)
            return  # our plugins check pins themselves
        if self._retention is not None:
            self._retention.forget(filepath)
        if self._plugin is not None:
            self._plugin.names_in_use.discard(filepath)
        super()._remove_checkpoint(trainer, filepath)

    def state_dict(self) -> dict[str, Any]:
        with self._decides():
            state: dict[str, Any] = dict(super().state_dict())
        if self._metrics:
            state["metrics"] = dict(self._metrics)
        if self._auto_interval is not None:
            state["interval"] = self._auto_interval.schedule.state_dict()
        if self._retention is not None:
            state["retention"] = self._retention.state_dict()
        checked = self._last_time_checked
        state["seconds_since_check"] = None if checked is None else time.monotonic() - checked
        path, step = self._being_saved or (self._last_checkpoint_saved, self._last_global_step_saved)
        # Whether a save is due and waits for the monitored value of a validation; False if this is that save.
        deferred = self._being_saved is None and getattr(self, "_defer_save_until_validation", False)
        return {**state, "last_checkpoint_saved": path, "last_global_step_saved": step, "deferred": deferred}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._known_of_failures = state_dict.get("interval", {})
        if self._retention is not None and self.dirpath is not None:
            known = state_dict.get("retention", ())
            self._retention.load_state_dict(
                known, os.fspath(self.dirpath), looks=self._lookup.tiers is None, levels=self._levels_of_names()
            )
        if self._resumes:
            self._seconds_since_check = state_dict.get("seconds_since_check")
            self._last_checkpoint_saved = state_dict.get("last_checkpoint_saved", "")
            self._last_global_step_saved = state_dict.get("last_global_step_saved", 0)
            self._defer_save_until_validation = state_dict.get("deferred", False)

    def _should_remove_checkpoint(self, trainer: Any, previous: str, current: str) -> bool:
        if self._retention is not None and self._retention.wants(previous):
            return False
        # Lightning keeps the checkpoint that the run was resumed from, but not on remote filesystems.
        resumed = trainer.ckpt_path
        if resumed and "://" in previous and (is_same_path(previous, resumed) or not self._is_in_dirpath(previous)):
            return False
        decision: bool = super()._should_remove_checkpoint(trainer, previous, current)
        return decision

    def _is_in_dirpath(self, path: Any) -> bool:
        return self.dirpath is not None and is_same_path(os.path.dirname(os.fspath(path)), self.dirpath)

    # ---- a run that is told to end -----------------------------------------------------------------------------------

    @property
    def preemption(self) -> Preemption | None:
        """The signals, deadlines and notices on which the run saves and ends; None if there are none."""
        return self._preemption

    def save_before_end(self, trainer: Any, reason: str) -> None:
        """Save a checkpoint and return when it is durable. Called on all ranks together, between two batches."""
        if trainer.fast_dev_run:
            return
        path = os.path.join(os.fspath(self.dirpath or ""), f"{_PREEMPTED}{trainer.global_step}{self.FILE_EXTENSION}")
        candidates = self._monitor_candidates(trainer)
        if self.save_on_exception:  # scripts then expect Lightning's name
            path = self.format_checkpoint_name(metrics=candidates)
        announce(trainer, f"This run ends because of {reason}: it saves {path} first.")
        if self._auto_interval is not None:
            self._auto_interval.schedule.is_ending = True
        try:
            # Not counted as one of the callback's own, so that a resumed run still saves what is due at this step.
            trainer.save_checkpoint(path)
            if self.save_last and self._plugin is not None and _saves_through_plugin(trainer.strategy):
                self._saved_by_this_trigger = self._last_checkpoint_saved = path
                self._save_last_checkpoint(trainer, candidates)
            self._wait_until_durable(trainer)
        except (CheckpointError, OSError) as error:  # OSError: from Lightning's own plugin
            logger.error("%s: %s", NOT_SAVED, error)  # noqa: TRY400 - the message says it all
            return
        has_failed = self._plugin is not None and self._plugin.checkpointer.has_failed(path)
        if trainer.strategy.broadcast(has_failed):  # with on_error="warn"; the reason is logged
            logger.error(NOT_SAVED)
            return
        self._is_ending = True
        self._remove_on_rank_0(trainer, lambda: self._older(trainer, _PREEMPTED, path))
        self._wait_until_durable(trainer)

    @property
    def is_rank_gone(self) -> bool:
        """Whether another rank is known to be dead, so that this rank need not wait for its answer."""
        just_in_time = self._just_in_time
        return just_in_time is not None and just_in_time.is_rank_gone

    def _save_just_in_time(self, trainer: Any, just_in_time: JustInTime, error: BaseException) -> None:
        plugin = trainer.strategy.checkpoint_io
        if isinstance(plugin, _PLUGINS):  # a pending save that is committed after this one would count as newer
            plugin.checkpointer.drain(timeout=None if isinstance(plugin, TorchFileIO) else _DRAIN_SECONDS)
        directory = os.fspath(self.dirpath or "")
        try:
            path = just_in_time.rescue(
                error, lambda step: os.path.join(directory, f"{_JUST_IN_TIME}{step}{self.FILE_EXTENSION}")
            )
        except Exception:  # also from users' hooks; it must not hide the exception that ends the training
            logger.exception("could not save a checkpoint after a rank had died: resume from the last one")
        else:
            self._is_ending = path is not None

    def _older_of_losses(self, trainer: Any) -> list[str]:
        resumed = os.path.basename(trainer.ckpt_path or "")
        if not resumed.startswith(_JUST_IN_TIME):
            return []
        return self._older(trainer, _JUST_IN_TIME, trainer.ckpt_path)

    def _wait_until_durable(self, trainer: Any) -> None:
        """Wait for saves and raise a failure, on all ranks together: if one rank ends, launchers kill the others."""
        plugin = trainer.strategy.checkpoint_io
        if isinstance(plugin, _PLUGINS):
            plugin.checkpointer.drain()
            raise_as_rank_0(trainer, plugin.checkpointer.raise_failure)
        else:
            trainer.strategy.barrier("lightning_ckpt.save_before_end")

    def _older(self, trainer: Any, prefix: str, newest: str) -> list[str]:
        paths = self._lookup.catalog(os.fspath(self.dirpath or "")).paths()
        others = [
            path for path in paths if os.path.basename(path).startswith(prefix) and not is_same_path(path, newest)
        ]
        return [path for path in others if self._should_remove_checkpoint(trainer, path, newest)]

    def _remove_on_rank_0(self, trainer: Any, find: Callable[[], list[str]]) -> None:
        if not trainer.is_global_zero:
            return
        try:
            for path in find():
                if not self._lookup.was_passed_over(path):
                    trainer.strategy.remove_checkpoint(path)
        except CheckpointError:
            logger.exception("older checkpoints of interruptions could not be deleted")

    # ---- resume ------------------------------------------------------------------------------------------------------

    @property
    def auto_resume(self) -> AutoResume | None:
        """The :class:`AutoResume` of this callback; None without ``resume="auto"``."""
        return self._auto

    def has_to_resume(self, trainer: Any, ckpt_path: Any) -> bool:
        """Return whether a fit with this ``ckpt_path`` will try to resume, without reading any checkpoint."""
        if ckpt_path not in (None, "last"):
            return True
        if ckpt_path is None and self._auto is None:
            return False
        self.meet(trainer)
        return bool(self._lookup.catalog(checkpoint_directory(self, trainer)).paths())

    def look_for_resume(self, trainer: Any) -> CheckpointInfo | None:
        """Return the checkpoint that ``resume="auto"`` continues from; each rank calls it on its own."""
        if self._auto is None:
            return None
        self.meet(trainer)
        given = os.fspath(trainer.default_root_dir if self._given_dirpath is None else self._given_dirpath)
        if not is_remote(given):  # the given path, because ModelCheckpoint resolves links
            Catalog(given).refuse_wrong_directory()
        options = {"storage_options": self._lookup.storage_options, "tiers": self._lookup.tiers}
        return self.newest(trainer, self._auto.look(checkpoint_directory(self, trainer), **options))

    @property
    def resumed(self) -> ResumePoint | None:
        """Where the last ``fit`` continued; None if there was nothing to resume, or a resume was not requested."""
        return self._resumed

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        directory, resumed = os.fspath(self.dirpath or ""), os.fspath(trainer.ckpt_path or "")
        place = os.path.dirname(resumed) if is_remote(resumed) else os.path.realpath(os.path.dirname(resumed))
        if directory and f"{place}/".startswith(f"{directory.rstrip('/')}/"):
            # only if the checkpoint is in the run's own directory
            self._has_moved = follow(checkpoint.get("callbacks", {}).get(self.state_key), directory)
        if trainer.state.fn == "fit":
            self._resumed = point_of(resumed, checkpoint)
        self._resumes = True
        if self._state is not None and trainer.state.fn == "fit":
            self._resumes = self._state.load(checkpoint)

    # ---- ckpt_path="last" and "best" ---------------------------------------------------------------------------------

    def _find_last_checkpoints(self, trainer: Any) -> set[str]:
        """Return the newest checkpoint of the directory that verifies, whatever its name."""
        directory = checkpoint_directory(self, trainer)
        found = self.newest(trainer)
        self._last_found = [] if found is None else [found]
        is_local = not is_remote(directory) and self._lookup.tiers is None
        if found is None:
            left = left_in_another_version(directory) if self.dirpath is None else None
            if left is not None:
                logger.warning(
                    "there is no checkpoint in %s, where this run saves, but there are some in %s: give "
                    "ResumableCheckpoint a dirpath, or resume='auto', so that each start finds the checkpoints "
                    "of the previous one",
                    directory,
                    left,
                )
            others = super()._find_last_checkpoints(trainer) if is_local else set()
            if not others:
                stock_hint(is_shown=False)  # until setup
                if left is None:
                    announce(trainer, f"There is nothing to resume in {directory}: this run starts from the beginning.")
            return others
        if not found.path.startswith(f"{directory.rstrip('/')}/"):
            return {found.path}  # it was saved for a requeue
        # If several callbacks have found one, the Trainer takes the newest by file date.
        if not is_local or len(trainer.checkpoint_callbacks) > 1:
            tell_of_checkpoint(trainer, found.path, found.modified if found.committed is None else found.committed)
        return {found.path}

    def newest(self, trainer: Any, attempts: ResumeAttempts | None = None) -> CheckpointInfo | None:
        """Return the newest checkpoint of the directory that verifies, whatever its name, or one of a requeue.

        ``attempts`` puts those last on which the run crashed too often. If there are some and none verifies, it raises.
        """
        tier = self._memory_tier(trainer)
        memory = None if tier is None or trainer.num_nodes > 1 else tier.found()  # machines do not share memory
        root = os.fspath(trainer.default_root_dir)
        return self._lookup.newest(checkpoint_directory(self, trainer), root, memory, attempts)

    @contextlib.contextmanager
    def _decides(self) -> Iterator[None]:
        """Do not wait for pending saves when ``ModelCheckpoint`` itself reads its paths to decide what to delete."""
        before, self._is_deciding = self._is_deciding, True
        try:
            yield
        finally:
            self._is_deciding = before

    def _once_on_store(self, path: str) -> str:
        # Opening a local path waits for its pending save (awaited_paths); reads from a store cannot be intercepted.
        if is_remote(path) and self._has_trained and self._plugin is not None and not self._is_deciding:
            checkpointer = self._plugin.checkpointer
            if checkpointer.is_pending(path):
                checkpointer.drain()
        return path

    @property
    def last_model_path(self) -> str:
        """Path of the newest checkpoint under the name ``last``; waits for a pending save if it is a URL."""
        return self._once_on_store(self._last_model_path)

    @last_model_path.setter
    def last_model_path(self, path: str) -> None:
        self._last_model_path = path

    @property
    def best_model_path(self) -> str:
        """Path of the best checkpoint, as for ``last``; before training, the one that the newest checkpoint records."""
        self._once_on_store(self._best_model_path)
        if self._best_model_path or self._has_trained or self.dirpath is None:
            return self._best_model_path
        return self._lookup.best(os.fspath(self.dirpath), self.state_key, self.monitor)

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:
        self._best_model_path = path


def _forget_beyond_top_k(callback: ResumableCheckpoint) -> None:
    """Trim the restored best checkpoints to a smaller ``save_top_k``: with more, Lightning would never delete any."""
    known, count = callback.best_k_models, callback.save_top_k
    if not 0 < count < len(known):
        return
    best_first = sorted(known, key=lambda path: float(known[path]), reverse=callback.mode == "max")
    for path in best_first[count:]:
        del known[path]
    callback.kth_best_model_path, callback.kth_value = best_first[count - 1], known[best_first[count - 1]]
    logger.warning(
        "save_top_k is %d now, and the run had kept %d: delete those yourself that you no longer need: %s",
        count,
        len(best_first),
        ", ".join(map(os.path.basename, best_first[count:])),
    )


class _WithAutomaticOptimization:
    """A proxy of a module that reports automatic optimization."""

    automatic_optimization = True

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _callbacks_of(trainer: Any) -> list[ResumableCheckpoint]:
    return [callback for callback in trainer.callbacks if isinstance(callback, ResumableCheckpoint)]


def _introduce(trainer: Any) -> None:
    for callback in _callbacks_of(trainer):
        callback.meet(trainer)


def _rehearse_first(trainer: Any, ckpt_path: Any) -> None:
    """Rehearse the script before the first fit that starts a new run, if a callback has the option ``rehearse``."""
    callbacks = _callbacks_of(trainer)
    asked = [callback.rehearse for callback in callbacks if callback.rehearse]
    if not asked or ResumableCheckpoint.has_rehearsed:
        return
    if any(callback.has_to_resume(trainer, ckpt_path) for callback in callbacks):
        announce(trainer, "This run resumes, so the script is not rehearsed first.")
        return
    ResumableCheckpoint.has_rehearsed = True
    rehearse_this_script(trainer, is_strict="strict" in asked)


def _copy(trainer: Any, plugin: TorchFileIO | ShardedCheckpointIO, source: str, target: str) -> None:
    def copy() -> None:
        plugin.before_change(target, removes=False)
        plugin.checkpointer.copy(source, target)
        plugin.checkpointer.wait_when_touched(target)

    if isinstance(plugin, ShardedCheckpointIO):
        raise_on_all_ranks(copy, world_size=trainer.world_size)
    else:
        raise_as_rank_0(trainer, copy if trainer.is_global_zero else _nothing)


def _check_alone(interval: str | None, settings: Mapping[str, Any]) -> None:
    for name in ("monitor", "every_n_train_steps", "train_time_interval"):
        if settings.get(name) is not None:
            raise ValueError(
                f"interval={interval!r} and {name} need two callbacks: one that saves for restarts, and a second "
                f"ResumableCheckpoint({name}=...)"
            )


def _is_no_crash(exception: BaseException) -> bool:
    # A signal or notice ended the run, or its model has changed, so that older checkpoints would fail, too.
    no_crash = isinstance(exception, (KeyboardInterrupt, StateMismatchError))
    return no_crash or type(exception).__name__ == "SIGTERMException"


def _warn_again(found: warnings.WarningMessage) -> None:
    warnings.warn_explicit(found.message, found.category, found.filename, found.lineno)


def _nothing() -> None:
    """Do nothing, on the ranks that do not write."""


def _saves_through_plugin(strategy: Any) -> bool:
    if is_routed(strategy):
        return True
    # Sharded strategies write by themselves and bypass the plugin.
    base: Any = next((cls for cls in type(strategy).__mro__ if cls.__name__ == "Strategy"), None)
    return base is not None and type(strategy).save_checkpoint is base.save_checkpoint
