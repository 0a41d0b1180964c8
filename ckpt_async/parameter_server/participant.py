"""Participants, the base of servers and workers: join the training, run the state machine, and perform its effects."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ckpt_async.consistent_cut import COORDINATOR, CutOptions, StaleGenerationError
from ckpt_async.consistent_cut.effects import Effect, Send
from ckpt_async.consistent_cut.messages import KINDS, Message, decode_message, encode_message
from ckpt_async.consistent_cut.types import MessageTag
from ckpt_async.parameter_server.frames import Frame
from ckpt_async.parameter_server.model import BlockTable
from ckpt_async.parameter_server.store import CutCheckpoint, CutStore
from ckpt_async.parameter_server.transport import Peer, PeerLostError, Transport
from ckpt_core.errors import CheckpointError

logger = logging.getLogger(__name__)

Own = TypeVar("Own", bound="Participant")

_PATIENCE = 0.05  # seconds between two attempts to join, while shards are missing
_WATCH_SECONDS = 5.0
ALIVE = Frame({"kind": "alive"})


@dataclass(frozen=True)
class Training:
    """The coordinator's answer to a participant that joins: a description of the training.

    Attributes:
        generation: Number of this start of the whole training.
        snapshot_id: Newest snapshot of earlier generations.
        incarnation: How often another process of this name has joined in this generation before.
        streams: Number of streams.
        shards: Names of all shards, with their addresses.
        workers: Names of all workers.
        root: Where the checkpoints are.
        checkpoint: Path of the checkpoint to load; None if there is none.
        options: Options of the snapshots.
    """

    generation: int
    snapshot_id: int
    incarnation: int
    streams: int
    shards: Mapping[str, str]
    workers: Sequence[str]
    root: str
    checkpoint: str | None
    options: CutOptions

    def to_content(self) -> dict[str, Any]:
        """Return it as plain JSON data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_content(cls, content: Mapping[str, Any]) -> Training:
        """Rebuild it from :meth:`to_content`."""
        return cls(**{**content, "options": CutOptions(**content["options"])})

    def check(self, tag: MessageTag) -> None:
        """Raise ``StaleGenerationError`` for a tag of another generation."""
        MessageTag(self.generation, 0).check_generation(tag)

    def rank(self, name: str) -> int:
        """Return a participant's rank in the checkpoint."""
        return [*self.shards, *self.workers].index(name)

    @property
    def world_size(self) -> int:
        """Number of participants."""
        return len(self.shards) + len(self.workers)


class Watch:
    """Pings other participants every few seconds; the transport reports those that do not answer as lost."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._asked: dict[str, Future[Frame]] = {}
        self._due = 0.0

    def look(self, names: Iterable[str]) -> None:
        """Ping the participants of these names if that is due; call it often."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _WATCH_SECONDS
        for name in names:
            asked = self._asked.get(name)
            if asked is None or asked.done():
                with contextlib.suppress(PeerLostError):
                    self._asked[name] = self._transport.request(name, ALIVE)


class Participant(abc.ABC):
    """A process that takes part in the training, as ``"shard"`` or ``"worker"``, under the name of its transport.

    Raises ``CheckpointError`` if the coordinator refuses it or cannot be reached.
    """

    def __init__(
        self, transport: Transport, coordinator: str, role: str, *, storage_options: dict[str, Any] | None = None
    ) -> None:
        self.name = transport.name
        self._transport = transport
        self._role = role
        self._lock = threading.RLock()
        self._ready = threading.Event()
        self._stopped = threading.Event()
        self._failure: CheckpointError | None = None
        self._writers: list[threading.Thread] = []
        self._needed = {COORDINATOR}
        self._watch = Watch(transport)
        transport.connect(COORDINATOR, coordinator)
        transport.start(self._receive, self._lost)
        try:
            self.training = self._join()
        except BaseException:
            transport.close()
            raise
        if role == "worker":
            self._needed.update(self.training.shards)
        self.store = CutStore(self.training.root, storage_options=storage_options)

    # ---- what a server and a worker do differently -------------------------------------------------------------------

    @abc.abstractmethod
    def _on_message(self, message: Message) -> list[Effect]:
        """Pass a message to the state machine, and return its effects."""

    @abc.abstractmethod
    def _on_request(self, frame: Frame) -> Frame | None:
        """Handle a frame that is not a message between state machines; return the answer, or None."""

    @abc.abstractmethod
    def _perform_own(self, effect: Effect) -> None:
        """Carry out an effect other than sending."""

    # ---- life --------------------------------------------------------------------------------------------------------

    def _join(self) -> Training:
        content = {"kind": "join", "role": self._role, "address": self._transport.address}
        while True:
            answer = self._transport.request(COORDINATOR, Frame(content)).result().content
            if "kind" not in answer:
                raise CheckpointError(f"{self.name} has joined too late: the training is over")
            if answer["kind"] == "welcome":
                training = Training.from_content(answer["training"])
                for shard, address in training.shards.items():
                    if address:  # empty for shards that have not joined; only workers need them, and join after them
                        self._transport.connect(shard, address)
                return training
            if answer["kind"] == "refused":
                raise CheckpointError(f"the coordinator refuses {self.name}: {answer['reason']}")
            time.sleep(_PATIENCE)

    def _open_checkpoint(self) -> CutCheckpoint | None:
        return None if self.training.checkpoint is None else self.store.open(self.training.checkpoint)

    @contextlib.contextmanager
    def _beginning(self) -> Iterator[None]:
        """If the body fails, report it to the coordinator, close the connections, and raise."""
        try:
            yield
        except Exception as error:
            self._fail(_as_checkpoint_error(error, f"{self.name} could not begin"))
            self.close()
            raise

    def _begin(self, effects: list[Effect]) -> None:
        """Handle messages from now on, and perform the first effects; called when the participant is complete."""
        self._ready.set()
        self._perform(effects)

    def check(self) -> None:
        """Raise the failure that has occurred in the background, if any."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Leave the training: wait for writes under way, and close the connections."""
        self._stopped.set()
        self._ready.set()
        for writer in self._writers:
            writer.join()
        self._transport.close()

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stop(self, failure: CheckpointError | None) -> None:
        with self._lock:
            if self._failure is None and not self._stopped.is_set():
                self._failure = failure
        self._stopped.set()

    def _fail(self, failure: CheckpointError) -> None:
        """Stop, and report the reason to the coordinator, which otherwise only sees that this process is gone."""
        if not self._stopped.is_set():
            self._transport.send(COORDINATOR, Frame({"kind": "failed", "reason": failure.message}))
        self._stop(failure)

    # ---- messages ----------------------------------------------------------------------------------------------------

    def _lost(self, peer: Peer) -> None:
        if peer.name in self._needed:
            self._fail(PeerLostError(f"{self.name} has lost {peer.name}", remedy="restart the whole training"))

    def _receive(self, peer: Peer, frame: Frame) -> Frame | None:
        content = frame.content
        if content.get("kind") == "exit":
            reason = content["reason"]
            self._stop(None if reason is None else CheckpointError(f"{self.name} was asked to stop: {reason}"))
            return None
        if content.get("kind") == ALIVE.content["kind"]:
            return ALIVE
        self._ready.wait()
        if self._stopped.is_set():
            return self._last_word()
        try:
            with self._lock:
                answer = self._on_request(frame)
                if answer is None and content["kind"] in KINDS:
                    self._perform(self._on_message(decode_message(content)))
                return answer
        except StaleGenerationError as error:
            logger.warning("%s: %s", self.name, error.message)
            if error.receiver_is_stale:
                self._stop(error)
            return Frame({"kind": "stale", "reason": error.message})
        except Exception as error:  # noqa: BLE001 - the state cannot be trusted any more, so the process has to end
            self._fail(_as_checkpoint_error(error, f"{self.name} failed on a message of {peer.name}"))
        return self._last_word()

    def _last_word(self) -> Frame | None:
        return None if self._failure is None else Frame({"kind": "failed", "reason": self._failure.message})

    # ---- effects -----------------------------------------------------------------------------------------------------

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._transport.send(effect.to, Frame(encode_message(effect.message)))
            else:
                self._perform_own(effect)

    def _write(
        self, snapshot_id: int, table: BlockTable, blocks: Mapping[str, torch.Tensor], participant: Mapping[str, Any]
    ) -> str:
        """Write this participant's files of a snapshot; return the report for the commit."""
        training = self.training
        return self.store.write(
            training.generation,
            snapshot_id,
            rank=training.rank(self.name),
            world_size=training.world_size,
            incarnation=training.incarnation,
            table=table,
            blocks=blocks,
            participant=participant,
        )

    def _write_later(
        self,
        snapshot_id: int,
        write: Callable[[], str],
        done: Callable[[int, str], list[Effect]],
        failed: Callable[[int, str], list[Effect]],
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Write this participant's part of a snapshot on a thread, then call ``after`` and ``done`` or ``failed``."""

        def run() -> None:
            try:
                report, settle = write(), done
            except Exception as error:  # noqa: BLE001 - the coordinator learns it, and gives up the snapshot
                report, settle = f"{type(error).__name__}: {error}", failed
                logger.warning("%s could not write its part of snapshot %d: %s", self.name, snapshot_id, report)
            with self._lock:
                after()
                self._perform(settle(snapshot_id, report))

        self._writers = [writer for writer in self._writers if writer.is_alive()]
        if len(self._writers) > 1:  # if the storage hangs, copies must not fill the memory
            after()
            reason = f"{len(self._writers)} earlier snapshots, which were given up, are still being written"
            self._perform(failed(snapshot_id, reason))
            return
        writer = threading.Thread(target=run, name="ckpt-cut-writer")
        self._writers.append(writer)
        writer.start()


def _as_checkpoint_error(error: Exception, what: str) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    wrapped = CheckpointError(f"{what}: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
