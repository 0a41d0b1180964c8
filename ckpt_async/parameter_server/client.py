"""The worker's client of the parameter server: pull, push, and its part in snapshots; its optimizer and sampler."""

from __future__ import annotations

import copy
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Sampler

from ckpt_async.consistent_cut import COORDINATOR, CutWorker, UpdateId, VectorClock, deal_streams
from ckpt_async.consistent_cut.effects import Effect, PersistWorker
from ckpt_async.consistent_cut.messages import Committed, Message, PullHeader, decode_message, encode_message
from ckpt_async.consistent_cut.types import next_update
from ckpt_async.parameter_server.frames import Frame
from ckpt_async.parameter_server.model import BlockTable, Model, aliases_of, buffers_of, parameters_of
from ckpt_async.parameter_server.participant import Participant
from ckpt_async.parameter_server.transport import PeerLostError, Transport
from ckpt_core.errors import CheckpointError, StateMismatchError
from ckpt_core.state.rng import RngState

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

logger = logging.getLogger(__name__)

_PATIENCE = 0.002  # seconds before the next pull while too many updates are under way
_IDLE = 0.01  # seconds between two checks for messages while there is nothing to train


class ParameterClient(Participant):
    """A worker's connection to the training: which batch comes next, :meth:`pull`, :meth:`push`.

    Its state for a snapshot is captured in :meth:`pull`, between two updates and before the pulled parameters are used.
    So a batch and its randomness may depend only on ``(stream, number of the batch)``, and on objects that were passed
    to :meth:`register`.

    Args:
        transport: Its name is the worker's name, which must be one that the coordinator was given.
        coordinator: Address of the coordinator.
        parameters: The model, or name and tensor of each of its parameters, which :meth:`pull` overwrites. If it is the
            model, its buffers (statistics of BatchNorm) are part of this worker's state, and the further names of tied
            parameters are saved.
        batches: Number of batches in each stream; None for streams without end.
        seed: Every pull seeds torch's default generator from this number and the update's, so that an update's
            randomness (dropout, augmentation) is the same whenever and wherever it is computed. None: the generators
            are left alone, and their states are in the checkpoint; only a worker of the same name restores them.
        max_block_bytes: See :class:`~ckpt_async.parameter_server.model.BlockTable`; equal in every process.
        storage_options: Options for fsspec, if the checkpoints are in an object store.

    Attributes:
        parameters: The model's parameters, by name.
        buffers: The model's buffers, by name, if the model was given.
        aliases: For each further name of a tied parameter, its name in ``parameters``.
        committed_snapshot: ID of the newest snapshot that is known to be a checkpoint.

    Example:
        A worker, in a process of its own::

            client = ParameterClient(SocketTransport("worker-0"), "10.0.0.1:7000", model, batches=100)
            for update in client.updates():
                client.pull()
                loss_of(model, batch_of(update.stream, update.seq)).backward()
                client.push()
            client.finish()
    """

    def __init__(
        self,
        transport: Transport,
        coordinator: str,
        parameters: Model,
        *,
        batches: int | None = None,
        seed: int | None = 0,
        max_block_bytes: int | None = None,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(transport, coordinator, "worker", storage_options=storage_options)
        training = self.training
        self.committed_snapshot = training.snapshot_id
        with self._beginning():
            self.parameters = parameters_of(parameters)
            self.buffers = buffers_of(parameters)
            self.aliases = aliases_of(parameters)
            self._batches = batches
            self._seed = seed
            self._objects: dict[str, Stateful] = {}
            self._saved: dict[str, Any] = {}
            self._pulled_for: UpdateId | None = None
            self.table = BlockTable(self.parameters.items(), max_block_bytes=max_block_bytes)
            self._shard_of = {
                block: shard for shard, blocks in self.table.deal(list(training.shards)).items() for block in blocks
            }
            streams = deal_streams(range(training.streams), list(training.workers))[self.name]
            self._worker = self._take_over(streams) if training.incarnation else self._start(streams)
            self._begin(self._worker.hello())
            while not self._worker.can_train:
                self.check()
                time.sleep(_IDLE)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy as None: the connection stays here when an object that holds it is copied or spawned."""
        return type(None), ()

    def _start(self, streams: Iterable[int]) -> CutWorker:
        training = self.training
        positions: Mapping[int, int] = dict.fromkeys(streams, 0)
        checkpoint = self._open_checkpoint()
        if checkpoint is not None:
            with checkpoint:
                positions = checkpoint.cut.vector.restricted_to(streams)
                self._saved = checkpoint.worker(self.name) or {"buffers": checkpoint.buffers()}
                self._load_buffers(checkpoint.path)
            logger.info("%s resumes from %s: %s", self.name, checkpoint.path, VectorClock(positions).in_words())
            if self._seed is None and "rng" in self._saved:
                RngState.decode(self._saved["rng"]).restore()
        return CutWorker(
            self.name,
            positions,
            training.shards,
            self._capture,
            generation=training.generation,
            snapshot_id=training.snapshot_id,
            options=training.options,
        )

    def _take_over(self, streams: Iterable[int]) -> CutWorker:
        training = self.training
        worker = CutWorker.rejoining(
            self.name,
            streams,
            training.shards,
            self._capture,
            generation=training.generation,
            incarnation=training.incarnation,
            options=training.options,
        )
        for shard in training.shards:
            meeting = {"kind": "meet", "name": self.name, "address": self._transport.address, "tag": list(worker.tag)}
            # Wait for the answer: from then on the shard can send to this worker.
            self._transport.request(shard, Frame(meeting)).result()
        return worker

    # ---- training ----------------------------------------------------------------------------------------------------

    @property
    def position(self) -> VectorClock:
        """The number of updates pushed so far, for each of this worker's streams."""
        with self._lock:
            return self._worker.cut

    @property
    def snapshot(self) -> int:
        """ID of the newest snapshot that this worker takes part in."""
        with self._lock:
            return self._worker.tag.snapshot_id

    @property
    def upcoming(self) -> UpdateId | None:
        """The update for which the next :meth:`pull` and :meth:`push` are; None when all batches were used."""
        return next_update(self.position, self._batches)

    def updates(self) -> Iterator[UpdateId]:
        """Yield all updates from here on; raise if the previous one was not pushed before the next is requested."""
        while (update := self.upcoming) is not None:
            yield update
            if self.upcoming == update:
                raise CheckpointError(
                    f"batch {update.seq} of stream {update.stream} was not pushed",
                    remedy="call push() or RemoteOptimizer.step() for every batch, in its order",
                )

    def plan(self) -> Iterator[UpdateId]:
        """Yield the same updates without waiting for pushes, for loaders that prefetch."""
        positions = dict(self.position)
        while (update := next_update(positions, self._batches)) is not None:
            positions[update.stream] = update.seq
            yield update

    def pull(self) -> None:
        """Load the newest parameters into the model; before that, take part in a snapshot if one is due.

        Waits while too many updates of the stream are under way.

        Raises:
            PeerLostError: A shard or the coordinator is gone.
        """
        update = self.upcoming
        if update is None:
            raise CheckpointError(f"{self.name} has no batch left", remedy="call finish()")
        while True:
            self.check()
            self._watch.look([COORDINATOR])
            with self._lock:
                tag = self._worker.tag
            question = Frame({"kind": "pull", "tag": list(tag)})
            try:
                futures = {shard: self._transport.request(shard, question) for shard in self.training.shards}
                frames = {shard: future.result() for shard, future in futures.items()}
            except PeerLostError as error:
                self.check()  # raises a failure that was reported before, if any
                self._fail(error)
                self.close()  # waits until the coordinator has been told
                raise
            answers = {shard: self._answer(shard, frame) for shard, frame in frames.items()}
            with self._lock:
                # Before the answers are used, because they may contain updates from after the cut.
                self._perform(self._worker.at_boundary({shard: header for shard, (header, _) in answers.items()}))
                if self._worker.may_push(update.stream):
                    break
            time.sleep(_PATIENCE)
        self._load({name: value for _, values in answers.values() for name, value in values.items()})
        self._pulled_for = update
        self.reseed()

    def reseed(self) -> None:
        """Seed torch's generator for the next update, as :meth:`pull` does; to be called if it was used since."""
        update = self.upcoming
        if self._seed is not None and update is not None:
            torch.manual_seed(seed_of(self._seed, update))

    def push(self, gradients: Mapping[str, torch.Tensor] | None = None) -> None:
        """Send the gradients of the batch :attr:`upcoming` to the shards, without waiting.

        Args:
            gradients: By the parameter's name; by default, each parameter's ``grad``. Parameters without a gradient are
                not stepped, and shards that hold no parameter with a gradient are not sent anything.

        Raises:
            CheckpointError: There was no :meth:`pull` for this batch.
        """
        self.check()
        update = self.upcoming
        if update is None or update != self._pulled_for:
            raise CheckpointError(
                f"{self.name} pushes an update for which nothing was pulled",
                remedy="call pull() once before each push()",
            )
        if gradients is None:
            own = self.parameters.items()
            gradients = {name: tensor.grad for name, tensor in own if tensor.grad is not None}
        pieces: dict[str, dict[str, torch.Tensor]] = {}
        for name, part in self.table.divide(gradients).items():
            pieces.setdefault(self._shard_of[name], {})[name] = part.detach()
        with self._lock:
            headers = self._worker.next_update(update.stream, pieces)
        for shard, header in headers.items():
            self._transport.send(shard, Frame({"kind": "push", "header": encode_message(header)}, pieces[shard]))
        self._pulled_for = None

    def finish(self) -> None:
        """Report that this worker has no batches left, and take part in snapshots until the training is over.

        Raises:
            CheckpointError: The training ended because of a failure.
        """
        if self._batches is not None and (update := self.upcoming) is not None:
            logger.warning(
                "%s ends although batch %d of stream %d was not pushed", self.name, update.seq, update.stream
            )
        self._transport.send(COORDINATOR, Frame({"kind": "done", "tag": list(self._worker.tag)}))
        try:
            while not self._stopped.wait(_IDLE):
                with self._lock:
                    self._perform(self._worker.at_boundary())
                self._watch.look([COORDINATOR])
        finally:
            self.close()
        super().check()

    def check(self) -> None:
        super().check()
        if self._stopped.is_set():
            raise CheckpointError(f"{self.name} cannot continue: the training is over")

    def _answer(self, shard: str, frame: Frame) -> tuple[PullHeader, Mapping[str, torch.Tensor]]:
        if frame.content.get("kind") == "failed":
            raise PeerLostError(f"{shard} has failed: {frame.content['reason']}", remedy="restart the whole training")
        if frame.content.get("kind") != "pulled":
            raise CheckpointError(f"{shard} has answered a pull with {frame.content or 'nothing'}")
        header = decode_message(frame.content["header"])
        assert isinstance(header, PullHeader)
        return header, frame.tensors

    @torch.no_grad()
    def _load(self, values: Mapping[str, torch.Tensor]) -> None:
        for block in self.table.blocks.values():
            block.of(self.parameters[block.parameter].detach()).copy_(values[block.name])

    # ---- the worker's own state --------------------------------------------------------------------------------------

    def register(self, name: str, stateful: Stateful) -> None:
        """Make an object part of this worker's state at every cut, and load its state from the checkpoint, if any.

        Args:
            name: Unique within the worker.
            stateful: An object with ``state_dict`` and ``load_state_dict``. Only a worker of the same name restores its
                state. The state is captured in :meth:`pull`, with which :meth:`RemoteOptimizer.step` ends.

        Raises:
            StateMismatchError: The name is taken.
        """
        if name in self._objects:
            raise StateMismatchError(f"{name!r} is registered already", key=name)
        self._objects[name] = stateful
        saved = self._saved.get("objects", {})
        if name in saved:
            stateful.load_state_dict(saved[name])

    @torch.no_grad()
    def _load_buffers(self, path: str) -> None:
        saved = self._saved.get("buffers", {})
        for name, buffer in self.buffers.items():
            if name not in saved:
                logger.warning("%s has nothing of the buffer %s, which stays as it is", path, name)
            elif saved[name].shape != buffer.shape:
                shapes = f"{tuple(saved[name].shape)} and {tuple(buffer.shape)}"
                raise StateMismatchError(f"the buffer {name!r} has another shape: {shapes}", path=path, key=name)
            else:
                buffer.copy_(saved[name])

    def _capture(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "objects": {name: copy.deepcopy(stateful.state_dict()) for name, stateful in self._objects.items()},
            "buffers": {name: buffer.detach().cpu().clone() for name, buffer in self.buffers.items()},
            "aliases": dict(self.aliases),
        }
        if self._seed is None:  # otherwise each pull seeds torch's generator
            state["rng"] = RngState.capture().encode()
        return state

    # ---- messages and effects ----------------------------------------------------------------------------------------

    def _on_request(self, frame: Frame) -> Frame | None:
        return None

    def _on_message(self, message: Message) -> list[Effect]:
        effects = self._worker.on_message(message)
        if isinstance(message, Committed):
            self.committed_snapshot = max(self.committed_snapshot, message.tag.snapshot_id)
        return effects

    def _perform_own(self, effect: Effect) -> None:
        assert isinstance(effect, PersistWorker)
        participant = {
            "name": self.name,
            "cut": effect.cut.to_pairs(),
            "pulled": [[*update, versions] for update, versions in effect.pulled.items()],
            **effect.state,
        }
        self._write_later(
            effect.snapshot_id,
            lambda: self._write(effect.snapshot_id, self.table, {}, participant),
            self._worker.persisted,
            self._worker.persist_failed,
        )


class RemoteOptimizer(torch.optim.Optimizer):
    """An optimizer for an ordinary training loop: :meth:`step` pushes gradients, and pulls the next parameters.

    Its parameters are the client's. It has no learning rate, because the servers' optimizers have one; so a scheduler
    that is given this optimizer fails instead of having no effect.

    Args:
        client: The worker's client. The parameters for the first batch are pulled at once.

    Example:
        In a worker's process::

            client = ParameterClient(transport, coordinator, model.named_parameters(), batches=100)
            optimizer = RemoteOptimizer(client)
            for update in client.updates():
                optimizer.zero_grad()
                loss_of(model, batch_of(update.stream, update.seq)).backward()
                optimizer.step()
            client.finish()
    """

    def __init__(self, client: ParameterClient) -> None:
        super().__init__(list(client.parameters.values()), {})
        self.client = client
        self._pull_next()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Push the gradients of this batch, and load the parameters for the next one into the model.

        Args:
            closure: Called first; computes the gradients and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.client.push()
        self._pull_next()
        return loss

    def _pull_next(self) -> None:
        if self.client.upcoming is not None:
            self.client.pull()


class UpdateSampler(Sampler[list[int]]):
    """A batch sampler with the batches of a worker's streams, from the worker's current position.

    Batches that were fetched but not pushed yet do not count as used, so loaders may prefetch.

    Args:
        client: The worker's client.
        samples_of: Returns the indices of the samples of a batch; must depend on its stream and number only.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> def loader_of(client, dataset, samples_of):
        ...     return DataLoader(dataset, batch_sampler=UpdateSampler(client, samples_of), num_workers=2)
    """

    def __init__(self, client: ParameterClient, samples_of: Callable[[UpdateId], list[int]]) -> None:
        self._client = client
        self._samples_of = samples_of

    def __iter__(self) -> Iterator[list[int]]:
        return (self._samples_of(update) for update in self._client.plan())


def seed_of(seed: int, update: UpdateId) -> int:
    """Return the seed of torch's generator for an update, given the client's ``seed``."""
    text = f"{seed}/{update.stream}/{update.seq}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
