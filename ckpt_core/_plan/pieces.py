"""Finds which pieces of a tensor are on this rank: their boxes, their live memory, and the ranks that hold the same."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from ckpt_core.buffers import storage_of
from ckpt_core.errors import SerializationError
from ckpt_core.geometry import Box, Sharding, sharded_boxes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

_Ranks = npt.NDArray[np.int64]

# A torch.nn.Buffer has the type torch.Tensor, so buffers are included.
PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
# A quantized tensor is more than its elements. The dtype is checked, because is_quantized is false for a view of bytes.
QUANTIZED_TYPES = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})


# A state can have a hundred thousand of these, and a named tuple is much faster to make than a data class. Neither of
# the next two classes can be compared with ==, because tensors cannot.
class Piece(NamedTuple):
    """The elements of one box of a tensor."""

    box: Box  # their place in the whole tensor
    tensor: torch.Tensor  # the elements, in the box's shape: a live view without gradient, maybe not contiguous

    def part(self, box: Box) -> Piece:
        """Return the elements of ``box``, which is inside this piece's box and, like it, placed in the whole tensor."""
        return self if box == self.box else Piece(box, _part(self.tensor, box.relative_to(self.box)))


class LocalTensor(NamedTuple):
    """The pieces of a tensor that are on this rank."""

    dtype: torch.dtype
    shape: tuple[int, ...]  # shape of the whole tensor
    # Empty if other ranks hold all elements. A tensor without elements has one piece, also without elements, on every
    # rank that has the tensor.
    pieces: tuple[Piece, ...]
    # The ranks, ascending, that hold exactly these pieces, including this rank; empty if there are no pieces.
    holders: tuple[int, ...]

    @classmethod
    def whole(cls, tensor: torch.Tensor, holders: tuple[int, ...] = ()) -> LocalTensor:
        """Return the local tensor for a tensor whose elements are all on this rank."""
        shape = tuple(tensor.shape)
        return cls(tensor.dtype, shape, (Piece(Box.whole(shape), tensor.detach()),), holders)


def local_tensor(tensor: torch.Tensor, *, key: str, rank: int, world_size: int, replicated: bool) -> LocalTensor:
    """Return the pieces of ``tensor`` that are on this rank.

    ``tensor`` may be plain (also a parameter, a buffer, any view), a ``DTensor`` on any mesh, or a ``ShardedTensor`` of
    FSDP1. A ``DTensor`` on a slice of a mesh is assumed to be on the other slices, too, since all ranks save the same
    tensors; on a mesh that is no slice, it is on that mesh only. ``replicated`` says whether every rank holds the same
    plain tensor; distributed tensors say it themselves. Raises for one that cannot be written as plain elements.
    """
    if type(tensor) in PLAIN_TYPES:
        _check_plain(tensor, key)
        return LocalTensor.whole(tensor, all_ranks(world_size) if replicated else (rank,))
    # Imported here, so that only processes with distributed tensors pay for the import.
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor):
        return _part_of_dtensor(tensor, key, rank)
    return _part_of_sharded_tensor(tensor, key, rank, world_size)


@functools.lru_cache(maxsize=8)
def all_ranks(world_size: int) -> tuple[int, ...]:
    """Return all ranks; always the same object, since there can be thousands of ranks."""
    return tuple(range(world_size))


def _check_plain(tensor: torch.Tensor, key: str) -> None:
    is_quantized = tensor.dtype in QUANTIZED_TYPES
    if tensor.layout is torch.strided and not is_quantized and not tensor.is_nested and not tensor.is_meta:
        storage_of(tensor, key=key)
        return
    if tensor.is_nested:
        kind, remedy = "a nested tensor", "save its parts, for example tensor.unbind(), as a list"
    elif is_quantized:
        kind, remedy = (
            "a quantized tensor",
            "save tensor.int_repr() and its scales and zero points, or tensor.dequantize()",
        )
    elif tensor.is_meta:
        kind, remedy = "on the meta device and has no data", "materialize it before it is saved or loaded into"
    else:
        kind, remedy = f"of layout {tensor.layout}", "save tensor.to_dense(), or its indices and values"
    raise SerializationError(f"the tensor at {key} is {kind}", key=key, remedy=remedy)


def _refused_type(tensor: torch.Tensor, key: str) -> SerializationError:
    kind = type(tensor)
    return SerializationError(
        f"the tensor at {key} is a {kind.__module__}.{kind.__qualname__}, which is more than its elements",
        key=key,
        remedy="save the plain tensors that it is made of",
    )


def _part_of_dtensor(tensor: DTensor, key: str, rank: int) -> LocalTensor:
    from ckpt_core._plan._torch_private import sharding_of

    with torch.no_grad():
        local = tensor.to_local().detach()
    if type(local) is not torch.Tensor:
        raise _refused_type(local, key)
    _check_plain(local, key)
    shape = tuple(tensor.shape)
    try:
        shardings = tuple(sharding_of(each) for each in tensor.placements)
        share = _mesh_view(tensor.device_mesh, rank).share(shape, shardings)
    except ValueError as error:
        raise SerializationError(
            f"the tensor at {key} has the {error}: that does not say which of its elements are where",
            key=key,
            remedy="redistribute() it to Shard and Replicate placements on a mesh of ascending ranks first",
        ) from None
    fits = tuple(local.shape) == share.local_shape if share.boxes else local.numel() == 0
    if not fits:
        raise SerializationError(
            f"the tensor at {key} has shape {list(shape)} and placements {tensor.placements}, which puts "
            f"{list(share.local_shape) if share.boxes else 'nothing'} on rank {rank}, but {list(local.shape)} is there",
            key=key,
            remedy="pass shape= and stride= to DTensor.from_local() where the parts are not equal",
        )
    if 0 in shape and share.holders:
        return LocalTensor.whole(torch.empty(shape, dtype=tensor.dtype), share.holders)
    pieces = tuple(Piece(box, _part(local, inside)) for box, inside in share.boxes)
    return LocalTensor(tensor.dtype, shape, pieces, share.holders)


def _part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dimension, (begin, size) in enumerate(zip(box.offset, box.shape, strict=True)):
        if size != tensor.shape[dimension]:
            tensor = tensor.narrow(dimension, begin, size)
    return tensor


@dataclass(frozen=True, slots=True)
class _Share:
    """One rank's share of a distributed tensor: boxes (in the whole and in the local tensor), and the ranks with it."""

    boxes: tuple[tuple[Box, Box], ...]
    local_shape: tuple[int, ...]
    holders: tuple[int, ...]


_NOTHING = _Share((), (), ())


class _MeshView:
    """A mesh as seen from one rank; caches the shares, which are the same for many tensors and at every save.

    It has one more dimension, for the slices of the root mesh: a tensor on one slice is replicated over the others.
    """

    def __init__(self, mesh: DeviceMesh, rank: int, whole: DeviceMesh | None = None) -> None:
        self._ranks = _slices(np.asarray(mesh.mesh.tolist()), np.asarray((whole or mesh).mesh.tolist()))
        position = np.argwhere(self._ranks == rank)
        self._coordinate = tuple(map(int, position[0])) if len(position) else None
        self._shares: dict[tuple[tuple[int, ...], tuple[Sharding | None, ...]], _Share] = {}

    def share(self, shape: tuple[int, ...], shardings: tuple[Sharding | None, ...]) -> _Share:
        """Return the rank's share of a tensor of this shape; raise a ``ValueError`` if the mesh does not define it."""
        share = self._shares.get((shape, shardings))
        if share is None:
            share = self._shares[shape, shardings] = self._computed_share(shape, (None, *shardings))
        return share

    def _computed_share(self, shape: tuple[int, ...], shardings: tuple[Sharding | None, ...]) -> _Share:
        if self._coordinate is None:
            return _NOTHING
        for dimension, sharding in enumerate(shardings):
            # torch numbers the ranks of a group in ascending order when it scatters and gathers, but otherwise uses the
            # order in the mesh. If these differ, the parts of a tensor can be in either order.
            if sharding is not None and (np.diff(self._ranks, axis=dimension) < 0).any():
                raise ValueError(
                    f"mesh {self._ranks[self._coordinate[0]].tolist()}, in which ranks do not ascend along dimension "
                    f"{dimension - 1}"
                )
        if 0 in shape:
            return _Share((), (), tuple(sorted(np.ravel(self._ranks).tolist())))
        boxes = tuple(sharded_boxes(shape, self._ranks.shape, self._coordinate, shardings))
        if not boxes:
            return _NOTHING
        same_pieces = tuple(
            slice(None) if sharding is None else index
            for sharding, index in zip(shardings, self._coordinate, strict=True)
        )
        holders = sorted(np.ravel(self._ranks[same_pieces]).tolist())
        # The last box is in the last corner, so its end is the local shape.
        return _Share(boxes, boxes[-1][1].end, tuple(holders))


def _slices(ranks: _Ranks, whole: _Ranks) -> _Ranks:
    """Return the ranks of a slice and of its sibling slices in the whole mesh, stacked; if it is no slice, its own."""
    found = np.argsort(whole, axis=None)[np.searchsorted(np.sort(whole, axis=None), ranks)]
    at = np.unravel_index(found, whole.shape)
    beside = [dimension for dimension, places in enumerate(at) if (places == places.flat[0]).all()]
    count = math.prod(whole.shape[dimension] for dimension in beside)
    if count * ranks.size != whole.size:
        return ranks[np.newaxis]
    slices = []
    for others in np.ndindex(*(whole.shape[dimension] for dimension in beside)):
        places = list(at)
        for dimension, place in zip(beside, others, strict=True):
            places[dimension] = np.full_like(ranks, place)
        slices.append(whole[tuple(places)])
    return np.stack(slices)


# By root mesh, and then by slice: slices of two different meshes can compare equal.
_mesh_views: WeakKeyDictionary[DeviceMesh, WeakKeyDictionary[DeviceMesh, dict[int, _MeshView]]] = WeakKeyDictionary()


def _mesh_view(mesh: DeviceMesh, rank: int) -> _MeshView:
    from ckpt_core._plan._torch_private import whole_mesh

    whole = whole_mesh(mesh)
    slices = _mesh_views.get(whole)
    if slices is None:
        slices = _mesh_views[whole] = WeakKeyDictionary()
    views = slices.setdefault(mesh, {})
    if rank not in views:
        views[rank] = _MeshView(mesh, rank, whole)
    return views[rank]


def _part_of_sharded_tensor(tensor: torch.Tensor, key: str, rank: int, world_size: int) -> LocalTensor:
    from ckpt_core._plan._torch_private import group_size, is_sharded_tensor

    if not is_sharded_tensor(tensor):
        raise _refused_type(tensor, key)
    if group_size(tensor) != world_size:
        raise SerializationError(
            f"the tensor at {key} is a ShardedTensor over {group_size(tensor)} of {world_size} ranks, which does not "
            "say what the other ranks hold",
            key=key,
            remedy="for hybrid sharding pass device_mesh= to FSDP, or use fully_shard() with a mesh of two dimensions",
        )
    metadata = tensor.metadata()
    dtype, shape = metadata.tensor_properties.dtype, tuple(metadata.size)
    if 0 in shape:
        return LocalTensor.whole(torch.empty(shape, dtype=dtype), all_ranks(world_size))
    pieces = []
    for shard in tensor.local_shards():
        if type(shard.tensor) not in PLAIN_TYPES:
            raise _refused_type(shard.tensor, key)
        _check_plain(shard.tensor, key)
        box = Box(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes))
        if box.numel:
            pieces.append(Piece(box, shard.tensor.detach()))
    return LocalTensor(dtype, shape, tuple(pieces), (rank,) if pieces else ())
