"""Tiers: checkpoints are committed on a fast local disk and uploaded in the background; last snapshots stay in memory.

``places``: maps paths between the tiers. ``ledger``: the record of uploads, kept next to them. ``nearest``: both tiers
as one storage to read from. ``sending``: uploads one checkpoint. ``uploader``: the queue of uploads and removals.
``memory``: snapshots in host memory, which survive a crash of the run's processes; ``machines``: on several machines.
"""

from ckpt_core.tiers.ledger import LEDGER_NAME, read_ledger
from ckpt_core.tiers.memory import MEMORY_ROOT, MemoryTier, RunInMemory, runs_in_memory
from ckpt_core.tiers.nearest import DAMAGE, TieredStorage
from ckpt_core.tiers.places import Tiers
from ckpt_core.tiers.uploader import Uploader

__all__ = [
    "DAMAGE",
    "LEDGER_NAME",
    "MEMORY_ROOT",
    "MemoryTier",
    "RunInMemory",
    "TieredStorage",
    "Tiers",
    "Uploader",
    "read_ledger",
    "runs_in_memory",
]
