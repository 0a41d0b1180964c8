"""Vector clocks, cuts, messages and options as plain data."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_async.consistent_cut import (
    ConsistentCut,
    CutOptions,
    InconsistentCutError,
    SnapshotAbortedError,
    StaleGenerationError,
    UpdateId,
    VectorClock,
    deal_streams,
)
from ckpt_async.consistent_cut.messages import (
    Abort,
    Begin,
    Committed,
    Hello,
    Marker,
    PersistFailed,
    Position,
    PullHeader,
    PushHeader,
    ShardAck,
    Takeover,
    Welcome,
    WorkerAck,
    decode_message,
    encode_message,
)
from ckpt_async.consistent_cut.types import MessageTag
from ckpt_core.errors import CheckpointError


def tag(snapshot_id: int, generation: int = 0) -> MessageTag:
    return MessageTag(generation, snapshot_id)


def test_errors_are_checkpoint_errors() -> None:
    assert all(
        issubclass(e, CheckpointError) for e in (InconsistentCutError, SnapshotAbortedError, StaleGenerationError)
    )


def test_vector_clocks() -> None:
    clock = VectorClock({3: 811, 0: 12})
    assert clock == {0: 12, 3: 811} and hash(clock) == hash(VectorClock([[0, 12], [3, 811]]))
    assert clock.in_words() == "stream 0 resumes at batch 13, stream 3 resumes at batch 812"
    assert (
        clock.includes(UpdateId(0, 12)) and not clock.includes(UpdateId(0, 13)) and not clock.includes(UpdateId(1, 1))
    )
    assert clock.differences({0: 12, 1: 5}) == {1: (None, 5), 3: (811, None)}
    assert clock.restricted_to([3]) == {3: 811}
    assert clock.restricted_to([3]).joined_with({0: 12}) == clock
    with pytest.raises(InconsistentCutError, match="at 12 and at 13"):
        clock.joined_with({0: 13})
    with pytest.raises(ValueError, match="negative"):
        VectorClock({0: -1})


@given(st.dictionaries(st.integers(0, 50), st.integers(0, 2**40)))
def test_a_cut_survives_json(counts: dict[int, int]) -> None:
    cut = ConsistentCut(7, 2, VectorClock(counts), ("w0", "w1"), ("s0",))
    assert ConsistentCut.from_metadata(json.loads(json.dumps(cut.to_metadata()))) == cut


@pytest.mark.parametrize("damage", [{"vector": None}, {"vector": [[1, -1]]}, {"snapshot_id": "x"}, {"workers": 3}])
def test_metadata_that_is_no_cut_is_refused(damage: dict[str, Any]) -> None:
    good = ConsistentCut(7, 2, VectorClock({0: 1}), ("w",), ("s",)).to_metadata()
    with pytest.raises(InconsistentCutError, match="does not describe a cut"):
        ConsistentCut.from_metadata({**good, **damage})
    with pytest.raises(InconsistentCutError):
        ConsistentCut.from_metadata({key: value for key, value in good.items() if key not in damage})


CLOCK = VectorClock({0: 1, 5: 2})
MESSAGES = [
    *(Hello(tag(1), "w", "worker", (0, 5), 2, ready=False), Welcome(tag(1)), Begin(tag(1)), Committed(tag(1))),
    *(Marker(tag(1), "w", CLOCK, CLOCK, 3), WorkerAck(tag(1), "w", CLOCK, {"a": CLOCK}, 1, "r")),
    *(ShardAck(tag(1), "s", CLOCK, CLOCK, "r"), PersistFailed(tag(1), "s", "why"), Abort(tag(1), "why")),
    *(Takeover(tag(1), "w", (0,), 1), Position(tag(1), "s", 1, CLOCK, CLOCK)),
    *(PushHeader(tag(1), UpdateId(0, 1), 1, 2), PullHeader(tag(1), 3, CLOCK, CLOCK)),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_survive_json(message: Any) -> None:
    decoded = decode_message(json.loads(json.dumps(encode_message(message))))
    assert decoded == message and type(decoded) is type(message)
    assert all(type(getattr(decoded, n)) is type(getattr(message, n)) for n in message.__slots__)


@pytest.mark.parametrize("data", [{}, {"kind": "Nothing"}, {"kind": "Begin"}, {"kind": "Begin", "tag": 3}])
def test_what_is_no_message_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not a"):
        decode_message(data)


@pytest.mark.parametrize(
    "wrong",
    [
        {"alignment": "sideways"},
        {"channel_state": "drop"},
        {"on_worker_failure": "ignore"},
        {"aligned_timeout": 0.0},
        {"aligned_timeout": float("inf")},
        {"snapshot_timeout": -1.0},
        {"max_inflight_updates": 0},
    ],
)
def test_wrong_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        CutOptions(**wrong)


def test_streams_are_dealt_evenly_and_all() -> None:
    dealt = deal_streams(range(7), ["x", "y", "z"])
    assert sorted(stream for streams in dealt.values() for stream in streams) == list(range(7))
    assert {len(streams) for streams in dealt.values()} == {2, 3}
