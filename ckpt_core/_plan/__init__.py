"""Plans which pieces of tensors a rank holds (``pieces``), and which of them it writes (``slicing``).

Pure functions of shapes, placements and the rank: no I/O and no communication.
"""

from ckpt_core._plan.pieces import QUANTIZED_TYPES, LocalTensor, Piece, local_tensor
from ckpt_core._plan.slicing import WritePlanCache

__all__ = ["QUANTIZED_TYPES", "LocalTensor", "Piece", "WritePlanCache", "local_tensor"]
