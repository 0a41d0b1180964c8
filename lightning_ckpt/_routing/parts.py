"""What the Trainer collects for a checkpoint, as the parts of a directory checkpoint, and back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from ckpt_core import Kind, Part

__all__ = [
    "GRADIENTS_KEY",
    "gradients_of",
    "keep_apart",
    "metadata_of",
    "optimizer_part",
    "parts_of",
    "put_back",
    "rest_of",
]

_MODEL = "model"
_REST = "trainer"
_GRADIENTS = "gradients"
# in the Trainer's checkpoint: gradients of an open accumulation window, of which each rank has its own
GRADIENTS_KEY = "lightning_ckpt_gradients"
# beside the gradients, and no name that a parameter can have
_POST_LOCAL_SGD = "post-localSGD/"


def optimizer_part(index: int) -> str:
    """Return the name of the part that holds one optimizer's state."""
    return "optimizer" if index == 0 else f"optimizer_{index}"


def parts_of(checkpoint: Mapping[str, Any], *, rank: int, buffers: Collection[str] = ()) -> list[Part]:
    """Split a checkpoint of the Trainer into parts.

    Weights and optimizers are parts of their own, so that each can be read alone; their tensors may be distributed. The
    rest is that of rank 0: only there has it everything, and ranks may differ in it. So are the buffers: each rank has
    updated its own with its own batches, and DDP continues with those of rank 0.

    Args:
        checkpoint: What the Trainer gives its strategy; the callbacks and hooks of the user have changed it already.
        rank: This process's rank.
        buffers: Names of the model's buffers.
    """
    model = checkpoint.get("state_dict", {})
    whole = {name: value for name, value in model.items() if name in buffers or not isinstance(value, torch.Tensor)}
    weights = {name: value for name, value in model.items() if name not in whole}
    kept_apart = ("state_dict", "optimizer_states", GRADIENTS_KEY)
    rest = {name: value for name, value in checkpoint.items() if name not in kept_apart}
    parts = [Part(_MODEL, weights, Kind.SHARDED)]
    for index, state in enumerate(checkpoint.get("optimizer_states", ())):
        parts.append(Part(optimizer_part(index), state, Kind.SHARDED))
    own = {"checkpoint": rest, "buffers": whole, "order": list(model) if "state_dict" in checkpoint else None}
    parts.append(Part(_GRADIENTS, checkpoint.get(GRADIENTS_KEY, {}), Kind.PER_RANK))
    return [*parts, Part(_REST, own if rank == 0 else {}, Kind.PER_RANK)]


def metadata_of(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is asked of a checkpoint before it is loaded: can it be resumed from, what was the best."""
    found: dict[str, Any] = {name: checkpoint[name] for name in ("epoch", "global_step") if name in checkpoint}
    if "optimizer_states" in checkpoint:
        found["optimizer_states"] = len(checkpoint["optimizer_states"])
    found["callbacks"] = {
        key: {"best_model_path": state["best_model_path"]}
        for key, state in checkpoint.get("callbacks", {}).items()
        if isinstance(state, Mapping) and isinstance(state.get("best_model_path"), str)
    }
    return found


def rest_of(opened: Any) -> tuple[dict[str, Any], dict[str, Any], list[str] | None]:
    """Return everything of a checkpoint but weights and optimizers.

    Args:
        opened: The open checkpoint.

    Returns:
        The rest, as the Trainer expects it; the model's buffers; the order of the model's state, if there is one.
    """
    rest = opened.load(_REST, rank=0)
    return rest["checkpoint"], rest["buffers"], rest["order"]


def gradients_of(opened: Any, ranks: Iterable[int]) -> dict[int, Any]:
    """Return the gradients of an open accumulation window that some of the ranks had, by rank.

    Args:
        opened: The open checkpoint.
        ranks: Which ranks of those that saved.
    """
    return {rank: opened.load(_GRADIENTS, rank=rank) for rank in ranks}


def keep_apart(mine: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide a rank's exact state into what is as large as the weights, which each rank writes itself, and the rest.

    Args:
        mine: The exact state of this rank.
    """
    large = dict(mine["gradients"])
    if mine["post_local_sgd"]:
        large[_POST_LOCAL_SGD] = mine["post_local_sgd"]
    return large, {**mine, "gradients": {}, "post_local_sgd": {}}


def put_back(state: Mapping[str, Any], apart: Mapping[int, Any]) -> dict[str, Any]:
    """Undo :func:`keep_apart` in the exact state of all ranks.

    Args:
        state: The exact state of all ranks.
        apart: What some ranks wrote themselves, by rank.
    """
    ranks = list(state[Kind.PER_RANK.value])
    for rank, saved in apart.items():
        if rank < len(ranks) and ranks[rank] is not None:
            gradients = dict(saved)
            own = gradients.pop(_POST_LOCAL_SGD, {})
            ranks[rank] = {**ranks[rank], "gradients": gradients, "post_local_sgd": own}
    return {**state, Kind.PER_RANK.value: ranks}
