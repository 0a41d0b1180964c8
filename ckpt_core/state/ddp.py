"""Gradient buckets of ``DistributedDataParallel`` that do not change after the first step of a process."""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

__all__ = ["rebuild_ddp_buckets"]


def rebuild_ddp_buckets(model: Any) -> bool:
    """Give DDP its final gradient buckets now instead of after the first step.

    DDP reduces the first step of a process in other buckets than all later ones. With three or more ranks the sums are then
    added in another order, so the first step after a resume differs in the last bits from the same step of a run that
    was not interrupted. There is no public way to ask for the final buckets.

    Args:
        model: The wrapped model, before its first step.

    Returns:
        Whether the buckets were rebuilt; they are not where DDP never rebuilds, or not in this way.
    """
    if not isinstance(model, DistributedDataParallel) or model.find_unused_parameters or model.static_graph:
        return False
    reducer = model.reducer
    if not (hasattr(reducer, "_push_all_rebuilt_params") and hasattr(reducer, "_rebuild_buckets")):
        return False
    reducer._push_all_rebuilt_params()
    return bool(reducer._rebuild_buckets())
