"""A model as servers and workers see it: blocks of parameters, buffers, and further names of tied parameters.

A block is a whole parameter, or some rows of a large one, fixed for the whole run. It has an optimizer state of its
own, so it can go to any shard, and nothing has to be cut or joined when the number of shards changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ckpt_core.geometry import Box
from ckpt_core.state.kinds import saved_buffers

Model = torch.nn.Module | Iterable[tuple[str, torch.Tensor]]


def parameters_of(model: Model) -> dict[str, torch.Tensor]:
    """Each parameter once, by its first name."""
    return dict(model.named_parameters() if isinstance(model, torch.nn.Module) else model)


def buffers_of(model: Model) -> dict[str, torch.Tensor]:
    """The buffers that a state dict of the model has; none unless the model itself is given."""
    return saved_buffers(model) if isinstance(model, torch.nn.Module) else {}


def aliases_of(model: Model) -> dict[str, str]:
    """The first name of each tied parameter, by each of its other names; none unless the model itself is given."""
    if not isinstance(model, torch.nn.Module):
        return {}
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in named if first[id(parameter)] != name}


def mean_of(buffers: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """The means over several workers; of what has none (counts, flags), the first worker's."""
    found: dict[str, torch.Tensor] = {}
    for name, value in (buffers[0] if buffers else {}).items():
        values = [own[name] for own in buffers if name in own and own[name].shape == value.shape]
        has_mean = value.is_floating_point() or value.is_complex()
        found[name] = torch.stack(values).mean(dim=0) if has_mean else value
    return found


@dataclass(frozen=True)
class Block:
    """Rows of a parameter: ``name`` is the parameter's, with ``[begin:end]`` if it is not all of it."""

    name: str
    parameter: str
    box: Box
    nbytes: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The block's part of a tensor like the parameter, dense or sparse in its rows; a view if that is dense."""
        if not self.box.shape or self.box.shape == tuple(tensor.shape):
            return tensor
        begin, rows = self.box.offset[0], self.box.shape[0]
        if not tensor.is_sparse:
            return tensor[begin : begin + rows]
        whole = tensor.coalesce()
        indices, values = whole.indices(), whole.values()
        inside = (indices[0] >= begin) & (indices[0] < begin + rows)
        indices = indices[:, inside].clone()
        indices[0] -= begin
        return torch.sparse_coo_tensor(
            indices, values[inside], self.box.shape, is_coalesced=True, check_invariants=True
        )


class BlockTable:
    """How a model is divided into blocks; the same in every process.

    Args:
        parameters: Name and tensor of each parameter; only types and shapes are looked at.
        max_block_bytes: Parameters larger than that are divided by rows. None: none is. An optimizer that looks at a
            parameter as a whole (its norm, its factors) looks at a block instead.

    Attributes:
        shapes: A tensor of one element's memory in the place of each parameter.
        blocks: All blocks by name, in the parameters' order.
    """

    def __init__(self, parameters: Iterable[tuple[str, torch.Tensor]], *, max_block_bytes: int | None = None) -> None:
        if max_block_bytes is not None and max_block_bytes < 1:
            raise ValueError(f"max_block_bytes={max_block_bytes} must be at least 1, or None")
        self.shapes: dict[str, torch.Tensor] = {}
        self.blocks: dict[str, Block] = {}
        for name, tensor in parameters:
            self.shapes[name] = torch.empty((), dtype=tensor.dtype).expand(tensor.shape)
            for block in _divide(name, tensor, max_block_bytes):
                self.blocks[block.name] = block

    def deal(self, shards: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Names of the blocks that each shard holds, as even in bytes as can be."""
        load = dict.fromkeys(shards, 0)
        dealt: dict[str, list[str]] = {shard: [] for shard in shards}
        for block in sorted(self.blocks.values(), key=lambda block: -block.nbytes):
            shard = min(shards, key=load.__getitem__)
            load[shard] += block.nbytes
            dealt[shard].append(block.name)
        order = {name: position for position, name in enumerate(self.blocks)}
        return {shard: tuple(sorted(names, key=order.__getitem__)) for shard, names in dealt.items()}

    def divide(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The blocks of some parameters or gradients. Blocks of which a sparse gradient has no rows are left out."""
        found = {}
        for block in self.blocks.values():
            if block.parameter in tensors:
                part = block.of(tensors[block.parameter])
                if not part.is_sparse or part._nnz():
                    found[block.name] = part
        return found

    def describe(self) -> dict[str, list[int]]:
        """What identifies the division: each block's shape; a checkpoint fits if its own is the same."""
        return {name: list(block.box.shape) for name, block in self.blocks.items()}


def _divide(name: str, tensor: torch.Tensor, max_bytes: int | None) -> list[Block]:
    shape = tuple(tensor.shape)
    nbytes = tensor.numel() * tensor.element_size()
    if max_bytes is None or nbytes <= max_bytes or not shape:
        return [Block(name, name, Box.whole(shape), nbytes)]
    row = nbytes // shape[0]
    step = max(1, max_bytes // row)
    blocks = []
    for begin in range(0, shape[0], step):
        rows = min(step, shape[0] - begin)
        box = Box((begin, *(0 for _ in shape[1:])), (rows, *shape[1:]))
        blocks.append(Block(f"{name}[{begin}:{begin + rows}]", name, box, rows * row))
    return blocks
