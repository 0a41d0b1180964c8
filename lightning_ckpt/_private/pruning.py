"""State of ``ModelPruning`` that is not in checkpoints: the initial weights that it restores, and pruning masks.

Lightning has no public name for the weight copies of the lottery ticket option. If it moves them, nothing is compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.nn.utils import prune

from ckpt_core.state.changed_values import fingerprint


def weights_to_go_back_to(callbacks: Iterable[Any]) -> str:
    """Return a digest of the initial weights, as of the start of the process, that pruning restores; ``""`` if none."""
    copies = [getattr(each, "_original_layers", None) or {} for each in callbacks if _goes_back(each)]
    modules = [layer["data"] for copy in copies for layer in copy.values()]
    return fingerprint([list(module.state_dict().values()) for module in modules]) if modules else ""


def _goes_back(callback: Any) -> bool:
    """Return whether restored weights last: Lightning 2.5.0 sets a tensor that the next forward pass overwrites."""
    copy = getattr(callback, "_copy_param", None)
    if copy is None:
        return False
    pruned, first = torch.nn.Module(), torch.nn.Module()
    pruned.weight, first.weight = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.ones(1))
    copy(prune.identity(pruned, "weight"), first, "weight")
    return bool(pruned.weight_orig == 1)


def missing_masks(module: torch.nn.Module, saved: Collection[str]) -> list[str]:
    """Return a note if masks of pruning are not in the saved weights."""
    masks = [name for name, _ in module.named_buffers() if name.endswith("_mask")]
    pruned = {name.removesuffix("_orig") for name, _ in module.named_parameters() if name.endswith("_orig")}
    lost = [name for name in masks if name.removesuffix("_mask") in pruned and name not in saved]
    if not lost or not saved:
        return []
    more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
    note = f"{', '.join(lost[:3])}{more} of the pruning are not in the checkpoint, so what was pruned is trained again"
    return [f"{note} (ModelPruning(make_pruning_permanent=False), and prune.identity before the load)"]
