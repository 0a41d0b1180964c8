"""Geometry: which pieces of which tensors a rank holds, and which of them it writes.

Pure functions of shapes, placements and the rank: no I/O and no communication.
``pieces``: what of a tensor is on this rank. ``slicing``: who writes it. ``grouping``: what goes into files of its own.
"""

from ckpt_core._plan.pieces import LocalTensor, Piece, local_tensor
from ckpt_core._plan.slicing import WritePlanCache, writes_of_rank
from ckpt_core.geometry import Box, byte_runs, split_box

__all__ = [
    "Box",
    "LocalTensor",
    "Piece",
    "WritePlanCache",
    "byte_runs",
    "local_tensor",
    "split_box",
    "writes_of_rank",
]
