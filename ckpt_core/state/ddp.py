"""State of ``DistributedDataParallel`` that can make a step after a resume differ: gradient buckets, comm hooks."""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ckpt_core.tree import tensors


def rebuild_ddp_buckets(model: Any) -> bool:
    """Give DDP its final gradient buckets now instead of after the first step; return whether it has them.

    DDP reduces the first step of a process in different buckets than all later steps. With three or more ranks, this
    changes the order of summation, so the first step after a resume differs in the last bits from the same step of an
    uninterrupted run. There is no public API to request the final buckets.
    """
    if not isinstance(model, DistributedDataParallel) or model.find_unused_parameters or model.static_graph:
        return False
    reducer = model.reducer
    if not (hasattr(reducer, "_push_all_rebuilt_params") and hasattr(reducer, "_rebuild_buckets")):
        return False
    reducer._push_all_rebuilt_params()
    return bool(reducer._rebuild_buckets())


def unsaved_hook_states(model: Any) -> list[str]:
    """Return a message for each DDP communication hook whose state no checkpoint holds, such as PowerSGD's errors.

    There is no public API to list a model's hooks.
    """
    registered = getattr(model, "_comm_hooks", None) if isinstance(model, DistributedDataParallel) else None
    return [
        f"the communication hook of DDP has a state ({type(state).__name__}) that is not saved: it begins anew"
        for _, state in registered or ()
        if _holds_tensors(state)
    ]


def _holds_tensors(state: Any) -> bool:
    names = {*getattr(state, "__dict__", ()), *getattr(type(state), "__slots__", ())}
    # PowerSGD creates its tensors only in its first steps
    return "error_dict" in names or any(tensors({name: getattr(state, name, None) for name in names}))
