"""``ResumableCallback``: checkpoints for ``transformers.Trainer``, saved as by Accelerate's ``save_state``.

The Trainer never calls ``save_state``, and no event lets a callback save in its place. So these methods are replaced,
on the given Trainer only:

==========================  ============================================================================================
``train`` (public)          to find the newest checkpoint that verifies, and to wait for pending saves when training
                            fails
``log`` (public)            with the option ``log_metrics``: gives the figures of the saves to all trackers
``_save_checkpoint``        the only place that knows that a checkpoint is due *after* the evaluation that may have made
                            it the best one, and before ``on_save``
``save_model``, ``_save``   during a save, write only the files next to the weights
``_save_optimizer_and_``     during a save, writes nothing; overrides of it write their additional files
``scheduler``
``_load_from_checkpoint``   it reads ``model.safetensors`` as one file, unverified; ``load_state`` reads what any
                            strategy wrote
``_load_best_model``        the same, and with the last save still in the background
``_load_rng_state``         it would warn that it finds no generators, and that the resume may not be exact
``_run_epoch``              a run that is resumed after its last step, within an epoch, would take another step; and
                            the passes over a stream without a length count as one epoch
``_maybe_log_save_``        with the option ``just_in_time``: what it logs and draws is part of the step
``evaluate``
``_tr_loss``,               the losses since the last log, which are in no checkpoint of the Trainer: what it logs after
``_globalstep_last_logged`` a resume would differ from what an uninterrupted run logs
``_total_loss_scalar``
==========================  ============================================================================================

Methods that subclasses override are replaced below the overrides, which are called as usual: the Trainer gets a class
that has :class:`_BelowOverrides` between its own and ``Trainer``.

:func:`missing_internals` detects whether a release of transformers has moved one of them.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import logging
import os
import re
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import transformers
from accelerate.utils import send_to_device
from torch.utils.data import SequentialSampler
from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length

from accelerate_ckpt._attach import attach
from accelerate_ckpt._private.trainers import trainer_being_made
from accelerate_ckpt._rehearsing import Rehearsal
from accelerate_ckpt._state.just_in_time import note_start, note_step, save_if_rank_was_lost
from accelerate_ckpt._state.load import FolderNotFoundError, find_resume, newest_usable
from accelerate_ckpt._state.naming import candidates
from accelerate_ckpt._state.parts import FORMAT, load_model
from accelerate_ckpt._state.preemption import failures_of_trackers_logged
from accelerate_ckpt._state.resume import AutoResume, as_at_start, refuse_unwritable
from accelerate_ckpt._state.session import IntegrationSave, Session, session_of
from accelerate_ckpt._state.stock import refuse_damaged_ours, shapes_in
from accelerate_ckpt.config import OptionError
from accelerate_ckpt.integrations.stock_trainer import StockCheckpointNotice
from ckpt_core import Catalog, verify
from ckpt_core.errors import CheckpointError, CheckpointFormatError, StateMismatchError
from ckpt_core.preemption import NOT_SAVED
from ckpt_core.state.code_origin import is_library
from ckpt_core.state.kinds import indexed
from ckpt_core.state.object_walk import is_plain
from ckpt_core.state.rng import RngState

__all__ = ["ResumableCallback", "missing_internals"]

log = logging.getLogger(__name__)

_STATE_FILE = "trainer_state.json"
_TORCH_FILES = ("optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", ".pth", "pytorch_model.bin")
_NOT_PREPARED = (
    "get_train_dataloader returns a loader that is not prepared, so its order is not saved (return "
    "self.accelerator.prepare(loader))"
)
_NAME = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-([0-9]+)")
_NEEDED = {
    "_save_checkpoint": ["self", "model", "trial"],
    "save_model": ["self", "output_dir", "_internal_call"],
    "_save": ["self", "output_dir", "state_dict"],
    "_save_optimizer_and_scheduler": ["self", "output_dir"],
    "_load_from_checkpoint": ["self", "resume_from_checkpoint", "model"],
    "_load_best_model": ["self"],
    "_load_rng_state": ["self", "checkpoint"],
}
_COUNTED = ("_total_train_tokens",)  # what TRL's trainers count for their logs
# Attributes of TRL's trainers that train for several steps on data that the model has generated
_GENERATED = ("_step", "_buffered_inputs")
_NOT_SAVED_GENERATED = (
    "what the model had generated for the next steps is not in the checkpoint: it holds objects (images), or this "
    "release of TRL keeps it otherwise than known"
)
_NOT_SAVED_BESIDES = (
    "this resume is not guaranteed to be exact: parameters that the optimizer trains outside of the model are not in "
    "the checkpoint"
)
_NOT_NOTED = (
    "a rank was lost, and what the model had generated for the next steps, parameters outside of the model, or what "
    "the Trainer's class saves beside the optimizer are not those of that step"
)
_COUNTS = {"epoch", "epochs_trained", "steps_trained_in_current_epoch"}  # arguments of _run_epoch
_NEEDED_DURING_TRAINING = ("_tr_loss", "_globalstep_last_logged", "_total_loss_scalar")


def missing_internals() -> list[str]:
    """Return the methods that this module replaces and this release of transformers lacks or has changed."""

    def is_known(name: str, arguments: list[str]) -> bool:
        method = getattr(Trainer, name, None)
        return method is not None and list(inspect.signature(method).parameters) == arguments

    return [name for name, arguments in _NEEDED.items() if not is_known(name, arguments)]


def _counts_are_known() -> bool:
    """Return whether this release of transformers passes its counts to ``_run_epoch``."""
    method = getattr(Trainer, "_run_epoch", None)
    return method is not None and inspect.signature(method).parameters.keys() >= _COUNTS


class ResumableCallback(TrainerCallback):
    """Lets a ``Trainer`` save and resume durably, in the background, and bit for bit.

    Pass it in the Trainer's ``callbacks``, or create it with the Trainer, to which it then adds itself. Create it on
    all ranks, before ``train`` is called.

    ``trainer.train(resume_from_checkpoint=...)`` and all arguments that say when to save and what to keep work as
    usual. ``True`` resumes from the newest checkpoint that verifies. So do ``"auto"`` and, with the option
    ``resume="auto"``, no argument; if there is no checkpoint, these start from the beginning.
    ``trainer.accelerator.resumed`` is the point of the resume, or None.

    Args:
        trainer: The Trainer (a single process, or DDP); None if it gets the callback in ``callbacks``.
        strategy: ``"sync"``, ``"async"`` or ``"sharded"``: see :class:`~accelerate_ckpt.CheckpointConfig`.
        **options: The other options of :class:`~accelerate_ckpt.CheckpointConfig`.

    Raises:
        OptionError: An option is unknown, or an argument of the Trainer is not supported.
        CheckpointError: This release of transformers is not supported.

    Example::

        arguments = TrainingArguments("runs", save_steps=100)
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[ResumableCallback(strategy="async")])
        trainer.train(resume_from_checkpoint=True)
    """

    def __init__(self, trainer: Any = None, strategy: str = "async", **options: Any) -> None:
        if options.get("memory_every_n_steps") is not None:
            raise OptionError(
                "memory_every_n_steps is not for the Trainer of transformers, which writes files of its own into each "
                "checkpoint: use interval='auto'"
            )
        missing = missing_internals()
        if missing:
            raise _unsupported_release(f"Trainer has no {', '.join(missing)} as it is known")
        self._trainer: Any = None
        self._options = {"strategy": strategy, **options}
        self._resumed: str | None = None
        self._rng: RngState | None = None
        self._stream: tuple[int, int] | None = None  # pass and batch of a resume, until the first epoch begins
        self._passes = 0  # passes over a stream that the Trainer has not counted
        self._ends_with: int | None = None
        self._adds_files = False
        self._has_later_weights = False  # whether train() has loaded what a later train() of the script had saved
        if trainer is not None:
            self._join(trainer)

    def on_init_end(self, *_: Any, **__: Any) -> None:
        if self._trainer is None:
            trainer = trainer_being_made(self)
            if trainer is not None:
                self._join(trainer)

    def _join(self, trainer: Any) -> None:
        _check_arguments(trainer)
        self._trainer = trainer
        accelerator = attach(trainer.accelerator, **self._options)
        loop_state = _LoopState(trainer, self._session.tell_once)
        accelerator.register_for_checkpointing(loop_state)
        accelerator.register_save_state_pre_hook(self._write_files)
        trainer.__class__ = _below_overrides(type(trainer))  # type: ignore[arg-type]
        trainer._resumable_callback = self
        self._session.owners = functools.partial(_of_the_script, weakref.ref(trainer))
        around: dict[str, Callable[..., Any]] = {
            "train": self._train,
            **({"log": self._log} if self._session.config.log_metrics else {}),
        }
        for name, ours in around.items():
            stock = getattr(trainer, name)
            setattr(trainer, name, functools.wraps(stock)(functools.partial(ours, stock)))
        # a new list, because the Trainer may be iterating over the present one
        handler = trainer.callback_handler
        others = [
            each for each in handler.callbacks if each is not self and not isinstance(each, StockCheckpointNotice)
        ]
        handler.callbacks = [*others, self]
        if self._session.config.just_in_time:
            if not hasattr(trainer, "_maybe_log_save_evaluate"):
                raise _unsupported_release("just_in_time needs _maybe_log_save_evaluate, which Trainer does not have")
            stock = trainer._maybe_log_save_evaluate
            trainer._maybe_log_save_evaluate = functools.wraps(stock)(functools.partial(self._end_step, stock))
            self._session.note_step = lambda _: None  # the Trainer fetches all batches of a step before it
            index = next(i for i, each in enumerate(accelerator._custom_objects) if each is loop_state)
            self._session.note_ahead = lambda loss: {"custom": {index: loop_state.after(loss)}}
            self._session.note_object = lambda each: loop_state.noted() if each is loop_state else each.state_dict()
            saves_more = (
                type(trainer)._save_optimizer_and_scheduler is not _BelowOverrides._save_optimizer_and_scheduler
            )
            self._session.not_noted = lambda: (
                [_NOT_NOTED] if saves_more or _generated_by(trainer) or _trained_besides(trainer) else []
            )
            target = lambda: self._path_of_step(trainer.state.global_step)  # noqa: E731
            self._session.saves_alone = IntegrationSave(
                os.path.abspath(trainer.args.output_dir), target, self._add_files
            )
        if self._session.preemption is not None:
            self._session.preemption.asks_itself = False  # the Trainer fetches all batches of a step before it
        if self._session.interval is not None:
            self._session.interval.asks_itself = False

    @property
    def _session(self) -> Session:
        if self._trainer is None:
            raise _unbound()
        session = session_of(self._trainer.accelerator)
        if session is None:
            raise CheckpointError(
                "the Trainer's Accelerator is not the one that it had when the callback was created",
                remedy="create a new Trainer and a new ResumableCallback",
            )
        return session

    # ---- training ----------------------------------------------------------------------------------------------------

    def _train(
        self,
        stock: Callable[..., Any],
        resume_from_checkpoint: Any = None,
        trial: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if trial is not None:
            raise OptionError("hyperparameter_search is not supported with ResumableCallback")
        _check_arguments(self._trainer)
        if self._session.rehearsal is not None:
            resume_from_checkpoint = self._begin_rehearsal(self._session.rehearsal)
        self._stay_where_it_began()
        if self._trainer.args.save_strategy != "no" or self._session.saves_by_itself:
            refuse_unwritable(self._session, self._trainer.args.output_dir)
        path = resume_from_checkpoint or None
        if path == "auto" or (self._session.config.resume == "auto" and resume_from_checkpoint is None):
            path = find_resume(self._session, self._trainer.args.output_dir, "train", _newest_usable)
        elif path is True:
            path = self._newest()
        self._session.told.add("resume")
        self._resumed = None
        if path is not None and self._session.checkpointer.exists(path):
            self._check_fits(os.fspath(path))
            self._resumed = os.fspath(path)
        elif path is not None and os.path.isdir(path):
            refuse_damaged_ours(path)  # the Trainer would load only its weights, without a warning
        preemption = self._session.preemption
        try:
            takes_name = _takes_name(stock) and not args  # train() of a subclass may take nothing else
            result = stock(resume_from_checkpoint=path, **kwargs) if takes_name else stock(path, trial, *args, **kwargs)
            self._end_if_told()
        except BaseException as error:
            save_if_rank_was_lost(error)
            checkpointer = self._session.checkpointer
            checkpointer.drain()
            failure = checkpointer.take_failure()
            if failure is not None:  # not raised: it would hide the exception that ended the training
                log.exception("a checkpoint could not be saved", exc_info=failure)
            raise
        finally:
            if preemption is not None:
                preemption.end()
        self._finish()
        self._session.note_clean_end()
        self._session.training_ended()
        self._session.report.close()
        return result

    def _begin_rehearsal(self, rehearsal: Rehearsal) -> Any:
        """Remove the trackers, end before any callback's ``on_train_end``, and return the path to resume from."""
        handler = self._trainer.callback_handler
        trackers = tuple(INTEGRATION_TO_CALLBACK.values())
        handler.callbacks = [each for each in handler.callbacks if not isinstance(each, trackers)]
        handler.on_train_end = lambda *_: rehearsal.leave_if_begun()
        rehearsal.window = self._trainer.args.gradient_accumulation_steps
        return rehearsal.resume or False

    def _end_step(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = stock(*args, **kwargs)
        note_step(self._session)
        return result

    def _end_if_told(self) -> None:
        """End the program if a signal or notice came after the last step, such as in the evaluation that follows."""
        preemption = self._session.preemption
        if preemption is None or not preemption.is_training:
            return
        preemption.end()  # from here on, signals have their usual effect
        self._ends_with = preemption.due(self._session, last=True)
        if self._ends_with is None:
            return
        self._session.checkpointer.drain()
        path = self._path_of_step(self._trainer.state.global_step)
        if self._session.agreement.from_rank_zero("save", self._session.checkpointer.exists(path)):
            self.on_save()
        self._save_checkpoint()
        self.on_save()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        preemption = self._session.preemption
        interval = self._session.interval
        status = preemption.due(self._session) if preemption is not None else None
        if interval is not None and interval.due(self._session):
            control.should_save = True
        if status is not None:
            self._ends_with = status
            control.should_save = True

    def on_save(self, *_: Any, **__: Any) -> None:
        if self._ends_with is None:
            return
        # Not by the Trainer's own stop, after which it and the script would continue as if training were over.
        try:
            self._finish()
        except CheckpointError as error:
            self._end(self._ends_with, error)
        figures = self._session.report.new_metrics()
        if figures:
            with failures_of_trackers_logged():
                self._trainer.log(figures)
        self._end(self._ends_with)

    def _end(self, status: int, failure: Exception | None = None) -> NoReturn:
        if failure is not None:
            log.error("%s: %s", NOT_SAVED, failure)
        elif self._session.checkpointer.has_failed(self._path_of_step(self._trainer.state.global_step)):
            log.error(NOT_SAVED)  # with on_error="warn", which has logged why
        self._session.note_clean_end()
        raise SystemExit(status)

    def _finish(self) -> None:
        """Wait for pending saves and raise their failure; called on all ranks together."""
        self._session.outcomes.after_training()
        self._session.checkpointer.close()

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        self._passes, self._stream, self._has_later_weights = 0, None, False
        if self._trainer is None:
            raise _unbound()
        if self._session.rehearsal is not None:
            self._session.rehearsal.has_all_data = True
        missing = [name for name in _NEEDED_DURING_TRAINING if not hasattr(self._trainer, name)]
        if missing:
            raise _unsupported_release(f"a Trainer that trains has no {', '.join(missing)}")
        if self._resumed is not None:
            accelerator = self._trainer.accelerator
            self._prepare_what_evaluates()
            accelerator.load_state(self._resumed)
            self._rng = RngState.capture()
            if not args.restore_callback_states_from_checkpoint:
                _restore_counts(self._trainer)
            self._has_later_weights = state.global_step > state.max_steps
            if self._has_later_weights:
                self._session.announce(
                    f"{self._resumed} was saved by a later train(): this one ends after step {state.max_steps}, and "
                    f"what the script does after it sees the weights of step {state.global_step}"
                )
            point = accelerator.resumed
            if point is not None and point.epoch and not has_length(train_dataloader):
                if _counts_are_known():
                    self._stream = point.epoch, point.batch
                else:
                    self._session.tell_once(
                        "passes",
                        "this resume is not guaranteed to be exact: this release of transformers counts the passes "
                        "over a stream without a length as one epoch (use a newer transformers 5)",
                    )

    def _prepare_what_evaluates(self) -> None:
        """Create the evaluation loaders that the Trainer keeps: created after the load, they would have new workers."""
        data, args = self._trainer.eval_dataset, self._trainer.args
        if args.dataloader_persistent_workers and args.eval_strategy != "no" and data is not None:
            for name in data if isinstance(data, dict) else (None,):
                self._trainer.get_eval_dataloader(name)

    def _passes_counted(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Correct the arguments of ``_run_epoch``: the Trainer counts all earlier passes over a stream as one."""
        at, self._stream = self._stream, None
        if at is not None:
            self._passes = at[0] - arguments["epochs_trained"]
            arguments["steps_trained_in_current_epoch"] = at[1]
        if self._passes:
            arguments["epoch"] += self._passes
            arguments["epochs_trained"] += self._passes
        return arguments

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        # An evaluation before the first step, or another callback, may have drawn since the checkpoint was loaded.
        rng, self._rng = self._rng, None
        if rng is not None:
            rng.restore()
        note_start(self._session)

    def on_evaluate(self, *_: Any, train_dataloader: Any = None, **__: Any) -> None:
        # Each evaluation prepares a new loader, which Accelerate never releases: it does not belong in checkpoints.
        # The Trainer keeps one with persistent workers, which draws a seed in its first pass only.
        if self._trainer is None or not self._trainer.is_in_train:
            self._tell_of_later_weights("evaluate")
            return
        loaders, data = self._trainer.accelerator._dataloaders, self._session.data
        kept = list(map(id, (train_dataloader, *getattr(self._trainer, "_eval_dataloaders", {}).values())))
        for loader in [loader for loader in loaders if id(loader) not in kept]:
            position = data.find(loader)
            if position is not None:
                position.release()
        loaders[:] = [loader for loader in loaders if id(loader) in kept]

    def on_predict(self, *_: Any, **__: Any) -> None:
        self._tell_of_later_weights("predict")

    def _tell_of_later_weights(self, what: str) -> None:
        if self._has_later_weights:
            self._session.tell_once(
                "later weights",
                f"this trainer.{what} has the weights of a checkpoint that a later train() had saved: the one before "
                "it resumed from that one, and had nothing left to train",
            )

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self._session.note_metrics(logs or {})
        if self._session.rehearsal is not None:
            speed = ("runtime", "per_second")  # different in each process
            self._session.rehearsal.log({name: it for name, it in (logs or {}).items() if not name.endswith(speed)})
        if "train_runtime" not in (logs or {}):
            return
        if self._session.rehearsal is not None:
            self._session.rehearsal.leave_if_begun()  # before the Trainer deletes checkpoints
        # The last thing that is logged. What comes after it looks for the best checkpoint in the file system.
        self._finish()
        best = state.best_model_checkpoint
        if best is not None and not os.path.isdir(best):
            log.warning("the best checkpoint %s could not be saved, so it is not loaded", best)
            state.best_model_checkpoint = None

    def _log(self, stock: Callable[..., Any], logs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        # not on_log: the callbacks of trackers come before ours
        if "train_runtime" in logs:
            self._session.checkpointer.drain()  # the last thing that is logged, so the last save belongs to it
        figures = self._session.report.new_metrics() if {"loss", "train_runtime"} & logs.keys() else {}
        if not figures:
            return stock(logs, *args, **kwargs)
        more = {**logs, **figures}
        result = stock(more, *args, **kwargs)
        logs |= {name: value for name, value in more.items() if name not in figures}  # the Trainer adds the epoch
        return result

    # ---- saving ------------------------------------------------------------------------------------------------------

    def _save_checkpoint(self) -> None:
        try:
            self._save()
        except (CheckpointError, OSError) as error:  # OSError: from a file that the Trainer itself writes
            if self._ends_with is None:
                raise
            self._end(self._ends_with, error)

    def _save(self) -> None:
        trainer, session = self._trainer, self._session
        self._stay_where_it_began()
        state = trainer.state
        trainer.store_flos()
        target = self._path_of_step(state.global_step)
        if state.best_global_step:
            best = self._path_of_step(state.best_global_step)
            is_saved = best == target or session.checkpointer.exists(best)
            if session.agreement.from_rank_zero("save", is_saved):
                state.best_model_checkpoint = best
        session.limit = functools.partial(_surplus, weakref.proxy(trainer))  # the session outlives the Trainer
        session.protected = {state.best_model_checkpoint} if state.best_model_checkpoint else set()
        session.not_exact = [] if self._loader_is_known() else [_NOT_PREPARED]
        session.not_exact += [_NOT_SAVED_GENERATED] if _generated_is_lost(trainer) else []
        trainer.accelerator.save_state(target)

    def _stay_where_it_began(self) -> None:
        if self._session.config.resume == "auto":
            args = self._trainer.args
            args.output_dir = as_at_start(self._session, args.output_dir)

    def _loader_is_known(self) -> bool:
        loader = self._trainer.callback_handler.train_dataloader
        is_prepared = any(loader is one for one in self._trainer.accelerator._dataloaders)
        return is_prepared or isinstance(getattr(loader, "sampler", None), SequentialSampler)

    def _path_of_step(self, step: int) -> str:
        return os.path.join(self._trainer.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{step}")

    def _write_files(self, _models: Any, _weights: Any, directory: str) -> None:
        self._adds_files = True
        try:
            self._trainer.save_model(directory, _internal_call=True)
            self._trainer._save_optimizer_and_scheduler(directory)
        finally:
            self._adds_files = False
        weights = os.path.join(directory, f"{indexed('model', 0)}.safetensors")
        if os.path.exists(weights):
            os.unlink(weights)
            self._session.tell_once(
                "weights",
                f"{type(self._trainer).__name__} writes its own model.safetensors, which is also a file of the "
                "checkpoint: it is left out, and the checkpoint's file has all weights. Use another name, or let "
                "super() write it",
            )
        if self._trainer.is_world_process_zero():
            self._add_state(directory)

    def _add_files(self, directory: str) -> None:
        self._add_model_files(directory)
        self._add_state(directory)

    def _add_model_files(self, directory: str) -> None:
        """Write the files that the Trainer puts next to the weights, except the pickle of its arguments."""
        trainer = self._trainer
        model = trainer.accelerator.unwrap_model(trainer.model)
        if hasattr(model, "peft_config"):
            model.save_pretrained(directory)  # only the adapters, for users who have the base model
        elif isinstance(model, PreTrainedModel):
            config = copy.deepcopy(model.config)
            config.architectures = [type(model).__name__]
            config.save_pretrained(directory)
            if model.can_generate():
                model.generation_config.save_pretrained(directory)
        processing = trainer.processing_class
        if processing is None:
            processing = getattr(trainer.data_collator, "tokenizer", None)
        if processing is not None:
            processing.save_pretrained(directory)

    def _add_state(self, directory: str) -> None:
        trainer = self._trainer
        _collect_callback_states(trainer)
        trainer.state.save_to_json(os.path.join(directory, _STATE_FILE))

    # ---- loading -----------------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, stock: Callable[..., Any], resume_from_checkpoint: Any, model: Any) -> None:
        # Ours is loaded when everything is prepared, in on_train_begin.
        if self._resumed is None or os.fspath(resume_from_checkpoint) != self._resumed:
            stock(resume_from_checkpoint, model)

    def _load_best_model(self, stock: Callable[[], None]) -> None:
        trainer, session = self._trainer, self._session
        best = trainer.state.best_model_checkpoint
        if not session.checkpointer.exists(best):  # saved without this callback
            stock()
            return
        log.info("loading the best model from %s (score: %s)", best, trainer.state.best_metric)
        self._load_weights(best)

    def _load_weights(self, path: Any) -> None:
        session = self._session
        if session.checkpointer.exists(path):
            model = self._trainer.accelerator.unwrap_model(self._trainer.model)
            with session.checkpointer.load(path) as checkpoint:
                load_model(model, checkpoint, indexed("model", 0), rank=session.rank)

    def _newest(self) -> str:
        """Return the newest checkpoint that can be used; called on all ranks together."""
        session, folder = self._session, self._trainer.args.output_dir
        path = session.agreement.asked_of_rank_zero("train", lambda: _newest_usable(session, folder, None))
        if path is None:
            raise FolderNotFoundError(
                f"No valid checkpoint found in output directory ({folder})",
                path=folder,
                remedy="ResumableCallback(resume='auto') starts the run from the beginning there",
            )
        return str(path)

    def _check_fits(self, path: str) -> None:
        session = self._session
        if self._trainer.args.ignore_data_skip:
            raise OptionError(
                "ignore_data_skip=True cannot be used to resume from this checkpoint: it continues at the saved "
                "position in the data"
            )
        with session.checkpointer.load(path) as checkpoint:
            checkpoint.read_file(_STATE_FILE)  # the Trainer reads it unverified
            about: Mapping[str, Any] = checkpoint.metadata.get(FORMAT) or {}
        saved = about.get("world_size", session.world_size)
        if saved != session.world_size:
            raise StateMismatchError(
                f"the checkpoint was saved by {saved} processes, and this run has {session.world_size}: the "
                "Trainer computes its position in the epoch from the number of steps, which would be wrong",
                path=path,
                remedy=f"start {saved} processes",
            )


class _BelowOverrides(Trainer):
    """Replaces methods of ``Trainer``, below a subclass's overrides, which still call them with ``super()``."""

    _resumable_callback: ResumableCallback

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._resumable_callback._save_checkpoint()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        callback = self._resumable_callback
        if not callback._adds_files:
            super().save_model(output_dir, _internal_call)
        elif self.is_world_process_zero():
            self._save(output_dir)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        callback = self._resumable_callback
        if not callback._adds_files:
            super()._save(output_dir, state_dict)
        elif output_dir is not None:
            callback._add_model_files(output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: Any) -> None:
        if not self._resumable_callback._adds_files:
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: Any, model: Any = None) -> None:
        self._resumable_callback._load_from_checkpoint(super()._load_from_checkpoint, resume_from_checkpoint, model)

    def _load_rng_state(self, checkpoint: Any) -> None:
        if not self._resumable_callback._resumed:
            super()._load_rng_state(checkpoint)

    def _load_best_model(self) -> None:
        self._resumable_callback._load_best_model(super()._load_best_model)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            kwargs = self._resumable_callback._passes_counted(kwargs)
            super()._run_epoch(*args, **kwargs)


@functools.lru_cache(maxsize=64)
def _below_overrides(kind: type) -> type:
    """Return the class of a Trainer with :class:`_BelowOverrides` inserted between ``Trainer`` and its subclasses."""
    if issubclass(kind, _BelowOverrides):
        return kind
    names: dict[str, Any] = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    override: Callable[..., None] = getattr(kind, "_load_from_checkpoint")  # noqa: B009
    if override is not Trainer._load_from_checkpoint:

        def load_from_checkpoint(self: Any, *args: Any, **kwargs: Any) -> None:
            override(self, *args, **kwargs)
            # SentenceTransformerTrainer's override, also used for the best model, looks for other kinds of files
            paths = [one for one in [*args, *kwargs.values()] if isinstance(one, (str, os.PathLike))]
            self._resumable_callback._load_weights(paths[0])

        names["_load_from_checkpoint"] = load_from_checkpoint
    bases = (_BelowOverrides,) if kind is Trainer else (kind, _BelowOverrides)
    return type(kind.__name__, bases, names)


class _LoopState:
    """The Trainer's private state, as an object that Accelerate saves and restores for each rank.

    Args:
        trainer: The Trainer.
        tell_once: Logs a warning about a topic.
    """

    def __init__(self, trainer: Any, tell_once: Callable[[str, str], None]) -> None:
        self._trainer, self._tell_once = trainer, tell_once

    def state_dict(self) -> dict[str, Any]:
        besides = _trained_besides(self._trainer)
        # those that were trained (a guide model's were not), and gradients: the Trainer zeroes only those of its model
        state = self._trainer.optimizer.state
        moved = {str(i): [p.detach(), p.grad] for i, p in enumerate(besides) if p.grad is not None or state.get(p)}
        trained = {"besides": moved} if besides else {}
        return {**self.noted(), **trained, "generated": _generated_by(self._trainer)}

    def noted(self) -> dict[str, Any]:
        """Return the part of the state that is noted after each step: all that is small."""
        trainer = self._trainer
        return {
            "lr_scheduler": trainer.lr_scheduler.state_dict(),
            "loss_since_log": trainer._tr_loss.detach(),
            "step_of_last_log": int(trainer._globalstep_last_logged),
            "counted": {name: vars(trainer)[name] for name in _COUNTED if name in vars(trainer)},
        }

    def after(self, loss: Any) -> dict[str, Any]:
        """Return the part of the state that changes with ``loss``, as it will be after the backward pass."""
        return {"loss_since_log": self._trainer._tr_loss.detach() + loss.detach()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        trainer = self._trainer
        trainer.lr_scheduler.load_state_dict(state["lr_scheduler"])
        trainer._tr_loss.copy_(state["loss_since_log"])
        trainer._globalstep_last_logged = int(state["step_of_last_log"])
        vars(trainer).update(state.get("counted", {}))
        vars(trainer).update(send_to_device(state.get("generated", {}), trainer.args.device))
        besides = _trained_besides(trainer)
        if besides and "besides" not in state:
            self._tell_once("besides", _NOT_SAVED_BESIDES)
        for index, (value, gradient) in state.get("besides", {}).items():
            parameter = besides[int(index)] if int(index) < len(besides) else None
            if parameter is None or parameter.shape != value.shape:
                raise StateMismatchError(
                    f"the optimizer had a parameter of shape {list(value.shape)} outside of the model, and has none "
                    "now",
                    key=f"parameter {index} of the optimizer that is not the model's",
                    remedy="train with the same loss as the run that saved",
                )
            parameter.data.copy_(value)
            parameter.grad = send_to_device(gradient, parameter.device)
        # The mean loss that train() returns is over its own steps only.
        trainer._total_loss_scalar = -float(state["loss_since_log"])


def _generated_by(trainer: Any) -> dict[str, Any]:
    """Return what one of TRL's Trainers has generated for later steps, if a checkpoint can hold it; otherwise empty."""
    found = {name: vars(trainer).get(name) for name in _GENERATED}
    return found if found["_buffered_inputs"] is not None and is_plain(found) else {}


def _trained_besides(trainer: Any) -> list[Any]:
    """Return parameters that the optimizer trains outside of the model, such as in a sentence-transformers loss."""
    known = {id(one) for model in trainer.accelerator._models for one in model.parameters()}
    return [one for group in trainer.optimizer.param_groups for one in group["params"] if id(one) not in known]


def _generated_is_lost(trainer: Any) -> bool:
    """Return whether one of TRL's Trainers will use data that it has generated and a checkpoint would not hold."""
    args = trainer.args
    steps = getattr(args, "steps_per_generation", None)
    step = vars(trainer).get("_step", trainer.state.global_step * args.gradient_accumulation_steps)
    return bool(steps and step % (steps * getattr(args, "num_iterations", 1)) and not _generated_by(trainer))


def _of_the_script(known: weakref.ref[Any]) -> list[object]:
    """Return the Trainer, its callbacks and functions, which may be of the script's own classes."""
    trainer = known()
    if trainer is None:
        return []
    names = ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics")
    functions = [getattr(trainer, name, None) for name in names]
    owners = [one.__self__ if isinstance(one, types.MethodType) else one for one in functions]
    return list({id(one): one for one in [trainer, *trainer.callback_handler.callbacks, *owners]}.values())


def _unbound() -> CheckpointError:
    return CheckpointError(
        "this ResumableCallback does not know its Trainer: it was added after the Trainer had been created",
        remedy="Trainer(..., callbacks=[ResumableCallback()]), or ResumableCallback(trainer) instead of add_callback",
    )


def _unsupported_release(what: str) -> CheckpointError:
    return CheckpointError(
        f"ResumableCallback does not work with transformers {transformers.__version__}: {what}",
        remedy="use transformers 5.3 or newer, or train without ResumableCallback",
    )


def _check_arguments(trainer: Any) -> None:
    """Check the Trainer's arguments.

    Raises:
        OptionError: An argument of the Trainer is not supported.
    """
    args = trainer.args
    problems = {
        "save_only_model=True: there would be nothing to resume from": args.save_only_model,
        "hub_strategy: it uploads checkpoints before they are durable (use 'end')": (
            args.push_to_hub and args.hub_strategy != "end"
        ),
        "enable_jit_checkpoint=True": getattr(args, "enable_jit_checkpoint", False),
        f"an output_dir that is a URL: {args.output_dir}": "://" in str(args.output_dir),
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "FSDP": trainer.is_fsdp_enabled,
        f"{type(trainer).__name__}, whose train() takes no resume_from_checkpoint": not _can_resume(type(trainer)),
    }
    for problem, is_there in problems.items():
        if is_there:
            raise OptionError(f"not supported with ResumableCallback: {problem}")


def _can_resume(kind: type[Trainer]) -> bool:
    kinds = {parameter.kind for parameter in inspect.signature(kind.train).parameters.values()}
    return _takes_name(kind.train) or inspect.Parameter.VAR_POSITIONAL in kinds


def _takes_name(train: Callable[..., Any]) -> bool:
    parameters = inspect.signature(train).parameters
    is_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return is_any or "resume_from_checkpoint" in parameters


def _restore_counts(trainer: Any) -> None:
    """Restore the counters of library callbacks such as ``EarlyStoppingCallback``, but not their arguments.

    For callbacks of the script's own classes, the resume warns if they have lost anything.
    """
    for name, saved in trainer.state.stateful_callbacks.items():
        kept = (one for one in trainer.callback_handler.callbacks if type(one).__name__ == name)
        alike = [one for one in kept if isinstance(one, ExportableState) and is_library(type(one))]
        for callback, state in zip(alike, saved if isinstance(saved, list) else [saved], strict=False):
            vars(callback).update(state.get("attributes", {}))


def _collect_callback_states(trainer: Any) -> None:
    states = trainer.state.stateful_callbacks
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(callback, ExportableState):
            name = type(callback).__name__
            if isinstance(states[name], list):  # several of one class
                states[name].append(callback.state())
            else:
                states[name] = callback.state()


def _surplus(trainer: Any, pending: list[str]) -> list[str] | None:
    """Return the checkpoints that ``save_total_limit`` is to delete, the oldest first, by the Trainer's own rules."""
    limit = trainer.args.save_total_limit
    if not limit or limit < 0:
        return None
    session = session_of(trainer.accelerator)
    infos = [
        info
        for info in reversed(Catalog(trainer.args.output_dir, suffix="").checkpoints())
        if _NAME.fullmatch(info.name)
        and info.is_readable  # damaged ones, and those that this user cannot read, stay and do not count
        and not (session and session.was_passed_over(info.path))
    ]
    best = trainer.state.best_model_checkpoint
    protected = {os.path.abspath(path) for path in [*pending, *([best] if best else [])]}
    committed = [os.path.abspath(info.path) for info in infos]
    candidates = [path for path in committed if path not in protected]
    return candidates[: max(0, len(candidates) + len(protected) - max(limit, len(protected)))]


def _newest_usable(session: Session, folder: str, auto: AutoResume | None) -> str | None:
    found = [info for info in candidates(folder) if _NAME.fullmatch(info.name)]
    return newest_usable(session, folder, found, lambda path: _verify(session, path), auto)


def _verify(session: Session, path: str) -> None:
    if session.checkpointer.exists(path):
        with session.checkpointer.load(path) as checkpoint:
            checkpoint.verify()
            checkpoint.read_file(_STATE_FILE)
        return
    refuse_damaged_ours(path)
    for name in os.listdir(path):  # the Trainer's own files, which have checksums or a structure to check
        if name.endswith(_TORCH_FILES):
            verify(os.path.join(path, name))
        elif name.endswith(".safetensors"):
            shapes_in(os.path.join(path, name))
    try:  # the Trainer writes this file last
        with open(os.path.join(path, _STATE_FILE), encoding="utf-8") as file:
            json.load(file)
    except (OSError, ValueError) as error:
        raise CheckpointFormatError(f"it is incomplete: {error}", path=path) from error
