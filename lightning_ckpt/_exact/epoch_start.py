"""Runs the hooks of an epoch's start again when a fit resumes in the middle of the epoch.

Lightning does not run them then, so what they set for the epoch would be missing until the next one. They are run with
the counters and generators of the first time, and then whatever was captured is restored: weights, optimizers,
schedulers and all that the checkpoint holds are as saved, and what it does not hold is as the hooks have made it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ckpt_core.state.rng import RngState
from lightning_ckpt._exact.metrics import torchmetrics_of
from lightning_ckpt._exact.parameter_groups import Groups, ParameterGroups
from lightning_ckpt._private.loops import Internals

# these train in the hook and restore the model after that; what they find is captured
_NOT_AGAIN = frozenset({"LearningRateFinder", "BatchSizeFinder"})
_CHANGE_WEIGHTS = frozenset({"StochasticWeightAveraging"})  # of Lightning's own
_FRAMEWORK = ("lightning.", "pytorch_lightning.", "lightning_ckpt.")
_HOOK = "on_train_epoch_start"


class EpochStart:
    """Runs the hooks ``on_train_epoch_start`` of one fit.

    ``begun`` is what the hooks of the last epoch were run with: counters, generators, metrics for callbacks, parameter
    groups.
    """

    def __init__(self, internals: Internals, groups: ParameterGroups) -> None:
        self._internals, self._groups = internals, groups
        self.begun: tuple[dict[str, Any], RngState, dict[str, Any], Groups | None] | None = None

    def run(self, begin: Callable[[], None]) -> None:
        """Run the hooks by ``begin``, and remember the state with which they are run."""
        metrics = dict(self._internals.connector._callback_metrics)
        self.begun = self._internals.progress(), RngState.capture(), metrics, self._groups.capture()
        begin()

    def capture(self) -> dict[str, Any] | None:
        """Return the state with which the hooks of the last epoch were run."""
        if self.begun is None:
            return None
        progress, rng, metrics, groups = self.begun
        values = {name: v.detach().clone() for name, v in metrics.items() if isinstance(v, torch.Tensor)}
        return {"progress": progress, "rng": rng.encode(), "metrics": values, "groups": groups}

    def run_again(
        self,
        begun: Mapping[str, Any] | None,
        now: Mapping[str, Any],
        schedulers: Any,
        callbacks: Mapping[str, Any],
        begin: Callable[[], None],
    ) -> None:
        """Run the hooks of the epoch that the checkpoint is in the middle of, and leave model and optimizers unchanged.

        ``begun`` is what :meth:`capture` returned, if the checkpoint has it, ``now`` are its counters, ``schedulers``
        the states of its learning rate schedulers, in case the hooks create other ones, and ``callbacks`` the states of
        its callbacks. ``begin`` runs the hooks.
        """
        begun = begun or {"progress": _at_start(now)}
        reloads = {name: now[name] for name in ("train_reload_epoch", "val_reload_epoch")}
        self._internals.set_progress({**begun["progress"], **reloads})
        if "rng" in begun:
            rng, device = RngState.decode(begun["rng"]), self._internals.trainer.strategy.root_device
            rng.restore()
            metrics = {name: value.to(device) for name, value in begun["metrics"].items()}
            self._internals.connector._callback_metrics = metrics
            self.begun = dict(begun["progress"]), rng, dict(metrics), begun.get("groups")
        module = self._internals.trainer.lightning_module
        with (
            self._kept_numbers(callbacks),
            self._quiet(),
            self._kept_metrics(module),
            self._kept_optimizers(schedulers),
            self._groups.temporarily(begun.get("groups")),
            self._kept_weights(module),
        ):
            begin()

    @contextlib.contextmanager
    def _kept_numbers(self, states: Mapping[str, Any]) -> Iterator[None]:
        # numbers that callbacks have loaded and their hooks update, such as the learning rate of BackboneFinetuning
        kept = []
        for callback in self._internals.trainer.callbacks:
            state = states.get(callback.state_key)
            found = [*state.items()] if isinstance(state, Mapping) else []
            own = vars(callback)
            numbers = {n: v for n, v in found if type(v) in (bool, int, float) and type(own.get(n)) is type(v)}
            kept.append((own, {n: v for n, v in numbers.items() if own[n] == v}))
        yield
        for own, numbers in kept:
            own.update(numbers)

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        # rows and warnings were logged the first time
        trainer = self._internals.trainer
        loggers = list(trainer.loggers)
        trainer.loggers = [_Quiet(logger) for logger in loggers]
        left_out = [(number, cb) for number, cb in enumerate(trainer.callbacks) if _is_not_run_again(cb)]
        trainer.callbacks = [cb for cb in trainer.callbacks if not _is_not_run_again(cb)]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            trainer.loggers = loggers
            for number, callback in left_out:  # hooks may have added others
                trainer.callbacks.insert(number, callback)

    @contextlib.contextmanager
    def _kept_metrics(self, module: torch.nn.Module) -> Iterator[None]:
        results = self._internals.results
        logged = set(results)
        updates = {name: metric._update_count for name, metric in torchmetrics_of(module)}
        yield
        for name in set(results) - logged:
            del results[name]
        for name, metric in torchmetrics_of(module):
            if metric._update_count != updates.get(name, 0):
                metric.reset()

    @contextlib.contextmanager
    def _kept_optimizers(self, schedulers: Any) -> Iterator[None]:
        trainer = self._internals.trainer
        kept = [(optimizer, _settings(optimizer)) for optimizer in trainer.optimizers]
        before = [config.scheduler for config in trainer.lr_scheduler_configs]
        yield
        for number, (config, state) in enumerate(zip(trainer.lr_scheduler_configs, schedulers or (), strict=False)):
            if number >= len(before) or config.scheduler is not before[number]:
                config.scheduler.load_state_dict(state)
        for optimizer, settings in kept:
            for group, values in zip(optimizer.param_groups, settings, strict=True):
                for name, value in values.items():
                    if isinstance(group.get(name), torch.Tensor) and isinstance(value, torch.Tensor):
                        group[name].copy_(value)
                    else:
                        group[name] = value

    @contextlib.contextmanager
    def _kept_weights(self, module: torch.nn.Module) -> Iterator[None]:
        trainer = self._internals.trainer
        owners = [module, *trainer.callbacks]
        if not any(_may_change_weights(type(owner)) for owner in owners):
            yield
            return
        before = {name: (t, t._version, t.detach().to("cpu", copy=True)) for name, t in _tensors(module)}
        yield
        with torch.no_grad():
            for name, tensor in _tensors(module):
                same, version, value = before.get(name, (None, 0, None))
                changed = tensor is not same or tensor._version != version
                if value is not None and changed and tensor.shape == value.shape:
                    tensor.copy_(value)


def _is_not_run_again(callback: object) -> bool:
    return not _NOT_AGAIN.isdisjoint(base.__name__ for base in type(callback).__mro__)


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    groups = [{name: v for name, v in group.items() if name != "params"} for group in optimizer.param_groups]
    return [{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items()} for group in groups]


def _may_change_weights(owner: type) -> bool:
    if is_users_own(getattr(owner, _HOOK, None)):
        return True
    return bool(_CHANGE_WEIGHTS & {base.__name__ for base in owner.__mro__})


def is_users_own(function: Any) -> bool:
    """Return whether a hook is the user's, and not Lightning's or ours."""
    return function is not None and not getattr(function, "__module__", "").startswith(_FRAMEWORK)


def _at_start(progress: Mapping[str, Any]) -> dict[str, Any]:
    # for a checkpoint of an earlier version, without `begun`: the batches of the epoch stay counted
    epoch = {kind: dict(counts) for kind, counts in progress["epoch"].items()}
    for counts in epoch.values():
        counts.update(ready=counts["ready"] - 1, started=counts["started"] - 1)
    return {**progress, "epoch": epoch}


class _Quiet:
    """A proxy of a logger that logs nothing."""

    def __init__(self, logger: Any) -> None:
        self.__dict__["_logger"] = logger

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._logger)

    def __getattr__(self, name: str) -> Any:
        if name == "experiment":
            return _Nothing()
        value = getattr(self.__dict__["_logger"], name)
        return _Nothing() if callable(value) and name.startswith(("log", "watch", "save")) else value


class _Nothing:
    """An object on which every access, call and assignment does nothing."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        return

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        return
