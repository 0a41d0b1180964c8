"""Hooks that Lightning lacks: wraps its functions for all Trainers and Fabrics once one of our objects is created.

Nothing is replaced in a program that only has this package installed, or only imports it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from ckpt_core.errors import CheckpointError, CheckpointNotFoundError, StorageError
from lightning_ckpt._bases import CheckpointIOBase, ModelCheckpointBase

_Call = Callable[[Any], None]


def before_setup(call: _Call) -> None:
    """Make every Trainer call ``call(trainer)`` when its processes are connected, before ``setup`` hooks and any load.

    A callback has such a hook, a ``CheckpointIO`` has none. Registering the same ``call`` again does nothing, as for
    all functions below. Raises ``CheckpointError`` if this release of Lightning lacks the wrapped function.
    """
    for package in _trainers():
        _call_first(importlib.import_module(f"{package}.trainer.call"), "_call_setup_hook", call, package)


def before_launches(call: Callable[[Any, Any], None]) -> None:
    """Make every Trainer call ``call(trainer, ckpt_path)`` before its first fit.

    It has launched no other process by then. Trial fits of Lightning's tuners and ``fast_dev_run`` do not count.
    """

    def launch(original: Callable[..., Any], trainer: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        if trainer.state.fn == "fit" and _is_a_first_start(trainer):
            call(trainer, inspect.signature(function).bind(*args, **kwargs).arguments.get("ckpt_path"))
        return original(trainer, function, *args, **kwargs)

    for package in _trainers():
        module = importlib.import_module(f"{package}.trainer.call")
        _wrap_once(module, "_call_and_handle_interrupt", launch, package, call)


def for_directories(load: Callable[..., dict[str, Any]]) -> None:
    """Make every ``load_from_checkpoint`` call ``load`` for a path that Lightning cannot open because it is no file.

    Lightning opens the path itself, without calling a plugin. If ``load``, which takes the path, ``map_location`` and
    ``weights_only``, finds no checkpoint either, Lightning's own error is raised.
    """

    def open_or_load(original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(path, *args, **kwargs)
        except (FileNotFoundError, IsADirectoryError) as error:
            if not isinstance(path, (str, os.PathLike)):
                raise
            try:
                return load(path, *args, **kwargs)
            except (CheckpointNotFoundError, StorageError):
                raise error from None

    for package in _trainers():
        _wrap_once(importlib.import_module(f"{package}.core.saving"), "pl_load", open_or_load, package, load)


def before_look_ups(call: _Call) -> None:
    """Make every Trainer call ``call(trainer)`` before it resolves its ``ckpt_path``, for which there is no hook."""

    def select(original: Callable[..., Any], connector: Any, *args: Any, **kwargs: Any) -> Any:
        call(connector.trainer)
        return original(connector, *args, **kwargs)

    _around_look_ups(select, call)


def find_path_when_none(find: Callable[[Any], list[str | None]], is_ahead: Callable[[Any], bool]) -> None:
    """Make every Trainer call ``find(trainer)`` to learn what a ``fit`` without ``ckpt_path`` resumes from.

    ``find`` returns an empty list to leave the choice to Lightning, else a list of the path, or of None for a fresh
    start. The public ``trainer.ckpt_path`` could be set instead, but Lightning then warns about every path that a user
    gives. ``find`` is not called for a Trainer that has already trained, whose state is newer than any checkpoint (but
    it is if ``is_ahead(trainer)``: the Trainer only resumed, from a checkpoint of a later fit), for ``fast_dev_run``,
    or for trial fits of Lightning's tuners.
    """

    def select(
        original: Callable[..., Any], connector: Any, state_fn: Any, ckpt_path: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        is_asked = ckpt_path is None and state_fn == "fit" and not connector._user_managed
        is_start = is_asked and (_is_a_first_start(connector.trainer) or is_ahead(connector.trainer))
        found = find(connector.trainer) if is_start else []
        return found[0] if found else original(connector, state_fn, ckpt_path, *args, **kwargs)

    _around_look_ups(select, find)


def override_path(choose: Callable[[Any], str | None], root: str) -> None:
    """Make every Trainer call ``choose(trainer)`` for what its first ``fit`` resumes from, whatever its ``ckpt_path``.

    Files that Lightning and its loggers write go to the directory ``root``, for which there is no setter. Functions
    that were registered before are no longer called for it; call this again after others may have been registered.
    """

    def select(original: Callable[..., Any], connector: Any, state_fn: Any, *args: Any, **kwargs: Any) -> Any:
        if state_fn == "fit" and _is_a_first_start(connector.trainer):
            connector.trainer._default_root_dir = root
            return choose(connector.trainer)
        return original(connector, state_fn, *args, **kwargs)

    _around_look_ups(select, choose, comes_first=True)


def with_devices(number: int) -> None:
    """Make every Trainer that is created from now on use ``number`` devices, whatever its arguments."""

    def make(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> None:
        original(trainer, *args, **{**kwargs, "devices": number})

    for package in _trainers():
        _wrap_once(importlib.import_module(package).Trainer, "__init__", make, package, with_devices)


def _is_a_first_start(trainer: Any) -> bool:
    is_trial = any(getattr(callback, "_early_exit", False) for callback in trainer.callbacks)
    has_begun = trainer.global_step or trainer.fit_loop.epoch_progress.current.ready
    return not (trainer.fast_dev_run or is_trial or has_begun)


def before_saves_of_fabric(call: _Call) -> None:
    """Make every Fabric call ``call(fabric)`` before it saves or loads, which all ranks do together."""
    for base in CheckpointIOBase.__bases__:
        package = base.__module__.partition(".plugins")[0]
        for name in ("save", "load", "load_raw"):
            _call_first(sys.modules[package].Fabric, name, call, package)


def before_loads_of_fabric(call: Callable[[Any, Any], None]) -> None:
    """Make every Fabric call ``call(fabric, path)`` before ``load``, which all ranks call together."""

    def load(original: Callable[..., Any], fabric: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        call(fabric, path)
        return original(fabric, path, *args, **kwargs)

    for base in CheckpointIOBase.__bases__:
        package = base.__module__.partition(".plugins")[0]
        _wrap_once(sys.modules[package].Fabric, "load", load, package, call)


def _trainers() -> list[str]:
    return [base.__module__.partition(".callbacks")[0] for base in ModelCheckpointBase.__bases__]


def _around_look_ups(around: Callable[..., Any], key: object, *, comes_first: bool = False) -> None:
    for package in _trainers():
        module = importlib.import_module(f"{package}.trainer.connectors.checkpoint_connector")
        connector = getattr(module, "_CheckpointConnector", None)
        _wrap_once(connector, "_select_ckpt_path", around, package, key, comes_first=comes_first)


def _call_first(owner: Any, name: str, call: _Call, package: str) -> None:
    def call_first(original: Callable[..., Any], first: Any, *args: Any, **kwargs: Any) -> Any:
        call(first)
        return original(first, *args, **kwargs)

    _wrap_once(owner, name, call_first, package, call)


def _wrap_once(
    owner: Any, name: str, around: Callable[..., Any], package: str, key: object, *, comes_first: bool = False
) -> None:
    """Replace a function of Lightning with ``around(original, *arguments)``, once per key; the last is outermost."""
    original = getattr(owner, name, None)
    if original is None:
        raise CheckpointError(
            f"lightning_ckpt does not work with this release of {package}: it has no {name}",
            remedy="use Lightning 2.5 to 2.7",
        )
    known = getattr(original, "ckpt_wrappers", {})
    if key in known and not (comes_first and known[key] is not original):
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    wrapper.ckpt_wrappers = {**known, key: wrapper}  # type: ignore[attr-defined]
    setattr(owner, name, wrapper)
