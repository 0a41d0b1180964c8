"""How ranks are brought out of the collectives in which they wait for a dead one.

torch has no public way to end all process groups of this process at once, which NCCL asks for where there are several:
only a function and a table of the groups whose names begin with an underscore (torch 2.6 to 2.13). Where a release has
them no longer, the default group is ended and then all are destroyed, both by public names; a wait in another group may
then last until its time-out.

Gloo does nothing there: the connections stay open as long as anything refers to the group, as DDP does, and a rank that
waits for one that is alive and has left the collective waits on. A receive that is not answered in time closes them.
"""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_TAG = 1 << 30  # that nobody else uses


def abort_process_groups() -> None:
    """End what this process and those connected to it wait for in process groups; none of them can be used again."""
    known = getattr(getattr(distributed_c10d, "_world", None), "pg_map", [dist.group.WORLD])  # all, by a private name
    for group in list(known):
        if group is not None and "gloo" in str(dist.get_backend_config(group)):
            _close_connections(group)
    abort = getattr(distributed_c10d, "_abort_process_group", _abort_in_public)
    with contextlib.suppress(Exception):  # backends raise errors of many kinds about the rank that is dead
        abort()


def _close_connections(group: dist.ProcessGroup) -> None:
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "").count(",") + 1  # each has connections of its own, by the tag
    for other in {*range(group.size())} - {group.rank()}:
        for tag in range(_TAG, _TAG + interfaces):
            with contextlib.suppress(Exception):
                group.recv([torch.zeros(1)], other, tag).wait(timedelta(milliseconds=1))


def _abort_in_public() -> None:
    if dist.group.WORLD is not None:
        dist.group.WORLD.abort()
        dist.destroy_process_group()
