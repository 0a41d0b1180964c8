"""The kind of each part of a state: replicated, sharded or per-rank; and a model's buffers and frozen parameters."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from ckpt_core.errors import StateMismatchError


class Kind(enum.Enum):
    """How a part of the state is distributed over ranks, declared by the caller instead of guessed from equal keys.

    Attributes:
        REPLICATED: Every rank holds the same; one copy is saved.
        SHARDED: Every rank holds a piece of one whole.
        PER_RANK: Every rank holds its own: random generators, data position, gradients of an open window.
    """

    REPLICATED = "replicated"
    SHARDED = "sharded"
    PER_RANK = "per-rank"


@dataclasses.dataclass(frozen=True)
class Part:
    """A named part of the state.

    Attributes:
        name: Letters, digits and underscores; beginning of the name of its file.
        state: Nested dictionaries, lists and tuples of tensors and plain values.
        kind: How it is distributed over ranks.
        frozen: Names of tensors in it that training does not change (:func:`frozen_parameters`). They are written once,
            and linked or copied at later saves, as long as their bytes are the same.
    """

    name: str
    state: Any
    kind: Kind
    frozen: Collection[str] = ()


def indexed(name: str, index: int) -> str:
    """Return the name of the part for one of several models or optimizers: ``model``, ``model_1`` and so on."""
    return name if index == 0 else f"{name}_{index}"


_WRAPPERS = re.compile(r"_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.|_orig_mod\.")


def frozen_parameters(model: torch.nn.Module) -> frozenset[str]:
    """Return the names of the parameters that need no gradient, with and without the prefixes of wrappers."""
    named = model.named_parameters(remove_duplicate=False)
    return frozenset(_by_all_names((name, value) for name, value in named if not value.requires_grad))


def buffers_by_name(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of a model, by their names with and without the prefixes of wrappers."""
    return _by_all_names(model.named_buffers(remove_duplicate=False))


def _by_all_names(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    found = dict(named)
    # an actual name takes precedence over one that results from removing another's prefixes
    return {**{_WRAPPERS.sub("", name).removeprefix("module."): value for name, value in found.items()}, **found}


def parameters_of(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """Return the parameters that optimizers have; FSDP2 modules, which evaluation leaves unsharded, are resharded."""
    found: list[torch.nn.Parameter] = []
    for module in modules:
        inner: Any
        for inner in module.modules():
            if any(cls.__name__ == "FSDPModule" for cls in type(inner).__mro__):  # importing it takes time
                inner.reshard()
        found += module.parameters()
    return found


def saved_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that a model's ``state_dict`` has, such as BatchNorm's statistics, by all names."""
    saved = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name in saved}


def buffers_of_rank(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that a model's ``state_dict`` has, each once; of a distributed buffer, this rank's piece.

    They are read from the modules, because some strategies collect a ``state_dict`` only on rank 0.
    """
    unsaved = {id(part._buffers.get(name)) for part in model.modules() for name in part._non_persistent_buffers_set}
    own = {id(buffer): (name, buffer) for name, buffer in buffers_by_name(model).items() if id(buffer) not in unsaved}
    return {name: _piece(buffer).detach() for name, buffer in own.values()}


def capture_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copy :func:`buffers_of_rank` to host memory."""
    return {name: buffer.to("cpu", copy=True) for name, buffer in buffers_of_rank(model).items()}


def restore_buffers(model: torch.nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    """Put a rank's buffers back, if the model still has them with the same shapes."""
    with torch.no_grad():
        for name, buffer in buffers_by_name(model).items() if saved else ():
            if name in saved and saved[name].shape == _piece(buffer).shape:
                _piece(buffer).copy_(_piece(saved[name]))


def _piece(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def join_ranks(replicated: Mapping[str, Any], per_rank: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """Combine the parts of all ranks into one state; None stands for a rank that could not report."""
    ranks = [None if state is None else dict(state) for state in per_rank]
    return {Kind.REPLICATED.value: dict(replicated), Kind.PER_RANK.value: ranks}


def state_of_rank(joined: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return what one rank held when the state was joined by :func:`join_ranks`."""
    ranks = joined[Kind.PER_RANK.value]
    state = ranks[rank] if rank < len(ranks) else None
    if state is None:
        raise StateMismatchError(
            f"the checkpoint holds no state of rank {rank}: it was saved by {len(ranks)} ranks, "
            "or that rank had failed when it was saved",
            key=f"{Kind.PER_RANK.value}.{rank}",
            remedy="resume from an earlier checkpoint, or with exact=False",
        )
    return dict(state)
