"""The only file that uses the inside of torch's process groups: how many collectives a rank has begun.

Collectives of one group come in the same order on all ranks. So a rank that has begun more of them than another, which
waits in a save, has left the place in the script where that one is. torch counts them for its flight recorder, and has
no public way in; without it, or where a backend does not count, a rank that does not come is found when the time is
over.
"""

from __future__ import annotations

import torch.distributed as dist

__all__ = ["collectives_begun"]


def collectives_begun() -> int | None:
    """Return how many collectives of all ranks this process has begun, None if unknown. Any thread may ask."""
    try:
        group = dist.group.WORLD
        return None if group is None else int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
