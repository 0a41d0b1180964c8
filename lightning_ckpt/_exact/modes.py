"""Captures modes and settings of a model's modules, and ``requires_grad``: state that no ``state_dict`` has."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ckpt_core.state.object_walk import set_by_libraries

_SETTINGS = (bool, int, float, str, type(None))

_Flags = dict[str, dict[str, Any]]


class Modes:
    """The ``training`` flags, ``requires_grad`` and settings of a model, as far as training has changed them.

    Settings are numbers and strings that torch's modules keep in attributes: ``p`` of ``Dropout``, ``momentum`` of
    ``BatchNorm1d``. What the user freezes or sets differently before a resume stays so, unless the run had changed it.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._begun = self._read()

    def _read(self) -> _Flags:
        return {
            "training": {name: child.training for name, child in self._module.named_modules()},
            "requires_grad": {name: p.requires_grad for name, p in self._module.named_parameters()},
            "settings": {
                f"{name}.{key}": value
                for name, child in self._module.named_modules()
                for key, value in _settings_of(child)
            },
        }

    def capture(self) -> _Flags:
        """Return what has changed, by the names of modules and parameters; flags of new ones count as True before."""
        now, begun = self._read(), self._begun
        flags = {
            kind: {name: flag for name, flag in now[kind].items() if flag is not begun[kind].get(name, True)}
            for kind in ("training", "requires_grad")
        }
        settings, first = now["settings"], begun["settings"]
        changed = {name: one for name, one in settings.items() if name in first and repr(one) != repr(first[name])}
        return {**flags, "settings": changed}

    def restore(self, flags: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore what :meth:`capture` returned, and set all other flags to their values at the start of the fit."""
        training = {**self._begun["training"], **flags["training"]}
        settings = flags.get("settings", {})  # checkpoints of earlier versions have none
        for name, child in self._module.named_modules():
            child.training = training.get(name, True)
            kept = {key: settings[f"{name}.{key}"] for key in vars(child) if f"{name}.{key}" in settings}
            vars(child).update(kept)
        gradients = {**self._begun["requires_grad"], **flags["requires_grad"]}
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad is not gradients.get(name, True):
                parameter.requires_grad_(gradients.get(name, True))


def _settings_of(child: Any) -> Iterator[tuple[str, Any]]:
    names = _set_by_torch(child.__class__)
    for name, value in vars(child).items():
        if type(value) in _SETTINGS and name in names:
            yield name, value


@functools.lru_cache(maxsize=256)
def _set_by_torch(kind: Any) -> frozenset[str]:
    """Return the attributes that torch's class of a module sets, except those that every module has."""
    of_torch = next(base for base in kind.__mro__ if base.__module__.startswith("torch."))
    return set_by_libraries(of_torch) - set_by_libraries(torch.nn.Module)
