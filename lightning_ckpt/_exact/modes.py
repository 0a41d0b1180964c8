"""Which modules train and which parameters have gradients: state of a model that no state_dict has."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_Flags = dict[str, dict[str, bool]]


class Modes:
    """The ``training`` flags and ``requires_grad`` of a model, as far as training has changed them.

    What its user freezes in another way before a resume stays so, unless the run had changed it.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._begun = self._read()

    def _read(self) -> _Flags:
        return {
            "training": {name: child.training for name, child in self._module.named_modules()},
            "requires_grad": {name: p.requires_grad for name, p in self._module.named_parameters()},
        }

    def capture(self) -> _Flags:
        """Return the flags that have changed, by the names of modules and parameters; what is new begins with True."""
        now = self._read()
        return {
            kind: {name: flag for name, flag in now[kind].items() if flag is not self._begun[kind].get(name, True)}
            for kind in now
        }

    def restore(self, flags: Mapping[str, Mapping[str, bool]]) -> None:
        """Set the flags that :meth:`capture` returned, and all others to what they began with."""
        training = {**self._begun["training"], **flags["training"]}
        for name, child in self._module.named_modules():
            child.training = training.get(name, True)
        gradients = {**self._begun["requires_grad"], **flags["requires_grad"]}
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad is not gradients.get(name, True):
                parameter.requires_grad_(gradients.get(name, True))
