"""From parts of the state to what this rank writes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckpt_core._layouts.sharded.plain import encode_plain
from ckpt_core._layouts.sharded.writing import PartContent
from ckpt_core._plan import LocalTensor, Piece, WritePlanCache, local_tensor
from ckpt_core.errors import SerializationError
from ckpt_core.state.kinds import Kind, Part

__all__ = ["plan_parts"]


def plan_parts(
    parts: Sequence[Part], *, rank: int, world_size: int, slice_replicated: bool, cache: WritePlanCache
) -> list[PartContent]:
    """Return what of each part this rank writes, found without asking the others.

    Args:
        parts: The state; names and structures are the same on all ranks.
        rank: This process's rank.
        world_size: Number of ranks.
        slice_replicated: Whether all ranks write a slice of what is the same on all; otherwise rank 0 writes it.
        cache: Remembers the plans.

    Raises:
        SerializationError: Something is no plain data, or a tensor that cannot be written; the error names its key.
    """
    planned = []
    for part in parts:
        skeleton, tensors = encode_plain(part.state, key=part.name)
        same = part.kind is not Kind.PER_RANK
        found = {
            name: local_tensor(tensor, key=f"{part.name}.{name}", rank=rank, world_size=world_size, replicated=same)
            for name, tensor in tensors
        }
        spread = part.kind is Kind.SHARDED or (part.kind is Kind.REPLICATED and slice_replicated)
        if spread and world_size > 1:
            pieces: Mapping[str, Sequence[Piece]] = cache.writes_of_rank(found, rank)
        else:
            _check_whole(part, found)
            pieces = {name: tensor.pieces for name, tensor in found.items()} if rank == 0 or not same else {}
        planned.append(PartContent(part.name, part.kind.value, skeleton, found, pieces, spread and world_size > 1))
    return planned


def _check_whole(part: Part, tensors: Mapping[str, LocalTensor]) -> None:
    for name, tensor in tensors.items():
        if [piece.box.shape for piece in tensor.pieces] != [tensor.shape]:
            raise SerializationError(
                f"the tensor at {part.name}.{name} is spread over ranks, and the part {part.name!r} is {part.kind.value}",
                key=f"{part.name}.{name}",
                remedy="give the part the kind Kind.SHARDED, or gather the tensor first",
            )
