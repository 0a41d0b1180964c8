"""The callback that makes a Lightning run resume bit for bit."""

from __future__ import annotations

import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch

from ckpt_core.policies import RetentionPolicy
from ckpt_core.preemption import Preemption
from ckpt_core.survivors import no_rescue, wait_seconds_of
from ckpt_core.tiers import MEMORY_ROOT
from lightning_ckpt._callbacks.just_in_time import JustInTime
from lightning_ckpt._callbacks.model_checkpoint import ReliableModelCheckpoint
from lightning_ckpt._exact.mismatch import name_mismatches, unwrap
from lightning_ckpt._exact.state import KEY, ExactState
from lightning_ckpt._private.guard import check_callback
from lightning_ckpt._recording import Recording
from lightning_ckpt._report import RunReport
from lightning_ckpt.io import NO_STATE_KEY

__all__ = ["ResumableCheckpoint"]


class ResumableCheckpoint(ReliableModelCheckpoint):
    """A ``ModelCheckpoint`` with which a resumed run ends with the bits of a run that was never interrupted.

    While it is on the Trainer, *every* checkpoint saved through the Trainer (by this callback, by another one, by
    ``trainer.save_checkpoint``) carries the exact state of all ranks under the key ``"lightning_ckpt"``: random
    generators, data position, random generators of data loading workers, gradients of an open accumulation window, open
    metrics, and the point of the training loop. ``trainer.fit(ckpt_path=...)`` resumes from there. Where exactness
    cannot be had, the resume says why in one warning.

    Args:
        dirpath: Directory of the checkpoints, also a URL; by default the logger's directory (but see ``resume``).
        filename: Name pattern of the checkpoints, such as ``"{epoch}-{step}"``.
        monitor: Name of the logged quantity that ranks the checkpoints.
        verbose: Whether to say when a checkpoint is saved.
        save_last: Whether to keep a checkpoint ``last.ckpt`` as well; ``"link"`` makes it a link
            (a hard one with ``AsyncCheckpointIO``, whose file is still being written). With our plugins neither costs a
            second write.
        save_top_k: Number of best checkpoints to keep; -1 keeps all.
        save_on_exception: Whether to save when training raises.
        save_weights_only: Whether to save the weights only; such a checkpoint cannot be resumed exactly.
        mode: ``"min"`` or ``"max"``: which ``monitor`` is better.
        auto_insert_metric_name: Whether names of quantities are put into the file name.
        every_n_train_steps: Save every so many optimizer steps.
        train_time_interval: Save at this interval of training time; the time since the last save survives a resume.
        every_n_epochs: Save every so many epochs.
        save_on_train_epoch_end: Whether to save at the end of the training epoch instead of after validation.
        enable_version_counter: Whether to add ``-v1`` and so on rather than replace a file.
        exact: Whether to capture and restore the exact state; without it this is a ``ModelCheckpoint``.
        data_resume: How loaders get back to where they were. ``"auto"``: by skipping in the sampler, by the loader's
            own state where it has one, else by reading again. ``"replay"``: always by reading again, which is slow but
            needs nothing of the data set but that it is deterministic.
        recorder: Whether each rank records its steps in a small file beside the checkpoints, and a resumed run compares
            those that it repeats and says whether they are the same. For a directory on a store, and with
            ``exact=False``, there is no file.
        retention: Which checkpoints of this callback to keep besides those that ``save_top_k`` keeps: a policy of
            :mod:`ckpt_core.policies`, or its words (``"latest=2,every_steps=1000"``). One is deleted when neither wants
            it. With ``save_top_k=-1``, which saves them all, the policy alone says what stays. The best, the last, the
            one that the run was resumed from, and what ``ckpt keep`` has pinned always stay.
        resume: ``"auto"``: ``trainer.fit`` without ``ckpt_path`` continues from the newest checkpoint that verifies, or
            starts from the beginning where there is none, which it says in one line; :attr:`resumed` tells which. A
            ``ckpt_path`` that is given wins. Without ``dirpath``, the checkpoints are then in ``checkpoints`` in the
            Trainer's ``default_root_dir``, so that each start finds those of the one before.
        resume_attempts: After how many starts in a row that ended without a newer checkpoint ``"auto"`` tries an older
            one first; None: never.
        log_metrics: Whether the Trainer's loggers get the figures of each save: ``checkpoint/bytes``,
            ``checkpoint/commit_seconds``, ``checkpoint/stall_seconds`` (since the last figures),
            ``checkpoint/stall_seconds_total``, ``checkpoint/share_of_run``, ``checkpoint/saves``,
            ``checkpoint/pending`` and ``checkpoint/failures``, as rank 0 sees them. Needs one of our plugins.
        preempt: What makes the run save ``preempted-step=N.ckpt`` after the batch, on all ranks at the same one, and
            end with ``SIGTERMException`` and the exit status 143 when it is durable: True, SIGTERM; names of signals
            (``"SIGTERM,SIGUSR1"``); or a :class:`ckpt_core.preemption.Preemption`, which also knows deadlines and
            notices, whose exit status is 75. False: SIGTERM ends the run without a save.
        interval: When to save for a restart: ``"auto"``, at the interval that loses the least time to saves and
            failures (Young/Daly), from what saves take here; ``"continuous"``, each as soon as the one before is
            durable. Also at the end of training, and of epochs if ``every_n_epochs`` is given. A checkpoint that is
            ranked by a ``monitor`` needs a callback of its own.
        mtbf: For ``"auto"``: mean time between failures of the whole job in seconds; by default as observed.
        max_overhead: For ``"auto"``: the share of the run that saves may take, such as 0.005; without ``mtbf`` it is
            used up.
        memory_every_n_steps: Keep a snapshot in the machine's memory, outside of this process, after every so many
            optimizer steps, besides the checkpoints: after a crash, ``resume="auto"`` and ``ckpt_path="last"`` take the
            newer of both. The last two are kept, and deleted when the run has ended. Needs one of our plugins, and all
            ranks on one machine. None: none.
        memory_dir: A directory in memory.
        just_in_time: Whether under DDP, when a rank dies, one of the others saves ``just-in-time-step=N.ckpt``, so that
            the restart repeats at most one step; or for how many seconds survivors wait for each other, 15 by default.

    Raises:
        CheckpointError: At the start of a fit, when this release of Lightning is not supported.

    Examples:
        >>> from lightning_ckpt import ResumableCheckpoint
        >>> callback = ResumableCheckpoint(dirpath="checkpoints", every_n_train_steps=100, save_last=True)
        >>> # Trainer(callbacks=[callback]).fit(model, ckpt_path="last")
    """

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
        preempt: bool | str | Preemption = True,
        recorder: bool = True,
        interval: Literal["auto", "continuous"] | None = None,
        mtbf: float | None = None,
        max_overhead: float | None = None,
        memory_every_n_steps: int | None = None,
        memory_dir: str | Path = MEMORY_ROOT,
        just_in_time: bool | float = False,
    ) -> None:
        if data_resume not in ("auto", "replay"):
            raise ValueError(f"data_resume must be 'auto' or 'replay', not {data_resume!r}")
        super().__init__(
            dirpath=dirpath,
            filename=filename,
            monitor=monitor,
            verbose=verbose,
            save_last=save_last,
            save_top_k=save_top_k,
            save_on_exception=save_on_exception,
            save_weights_only=save_weights_only,
            mode=mode,
            auto_insert_metric_name=auto_insert_metric_name,
            every_n_train_steps=every_n_train_steps,
            train_time_interval=train_time_interval,
            every_n_epochs=every_n_epochs,
            save_on_train_epoch_end=save_on_train_epoch_end,
            enable_version_counter=enable_version_counter,
            retention=retention,
            resume=resume,
            resume_attempts=resume_attempts,
            preempt=preempt,
            interval=interval,
            mtbf=mtbf,
            max_overhead=max_overhead,
            memory_every_n_steps=memory_every_n_steps,
            memory_dir=memory_dir,
        )
        check_callback(self)
        self.exact = exact
        self.data_resume = data_resume
        self.log_metrics = log_metrics
        self._report: RunReport | None = None
        self.recorder = recorder
        self._survivors_wait = wait_seconds_of(just_in_time)
        self._just_in_time: JustInTime | None = None
        self._recording: Recording | None = None
        self._state: ExactState | None = None
        self._seconds_since_check: float | None = None
        self._being_saved: tuple[str, int] | None = None
        self._resumes = True

    # ---- the exact state ---------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        name_mismatches(trainer)
        if stage == "fit" and self._is_first_callback(trainer):
            self._report = RunReport(trainer, log_metrics=self.log_metrics)
        if self.exact and stage == "fit" and trainer.lightning_module is not None:  # which a test may leave out
            self._state = ExactState.of(trainer, self.data_resume == "replay", self._warn_inexact)

    def _warn_inexact(self, causes: str) -> None:
        warnings.warn(f"this resume cannot be promised to be exact: {causes}", stacklevel=2)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if self._state is not None and self._is_first(trainer):
            self._state.save(checkpoint)
        if KEY not in checkpoint:
            checkpoint[NO_STATE_KEY] = "outside of a fit" if self.exact else "by ResumableCheckpoint(exact=False)"

    def _is_first_callback(self, trainer: Any) -> bool:
        return next(cb for cb in trainer.callbacks if isinstance(cb, ResumableCheckpoint)) is self

    def _is_first(self, trainer: Any) -> bool:
        # The callbacks on a Trainer share the exact state; all ranks take part in each gathering of it.
        return next(cb for cb in trainer.callbacks if isinstance(cb, ResumableCheckpoint) and cb.exact) is self

    def _all_ranks_are_here(self) -> bool:
        # an exception on one rank only: Lightning's part of a save would wait for the others for ever
        return self._state is None or self._state.all_ranks_are_here()

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        self._resumes = True
        if self._state is not None and trainer.state.fn == "fit":
            self._resumes = self._state.load(checkpoint)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self._state is not None:
            self._state.fit_started()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        if self._seconds_since_check is not None:
            self._last_time_checked = time.monotonic() - self._seconds_since_check
            self._seconds_since_check = None
        if self._state is not None:
            self._begin_recording(trainer)
            self._state.training_starts()
            self._begin_just_in_time(trainer)
        if self._report is not None:
            self._report.training_starts(self.dirpath)

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if self._state is not None:
            self._state.weights_averaged(True)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self._state is not None:
            self._state.weights_averaged(False)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        if self._state is not None:
            self._state.backward_begins()

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
                options = self._storage_options
                just_in_time = JustInTime(trainer, self._state, str(self.dirpath), options, self._survivors_wait)
                problem = just_in_time.problem_of_place()
                if problem is None:
                    self._just_in_time = just_in_time
                else:
                    just_in_time.close()
            if problem is not None and trainer.is_global_zero:
                warnings.warn(no_rescue(problem), stacklevel=2)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._just_in_time is not None and not self._is_ending:
            self._save_just_in_time(trainer, self._just_in_time, exception)
        super().on_exception(trainer, pl_module, exception)

    def _begin_recording(self, trainer: Any) -> None:
        # one record of a Trainer: the first callback that wants it
        wants = (cb for cb in trainer.callbacks if isinstance(cb, ResumableCheckpoint) and cb.exact and cb.recorder)
        is_first = next(wants, None) is self
        if self._state is not None and self._recording is None and is_first and not trainer.fast_dev_run:
            self._recording = Recording(trainer, self.dirpath)
            self._state.record(self._recording)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._recording is not None:
            self._recording.batch_ended(outputs, batch_idx)
        if self._state is not None:
            self._state.batch_ends()
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._report is not None:
            self._report.after_batch()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._recording is not None:
            self._recording.finish()
        super().on_train_end(trainer, pl_module)
        if self._state is not None:
            self._state.training_ended()
        if self._report is not None:
            self._report.training_ends(self.dirpath)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if self._state is not None and self._is_first(trainer):
            self._state.fit_ended()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        unwrap(trainer)
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.close()
        just_in_time, self._just_in_time = self._just_in_time, None
        if just_in_time is not None:
            just_in_time.close()
        super().teardown(trainer, pl_module, stage)
        report, self._report = self._report, None
        if report is not None:
            report.close()
        if self._state is not None:
            self._state.release()

    # ---- what ModelCheckpoint forgets --------------------------------------------------------------------------------

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        # the state is taken in the middle of the save, when ModelCheckpoint does not count it yet
        self._being_saved = (filepath, trainer.global_step)
        try:
            super()._save_checkpoint(trainer, filepath)
        finally:
            self._being_saved = None

    def state_dict(self) -> dict[str, Any]:
        state = dict(super().state_dict())
        checked = self._last_time_checked
        state["seconds_since_check"] = None if checked is None else time.monotonic() - checked
        path, step = self._being_saved or (self._last_checkpoint_saved, self._last_global_step_saved)
        return {**state, "last_checkpoint_saved": path, "last_global_step_saved": step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if not self._resumes:
            return
        self._seconds_since_check = state_dict.get("seconds_since_check")
        self._last_checkpoint_saved = state_dict.get("last_checkpoint_saved", "")
        self._last_global_step_saved = state_dict.get("last_global_step_saved", 0)
