"""How ranks come to one outcome of a save without a collective: each reports, one commits.

``rank_group``: the ranks. ``reports``: one save, from the reports of all ranks to the outcome. ``outcome``: the failure
of a save that one rank makes for all, raised on all at the same step. ``meeting``: what one rank is asked for, done by
all at the same step. ``store``: what they talk through.
"""

from ckpt_core._commit.errors_as_data import decode_error, encode_error
from ckpt_core._commit.meeting import Call, Meeting, Position
from ckpt_core._commit.outcome import SharedOutcome
from ckpt_core._commit.rank_group import RankGroup
from ckpt_core._commit.reports import JointSave, SaveSeries
from ckpt_core._commit.store import connect_store

__all__ = [
    "Call",
    "JointSave",
    "Meeting",
    "Position",
    "RankGroup",
    "SaveSeries",
    "SharedOutcome",
    "connect_store",
    "decode_error",
    "encode_error",
]
