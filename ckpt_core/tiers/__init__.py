"""Two tiers: checkpoints are committed on a fast local disk and uploaded from there in the background.

``places``: which path of one tier is which of the other. ``ledger``: what was uploaded, kept beside the uploads. ``nearest``: both
tiers as one storage to read from. ``sending``: one checkpoint from tier to tier. ``uploader``: the queue of uploads and
removals. ``directories``: a directory checkpoint that is read from the nearest tier. ``placement``: all of this, or none of
it, for a checkpointer.
"""

from ckpt_core.tiers.directories import NearestDirectoryCheckpoint
from ckpt_core.tiers.ledger import LEDGER_NAME, read_ledger
from ckpt_core.tiers.nearest import TieredStorage
from ckpt_core.tiers.placement import Placement
from ckpt_core.tiers.places import Tiers

__all__ = ["LEDGER_NAME", "NearestDirectoryCheckpoint", "Placement", "TieredStorage", "Tiers", "read_ledger"]
