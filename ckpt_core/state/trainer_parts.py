"""Convert checkpoints of Lightning's Trainer and Fabric into the parts of a directory checkpoint, and back.

Only names of keys are used, so Lightning need not be installed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from ckpt_core.state.kinds import Kind, Part, indexed

_MODEL = "model"
_REST = "trainer"
_GRADIENTS = "gradients"
_FABRIC = "fabric"
# key in the Trainer's checkpoint: gradients of an open accumulation window, this rank's; once loaded, by rank
GRADIENTS_KEY = "lightning_ckpt_gradients"


def parts_of(
    checkpoint: Mapping[str, Any], *, rank: int, buffers: Collection[str] = (), frozen: Collection[str] = ()
) -> list[Part]:
    """Split a checkpoint of the Trainer into parts.

    Weights and optimizers are parts of their own, so that each can be read alone; their tensors may be distributed. The
    rest is taken from rank 0: only there it is complete, and ranks may differ. So are the ``buffers``: each rank has
    updated its own with its own batches, and DDP continues with those of rank 0. ``frozen`` parameters are those that
    training does not change.
    """
    model = checkpoint.get("state_dict", {})
    whole = {name: value for name, value in model.items() if name in buffers or not isinstance(value, torch.Tensor)}
    weights = {name: value for name, value in model.items() if name not in whole}
    kept_apart = ("state_dict", "optimizer_states", GRADIENTS_KEY)
    rest = {name: value for name, value in checkpoint.items() if name not in kept_apart}
    parts = [Part(_MODEL, weights, Kind.SHARDED, frozen)]
    for index, state in enumerate(checkpoint.get("optimizer_states", ())):
        parts.append(Part(indexed("optimizer", index), state, Kind.SHARDED))
    own = {"checkpoint": rest, "buffers": whole, "order": list(model) if "state_dict" in checkpoint else None}
    parts.append(Part(_GRADIENTS, checkpoint.get(GRADIENTS_KEY, {}), Kind.PER_RANK))
    return [*parts, Part(_REST, own if rank == 0 else {}, Kind.PER_RANK)]


def metadata_of(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return what can be read without loading the checkpoint: epoch, step, count of optimizers, best paths, metrics."""
    found: dict[str, Any] = {name: checkpoint[name] for name in ("epoch", "global_step") if name in checkpoint}
    if "optimizer_states" in checkpoint:
        found["optimizer_states"] = len(checkpoint["optimizer_states"])
    found["callbacks"] = {
        key: {"best_model_path": state["best_model_path"]}
        for key, state in checkpoint.get("callbacks", {}).items()
        if isinstance(state, Mapping) and isinstance(state.get("best_model_path"), str)
    }
    metrics = metrics_of(checkpoint)
    return {**found, "metrics": metrics} if metrics else found


def metrics_of(checkpoint: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that the callbacks of a Trainer have noted in its checkpoint."""
    found: dict[str, float] = {}
    for state in checkpoint.get("callbacks", {}).values():
        noted = state.get("metrics") if isinstance(state, Mapping) else None
        if isinstance(noted, Mapping):
            found |= {str(name): value for name, value in noted.items() if isinstance(value, float)}
    return found


def rest_of(opened: Any) -> tuple[dict[str, Any], dict[str, Any], list[str] | None]:
    """Return the rest (no weights or optimizers) of a checkpoint, the buffers, and the order of the model's state."""
    rest = opened.load(_REST, rank=0)
    return rest["checkpoint"], rest["buffers"], rest["order"]


def gradients_of(opened: Any, ranks: Iterable[int]) -> dict[int, Any]:
    """Return the gradients that ``ranks`` had in an open accumulation window, by rank."""
    return {rank: opened.load(_GRADIENTS, rank=rank) for rank in ranks}


def is_of_trainer(opened: Any) -> bool:
    """Return whether an open directory checkpoint was made from a Trainer's checkpoint."""
    return {_MODEL, _REST, _GRADIENTS} <= set(opened.parts)


def rest_of_fabric(opened: Any) -> dict[str, Any] | None:
    """Return rank 0's rest of a Fabric checkpoint, with buffers by part name; None if it is not Fabric's."""
    part = opened.parts.get(_FABRIC)
    if part is None or part.kind != Kind.PER_RANK.value:
        return None
    rest = opened.load(_FABRIC, rank=0)
    is_whole = isinstance(rest, Mapping) and rest.keys() >= opened.parts.keys() - {_FABRIC}
    return dict(rest) if is_whole else None


def buffers_apart(opened: Any, part: str) -> dict[str, Any]:
    """Return rank 0's buffers of a model that a Trainer or Fabric has saved, which are stored outside its part."""
    if part == _MODEL and is_of_trainer(opened):
        return rest_of(opened)[1]
    found = (rest_of_fabric(opened) or {}).get(part)
    return dict(found) if isinstance(found, Mapping) else {}


def whole(
    opened: Any, ranks: Iterable[int], *, map_location: Any | None = None, empty: Callable[..., Any] | None = None
) -> dict[str, Any]:
    """Return a checkpoint as the Trainer collected it, with whole tensors.

    It has the gradients that ``ranks`` had in an open accumulation window. ``map_location`` is the device of the
    tensors. If it maps saved devices, which a directory does not record, the CPU is used. ``empty`` is called to create
    large tensors without values instead.
    """
    device = map_location if isinstance(map_location, (str, torch.device)) else empty
    checkpoint, buffers, order = rest_of(opened)
    gradients = gradients_of(opened, ranks)
    if any(gradients.values()):
        checkpoint[GRADIENTS_KEY] = gradients
    model = {**opened.load(_MODEL, map_location=device), **buffers}
    if order is not None:
        checkpoint["state_dict"] = {name: model[name] for name in order}
    count = opened.metadata.get("optimizer_states")
    if count is not None:
        checkpoint["optimizer_states"] = [
            opened.load(indexed("optimizer", index), map_location=device) for index in range(count)
        ]
    return checkpoint
