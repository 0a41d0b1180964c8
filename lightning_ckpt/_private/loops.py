"""Wraps the private parts of Lightning's loops that exact resume needs.

Lightning has no public hook between "the loaders are known" and "their iterators are made", none around the fetch of a
batch, and no way to resume in the middle of an epoch, of a batch's end or of a validation. Everything needed for that
is here, each use with its reason. The names are the same in Lightning 2.5 to 2.7 and in both packages;
:mod:`lightning_ckpt._private.guard` checks them at the start of a fit, and raises one clear error if one is missing.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import math
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ckpt_core.errors import CheckpointError
from lightning_ckpt._private.replacing import replace, replace_once, wrap

_LIMITS = ("max_epochs", "max_steps", "min_epochs", "min_steps")
_AFTER_LAST_HOOKS = ("on_batch_end", "reset_results")


def checkpoint_directory(callback: Any, trainer: Any) -> str:
    """Return the directory of a ``ModelCheckpoint``'s files.

    Before ``setup`` the directory may still depend on the logger, and Lightning resolves ``ckpt_path`` before
    ``setup``.
    """
    resolve = getattr(callback, "_ModelCheckpoint__resolve_ckpt_dir", None)
    found = callback.dirpath if resolve is None else resolve(trainer)
    return str(found)


def resume_from(trainer: Any, path: str) -> None:
    """Make a fit resume from another checkpoint; its ranks are connected, and it has restored nothing yet."""
    connector = trainer._checkpoint_connector
    original = connector.resume_start
    replace_once(connector, "resume_start", lambda _=None, *args, **kwargs: original(path, *args, **kwargs))


def whole_checkpoint(trainer: Any) -> dict[str, Any]:
    """Return what a checkpoint of the Trainer holds, without a collective of Lightning's own."""
    checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    return checkpoint


def model_averaging(strategy: Any) -> tuple[Any, Any]:
    """Return the object that averages the weights of a ``DDPStrategy``, and the state of its communication hook.

    The first is ``None`` until the strategy is set up for ``fit``, and where weights are not averaged; so is the second
    where there is no hook. Neither has a public name.
    """
    return getattr(strategy, "_model_averager", None), getattr(strategy, "_ddp_comm_state", None)


def gathers_on_one_rank(strategy: Any) -> bool:
    """Return whether a strategy collects the whole state on one rank; the setting for that has no public name."""
    is_full = getattr(strategy, "_state_dict_type", None) == "full"
    return is_full or not getattr(strategy, "_save_distributed_checkpoint", True)


def given_to(fabric: Any) -> list[Any]:
    """Return the objects that may be a Fabric's checkpoint plugin: that of its strategy, and its callbacks."""
    return [getattr(fabric.strategy, "_checkpoint_io", None), *fabric._callbacks]


def tell_of_checkpoint(trainer: Any, path: str, modified: float) -> None:
    """Tell the Trainer of a checkpoint on a store and its commit time (Unix), so that it does not query the store."""
    connector = sys.modules[type(trainer._checkpoint_connector).__module__]
    original = connector.get_filesystem
    known: dict[str, Any] | None = getattr(original, "found_checkpoints", None)
    if known is None:
        known = {}

        @functools.wraps(original)
        def get_filesystem(asked: Any, **options: Any) -> Any:
            found = known.pop(str(asked), None)
            return original(asked, **options) if found is None else found

        get_filesystem.found_checkpoints = known  # type: ignore[attr-defined]
        connector.get_filesystem = get_filesystem  # type: ignore[attr-defined]
    date = datetime.datetime.fromtimestamp(modified, tz=datetime.timezone.utc)
    # the two methods of a filesystem that the Trainer calls for a path that was found for "last"
    known[path] = types.SimpleNamespace(exists=lambda _: True, modified=lambda _: date)


class Internals:
    """The private parts of one Trainer that exact resume reads, sets and wraps."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.fit_loop = trainer.fit_loop
        self.epoch_loop = trainer.fit_loop.epoch_loop
        self.val_loop = trainer.fit_loop.epoch_loop.val_loop
        # holds the logged values, of which only the results are public
        self.connector = trainer._logger_connector
        # restores checkpoints: the one that a fit resumes from, and those that callbacks restore themselves
        self.checkpoints = trainer._checkpoint_connector

    @property
    def results(self) -> Any:
        """What ``self.log`` has collected in the running epoch, by key; only the reduced values are public."""
        return self.epoch_loop._results

    def logged(self) -> dict[str, Any]:
        """Return the logged values that the Trainer's connector holds, and its current hook."""
        return {
            "callback": dict(self.connector._callback_metrics),
            "logged": dict(self.connector._logged_metrics),
            "progress_bar": dict(self.connector._progress_bar_metrics),
            "first_iteration": self.connector._first_loop_iter,
            "current_hook": self.connector._current_fx,
        }

    def logged_when_asked(self) -> dict[str, Any]:
        """Return the values that :meth:`logged` would return if the logged metrics were read now, as loggers do."""
        found, told = self.logged(), self.results.metrics(on_step=True)
        of = {"callback": "callback", "logged": "log", "progress_bar": "pbar"}
        return {name: {**found[name], **told[key]} for name, key in of.items()}

    def set_logged(self, found: Mapping[str, Any]) -> None:
        """Restore what :meth:`logged` returned."""
        self.connector._callback_metrics = found["callback"]
        self.connector._logged_metrics = found["logged"]
        self.connector._progress_bar_metrics = found["progress_bar"]
        self.connector._first_loop_iter = found["first_iteration"]
        self.connector._current_fx = found["current_hook"]

    # ---- hooks into the loops ----------------------------------------------------------------------------------------

    def before_iterators(self, call: Callable[[], None]) -> None:
        """Call ``call`` just before Lightning makes the iterators of newly loaded training loaders.

        ``_load_combined_loader_states`` is the only function that Lightning calls between creating the loaders and
        iterating over them. ``call`` replaces it, because exact resume restores the loaders' states itself.
        """
        replace(self.fit_loop, "_load_combined_loader_states", call)

    def around_setup(self, call: Callable[[str, Callable[[], None]], None]) -> None:
        """Create loaders by ``call(name, original)``; ``name`` is the key of their reload epoch in :meth:`progress`."""
        wrap(self.fit_loop, "setup_data", functools.partial(call, "train_reload_epoch"))
        wrap(self.val_loop, "setup_data", functools.partial(call, "val_reload_epoch"))

    @contextlib.contextmanager
    def at(self, epoch: float, step: int | None) -> Iterator[None]:
        """Set ``trainer.current_epoch``, if finite, and ``trainer.global_step``, if not None, inside the context."""
        loop = self.epoch_loop
        epochs, steps = self.fit_loop.epoch_progress.current, loop.automatic_optimization.optim_progress.optimizer.step
        counts = epochs, steps.total, loop.manual_optimization.optim_step_progress.total
        before = [count.completed for count in counts]
        wanted = int(epoch) if math.isfinite(epoch) else before[0], *(before[1:] if step is None else (step, step))
        for count, value in zip(counts, wanted, strict=True):
            count.completed = value
        try:
            yield
        finally:
            for count, value in zip(counts, before, strict=True):
                count.completed = value

    def around_epoch_start(self, call: Callable[[Callable[[], None]], None]) -> None:
        """Replace the start of each epoch, which runs the hooks ``on_train_epoch_start``, with ``call(original)``.

        A callback's own hook runs too late to capture the state before these hooks, and too early for that after them.
        """
        wrap(self.fit_loop, "on_advance_start", call)

    def after_last_hooks(self, call: Callable[[], None]) -> None:
        """Call ``call`` when the hooks ``on_train_batch_end`` or ``on_validation_end`` have run, and at other times.

        The module's own hook runs after those of all callbacks, just before the counters and logged values change.
        """

        def then(original: Callable[[], None]) -> None:
            call()
            original()

        for name in _AFTER_LAST_HOOKS:
            wrap(self.connector, name, then)

    def around_validation(
        self, before: Callable[[], None], over: Callable[[], None], after: Callable[[], None]
    ) -> None:
        """Call ``before`` each validation inside ``fit``, ``over`` before its last hooks run, and ``after`` all of it.

        ``on_validation_start`` is too late: the iterators of the loaders are made before it.
        """

        def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            before()
            outputs = original(*args, **kwargs)
            after()
            return outputs

        def end(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            over()
            return original(*args, **kwargs)

        wrap(self.val_loop, "run", run)
        wrap(self.val_loop, "_on_evaluation_end", end)

    def around_loops(self, load: Callable[[Callable[[], None]], None], run: Callable[[Callable[[], Any]], Any]) -> None:
        """Load the loops' states by ``load(original)`` and run the loops by ``run(original)``, whoever calls them."""

        def load_state_dict(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
            load(functools.partial(original, *args, **kwargs))

        wrap(self.fit_loop, "load_state_dict", load_state_dict)
        wrap(self.fit_loop, "run", run)

    def around_resume(self, load: Callable[[Callable[[], None]], None]) -> None:
        """Restore what the fit itself restores first, modules and callbacks, by ``load(original)``.

        Callbacks and hooks may restore checkpoints as well, and the same public hooks are called then. Only the fit
        calls ``_restore_modules_and_callbacks``, once.
        """
        original = self.checkpoints._restore_modules_and_callbacks

        def restore(*args: Any, **kwargs: Any) -> None:
            load(functools.partial(original, *args, **kwargs))

        replace_once(self.checkpoints, "_restore_modules_and_callbacks", restore)

    def finish_resume(self, wanted: Callable[[], bool], finished: Callable[[], None]) -> None:
        """Make the fit restore the training state of the checkpoint that it resumes from, if ``wanted()`` by then.

        Between modules and training state, Lightning calls ``on_fit_start``. A checkpoint that a hook restores there
        replaces the fit's own, whose counters and optimizers would then never be restored.
        """
        connector = self.checkpoints
        loaded, path, original = connector._loaded_checkpoint, connector._ckpt_path, connector.restore_training_state

        def restore_training_state() -> None:
            if connector._loaded_checkpoint and connector._loaded_checkpoint is not loaded:
                original()
                return
            vars(connector).pop("restore_training_state", None)
            if wanted():
                connector._loaded_checkpoint, connector._ckpt_path = loaded, path
            original()
            finished()

        replace(connector, "restore_training_state", restore_training_state)

    def release(self) -> None:
        """Remove all wrappers from Lightning's objects."""
        for owner, names in (
            (self.checkpoints, ("_restore_modules_and_callbacks", "restore_training_state")),
            (
                self.fit_loop,
                ("_load_combined_loader_states", "load_state_dict", "on_advance_start", "run", "setup_data"),
            ),
            (self.epoch_loop, ("reset", "on_run_start", "advance", "_should_check_val_fx")),
            (self.val_loop, ("run", "_on_evaluation_end", "setup_data")),
            (self.connector, _AFTER_LAST_HOOKS),
        ):
            for name in names:
                vars(owner).pop(name, None)

    # ---- what the loops know -----------------------------------------------------------------------------------------

    @property
    def combined_loader(self) -> Any:
        """The training loaders as one."""
        return self.fit_loop._combined_loader

    def combined(self, name: str) -> Any:
        """Return the combined loader made last; ``name`` is the key of its reload epoch in :meth:`progress`."""
        return (self.val_loop if name == "val_reload_epoch" else self.fit_loop)._combined_loader

    @property
    def fetcher(self) -> Any:
        """The data fetcher, which takes batches from the training loaders."""
        return self.fit_loop._data_fetcher

    @property
    def prefetched(self) -> int:
        """How many batches the fetcher is ahead of training: 1 where the loaders do not know their length, else 0."""
        fetcher = self.fetcher
        if fetcher is None or fetcher.length is not None:
            return 0
        return int(getattr(fetcher, "prefetch_batches", 0))

    @property
    def steps_take_the_iterator(self) -> bool:
        """Whether ``training_step`` takes the iterator itself and fetches as it likes."""
        return "DataLoaderIter" in type(self.fetcher).__name__

    def progress(self) -> dict[str, Any]:
        """Return all counters of the loops, as plain data."""
        epoch_loop = self.epoch_loop
        return {
            "epoch": _counters(self.fit_loop.epoch_progress),
            "batch": _counters(epoch_loop.batch_progress),
            "scheduler": _counters(epoch_loop.scheduler_progress),
            "automatic": _counters(epoch_loop.automatic_optimization.optim_progress),
            "manual": _counters(epoch_loop.manual_optimization.optim_step_progress),
            "validation": _counters(self.val_loop.batch_progress),
            "batches_that_stepped": epoch_loop._batches_that_stepped,
            "train_reload_epoch": float(self.fit_loop._last_train_dl_reload_epoch),
            "val_reload_epoch": float(self.val_loop._last_val_dl_reload_epoch),
            "accumulate_grad_batches": int(self.trainer.accumulate_grad_batches),
        }

    def counts(self) -> dict[str, dict[str, int]]:
        """Return how many epochs of the fit and batches of the epoch are ready, started, processed and completed."""
        current = {"epoch": self.fit_loop.epoch_progress.current, "batch": self.epoch_loop.batch_progress.current}
        names = ("ready", "started", "processed", "completed")
        return {kind: {name: int(getattr(of, name)) for name in names} for kind, of in current.items()}

    def limits(self) -> dict[str, int | None]:
        """Return when the fit ends, by the names of the Trainer's arguments; hooks may have changed these limits."""
        epochs, steps = vars(self.fit_loop), vars(self.epoch_loop)
        return {name: (epochs if "epochs" in name else steps)[name] for name in _LIMITS}

    def set_limits(self, limits: Mapping[str, int | None]) -> None:
        """Set what :meth:`limits` returned."""
        for name, value in limits.items():
            setattr(self.fit_loop if "epochs" in name else self.epoch_loop, name, value)

    @property
    def can_stop(self) -> bool:
        """Whether the run has trained for ``min_epochs`` and ``min_steps``."""
        return bool(self.fit_loop._can_stop_early)

    def set_progress(self, progress: dict[str, Any]) -> None:
        """Restore :meth:`progress`, and mark the loops as continuing instead of restarting."""
        epoch_loop = self.epoch_loop
        self.fit_loop.epoch_progress.load_state_dict(progress["epoch"])
        epoch_loop.batch_progress.load_state_dict(progress["batch"])
        epoch_loop.scheduler_progress.load_state_dict(progress["scheduler"])
        epoch_loop.automatic_optimization.optim_progress.load_state_dict(progress["automatic"])
        epoch_loop.manual_optimization.optim_step_progress.load_state_dict(progress["manual"])
        self.val_loop.batch_progress.load_state_dict(progress["validation"])
        epoch_loop._batches_that_stepped = progress["batches_that_stepped"]
        self.fit_loop._last_train_dl_reload_epoch = progress["train_reload_epoch"]
        self.val_loop._last_val_dl_reload_epoch = progress["val_reload_epoch"]
        for loop in (self.fit_loop, epoch_loop, self.val_loop):
            loop._restarting = False
            loop._loaded_from_state_dict = False
            loop._resuming_from_checkpoint = False
            if hasattr(loop, "reset_restart_stage"):
                loop.reset_restart_stage()

    # ---- resuming in the middle -------------------------------------------------------------------------------------

    def continue_epoch(self, enter: Callable[[], None], batches: int) -> None:
        """Make the next run of the epoch loop continue after ``batches`` batches; ``enter`` makes its iterators."""

        def on_run_start(fetcher: Any) -> None:
            enter()
            # as the original does, so that the last batch is recognized
            fetcher.fetched += batches
            fetcher._start_profiler = self.epoch_loop._on_before_fetch
            fetcher._stop_profiler = self.epoch_loop._on_after_fetch

        replace_once(self.epoch_loop, "reset", lambda: None)
        replace_once(self.epoch_loop, "on_run_start", on_run_start)

    def finish_batch(self, finish: Callable[[], None], validate: bool | None) -> None:
        """Make the first iteration of the epoch loop the rest of one whose batch is done.

        ``finish`` is called instead of training on a batch. ``validate`` is whether validation follows; None lets
        Lightning decide, as after any batch.
        """

        def advance(fetcher: Any) -> None:
            finish()

        # the loop may be at its last batch, and would end before the rest is done unless it is restarting
        self.epoch_loop._restarting = True
        self.val_loop._restarting = False
        self.val_loop._has_run = False
        replace_once(self.epoch_loop, "advance", advance)
        if validate is not None:
            replace_once(self.epoch_loop, "_should_check_val_fx", lambda fetcher: validate)

    def skip_batch(self) -> None:
        """Do nothing more for a batch whose end is done already."""
        self.epoch_loop._restarting = False

    def end_batch(self) -> None:
        """Do what Lightning does with a batch after the ``on_train_batch_end`` hooks."""
        self.epoch_loop._restarting = False
        self.connector.on_batch_end()
        self.epoch_loop.batch_progress.increment_completed()
        self.connector.update_train_step_metrics()

    def end_epoch(self) -> None:
        """Do what Lightning does with an epoch after the ``on_train_epoch_end`` hooks."""
        epoch_loop = self.epoch_loop
        self.connector.on_epoch_end()
        if epoch_loop._num_ready_batches_reached():
            epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        # loggers are given the step of the last batch
        epoch_loop._batches_that_stepped -= 1
        self.connector.update_train_epoch_metrics()
        epoch_loop._batches_that_stepped += 1
        self.fit_loop.epoch_progress.increment_completed()

    def discard_validation_loaders(self) -> None:
        """Discard the validation loaders that Lightning makes when a fit starts: they are made when needed."""
        self.val_loop._combined_loader = None

    def set_up_validation(self) -> None:
        """Make the validation loaders now, so that making them draws no random numbers later."""
        if self.val_loop._combined_loader is None and self.trainer.enable_validation:
            self.trainer.validating = True
            self.val_loop.setup_data()
            self.trainer.training = True

    def validation_loaders(self) -> Iterator[Any]:
        """Return the validation loaders, if they have been created."""
        combined = self.val_loop._combined_loader
        yield from combined.flattened if combined is not None else ()

    # ---- the combined loader -----------------------------------------------------------------------------------------

    @staticmethod
    def record_iteration(
        combined: Any, iterate: Callable[[Callable[[], Any]], Any], fetch: Callable[[Callable[[], Any]], Any]
    ) -> None:
        """Replace ``iter(combined)`` with ``iterate(original)`` and ``next(combined)`` with ``fetch(original)``.

        Python looks up both on the class, so the object is given a subclass.
        """
        base = type(combined)

        class Recorded(base):  # type: ignore[misc,valid-type]
            def __iter__(self) -> Any:
                iterate(lambda: base.__iter__(self))
                return self

            def __next__(self) -> Any:
                return fetch(lambda: base.__next__(self))

            def __reduce_ex__(self, protocol: Any) -> Any:  # a copy is not recorded
                return base.__new__, (base,), *super().__reduce_ex__(protocol)[2:]

        Recorded.__name__, Recorded.__qualname__ = base.__name__, base.__qualname__
        Recorded.__module__ = base.__module__
        combined.__class__ = Recorded

    @staticmethod
    def stop_recording(combined: Any) -> None:
        """Undo :meth:`record_iteration`."""
        combined.__class__ = type(combined).__mro__[1]

    @staticmethod
    def make_idle_iterator(combined: Any) -> None:
        """Give the combined loader its iterator, whose length Lightning reads, without the loaders' iterators."""
        module = _defining_module(combined)
        iterator_class = module._SUPPORTED_MODES[combined._mode]["iterator"]
        combined._iterator = iterator_class(combined.flattened, combined._limits)

    @staticmethod
    def iterators(combined: Any) -> list[Any]:
        """Return the iterators of the loaders, in their order."""
        return combined._iterator.iterators if combined._iterator is not None else []

    @staticmethod
    def exhausted(combined: Any) -> list[bool]:
        """Return which loaders have been exhausted once in this epoch; empty if the mode does not count that."""
        return list(getattr(combined._iterator, "_consumed", []))

    @staticmethod
    def waits_for_the_longest(combined: Any) -> bool:
        """Return whether exhausted loaders yield nothing until the longest one is exhausted (``max_size``)."""
        return bool(combined._mode == "max_size")

    @staticmethod
    def set_position(combined: Any, batches: int, exhausted: list[bool]) -> None:
        """Set how many batches the combined iterator has yielded."""
        combined._iterator._idx = batches
        if exhausted:
            combined._iterator._consumed = list(exhausted)


def _counters(progress: Any) -> dict[str, Any]:
    # as its state_dict returns them; dataclasses.asdict takes three times as long
    values = {name: getattr(progress, name) for name in progress.__dataclass_fields__}
    return {name: _counters(v) if hasattr(v, "__dataclass_fields__") else v for name, v in values.items()}


def _defining_module(combined: Any) -> Any:
    for base in type(combined).__mro__:
        module = sys.modules[base.__module__]
        if hasattr(module, "_SUPPORTED_MODES"):
            return module
    raise CheckpointError(f"{type(combined).__name__} is not a CombinedLoader as this release of Lightning has it")
