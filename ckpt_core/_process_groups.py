"""How ranks are brought out of the collectives in which they wait for a dead one.

torch has no public way to end all process groups of this process at once, which NCCL asks for where there are several:
only a function whose name begins with an underscore (torch 2.6 to 2.13). Where a release has it no longer, the default
group is ended and then all are destroyed, both by public names; with NCCL, a wait in another group may then last until
its time-out.
"""

from __future__ import annotations

import contextlib

import torch.distributed as dist
from torch.distributed import distributed_c10d


def abort_process_groups() -> None:
    """End what this process and those connected to it wait for in process groups; none of them can be used again."""
    abort = getattr(distributed_c10d, "_abort_process_group", _abort_in_public)
    with contextlib.suppress(Exception):  # backends raise errors of many kinds about the rank that is dead
        abort()


def _abort_in_public() -> None:
    if dist.group.WORLD is not None:
        dist.group.WORLD.abort()
        dist.destroy_process_group()
