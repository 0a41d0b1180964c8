"""What processes say to each other. Any transport will do: messages may be reordered, duplicated, delayed and lost.

A push that is sent again must be sent with the header it had the first time. Nothing else is asked of a transport.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ckpt_async.consistent_cut.types import MessageTag, UpdateId, VectorClock


@dataclass(frozen=True, slots=True)
class PushHeader:
    """Goes with each piece of an update from a worker to a shard.

    Attributes:
        tag: The worker's tag when the update was issued.
        update: Which update this is a piece of.
        piece: Counts the pieces of this stream sent to this shard; equal to ``update.seq`` unless pushes are sparse.
        incarnation: Life of the worker.
    """

    tag: MessageTag
    update: UpdateId
    piece: int
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class PullHeader:
    """Goes with each reply to a pull.

    Attributes:
        tag: The shard's tag when the parameters were read.
        version: Number of updates the shard had applied since it was started.
        applied: The last update of each stream that the parameters contain.
        pieces: Number of pieces of each stream that the parameters contain.
    """

    tag: MessageTag
    version: int
    applied: VectorClock
    pieces: VectorClock


@dataclass(frozen=True, slots=True)
class Hello:
    """A participant to the coordinator: when it starts, when the coordinator was restarted, when it has caught up."""

    tag: MessageTag
    sender: str
    role: Literal["worker", "shard"]
    streams: tuple[int, ...] = ()
    incarnation: int = 0
    ready: bool = True


@dataclass(frozen=True, slots=True)
class Welcome:
    """The coordinator's answer: snapshots up to ``tag.snapshot_id`` are over."""

    tag: MessageTag


@dataclass(frozen=True, slots=True)
class Begin:
    """The coordinator to everybody: snapshot ``tag.snapshot_id`` begins."""

    tag: MessageTag


@dataclass(frozen=True, slots=True)
class Marker:
    """A worker to one shard: where its streams are cut by snapshot ``tag.snapshot_id``.

    Attributes:
        sender: Name of the worker.
        cut: Last update of each of the worker's streams that belongs to the snapshot.
        pieces: How many pieces of each of them were sent to *this* shard up to there.
        incarnation: Life of the worker.
    """

    tag: MessageTag
    sender: str
    cut: VectorClock
    pieces: VectorClock
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class WorkerAck:
    """A worker to the coordinator: its state at the cut is durable.

    Attributes:
        pieces: For each shard, how many pieces of the worker's streams were sent to it up to the cut.
        report: Whatever the commit needs to know about the bytes written (a digest, a JSON text); not looked into.
    """

    tag: MessageTag
    sender: str
    cut: VectorClock
    pieces: Mapping[str, VectorClock]
    incarnation: int = 0
    report: str = ""


@dataclass(frozen=True, slots=True)
class ShardAck:
    """A shard to the coordinator: its state at the cut is durable."""

    tag: MessageTag
    sender: str
    cut: VectorClock
    pieces: VectorClock
    report: str = ""


@dataclass(frozen=True, slots=True)
class PersistFailed:
    """A participant to the coordinator: its state could not be written."""

    tag: MessageTag
    sender: str
    reason: str


@dataclass(frozen=True, slots=True)
class Abort:
    """The coordinator to everybody: snapshots up to ``tag.snapshot_id`` are over and will never be committed."""

    tag: MessageTag
    reason: str


@dataclass(frozen=True, slots=True)
class Committed:
    """The coordinator to everybody: snapshot ``tag.snapshot_id`` is a checkpoint now."""

    tag: MessageTag


@dataclass(frozen=True, slots=True)
class Takeover:
    """A worker that rejoins to a shard: from now on refuse what earlier lives of these streams' worker sent."""

    tag: MessageTag
    sender: str
    streams: tuple[int, ...]
    incarnation: int


@dataclass(frozen=True, slots=True)
class Position:
    """A shard's answer to :class:`Takeover`: what it has received of each of the streams."""

    tag: MessageTag
    sender: str
    incarnation: int
    applied: VectorClock = field(default_factory=VectorClock)
    pieces: VectorClock = field(default_factory=VectorClock)


Message = (
    Hello
    | Welcome
    | Begin
    | Marker
    | WorkerAck
    | ShardAck
    | PersistFailed
    | Abort
    | Committed
    | Takeover
    | Position
    | PushHeader
    | PullHeader
)
KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Message)}


def encode_message(message: Message) -> dict[str, Any]:
    """The message as plain JSON data, for transports that have no encoding of their own."""
    values = {entry.name: _encode(getattr(message, entry.name)) for entry in dataclasses.fields(message)}
    return {"kind": type(message).__name__, **values}


def decode_message(data: Mapping[str, Any]) -> Message:
    """The way back from :func:`encode_message`.

    Raises:
        ValueError: The data is not that of a message.
    """
    kind = KINDS.get(data.get("kind", ""))
    if kind is None:
        raise ValueError(f"not a message between participants of a cut: {dict(data)!r}")
    try:
        message: Message = kind(**{name: _decode(name, value) for name, value in data.items() if name != "kind"})
    except (TypeError, ValueError) as error:
        raise ValueError(f"not a {kind.__name__} message: {error}") from error
    return message


def _encode(value: Any) -> Any:
    if isinstance(value, VectorClock):
        return value.to_pairs()
    if isinstance(value, Mapping):
        return {name: clock.to_pairs() for name, clock in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _decode(name: str, value: Any) -> Any:
    if name == "tag":
        return MessageTag(*value)
    if name == "update":
        return UpdateId(*value)
    if name == "streams":
        return tuple(value)
    if name in {"cut", "applied"} or (name == "pieces" and not isinstance(value, Mapping)):
        return VectorClock(value)
    if name == "pieces":
        return {shard: VectorClock(pairs) for shard, pairs in value.items()}
    return value
