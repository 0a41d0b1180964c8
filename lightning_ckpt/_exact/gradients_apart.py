"""What of a rank's exact state is as large as the weights, kept apart from the rest in directory checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_core import Kind

# beside the gradients, and no name that a parameter can have
_POST_LOCAL_SGD = "post-localSGD/"


def keep_apart(mine: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide a rank's exact state into what is as large as the weights, which each rank writes itself, and the rest."""
    large = dict(mine["gradients"])
    if mine["post_local_sgd"]:
        large[_POST_LOCAL_SGD] = mine["post_local_sgd"]
    return large, {**mine, "gradients": {}, "post_local_sgd": {}}


def put_back(state: Mapping[str, Any], apart: Mapping[int, Any]) -> dict[str, Any]:
    """Undo :func:`keep_apart` in the exact state of all ranks, with what some ranks wrote themselves, by rank."""
    ranks = list(state[Kind.PER_RANK.value])
    for rank, saved in apart.items():
        if rank < len(ranks) and ranks[rank] is not None:
            gradients = dict(saved)
            own = gradients.pop(_POST_LOCAL_SGD, {})
            ranks[rank] = {**ranks[rank], "gradients": gradients, "post_local_sgd": own}
    return {**state, Kind.PER_RANK.value: ranks}
