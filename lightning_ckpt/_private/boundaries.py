"""Wraps the private parts of Lightning that run between two batches, and its signal handlers.

No callback hook is called when a batch and all that follows it, such as a validation, is over, and a plugin has no
hooks at all. Signal handlers are methods of a private object and are registered after ``setup``: if they were replaced
on the object by then, the replacements are registered. :func:`lightning_ckpt._private.guard.missing_boundaries` finds
out if a release of Lightning has moved one; the names are the same in 2.5 to 2.7 and in both packages.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from lightning_ckpt._private.replacing import replace, wrap


class TrainerBoundaries:
    """Calls back at the boundaries of one Trainer's loops until the Trainer tears its signal handlers down.

    Args:
        trainer: A Trainer of either package, before it registers its signal handlers.
        registering: Called just before it registers them.
        reached: Called at each boundary with its position, which increases: after each batch and all that follows it,
            after each batch of a validation, test or prediction and at their end, and after ``on_train_end``.
        ending: Called when training is over, before ``on_train_end``.
        closing: Called when the Trainer is torn down, also after an exception.

    The trial runs of Lightning's tuners have no boundaries: nothing of them is to be saved.
    """

    END = 2**62

    def __init__(
        self,
        trainer: Any,
        *,
        registering: Callable[[], None],
        reached: Callable[[tuple[int, int]], None],
        ending: Callable[[], None],
        closing: Callable[[], None],
    ) -> None:
        self._trainer = trainer
        self._connector = trainer._signal_connector
        self._registering, self._reached, self._ending, self._closing = registering, reached, ending, closing
        self._batches = self._evaluated = 0
        self._callbacks = list(trainer.callbacks)
        loops = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop)
        self._undo = [
            wrap(trainer.fit_loop.epoch_loop, "on_advance_end", self._after_batch),
            wrap(trainer.fit_loop, "on_run_end", self._around_train_end),
            wrap(self._connector, "register_signal_handlers", self._before_registering),
            wrap(self._connector, "teardown", self._around_teardown),
            *(wrap(loop, "_evaluation_step", self._after_evaluation_batch) for loop in loops),
            wrap(trainer.predict_loop, "_predict_step", self._after_evaluation_batch),
            *(wrap(loop, "on_run_end", self._before_evaluation_end) for loop in (*loops, trainer.predict_loop)),
        ]

    def _before_registering(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._registering()
        return original(*args, **kwargs)

    def _after_batch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not self._is_trial:
            self._batches, self._evaluated = self._batches + 1, 0
            self._reached((self._batches, 0))
        return result

    @property
    def _is_trial(self) -> bool:
        callbacks = self._trainer.callbacks  # a tuner replaces them with its own, or with none
        return bool(self._callbacks) and not any(ours is one for ours in self._callbacks for one in callbacks)

    def _after_evaluation_batch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not self._trainer.sanity_checking and not self._is_trial:  # a sanity check is short, and precedes training
            self._evaluated += 1
            self._reached((self._batches, self._evaluated))
        return result

    def _before_evaluation_end(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._trainer.sanity_checking and not self._is_trial:
            self._reached((self._batches, self.END))
        return original(*args, **kwargs)

    def _around_train_end(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._is_trial:
            return original(*args, **kwargs)
        self._ending()
        result = original(*args, **kwargs)
        self._reached((self._batches + 1, self.END))
        return result

    def _around_teardown(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for undo in reversed(self._undo):
            undo()
        try:
            return original(*args, **kwargs)
        finally:
            self._closing()

    # ---- signals -----------------------------------------------------------------------------------------------------

    @property
    def requeue_signal(self) -> str | None:
        """The name of the signal for which Lightning requeues a job, None if it does not."""
        environment = self._trainer._accelerator_connector.cluster_environment
        requeue = getattr(environment, "requeue_signal", None) if getattr(environment, "auto_requeue", False) else None
        return getattr(requeue, "name", None)

    def instead_of_requeue(self, note: Callable[[], None]) -> Callable[[], None]:
        """Make the handler of SLURM's requeue signal call ``note``; return a function that does what it did before."""
        requeue = self._connector._slurm_sigusr_handler_fn
        signum: list[Any] = []

        def handler(number: Any, frame: Any) -> None:
            signum[:] = [number]
            note()

        self._undo.append(replace(self._connector, "_slurm_sigusr_handler_fn", handler))
        return lambda: requeue(*(signum or [None]), None)

    def instead_of_terminate(self, note: Callable[[], None]) -> Callable[[int], None]:
        """Make the handler of SIGTERM call ``note``; return a function that then ends the run on the calling rank.

        That function takes the exit status with which the process ends, unless user code catches Lightning's exception.
        """

        def handler(number: Any, frame: Any) -> None:
            launcher = self._trainer.strategy.launcher
            if launcher is not None and not told:
                told.append(number)
                launcher.kill(number)  # the processes that this one has started
            note()

        told: list[Any] = []
        self._undo.append(replace(self._connector, "_sigterm_notifier_fn", handler))
        return self._terminate

    def _terminate(self, status: int) -> None:
        self._connector.received_sigterm = True
        package = type(self._connector).__module__.partition(".trainer.")[0]
        raise importlib.import_module(f"{package}.utilities.exceptions").SIGTERMException(status)


NO_EXCEPTIONS = "ranks that Lightning forks or spawns tell no callback of an exception (use ddp, or torchrun)"


def forks_or_spawns(strategy: Any) -> bool:
    """Return whether Lightning forks or spawns the ranks itself: then it never calls ``on_exception`` of callbacks.

    No public name distinguishes the launchers of ``ddp_spawn``, ``ddp_fork`` and ``ddp_notebook`` from that of ``ddp``.
    """
    kinds = type(getattr(strategy, "launcher", None)).__mro__
    return any(kind.__name__ == "_MultiProcessingLauncher" for kind in kinds)
