"""A part of the state as it is given to those who write it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from ckpt_core._layouts.sharded.manifest import Kind
from ckpt_core._layouts.sharded.plain import Json
from ckpt_core.geometry import Box

__all__ = ["PartContent", "TensorPiece", "WholeTensor"]


class TensorPiece(Protocol):
    """The elements of one box of a tensor."""

    @property
    def box(self) -> Box:
        """Where they are in the whole tensor."""

    @property
    def tensor(self) -> torch.Tensor:
        """They themselves, in the shape of the box: live, maybe not contiguous."""


class WholeTensor(Protocol):
    """What a tensor is, over all ranks."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of its elements."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent of the whole tensor."""


@dataclasses.dataclass(frozen=True)
class PartContent:
    """A part of the state, ready to be written.

    Attributes:
        name: Letters, digits and underscores; beginning of the file's name.
        kind: Who holds it.
        skeleton: Its structure, from :func:`~ckpt_core._layouts.sharded.plain.encode_plain`.
        tensors: All of its tensors, in the order of ``encode_plain``, the same on all ranks (but for a per-rank part).
        pieces: What this rank writes of each; tensors of which it writes nothing may be missing.
        spread: Whether several ranks write it. If not, rank 0 writes it whole.
        groups: Tensors with another number than 0 go into files of their own, one for each number.
    """

    name: str
    kind: Kind
    skeleton: Json
    tensors: Mapping[str, WholeTensor]
    pieces: Mapping[str, Sequence[TensorPiece]]
    spread: bool = False
    groups: Mapping[str, int] = dataclasses.field(default_factory=dict)
