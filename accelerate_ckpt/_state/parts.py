"""The parts of an Accelerator's state, each with its kind (replicated, sharded, per-rank), and how they are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.modules.lazy import LazyModuleMixin

from ckpt_core.directory import DirectoryCheckpoint, Part
from ckpt_core.errors import StateMismatchError
from ckpt_core.state.kinds import Kind, buffers_of_rank, frozen_parameters, indexed, saved_buffers
from ckpt_core.tree import tensors

FORMAT = "accelerate_ckpt"  # our entry in a checkpoint's metadata
RANK = "own"  # the part with the state of each rank


def model_parts(models: Sequence[Any], weights: Sequence[Mapping[str, Any]], kind: Kind) -> list[Part]:
    """Return one part for each state dictionary; hooks may have removed those of some models."""
    frozen = [frozen_parameters(model) for model in models] if len(models) == len(weights) else [()] * len(weights)
    return [Part(indexed("model", index), state, kind, frozen[index]) for index, state in enumerate(weights)]


def optimizer_parts(optimizers: Sequence[Any], kind: Kind) -> list[Part]:
    """Return one part for each optimizer."""
    return [Part(indexed("optimizer", index), item.state_dict(), kind) for index, item in enumerate(optimizers)]


def scheduler_parts(schedulers: Sequence[Any]) -> list[Part]:
    """Return one part for each scheduler."""
    states = [item.state_dict() for item in schedulers]
    return [Part(indexed("scheduler", index), state, Kind.REPLICATED) for index, state in enumerate(states)]


def custom_parts(objects: Sequence[Any]) -> list[Part]:
    """Return one per-rank part for each registered object."""
    return [Part(f"custom_{index}", item.state_dict(), Kind.PER_RANK) for index, item in enumerate(objects)]


def tensor_sizes(parts: Sequence[Part]) -> Iterator[int]:
    """Return the sizes in bytes of the tensors in the parts, each object counted once."""
    seen: set[int] = set()
    for part in parts:
        for _, tensor in tensors(part.state):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor.nbytes if tensor.layout is torch.strided else 0  # the others are small objects


def own_buffers(accelerator: Any) -> list[dict[str, torch.Tensor]]:
    """Return this rank's buffers of each model, such as BatchNorm's statistics."""
    buffers_of = buffers_of_rank if is_sharded(accelerator) else saved_buffers
    return [buffers_of(model) for model in accelerator._models]


def check_optimizer(optimizer: Any, state: Mapping[str, Any], *, path: str, key: str) -> None:
    """Raise if the state is of an optimizer over other parameters, before anything is changed."""
    here = [len(group["params"]) for group in optimizer.param_groups]
    saved = [len(group["params"]) for group in state["param_groups"]]
    if here != saved:
        raise StateMismatchError(
            f"the checkpoint's optimizer has parameter groups of {saved} parameters, and the one here has groups of "
            f"{here}",
            path=path,
            key=key,
            remedy="prepare the same model and optimizer as the run that saved",
        )


def check_weights(
    model: torch.nn.Module, saved: Mapping[str, tuple[int, ...] | None], *, strict: bool, path: str
) -> None:
    """Raise if weights are of another model, by their shapes (None for non-tensors), before anything is changed.

    With ``strict``, also for missing and unexpected names. A model with modules that override loading is not checked:
    they may accept other names and shapes.
    """
    if any(_loads_in_its_own_way(module) for module in model.modules()):
        return
    here = model.state_dict(keep_vars=True)
    problems = [
        f"{name} has shape {list(shape)} in the checkpoint and {list(here[name].shape)} in the model"
        for name, shape in saved.items()
        if shape is not None and isinstance(here.get(name), torch.Tensor) and tuple(here[name].shape) != shape
    ]
    if strict:
        # One name of a tied weight is enough; BatchNorm statistics of old models have no counters.
        stored = {id(here[name]) for name in saved if name in here}
        missing = [name for name, value in here.items() if id(value) not in stored and isinstance(value, torch.Tensor)]
        problems += [f"{name} is not in the checkpoint" for name in missing if not name.endswith("num_batches_tracked")]
        problems += [f"{name} is not in the model" for name in saved if name not in here]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise StateMismatchError(
            f"the checkpoint is of another model: {'; '.join(problems[:3])}{more}",
            path=path,
            key=problems[0].split()[0],
            remedy="prepare the same model as the run that saved",
        )


def _loads_in_its_own_way(module: torch.nn.Module) -> bool:
    kind = type(module)
    return bool(
        module._load_state_dict_pre_hooks
        or kind.load_state_dict is not torch.nn.Module.load_state_dict
        or not kind._load_from_state_dict.__module__.startswith("torch.nn.")
        or isinstance(module, LazyModuleMixin)
    )


def load_model(
    model: torch.nn.Module,
    checkpoint: DirectoryCheckpoint,
    part: str,
    *,
    rank: int,
    strict: bool = True,
    **arguments: Any,
) -> None:
    """Read a model's weights from a part straight into its tensors: those of ``rank``, if each rank has its own.

    The tensors are those of its ``state_dict``; its ``load_state_dict`` is called too, with ``arguments``. If the
    checkpoint is of another model, nothing is changed. With ``strict``, missing and unexpected names raise.
    """
    loaded = checkpoint.load(part, into=model.state_dict(), rank=rank, strict=strict)
    # Tensors that the model does not have come without values.
    loaded = {name: value for name, value in loaded.items() if not getattr(value, "is_meta", False)}
    # The values are loaded already. This call is for modules with their own loading code, and for extra state.
    model.load_state_dict(loaded, strict=strict, **arguments)


# ---- FSDP: models and optimizers in pieces, each rank with its own ---------------------------------------------------

# Only this rank's piece of each tensor, on its present device.
_PIECES = StateDictOptions(full_state_dict=False, cpu_offload=False)


def is_sharded(accelerator: Any) -> bool:
    """Return whether the Accelerator's models are sharded."""
    return bool(accelerator.distributed_type == DistributedType.FSDP)


def has_more_optimizers(accelerator: Any) -> bool:
    """Whether there are optimizers that :func:`sharded_parts` leaves out, as Accelerate does."""
    return len(accelerator._optimizers) > len(accelerator._models)


def sharded_parts(accelerator: Any) -> list[Part]:
    """Return models and optimizers in pieces; each optimizer belongs to the model with its number, as in Accelerate."""
    found = [
        Part(
            indexed("model", index),
            get_model_state_dict(model, options=_PIECES),
            Kind.SHARDED,
            frozen_parameters(model),
        )
        for index, model in enumerate(accelerator._models)
    ]
    for index, (model, optimizer) in enumerate(zip(accelerator._models, accelerator._optimizers, strict=False)):
        state = get_optimizer_state_dict(model, optimizer.optimizer, options=_PIECES)
        found.append(Part(indexed("optimizer", index), state, Kind.SHARDED))
    return found


def read_sharded(accelerator: Any, checkpoint: DirectoryCheckpoint) -> list[Any]:
    """Read this rank's pieces of models and optimizers; any number of ranks may have saved. See :func:`apply_sharded`.

    If the checkpoint is of another model, nothing is changed.
    """
    # The targets first: creating them takes all ranks, while reading may fail on one.
    targets = sharded_parts(accelerator)
    return [checkpoint.load(target.name, into=target.state) for target in targets]


def apply_sharded(accelerator: Any, states: Sequence[Any]) -> None:
    """Set the states that :func:`read_sharded` has read; called on all ranks together."""
    models = accelerator._models
    for model, state in zip(models, states, strict=False):
        set_model_state_dict(model, state, options=_PIECES)
    for model, optimizer, state in zip(models, accelerator._optimizers, states[len(models) :], strict=False):
        set_optimizer_state_dict(model, optimizer.optimizer, state, options=_PIECES)
