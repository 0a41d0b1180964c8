"""How ranks agree without a collective: who they are, what became of a save, and when to act together."""

from ckpt_core._commit.errors_as_data import decode_error, encode_error
from ckpt_core._commit.meeting import Call, Meeting
from ckpt_core._commit.outcome import SharedOutcome
from ckpt_core._commit.rank_group import RankGroup
from ckpt_core._commit.store import TimedStore, connect_store, seal

__all__ = [
    "Call",
    "Meeting",
    "RankGroup",
    "SharedOutcome",
    "TimedStore",
    "connect_store",
    "decode_error",
    "encode_error",
    "seal",
]
