"""What Lightning's Trainer and Fabric collect for a checkpoint, as the parts of a directory checkpoint, and back.

Names of keys only: Lightning need not be installed to convert one layout into the other.
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
# in the Trainer's checkpoint: gradients of an open accumulation window, of which each rank has its own
GRADIENTS_KEY = "lightning_ckpt_gradients"


def parts_of(
    checkpoint: Mapping[str, Any], *, rank: int, buffers: Collection[str] = (), frozen: Collection[str] = ()
) -> list[Part]:
    """Split a checkpoint of the Trainer into parts.

    Weights and optimizers are parts of their own, so that each can be read alone; their tensors may be distributed. The
    rest is that of rank 0: only there has it everything, and ranks may differ in it. So are the ``buffers``: each rank
    has updated its own with its own batches, and DDP continues with those of rank 0. ``frozen`` parameters are those
    that training does not change.
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
    """Return what is asked of a checkpoint before it is loaded: can it be resumed from, what was the best."""
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
    """Return all of a checkpoint but weights and optimizers: that, the buffers, the order of the model's state."""
    rest = opened.load(_REST, rank=0)
    return rest["checkpoint"], rest["buffers"], rest["order"]


def gradients_of(opened: Any, ranks: Iterable[int]) -> dict[int, Any]:
    """Return the gradients of an open accumulation window that some of the ranks had, by rank."""
    return {rank: opened.load(_GRADIENTS, rank=rank) for rank in ranks}


def is_of_trainer(opened: Any) -> bool:
    """Return whether an open directory checkpoint was made of a Trainer's."""
    return {_MODEL, _REST, _GRADIENTS} <= set(opened.parts)


def rest_of_fabric(opened: Any) -> dict[str, Any] | None:
    """Return what Fabric keeps of rank 0, the buffers by the names of the parts; None if it is not Fabric's."""
    part = opened.parts.get(_FABRIC)
    if part is None or part.kind != Kind.PER_RANK.value:
        return None
    rest = opened.load(_FABRIC, rank=0)
    is_whole = isinstance(rest, Mapping) and rest.keys() >= opened.parts.keys() - {_FABRIC}
    return dict(rest) if is_whole else None


def buffers_apart(opened: Any, part: str) -> dict[str, Any]:
    """Return the buffers of a model that a Trainer or Fabric has saved: those of rank 0, which are not in the part."""
    if part == _MODEL and is_of_trainer(opened):
        return rest_of(opened)[1]
    found = (rest_of_fabric(opened) or {}).get(part)
    return dict(found) if isinstance(found, Mapping) else {}


def whole(
    opened: Any, ranks: Iterable[int], *, map_location: Any | None = None, empty: Callable[..., Any] | None = None
) -> dict[str, Any]:
    """Return a checkpoint as the Trainer collected it, all of its tensors whole.

    ``ranks`` are those whose gradients of an open accumulation window are wanted. ``map_location`` is the device of the
    tensors; it is the CPU where it maps the devices that tensors were on, which a directory does not say. ``empty``
    makes the large tensors instead, without values.
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
