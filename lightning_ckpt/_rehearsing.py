"""Lightning's side of a rehearsal: in its processes, a Trainer saves, takes notes of each step, and ends early.

The script is not changed. Its checkpoints go to another directory, its loggers write nothing, and code after the
training is not run. The processes are started by ``ckpt rehearse``, or by a Trainer that rehearses its own script.
"""

from __future__ import annotations

import builtins
import functools
import multiprocessing
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torchmetrics import Metric

from ckpt_core.errors import CheckpointError
from ckpt_core.rehearsal import (
    CannotRehearseError,
    Notes,
    Plan,
    classes_of,
    generators_of,
    labelled,
    optimizers_of,
    plain_of,
    rehearse,
    script_variables,
    states_of,
)
from ckpt_core.state.code_origin import is_users_file
from ckpt_core.tree import leaves
from lightning_ckpt._bases import CheckpointBase, DummyLoggerBase
from lightning_ckpt._exact.user_attributes import UserAttributes
from lightning_ckpt._private.hooks import override_path, with_devices
from lightning_ckpt._private.replacing import Live
from lightning_ckpt._report import announce

_OF_LOADERS = ("dataset", "sampler", "batch_sampler", "collate_fn")
_TEST_RUNNERS = ("pytest", "py.test")  # started again, they would run other tests before this fit
_IN_PLACE = "leave out rehearse, and give the command that starts the training to `ckpt rehearse -- COMMAND`"


def rehearse_if_asked() -> None:
    """Make the first fit of this process a rehearsal, if the process was started for one."""
    plan = _plan()
    if plan is not None:
        override_path(_begin, plan.directory)
        if plan.ranks is not None:
            with_devices(plan.ranks)


def is_rehearsed() -> bool:
    """Return whether this process belongs to a rehearsal."""
    return _plan() is not None


def rehearse_this_script(trainer: Any, *, is_strict: bool) -> None:
    """Rehearse the script of this process, as ``ckpt rehearse`` does, and report whether its resumes are exact.

    Raises:
        CheckpointError: The process cannot be started again by its command. If ``is_strict``, also if a resume is not
            exact, or the script cannot be rehearsed.
    """
    _refuse_other_launchers(trainer)
    if not trainer.is_global_zero:
        return
    try:
        result = rehearse(
            _command_of_this_process(), by_script=True, announce=lambda line: announce(trainer, f"rehearsal: {line}")
        )
    except CannotRehearseError as error:
        if is_strict:
            raise
        warnings.warn(f"no rehearsal before this training: {error}", stacklevel=2)
        return
    if result.is_exact:
        announce(trainer, result.text())
    elif is_strict:
        raise CheckpointError(
            f"a resume of this script would not be exact, so it does not train:\n{result.text()}",
            remedy="fix what is named, or train anyway with rehearse=True",
        )
    else:
        warnings.warn(f"a resume of this script would not be exact:\n{result.text()}", stacklevel=2)


def _refuse_other_launchers(trainer: Any) -> None:
    environment = getattr(trainer.strategy, "cluster_environment", None)
    is_launched = environment is not None and environment.creates_processes_externally
    # in all but the first rank, Lightning's own launcher looks like an external one
    by_lightning = type(environment).__name__ == "LightningEnvironment" and not trainer.is_global_zero
    if trainer.num_nodes > 1 or (is_launched and not by_lightning):
        raise CheckpointError(
            "rehearse starts the script again, but cannot restart the other ranks, which a launcher has started",
            remedy=_IN_PLACE,
        )


def _command_of_this_process() -> list[str]:
    file = getattr(sys.modules["__main__"], "__file__", None)
    is_script = is_users_file(file) and os.path.basename(str(file)) not in _TEST_RUNNERS
    if not is_script or hasattr(builtins, "__IPYTHON__") or multiprocessing.parent_process() is not None:
        raise CheckpointError(
            "rehearse starts the script again, but this process (a notebook, a test, a prompt, a process started "
            "by another one) does not run a script",
            remedy=_IN_PLACE,
        )
    words = sys.orig_argv[1:]
    # the command may name the script relative to the start directory, which the script may have left
    names = [os.path.basename(word) for word in words]
    if os.path.basename(str(file)) in names:
        words[names.index(os.path.basename(str(file)))] = os.path.abspath(str(file))
    return [sys.executable, *words]


@functools.cache
def _plan() -> Plan | None:
    return Plan.of_environment()


def _begin(trainer: Any) -> str | None:
    plan = _plan()
    assert plan is not None
    if plan.by_script and not any(getattr(callback, "rehearse", False) for callback in trainer.callbacks):
        raise CheckpointError(
            "rehearse works only with the first Trainer of a script that fits",
            remedy="give rehearse to the ResumableCheckpoint of the first Trainer, or train with each in a script of "
            "its own",
        )
    for number, callback in enumerate(trainer.checkpoint_callbacks):
        if hasattr(callback, "dirpath"):
            callback.dirpath = os.path.join(plan.checkpoints, str(number))
    logger = _Logger(plan.directory)
    trainer.loggers = [logger] if trainer.loggers else []
    trainer.callbacks = [*trainer.callbacks, Rehearsal(plan, logger)]
    return plan.resume


class _Logger(DummyLoggerBase):
    """Keeps what is logged in one step, and writes nothing; ``experiment`` takes every call."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        self._directory = directory
        self.rows: dict[str, Any] = {}

    @property
    def save_dir(self) -> str:
        return self._directory

    @property
    def log_dir(self) -> str:
        return self._directory

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.rows.update(metrics)


class Rehearsal(Live, CheckpointBase):
    """Saves at the points of the plan, and takes notes after each batch.

    It is a ``Checkpoint`` so that, like the user's checkpoint callbacks, it runs after callbacks such as EarlyStopping.
    """

    def __init__(self, plan: Plan, logger: _Logger) -> None:
        self._plan, self._logger = plan, logger
        self._batch: Any = None
        self._steps_before = 0
        self._left = set(plan.points)
        self._at = set(plan.at)
        self._is_over = False
        self._batches: int | None = None
        self._middle = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._move_to_end(trainer)  # behind all others, including those of the module's configure_callbacks
        self._notes = Notes(self._plan, trainer.global_rank)
        if self._plan.resume is not None:
            self._notes.resumed()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._users = UserAttributes(trainer)
        per_epoch, window = trainer.num_training_batches, trainer.accumulate_grad_batches
        known = int(per_epoch) if per_epoch != float("inf") and per_epoch > 0 else None
        self._batches = self._plan.batches(known, window)
        most = self._batches if self._batches is not None else (self._plan.steps or 1) * window
        if known is not None and trainer.max_epochs not in (None, -1):
            most = min(most, known * trainer.max_epochs)
        # in the middle of the second epoch, if there is one: by then, the hooks of an epoch's start have run twice
        if known is not None:
            self._middle = known + max(1, known // 2) if most > known + known // 2 + window else min(known, most) // 2
        else:
            self._middle = most // 2

    def _move_to_end(self, trainer: Any) -> None:
        trainer.callbacks = [*(callback for callback in trainer.callbacks if callback is not self), self]

    # ---- the steps ---------------------------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._move_to_end(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._batch = {name or "batch": leaf for name, leaf in leaves(batch)}
        self._steps_before = trainer.global_step
        self._notes.hand_out(trainer.current_epoch, next(iter(_loaders(trainer)), None), self._batch)
        self._notes.trains()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._plan.ranks is not None:
            return
        number = trainer.fit_loop.total_batch_idx
        self._take(trainer, number, batch_idx, outputs)
        is_open = trainer.global_step == self._steps_before
        self._is_over = self._is_last(trainer.global_step, number)
        if self._is_over:
            self._leave(trainer)
        if self._at and trainer.global_step >= min(self._at) and not is_open:
            self._at.remove(min(self._at))
            self._save(trainer, "step")
        elif "middle" in self._left and number + 1 >= max(1, self._middle) and not is_open:
            self._save(trainer, "middle")
        elif "accumulation" in self._left and is_open and trainer.global_step and pl_module.automatic_optimization:
            self._save(trainer, "accumulation")

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        if not trainer.sanity_checking and "validation" in self._left:
            self._save(trainer, "validation")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if "epoch-end" in self._left:
            self._save(trainer, "epoch-end")
        if self._plan.ranks is not None and self._notes.handed:
            self._leave(trainer)
        # If training is over, this callback's on_train_end ends the process: it must run before those of all others.
        trainer.callbacks = [self, *(callback for callback in trainer.callbacks if callback is not self)]

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._take(trainer, trainer.fit_loop.total_batch_idx + 1, None, None)
        self._leave(trainer)

    def _is_last(self, step: int, number: int) -> bool:
        if self._plan.until is not None:
            return number >= self._plan.until
        if self._batches is not None:
            return number + 1 >= self._batches
        return self._plan.steps is not None and step >= self._plan.steps

    def _save(self, trainer: Any, point: str) -> None:
        self._left.discard(point)
        number = trainer.fit_loop.total_batch_idx
        path = os.path.join(self._plan.saves, f"{point}-{number}.ckpt")
        trainer.save_checkpoint(path)
        place = f"step {trainer.global_step} (epoch {trainer.current_epoch})"
        self._notes.saved(point, path, number, place, [f"logged:{name}" for name in _named(self._logger.rows)])

    def _leave(self, trainer: Any) -> None:
        trainer.strategy.checkpoint_io.teardown()  # saves in the background are durable then
        left = self._left if self._plan.only_points else self._left - self._impossible(trainer)
        self._notes.missed(sorted(left) + [f"step {step}" for step in sorted(self._at)])
        self._notes.write()
        trainer.strategy.barrier("rehearsal")
        self._notes.leave()

    def _impossible(self, trainer: Any) -> set[str]:
        """Return the points that training with this script never reaches."""
        schedulers = (getattr(callback, "going_to_accumulate_grad_batches", None) for callback in trainer.callbacks)
        accumulates = trainer.accumulate_grad_batches > 1 or any(ask() for ask in schedulers if ask is not None)
        possible = {"accumulation": accumulates, "validation": trainer.enable_validation}
        return {point for point, occurs in possible.items() if not occurs}

    # ---- notes -------------------------------------------------------------------------------------------------------

    def _take(self, trainer: Any, number: int, batch_idx: int | None, outputs: Any) -> None:
        module, loaders = trainer.lightning_module, _loaders(trainer)
        rows, self._logger.rows = self._logger.rows, {}
        parts = (getattr(loader, name, None) for loader in loaders for name in _OF_LOADERS)
        data = [part for part in parts if part is not None]
        users = self._users.values()
        batch = "end" if batch_idx is None else batch_idx
        callbacks = [cb for cb in trainer.callbacks if cb not in trainer.checkpoint_callbacks]
        state: dict[str, dict[str, Any]] = {
            "position": {"step": trainer.global_step, "epoch": trainer.current_epoch, "batch": batch},
            "generators": generators_of([*data, module, *callbacks]),
            "data": self._batch or {},
            "modes": dict(_modes(module)),
            "loss": {name or "loss": leaf for name, leaf in leaves(outputs)},
            "gradients": {name: parameter.grad for name, parameter in module.named_parameters()},
            "weights": {**dict(module.named_parameters()), **dict(module.named_buffers())},
            "optimizers": optimizers_of(trainer.optimizers, {id(p): name for name, p in module.named_parameters()}),
            "schedulers": states_of(enumerate(config.scheduler for config in trainer.lr_scheduler_configs)),
            "logged": {**dict(_metrics(module)), **trainer.callback_metrics, **_named(rows)},
            "callbacks": states_of(labelled(callbacks)),
            "data sets": plain_of(data),
            "attributes": {
                f"{label}.{path}": value
                for (label, _), (_, values) in zip(labelled([o for o, _ in users]), users, strict=True)
                for path, value in values.items()
            },
            "variables": script_variables(),
        }
        self._notes.take(number, state)
        if not self._defined:
            self._defined = True
            self._define(module, callbacks, data)

    _defined = False

    def _define(self, module: Any, callbacks: list[Any], data: list[Any]) -> None:
        of_module, of_data = classes_of(module, depth=0), classes_of(*data)
        of_callbacks = classes_of(*callbacks, depth=0)
        for subject in ("loss", "weights", "modes", "optimizers", "schedulers", "logged", "gradients"):
            self._notes.define(subject, of_module)
        for subject in ("data", "data sets", "position"):
            self._notes.define(subject, of_data)
        self._notes.define("callbacks", of_callbacks)
        self._notes.define("generators", [*of_data, *of_module])
        self._notes.define("attributes", [*of_module, *of_callbacks])


def _named(rows: Mapping[str, Any]) -> dict[str, Any]:
    return {f"row {name}": value for name, value in rows.items()}


def _loaders(trainer: Any) -> list[Any]:
    return [leaf for _, leaf in leaves(trainer.train_dataloader)]


def _modes(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, child in module.named_modules():
        yield f"{name or type(child).__name__}.training", child.training
    for name, parameter in module.named_parameters():
        yield f"{name}.requires_grad", parameter.requires_grad


def _metrics(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, child in module.named_modules():
        if isinstance(child, Metric):
            for key, value in leaves(child.metric_state):
                yield f"{name}.{key}", value
