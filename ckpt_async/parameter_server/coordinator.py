"""The training coordinator: admits participants, begins snapshots, and commits them as checkpoints."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError
from typing import Any

from ckpt_async.consistent_cut import (
    ConsistentCut,
    CutOptions,
    InconsistentCutError,
    SnapshotCoordinator,
    StaleGenerationError,
)
from ckpt_async.consistent_cut.effects import CommitCut, Effect, ReserveSnapshot, RollbackNeeded, Send, SnapshotAborted
from ckpt_async.consistent_cut.messages import decode_message, encode_message
from ckpt_async.consistent_cut.types import MessageTag
from ckpt_async.parameter_server.frames import Frame
from ckpt_async.parameter_server.participant import ALIVE, Training, Watch
from ckpt_async.parameter_server.store import CutStore, newest_first
from ckpt_async.parameter_server.transport import Peer, PeerLostError, Transport
from ckpt_core.errors import CheckpointError
from ckpt_core.events import Listener, SaveCommitted, SaveFailed, SaveStarted, notify
from ckpt_core.paths import StrPath

logger = logging.getLogger(__name__)

_TICK = 0.005  # seconds
_EXIT_ANSWER_SECONDS = 5.0  # seconds to wait for the answer of a participant that is asked to stop
_RETRY = 1.0  # seconds after which an aborted final snapshot is tried again
_PATIENCE = 60.0  # seconds, or ``every`` if longer, after which it is logged why no snapshot begins


@dataclasses.dataclass(frozen=True)
class _Member:
    instance: str
    incarnation: int


class TrainingCoordinator:
    """Starts an asynchronous training from the newest checkpoint that verifies, and takes snapshots of it.

    Each training has one, in a process of its own or on a thread of another participant. If it is lost, the whole
    training has to be restarted; also if a shard is lost, or a worker while ``options.on_worker_failure`` is
    ``"rollback"``.

    Args:
        transport: Its name must be :data:`ckpt_async.consistent_cut.COORDINATOR`.
        root: Where the checkpoints are: a directory that all machines share, or a URL.
        streams: Number of streams of data: fixed for the whole training, over all its starts, and at least the largest
            number of workers.
        shards: Names of the shards. Their number may differ from that in the checkpoint.
        workers: Names of the workers. Their number may differ from that in the checkpoint.
        every: Seconds between two snapshots.
        keep: How many checkpoints are kept.
        options: Options of the snapshots.
        generation: Number of this start of the training, larger than any before. None claims one below ``root``, which
            must be on a filesystem then.
        storage_options: Options for fsspec.
        listeners: Called with the events of saves (:mod:`ckpt_core.events`).

    Attributes:
        store: The store of the checkpoints.
        checkpoint: Path of the checkpoint that the training resumes from; None for a training from scratch.
        resumed: The cut of that checkpoint, or None.

    Raises:
        CheckpointCorruptedError: There are checkpoints, and none verifies. None is deleted.

    Example:
        The coordinator of two shards and three workers::

            transport = SocketTransport("coordinator", "10.0.0.1:7000")
            shards = ["shard-0", "shard-1"]
            workers = ["worker-0", "worker-1", "worker-2"]
            TrainingCoordinator(transport, "/shared/run", streams=6, shards=shards, workers=workers, every=300).run()
    """

    def __init__(
        self,
        transport: Transport,
        root: StrPath,
        *,
        streams: int,
        shards: Sequence[str],
        workers: Sequence[str],
        every: float = 300.0,
        keep: int = 3,
        options: CutOptions | None = None,
        generation: int | None = None,
        storage_options: dict[str, Any] | None = None,
        listeners: Sequence[Listener] = (),
    ) -> None:
        if not 1 <= len(workers) <= streams:
            raise ValueError(f"{len(workers)} workers cannot share {streams} streams: each needs one at least")
        if not shards or len({*shards, *workers}) != len(shards) + len(workers):
            raise ValueError("there must be a shard, and all names must differ")
        if not every > 0 or keep < 1:
            raise ValueError(f"every={every} must be a positive number of seconds, and keep={keep} at least 1")
        self.store = CutStore(root, storage_options=storage_options)
        self._transport = transport
        self._streams = streams
        self._shards = dict.fromkeys(shards, "")
        self._workers = tuple(workers)
        self._every = every
        self._keep = keep
        self._options = options or CutOptions()
        self._listeners = listeners
        self._lock = threading.RLock()
        self._members: dict[str, _Member] = {}
        self._done: set[str] = set()
        self._gone: set[str] = set()
        self._final: int | None = None
        self._began: dict[int, float] = {}
        self._due = time.monotonic() + every
        self._failure: CheckpointError | None = None
        self._finished = False
        self._threads: list[threading.Thread] = []
        self._watch = Watch(transport)
        self._ready = threading.Event()
        self.checkpoint: str | None = None
        self.resumed: ConsistentCut | None = None
        # Before the checkpoint is read, which takes long, so that participants get signs of life meanwhile.
        transport.start(self._receive, self._lost)
        try:
            self._generation = self.store.claim_generation(generation)
            self._resume()
            self.store.clean()
        except BaseException:
            self._finished = True
            self._ready.set()
            transport.close()
            raise
        self._cuts = SnapshotCoordinator(
            range(streams),
            shards,
            generation=self._generation,
            last_snapshot_id=self._last_id,
            options=self._options,
        )
        self._ready.set()

    @property
    def _last_id(self) -> int:
        return 0 if self.resumed is None else self.resumed.snapshot_id

    def _resume(self) -> None:
        newest = self.store.newest()
        if newest is None:
            logger.info("generation %d begins: there is no checkpoint in %s", self._generation, self.store.root)
            return
        with newest:
            self.checkpoint, self.resumed = newest.path, newest.cut
        if len(self.resumed.vector) != self._streams:
            raise InconsistentCutError(
                f"the checkpoint is of {len(self.resumed.vector)} streams, and the training has {self._streams}",
                path=self.checkpoint,
                remedy="the number of streams is fixed: resume with the same, and any number of workers up to it",
            )
        logger.info(
            "generation %d resumes from %s: %s", self._generation, self.checkpoint, self.resumed.vector.in_words()
        )

    # ---- life --------------------------------------------------------------------------------------------------------

    def run(self) -> ConsistentCut:
        """Coordinate until all workers have finished and the last snapshot is a checkpoint.

        Returns:
            The cut of that checkpoint.

        Raises:
            CheckpointError: A participant is lost; restart the whole training.
        """
        try:
            while not self._finished and self._failure is None:
                with self._lock:
                    self._perform(self._cuts.tick(time.monotonic()))
                    self._trigger_if_due()
                    here = [name for name in self._shards if name in self._members.keys() - self._gone]
                self._watch.look(here)
                time.sleep(_TICK)
        finally:
            self._end()
        if self._failure is not None:
            raise self._failure
        assert self._cuts.last_committed is not None
        return self._cuts.last_committed

    def request_checkpoint(self) -> None:
        """Request a snapshot as soon as one can begin; may be called on any thread."""
        self._due = time.monotonic()

    def _trigger_if_due(self) -> None:
        now = time.monotonic()
        if now < self._due:
            return
        if (obstacle := self._cuts.obstacle) is not None:
            late = now - self._due
            if late > max(self._every, _PATIENCE):
                if (snapshot := self._cuts.open_snapshot) is not None:
                    logger.warning(
                        "the next snapshot is %.0f s late, because snapshot %d is still being written, and training "
                        "continues: if that happens often, raise every=%g",
                        *(late, snapshot, self._every),
                    )
                else:
                    logger.warning("no snapshot could begin for %.0f s, and training continues: %s", late, obstacle)
                self._due = now
            return
        self._due = now + self._every
        effects = self._cuts.trigger(now)
        if self._done.issuperset(self._workers):
            self._final = self._cuts.open_snapshot
        self._perform(effects)

    def _end(self) -> None:
        with self._lock:
            reason = None if self._failure is None else self._failure.message
            if not self._finished and reason is None:
                reason = "the coordinator was interrupted"
            self._finished = True
        # Workers first: a worker that was told of the end does not report that the shards are gone.
        for names in (self._workers, self._shards):
            self._tell_to_exit([name for name in names if name in self._members.keys() - self._gone], reason)
        for thread in self._threads:
            thread.join()
        self._transport.close()

    def _tell_to_exit(self, names: Sequence[str], reason: str | None) -> None:
        question = Frame({"kind": "exit", "reason": reason})
        answers = [(name, self._transport.request(name, question)) for name in names]
        deadline = time.monotonic() + _EXIT_ANSWER_SECONDS
        for name, answer in answers:
            try:
                answer.result(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                logger.warning("%s does not answer the request to stop", name)
            except PeerLostError as error:
                logger.debug("%s is gone already: %s", name, error)

    def _fail(self, reason: str, remedy: str = "start the whole training again from the newest checkpoint") -> None:
        if self._failure is None and not self._finished:
            self._failure = CheckpointError(reason, remedy=remedy)

    # ---- messages ----------------------------------------------------------------------------------------------------

    def _receive(self, peer: Peer, frame: Frame) -> Frame | None:
        content = frame.content
        if content["kind"] == ALIVE.content["kind"]:
            return ALIVE
        self._ready.wait()
        with self._lock:
            if self._finished:
                return None
            try:
                if content["kind"] == "join":
                    return self._admit(peer, content)
                if content["kind"] == "done":
                    MessageTag(self._generation, 0).check_generation(MessageTag(*content["tag"]))
                    if self._is_current(peer):
                        self._done.add(peer.name)
                        if self._done.issuperset(self._workers):
                            self.request_checkpoint()
                elif content["kind"] == "failed":
                    self._member_failed(peer, content["reason"])
                else:
                    self._perform(self._cuts.on_message(decode_message(content)))
            except StaleGenerationError as error:
                logger.warning("the coordinator: %s", error.message)
                if error.receiver_is_stale:
                    self._fail(error.message)
            except InconsistentCutError as error:
                logger.warning("the coordinator does not take what %s says: %s", peer.name, error.message)
        return None

    def _member_failed(self, peer: Peer, reason: str) -> None:
        logger.warning("%s has failed: %s", peer.name, reason)
        is_needed = peer.name in self._shards or self._options.on_worker_failure == "rollback"
        if self._is_current(peer) and is_needed:
            self._fail(reason if reason.startswith(peer.name) else f"{peer.name} has failed: {reason}")

    def _is_current(self, peer: Peer) -> bool:
        return peer.name in self._members and peer.instance in {"", self._members[peer.name].instance}

    def _admit(self, peer: Peer, content: dict[str, Any]) -> Frame:
        name, role = peer.name, content["role"]
        if name not in (self._shards if role == "shard" else self._workers):
            return Frame({"kind": "refused", "reason": f"there is no {role} of that name in this training"})
        if role == "worker" and not all(self._shards.values()):
            return Frame({"kind": "wait"})
        known = self._members.get(name)
        if known is None or known.instance != peer.instance:
            if known is not None and (role == "shard" or self._options.on_worker_failure == "rollback"):
                return Frame({"kind": "refused", "reason": f"{name} was here before: restart the whole training"})
            self._replace(name, peer.instance, known)
        self._transport.connect(name, content["address"])
        if role == "shard":
            self._shards[name] = content["address"]
        training = Training(
            generation=self._generation,
            snapshot_id=self._last_id,
            incarnation=self._members[name].incarnation,
            streams=self._streams,
            shards=self._shards,
            workers=self._workers,
            root=self.store.root,
            checkpoint=self.checkpoint,
            options=self._options,
        )
        return Frame({"kind": "welcome", "training": training.to_content()})

    def _replace(self, name: str, instance: str, known: _Member | None) -> None:
        if known is not None:
            logger.info("%s takes the place of one that was lost", name)
            self._done.discard(name)
            self._perform(self._cuts.member_lost(name, known.incarnation))
        self._gone.discard(name)
        self._members[name] = _Member(instance, 0 if known is None else known.incarnation + 1)

    def _lost(self, peer: Peer) -> None:
        with self._lock:
            if self._finished or peer.name in self._gone or not self._is_current(peer):
                return
            logger.warning("%s was lost", peer.name)
            self._gone.add(peer.name)
            self._perform(self._cuts.member_lost(peer.name, self._members[peer.name].incarnation))
            if peer.name in self._shards:
                self._fail(f"{peer.name} was lost")

    # ---- effects -----------------------------------------------------------------------------------------------------

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self._transport.send(effect.to, Frame(encode_message(effect.message)))
                case ReserveSnapshot():
                    try:
                        self._reserve(effect.snapshot_id)
                    except CheckpointError as error:  # no participant has heard of the snapshot yet: training continues
                        self._perform(self._cuts.abort(f"its directory could not be made: {error.message}"))
                        return
                case CommitCut():
                    self._later(functools.partial(self._commit, effect))
                case SnapshotAborted():
                    self._aborted(effect)
                case RollbackNeeded():
                    self._fail(effect.reason)
                case _:
                    raise TypeError(f"a {type(effect).__name__} is not for a coordinator")

    def _later(self, action: Callable[[], None]) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=action, name="ckpt-cut-commit")
        self._threads.append(thread)
        thread.start()

    def _reserve(self, snapshot_id: int) -> None:
        self._began[snapshot_id] = time.monotonic()
        notify(self._listeners, SaveStarted(path=self.store.path(self._generation, snapshot_id)))
        self.store.reserve(self._generation, snapshot_id)

    def _aborted(self, effect: SnapshotAborted) -> None:
        logger.warning("%s", effect.error.message)
        if self._final == effect.snapshot_id:
            self._final = None
            self._due = min(self._due, time.monotonic() + _RETRY)
        path = self.store.path(self._generation, effect.snapshot_id)
        notify(self._listeners, SaveFailed(path=path, error=effect.error.message))
        self._began.pop(effect.snapshot_id, None)
        self._later(functools.partial(self._discard, effect.snapshot_id))

    def _discard(self, snapshot_id: int) -> None:
        try:
            self.store.discard(self._generation, snapshot_id)
        except CheckpointError as error:
            logger.warning("could not delete snapshot %d, which was given up: %s", snapshot_id, error.message)

    def _commit(self, effect: CommitCut) -> None:
        cut = dataclasses.replace(effect.cut, workers=self._workers)
        reports = [effect.shard_reports[name] for name in cut.shards]
        reports += [effect.worker_reports[name] for name in cut.workers]
        try:
            path, size = self.store.commit(cut, reports)
        except Exception as error:  # noqa: BLE001 - the snapshot is given up, and the training continues
            with self._lock:
                self._perform(self._cuts.commit_failed(cut.snapshot_id, f"{type(error).__name__}: {error}"))
            return
        logger.info("%s is committed: %s", path, cut.vector.in_words())
        if (later := self._later_checkpoint(path)) is not None:
            with self._lock:
                self._fail(
                    f"a later start of this training has saved {later}, so this one's checkpoints are of no use",
                    remedy="leave it to the later one, or give each training a root of its own",
                )
            return
        with self._lock:
            seconds = time.monotonic() - self._began.pop(cut.snapshot_id)
            notify(self._listeners, SaveCommitted(path=path, bytes=size, background_seconds=seconds))
            self._perform(self._cuts.committed(cut.snapshot_id))
            self._finished = self._finished or cut.snapshot_id == self._final
        try:
            self.store.prune(self._keep)
        except CheckpointError as error:
            logger.warning("could not delete old checkpoints: %s", error.message)

    def _later_checkpoint(self, path: str) -> str | None:
        try:
            newest = newest_first([path, *self.store.committed()])[0]
        except Exception:  # noqa: BLE001 - the next snapshot may still succeed
            return None
        return None if newest == path else newest
