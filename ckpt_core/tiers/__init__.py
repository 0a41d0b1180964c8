"""Tiers: checkpoints are committed on a fast local disk and uploaded from there; the last snapshots are in memory.

``places``: which path of one tier is which of the other. ``ledger``: what was uploaded, kept next to the uploads.
``nearest``: both tiers as one storage to read from. ``sending``: one checkpoint from tier to tier. ``uploader``:
uploads and removals in order. ``memory``: snapshots in host memory, which survive a crash of the run's processes.
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
