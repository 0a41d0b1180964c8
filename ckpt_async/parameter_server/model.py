"""The division of a model into blocks of parameters, which are dealt to shards; its buffers and tied parameters.

A block is a whole parameter, or some rows of a large one, fixed for the whole run. It has an optimizer state of its
own, so it can be assigned to any shard, and nothing has to be split or joined when the number of shards changes.
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
    """Return each parameter once, by its first name."""
    return dict(model.named_parameters() if isinstance(model, torch.nn.Module) else model)


def buffers_of(model: Model) -> dict[str, torch.Tensor]:
    """Return the buffers that a state dict of the model has; none unless ``model`` is a module."""
    return saved_buffers(model) if isinstance(model, torch.nn.Module) else {}


def aliases_of(model: Model) -> dict[str, str]:
    """Return the first name of each tied parameter, by each of its other names; none unless ``model`` is a module."""
    if not isinstance(model, torch.nn.Module):
        return {}
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in named if first[id(parameter)] != name}


def mean_of(buffers: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Return the mean of each buffer over several workers; for integers and flags, the first worker's value."""
    found: dict[str, torch.Tensor] = {}
    for name, value in (buffers[0] if buffers else {}).items():
        values = [own[name] for own in buffers if name in own and own[name].shape == value.shape]
        has_mean = value.is_floating_point() or value.is_complex()
        found[name] = torch.stack(values).mean(dim=0) if has_mean else value
    return found


@dataclass(frozen=True)
class Block:
    """A whole parameter or some of its rows; ``name`` is the parameter's, followed by ``[begin:end]`` for rows."""

    name: str
    parameter: str
    box: Box
    nbytes: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the block's part of a tensor shaped like the parameter, dense (then a view) or sparse in its rows."""
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
        parameters: Name and tensor of each parameter; only types and shapes are used.
        max_block_bytes: Larger parameters are divided by rows. None: no parameter is divided. An optimizer that uses
            a parameter as a whole (its norm, its factors) uses a block instead.

    Attributes:
        shapes: For each parameter, a tensor of its type and shape that takes the memory of one element.
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
        """Assign the blocks to shards, as evenly in bytes as possible; return the names of each shard's blocks."""
        load = dict.fromkeys(shards, 0)
        dealt: dict[str, list[str]] = {shard: [] for shard in shards}
        for block in sorted(self.blocks.values(), key=lambda block: -block.nbytes):
            shard = min(shards, key=load.__getitem__)
            load[shard] += block.nbytes
            dealt[shard].append(block.name)
        order = {name: position for position, name in enumerate(self.blocks)}
        return {shard: tuple(sorted(names, key=order.__getitem__)) for shard, names in dealt.items()}

    def divide(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the blocks of some parameters or gradients, without blocks in which a sparse gradient has no rows."""
        found = {}
        for block in self.blocks.values():
            if block.parameter in tensors:
                part = block.of(tensors[block.parameter])
                if not part.is_sparse or part._nnz():
                    found[block.name] = part
        return found

    def describe(self) -> dict[str, list[int]]:
        """Return the shape of each block, by name; a checkpoint fits this model if its own description is equal."""
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
