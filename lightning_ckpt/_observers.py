"""Delays ``Logger.after_save_checkpoint`` until the checkpoint is durable, and calls it with the values of that save.

Lightning calls it when ``save_checkpoint`` has returned. After a background save, the file does not exist yet then, or
is still that of the previous save: a logger that uploads checkpoints would upload the old file with the new score.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any
from weakref import proxy

from lightning_ckpt._plugin_base import ReliableCheckpointIO
from lightning_ckpt._private.replacing import replace, wrap

_PATHS = ("last_model_path", "best_model_path")


@dataclasses.dataclass
class _DelayedCall:
    """A delayed call of a logger's ``after_save_checkpoint``."""

    call: Callable[[], None]
    path: str
    mentioned: frozenset[str]
    step: int


class Observers:
    """Delays the calls to one Trainer's loggers; does nothing unless the Trainer's plugin saves in the background."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._untold: list[_DelayedCall] = []
        self._views: dict[int, Any] = {}
        self._undo: list[Callable[[], None]] = []
        plugin = trainer.strategy.checkpoint_io
        self._checkpointer: Any = None
        if not isinstance(plugin, ReliableCheckpointIO) or plugin.checkpointer.strategy != "async":
            return
        self._checkpointer = plugin.checkpointer
        observers = [logger for logger in trainer.loggers if _observes(logger)] if trainer.is_global_zero else []
        for logger in observers:
            self._undo.append(wrap(logger, "after_save_checkpoint", self._later))
            self._undo.append(wrap(logger, "finalize", self._after_telling))
        if observers:
            self._undo.append(replace(plugin, "before_change", self._before_change))

    def _later(self, tell: Callable[[Any], None], callback: Any) -> None:
        state = {**vars(callback), "best_k_models": dict(getattr(callback, "best_k_models", {})), "_plugin": None}
        path = os.fspath(state.get("_last_checkpoint_saved") or "")
        view = self._view(callback)

        def call() -> None:
            vars(view).clear()
            vars(view).update(state)
            tell(proxy(view))

        names = [path, *(getattr(callback, name, None) for name in _PATHS), *state["best_k_models"]]
        mentioned = frozenset(self._checkpointer.known_as(name) for name in names if name)
        self._untold.append(_DelayedCall(call, path, mentioned, self._trainer.global_step))
        self.tell_ended()

    def _after_telling(self, finalize: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.tell_all()
        return finalize(*args, **kwargs)

    def _view(self, callback: Any) -> Any:
        # One view per callback: loggers keep the callbacks that they were called with, and read them again at the end.
        view = self._views.get(id(vars(callback)))
        if view is None:
            view = self._views[id(vars(callback))] = object.__new__(callback.__class__)
        return view

    def _is_pending(self, untold: _DelayedCall) -> bool:
        if untold.path:
            return bool(self._checkpointer.is_pending(untold.path))
        return bool(self._checkpointer.pending)  # a callback that does not record which path it saved

    def tell_ended(self) -> None:
        """Notify loggers of the checkpoints that are durable by now; never of those whose save failed."""
        while self._untold and not self._is_pending(self._untold[0]):
            first = self._untold.pop(0)
            if not first.path or not self._checkpointer.has_failed(first.path):
                first.call()

    def tell_all(self) -> None:
        """Wait for pending saves, and notify loggers of what was saved."""
        if self._checkpointer is not None:
            self._checkpointer.drain()
            self.tell_ended()

    def _before_change(self, path: Any, *, removes: bool) -> None:
        """Before ``path`` is replaced or deleted, wait and make all delayed calls, if an older save mentions it."""
        known, step = self._checkpointer.known_as(path), self._trainer.global_step
        if any(known in untold.mentioned and (removes or untold.step != step) for untold in self._untold):
            self.tell_all()

    def close(self) -> None:
        """Leave the loggers and the plugin as they were."""
        for undo in reversed(self._undo):
            undo()


def _observes(logger: Any) -> bool:
    """Return whether a logger overrides ``after_save_checkpoint``."""
    bases = [cls for cls in type(logger).__mro__ if "after_save_checkpoint" in vars(cls)]
    return bool(bases) and bases[0].__name__ != "Logger"  # the base class does nothing
