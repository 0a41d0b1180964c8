"""FSDP: models and optimizers in pieces, each rank with its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accelerate.utils import DistributedType
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from accelerate_ckpt._state.parts import indexed
from ckpt_core.directory import DirectoryCheckpoint, Part
from ckpt_core.state.kinds import Kind

__all__ = ["apply", "is_used", "parts", "read"]

# Of every tensor only this rank's piece, where it is now.
_PIECES = StateDictOptions(full_state_dict=False, cpu_offload=False)


def is_used(accelerator: Any) -> bool:
    """Whether the Accelerator's models are sharded."""
    return bool(accelerator.distributed_type == DistributedType.FSDP)


def parts(accelerator: Any) -> list[Part]:
    """Return the models and optimizers in pieces; each optimizer belongs to the model with its number, as in Accelerate."""
    found = [
        Part(indexed("model", index), get_model_state_dict(model, options=_PIECES), Kind.SHARDED)
        for index, model in enumerate(accelerator._models)
    ]
    for index, (model, optimizer) in enumerate(zip(accelerator._models, accelerator._optimizers, strict=False)):
        state = get_optimizer_state_dict(model, optimizer.optimizer, options=_PIECES)
        found.append(Part(indexed("optimizer", index), state, Kind.SHARDED))
    return found


def read(accelerator: Any, checkpoint: DirectoryCheckpoint) -> list[Any]:
    """Read this rank's pieces of models and optimizers, whatever the number of ranks that saved; see :func:`apply`.

    Raises:
        StateMismatchError: The checkpoint is of another model. Nothing was changed.
    """
    # The targets first: making them takes all ranks, and reading may fail on one.
    targets = parts(accelerator)
    return [checkpoint.load(target.name, into=target.state) for target in targets]


def apply(accelerator: Any, states: Sequence[Any]) -> None:
    """Set what :func:`read` has read; called on all ranks together."""
    models = accelerator._models
    for model, state in zip(models, states, strict=False):
        set_model_state_dict(model, state, options=_PIECES)
    for model, optimizer, state in zip(models, accelerator._optimizers, states[len(models) :], strict=False):
        set_optimizer_state_dict(model, optimizer.optimizer, state, options=_PIECES)
