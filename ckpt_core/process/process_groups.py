"""Abort process groups, so that ranks leave the collectives in which they wait for a dead rank.

NCCL requires that all process groups of a process are aborted at once. torch has no public API for that, only a private
function and a private table of the groups (torch 2.6 to 2.13). If a release lacks them, the default group is aborted
and then all groups are destroyed, both by public functions; a wait in another group may then last until its time-out.

For Gloo, an abort does nothing: the connections stay open as long as anything refers to the group, as DDP does, and
a rank keeps waiting for a rank that is alive and has left the collective. A receive that times out closes them.
"""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_TAG = 1 << 30  # a message tag that no other code uses


def abort_process_groups() -> None:
    """End all waits in process groups, of this process and its peers; no group can be used afterwards."""
    known = getattr(getattr(distributed_c10d, "_world", None), "pg_map", [dist.group.WORLD])  # all groups, if available
    for group in list(known):
        if group is not None and "gloo" in str(dist.get_backend_config(group)):
            _close_connections(group)
    abort = getattr(distributed_c10d, "_abort_process_group", _abort_in_public)
    with contextlib.suppress(Exception):  # backends raise many kinds of errors about the dead rank
        abort()


def _close_connections(group: dist.ProcessGroup) -> None:
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "").count(",") + 1  # the tag selects the interface's connections
    for other in {*range(group.size())} - {group.rank()}:
        for tag in range(_TAG, _TAG + interfaces):
            with contextlib.suppress(Exception):
                group.recv([torch.zeros(1)], other, tag).wait(timedelta(milliseconds=1))


def _abort_in_public() -> None:
    if dist.group.WORLD is not None:
        dist.group.WORLD.abort()
        dist.destroy_process_group()
