"""Gathers on rank 0 the state of every rank of a Trainer, also when a rank may be missing."""

from __future__ import annotations

import datetime
import logging
from typing import Any

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)

_INTERRUPTED_TIMEOUT = datetime.timedelta(seconds=30)


def on_host(tree: Any) -> Any:
    """Return dictionaries and lists with their tensors moved to host memory, to be sent to other processes."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().cpu()
    if type(tree) is dict:  # subclasses of users are passed on unchanged
        return {key: on_host(value) for key, value in tree.items()}
    if type(tree) is list:
        return [on_host(value) for value in tree]
    return tree


class Gathering:
    """A process group of one Trainer's ranks, separate from that of the training; created on all ranks together."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._is_alone = False
        # the training's group may use NCCL, which would send the state through the accelerator
        connected = dist.is_available() and dist.is_initialized() and trainer.world_size > 1
        self._group: Any = dist.new_group(backend="gloo") if connected else None

    @property
    def is_single(self) -> bool:
        """Whether there is only one rank, so that its state is not sent to another process."""
        return self._group is None

    def all_are_here(self) -> bool:
        """Return whether all ranks take part; called on all ranks that do."""
        if self._group is None or self._is_alone:
            return self._group is None
        if self._trainer.state.status == "interrupted":
            try:
                # after an exception on this rank only, the others will not join
                dist.monitored_barrier(self._group, timeout=_INTERRUPTED_TIMEOUT)
            except RuntimeError:
                self._is_alone = True
                log.warning("the other ranks do not save, so the checkpoint holds the exact state of one rank only")
        return not self._is_alone

    def gather(self, mine: Any) -> list[Any] | None:
        """Return on rank 0 the values of all ranks, or only its own if some are missing; None on the other ranks."""
        if self._group is None:
            return [mine]
        if not self.all_are_here():
            return [mine] if self._trainer.is_global_zero else None
        ranks: list[Any] | None = [None] * self._trainer.world_size if self._trainer.is_global_zero else None
        dist.gather_object(on_host(mine), ranks, dst=0, group=self._group)
        return ranks

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the mean over all ranks of a floating-point tensor, which has the same shape on all of them."""
        total = tensor.detach().clone()
        if self._group is not None:
            dist.all_reduce(total, group=self._group if total.device.type == "cpu" else None)
            total /= self._trainer.world_size
        return total
