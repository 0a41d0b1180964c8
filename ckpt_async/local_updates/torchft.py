"""Checkpoints of torchft's DiLoCo, with one or several fragments.

torchft restores a lost worker from another one, but leaves checkpoints, from which all workers can restart, to the
user. It keeps the shared parameters and the outer optimizers in private attributes, here those of torchft 0.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ckpt_async.local_updates.diloco import OuterLoop
from ckpt_core.errors import CheckpointError, StateMismatchError

_LOOP = ("_fragments", "_local_step")
_FRAGMENT = ("_allreduce_work", "_model_fragment", "_outer_optimizer", "original_parameters")


class TorchftLoop(OuterLoop):
    """The state of ``torchft.local_sgd.DiLoCo``.

    Save when the inner optimizer's step has ended a window, that is, when :attr:`at_boundary` is true.

    Args:
        diloco: The ``DiLoCo``.
        manager: Its ``Manager``.

    Raises:
        CheckpointError: The object lacks attributes of torchft 0.2.
    """

    def __init__(self, diloco: Any, manager: Any) -> None:
        missing = [name for name in _LOOP if not hasattr(diloco, name)]
        for fragment in getattr(diloco, "_fragments", ()):
            missing += [f"_fragments[].{name}" for name in _FRAGMENT if not hasattr(fragment, name)]
        if missing:
            raise CheckpointError(
                f"the {type(diloco).__name__} of this torchft has no {', '.join(dict.fromkeys(missing))}",
                remedy="use torchft 0.2",
            )
        self._diloco = diloco
        self._manager = manager

    @property
    def at_boundary(self) -> bool:
        """Whether a window has just ended and no reduction is under way."""
        is_reducing = any(fragment._allreduce_work for fragment in self._diloco._fragments)
        return self._diloco._local_step == 0 and not is_reducing

    def _check(self) -> None:
        if not self.at_boundary:
            raise CheckpointError(
                f"DiLoCo is at inner step {self._diloco._local_step} of a window",
                remedy="save when TorchftLoop.at_boundary is true: once in each window with fragment_sync_delay=0",
            )

    def _named(self) -> Iterator[tuple[str, Any, str]]:
        for number, fragment in enumerate(self._diloco._fragments):
            for name in fragment.original_parameters:
                yield f"{number}.{name}", fragment, name

    def _outer_optimizers(self) -> list[Any]:
        """Return each outer optimizer once; several fragments may share one."""
        return list({id(f._outer_optimizer): f._outer_optimizer for f in self._diloco._fragments}.values())

    def global_parameters(self) -> dict[str, torch.Tensor]:
        self._check()
        return {key: fragment.original_parameters[name] for key, fragment, name in self._named()}

    def outer_state(self) -> dict[str, Any]:
        self._check()
        optimizers = [optimizer.state_dict() for optimizer in self._outer_optimizers()]
        return {"optimizers": optimizers, "manager": dict(self._manager.state_dict())}

    def own_parameters(self) -> dict[str, torch.Tensor]:
        self._check()
        found = {}
        for key, fragment, name in self._named():
            value = fragment._model_fragment.get_parameter(name).detach()
            if not torch.equal(value.cpu(), fragment.original_parameters[name].cpu()):
                found[key] = value
        return found

    @torch.no_grad()
    def load(self, parameters: Mapping[str, torch.Tensor], outer: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        named = list(self._named())
        optimizers = self._outer_optimizers()
        if parameters.keys() != {key for key, _, _ in named} or len(optimizers) != len(outer["optimizers"]):
            raise StateMismatchError("the checkpoint is of another model, or of other fragments of it", key="model")
        for key, fragment, name in named:
            fragment.original_parameters[name].copy_(parameters[key])
            fragment._model_fragment.get_parameter(name).copy_(own.get(key, parameters[key]))
        for optimizer, state in zip(optimizers, outer["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self._manager.load_state_dict(dict(outer["manager"]))
        self._diloco._local_step = 0
