"""Checks that Lightning has the private names that we use: one clear error at the start of a fit instead of a crash."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable
from typing import Any

from torchmetrics import SumMetric

from ckpt_core.errors import CheckpointError

_FIT_LOOP = (
    "_can_stop_early",
    "_combined_loader",
    "_data_fetcher",
    "_last_train_dl_reload_epoch",
    "_load_combined_loader_states",
    "_restarting",
    "epoch_progress",
    "max_epochs",
    "min_epochs",
    "on_advance_start",
)
_EPOCH_LOOP = (
    "_batches_that_stepped",
    "_num_ready_batches_reached",
    "_restarting",
    "_results",
    "_should_check_val_epoch",
    "_should_check_val_fx",
    "advance",
    "automatic_optimization",
    "batch_progress",
    "manual_optimization",
    "max_steps",
    "min_steps",
    "on_run_start",
    "reset",
    "scheduler_progress",
    "update_lr_schedulers",
    "val_loop",
)
_VAL_LOOP = ("_combined_loader", "_has_run", "_last_val_dl_reload_epoch", "_on_evaluation_end", "batch_progress", "run")
_CONNECTOR = (
    "_callback_metrics",
    "_current_fx",
    "_first_loop_iter",
    "_logged_metrics",
    "_progress_bar_metrics",
    "on_batch_end",
    "on_epoch_end",
    "reset_results",
    "update_train_epoch_metrics",
    "update_train_step_metrics",
)
_CHECKPOINTS = (
    "_ckpt_path",
    "_loaded_checkpoint",
    "_restore_modules_and_callbacks",
    "_user_managed",
    "dump_checkpoint",
    "restore_training_state",
    "resume_start",
)
_MODEL_CHECKPOINT = (
    "_ModelCheckpoint__resolve_ckpt_dir",
    "_find_last_checkpoints",
    "_last_checkpoint_saved",
    "_last_global_step_saved",
    "_link_checkpoint",
    "_monitor_candidates",
    "_save_checkpoint",
    "_save_last_checkpoint",
    "_should_remove_checkpoint",
)
_INTERNALS = (
    ("fit_loop", _FIT_LOOP),
    ("fit_loop.epoch_loop", _EPOCH_LOOP),
    ("fit_loop.epoch_loop.automatic_optimization", ("optim_progress",)),
    ("fit_loop.epoch_loop.manual_optimization", ("optim_step_progress",)),
    ("fit_loop.epoch_loop.val_loop", _VAL_LOOP),
    ("_logger_connector", _CONNECTOR),
    ("_checkpoint_connector", _CHECKPOINTS),
)
_BOUNDARIES = (
    (
        "_signal_connector",
        (
            "_sigterm_notifier_fn",
            "_slurm_sigusr_handler_fn",
            "received_sigterm",
            "register_signal_handlers",
            "teardown",
        ),
    ),
    ("_accelerator_connector", ("cluster_environment",)),
    ("fit_loop", ("on_run_end",)),
    ("fit_loop.epoch_loop", ("on_advance_end",)),
    ("fit_loop.epoch_loop.val_loop", ("_evaluation_step", "on_run_end")),
    ("validate_loop", ("_evaluation_step", "on_run_end")),
    ("test_loop", ("_evaluation_step", "on_run_end")),
    ("predict_loop", ("_predict_step", "on_run_end")),
)
_DDP_STRATEGY = ("_ddp_comm_state", "_model_averager")
_METRIC = ("_computed", "_defaults", "_update_count")


def missing_internals(trainer: Any) -> list[str]:
    """Return the private attributes that exact resume uses and the Trainer does not have."""
    missing = _missing(trainer, _INTERNALS)
    if any(cls.__name__ == "DDPStrategy" for cls in type(trainer.strategy).__mro__):
        missing += _missing(trainer, (("strategy", _DDP_STRATEGY),))
    metric = SumMetric()
    return missing + [f"torchmetrics.Metric.{name}" for name in _METRIC if not hasattr(metric, name)]


def missing_boundaries(trainer: Any) -> list[str]:
    """Return the private attributes used between batches and for signals that the Trainer does not have."""
    return _missing(trainer, _BOUNDARIES)


def _missing(trainer: Any, wanted: Iterable[tuple[str, tuple[str, ...]]]) -> list[str]:
    missing = []
    for path, names in wanted:
        owner = functools.reduce(lambda found, name: getattr(found, name, None), path.split("."), trainer)
        missing += [f"trainer.{path}.{name}" for name in names if not hasattr(owner, name)]
    return missing


def check(trainer: Any) -> None:
    """Raise ``CheckpointError`` if this release of Lightning lacks a private name that exact resume needs."""
    missing = missing_internals(trainer)
    if missing:
        package = importlib.import_module(type(trainer).__module__.partition(".")[0])
        raise CheckpointError(
            f"exact resume does not work with {package.__name__} {package.__version__}: it has no {', '.join(missing)}",
            remedy="use Lightning 2.5 to 2.7, or ResumableCheckpoint(exact=False)",
        )


def check_callback(callback: Any) -> None:
    """Raise ``CheckpointError`` if ``ModelCheckpoint`` lacks a private method that we override or call."""
    missing = [name for name in _MODEL_CHECKPOINT if not hasattr(callback, name)]
    if missing:
        raise CheckpointError(
            f"{type(callback).__name__} does not work with this release of Lightning: its ModelCheckpoint has no "
            f"{', '.join(missing)}",
            remedy="use Lightning 2.5 to 2.7",
        )
