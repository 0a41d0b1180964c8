"""Public names of ``_commit``: how ranks agree, without a collective, on a save's outcome and on acting together."""

from ckpt_core._commit.acting_together import Call, Meeting
from ckpt_core._commit.agreement import Agreement
from ckpt_core._commit.announcement import decode_error, encode_error, names_of
from ckpt_core._commit.background_failures import RunOutcome
from ckpt_core._commit.endings import Endings
from ckpt_core._commit.raising_together import raise_together
from ckpt_core._commit.rank_group import RankGroup
from ckpt_core._commit.tcp_store import connect_store

__all__ = [
    "Agreement",
    "Call",
    "Endings",
    "Meeting",
    "RankGroup",
    "RunOutcome",
    "connect_store",
    "decode_error",
    "encode_error",
    "names_of",
    "raise_together",
]
