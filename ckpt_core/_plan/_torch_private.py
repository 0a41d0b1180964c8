"""Wraps the private names of torch that are needed for distributed tensors.

Whether a placement cuts a tensor into strided parts, of which mesh another mesh is a slice, and over which ranks an
FSDP1 ``ShardedTensor`` is spread, is available only through private names (with an underscore). All private names for
distributed tensors that this package uses are in this file.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ckpt_core.errors import CheckpointError
from ckpt_core.geometry import Sharding

try:
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed.tensor.placement_types import _StridedShard
except ImportError as moved:
    raise CheckpointError(
        f"sharded tensors: ckpt_core does not work with torch {torch.__version__}: {moved}",
        remedy="upgrade ckpt_core, or use a release of torch that this version knows",
    ) from moved


def sharding_of(placement: Placement) -> Sharding | None:
    """Return how the placement shards a tensor; None if it replicates it; raise a ``ValueError`` if it does neither."""
    # _StridedShard is a subclass of Shard in some releases of torch and not in others, so it is checked first.
    if isinstance(placement, _StridedShard):
        return Sharding(placement.dim, int(placement.split_factor))
    if type(placement) is Shard:
        return Sharding(placement.dim)
    if type(placement) is Replicate:
        return None
    raise ValueError(f"placement {placement!r}")


def whole_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the root mesh of a (maybe flattened) slice such as ``mesh["dp"]``; the mesh itself if it is no slice."""
    find = getattr(mesh, "_get_root_mesh", None)  # in releases after torch 2.8
    if find is None and not hasattr(device_mesh, "_mesh_resources"):
        return mesh  # treated as no slice: a save of slices will fail, other saves will not
    return device_mesh._mesh_resources.get_root_mesh(mesh) if find is None else find()


def is_sharded_tensor(tensor: torch.Tensor) -> TypeGuard[ShardedTensor]:
    """Return whether the tensor is a ``ShardedTensor``, as in the sharded state of FSDP1."""
    return isinstance(tensor, ShardedTensor)


def group_size(tensor: ShardedTensor) -> int:
    """Return the number of ranks that the tensor is spread over, whether or not each of them has elements."""
    return int(tensor._process_group.size())
