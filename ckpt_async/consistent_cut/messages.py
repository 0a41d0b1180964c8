"""The messages between workers, shards and coordinator, which may be reordered, duplicated, delayed and lost.

A push that is sent again must have the same header as the first time. Nothing else is required of a transport.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ckpt_async.consistent_cut.types import MessageTag, UpdateId, VectorClock


@dataclass(frozen=True, slots=True)
class PushHeader:
    """The header of each piece of an update that a worker sends to a shard.

    Attributes:
        tag: The worker's tag when the update was issued.
        update: The update that this is a piece of.
        piece: Counts the pieces of this stream sent to this shard; equal to ``update.seq`` unless pushes are sparse.
        incarnation: Incarnation of the worker.
    """

    tag: MessageTag
    update: UpdateId
    piece: int
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class PullHeader:
    """The header of each reply to a pull.

    Attributes:
        tag: The shard's tag when the parameters were read.
        version: Number of updates that the shard had applied since it was started.
        applied: The last update of each stream that the parameters contain.
        pieces: Number of pieces of each stream that the parameters contain.
    """

    tag: MessageTag
    version: int
    applied: VectorClock
    pieces: VectorClock


@dataclass(frozen=True, slots=True)
class Hello:
    """From a participant to the coordinator: it has started, has seen the coordinator restart, or has caught up."""

    tag: MessageTag
    sender: str
    role: Literal["worker", "shard"]
    streams: tuple[int, ...] = ()
    incarnation: int = 0
    ready: bool = True


@dataclass(frozen=True, slots=True)
class Welcome:
    """The coordinator's answer to :class:`Hello`: snapshots up to ``tag.snapshot_id`` are over."""

    tag: MessageTag


@dataclass(frozen=True, slots=True)
class Begin:
    """From the coordinator to all: snapshot ``tag.snapshot_id`` begins."""

    tag: MessageTag


@dataclass(frozen=True, slots=True)
class Marker:
    """From a worker to one shard: where snapshot ``tag.snapshot_id`` cuts the worker's streams.

    Attributes:
        sender: Name of the worker.
        cut: Last update of each of the worker's streams that belongs to the snapshot.
        pieces: How many pieces of each of these streams were sent to *this* shard up to the cut.
        incarnation: Incarnation of the worker.
    """

    tag: MessageTag
    sender: str
    cut: VectorClock
    pieces: VectorClock
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class WorkerAck:
    """From a worker to the coordinator: the worker's state at the cut is durable.

    Attributes:
        pieces: For each shard, how many pieces of the worker's streams were sent to it up to the cut.
        report: What the commit needs to know about the written bytes (a digest, a JSON text); passed on unread.
    """

    tag: MessageTag
    sender: str
    cut: VectorClock
    pieces: Mapping[str, VectorClock]
    incarnation: int = 0
    report: str = ""


@dataclass(frozen=True, slots=True)
class ShardAck:
    """From a shard to the coordinator: the shard's state at the cut is durable."""

    tag: MessageTag
    sender: str
    cut: VectorClock
    pieces: VectorClock
    report: str = ""


@dataclass(frozen=True, slots=True)
class PersistFailed:
    """From a participant to the coordinator: the participant's state could not be written."""

    tag: MessageTag
    sender: str
    reason: str


@dataclass(frozen=True, slots=True)
class Abort:
    """From the coordinator to all: snapshots up to ``tag.snapshot_id`` are over, and this one is never committed."""

    tag: MessageTag
    reason: str


@dataclass(frozen=True, slots=True)
class Committed:
    """From the coordinator to all: snapshot ``tag.snapshot_id`` is a checkpoint now."""

    tag: MessageTag


@dataclass(frozen=True, slots=True)
class Takeover:
    """From a rejoining worker to a shard: refuse, from now on, messages of earlier incarnations about these streams."""

    tag: MessageTag
    sender: str
    streams: tuple[int, ...]
    incarnation: int


@dataclass(frozen=True, slots=True)
class Position:
    """A shard's answer to :class:`Takeover`: how much of each stream it has received."""

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
    """Return the message as plain JSON data, for transports that have no encoding of their own."""
    values = {entry.name: _encode(getattr(message, entry.name)) for entry in dataclasses.fields(message)}
    return {"kind": type(message).__name__, **values}


def decode_message(data: Mapping[str, Any]) -> Message:
    """Decode the data of :func:`encode_message`.

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
