"""A worker's side: pull parameters, push gradients, be cut between two updates; its optimizer and sampler."""

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

_PATIENCE = 0.002  # seconds before asking again
_IDLE = 0.01  # seconds between two looks at messages, when there is nothing to train


class ParameterClient(Participant):
    """A worker's connection to the training: which batch comes next, :meth:`pull`, :meth:`push`.

    It is cut by :meth:`pull`, between two updates and before the parameters that were pulled are used; so what the
    batch and its randomness depend on must be a function of ``(stream, number of the batch)``, or be in
    :meth:`register`.

    Args:
        transport: Its name is the worker's; the coordinator knows which names there are.
        coordinator: Address of the coordinator.
        parameters: The model, or name and tensor of each of its parameters, which :meth:`pull` overwrites. Of a model,
            its buffers (statistics of BatchNorm) are part of this worker's state, and further names of tied parameters
            are saved.
        batches: Number of batches in each stream; None for streams without end.
        seed: Every pull sets torch's default generator from this number and the update's, so that an update's
            randomness (dropout, augmentation) is the same whenever and wherever it is computed. None: the generators
            are left alone, and their states are part of the checkpoint, which only a worker of the same name gets back.
        max_block_bytes: See :class:`~ckpt_async.parameter_server.model.BlockTable`; the same in every process.
        storage_options: For fsspec, if the checkpoints are in an object store.

    Attributes:
        parameters: Those of the model, by name.
        buffers: Those of the model, by name, if it was given.
        aliases: Of its tied parameters, the name in ``parameters`` by each further name.
        committed_snapshot: Id of the newest snapshot that is known to be a checkpoint.

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
        """A copy of what holds it, and what a spawned process gets, holds None: the connection stays here."""
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
            # Its answer says that the shard can be asked.
            self._transport.request(shard, Frame(meeting)).result()
        return worker

    # ---- training ----------------------------------------------------------------------------------------------------

    @property
    def position(self) -> VectorClock:
        """How many updates of each of this worker's streams were pushed."""
        with self._lock:
            return self._worker.cut

    @property
    def snapshot(self) -> int:
        """Id of the newest snapshot that this worker takes part in."""
        with self._lock:
            return self._worker.tag.snapshot_id

    @property
    def upcoming(self) -> UpdateId | None:
        """The update that the next :meth:`pull` and :meth:`push` are about; None when all batches were used."""
        return next_update(self.position, self._batches)

    def updates(self) -> Iterator[UpdateId]:
        """All updates from here on, one after the other, each when the one before was pushed."""
        while (update := self.upcoming) is not None:
            yield update
            if self.upcoming == update:
                raise CheckpointError(
                    f"batch {update.seq} of stream {update.stream} was not pushed",
                    remedy="call push() or RemoteOptimizer.step() for every batch, in its order",
                )

    def plan(self) -> Iterator[UpdateId]:
        """The same updates, without waiting for any push: for loaders that are ahead of the training."""
        positions = dict(self.position)
        while (update := next_update(positions, self._batches)) is not None:
            positions[update.stream] = update.seq
            yield update

    def pull(self) -> None:
        """Load the newest parameters into the model, after taking part in a snapshot if one is due.

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
                self.check()  # which may know more
                self._fail(error)
                self.close()  # after which the coordinator knows it, too
                raise
            answers = {shard: self._answer(shard, frame) for shard, frame in frames.items()}
            with self._lock:
                # Before anything of the answers is used: they may show updates from after the cut.
                self._perform(self._worker.at_boundary({shard: header for shard, (header, _) in answers.items()}))
                if self._worker.may_push(update.stream):
                    break
            time.sleep(_PATIENCE)
        self._load({name: value for _, values in answers.values() for name, value in values.items()})
        self._pulled_for = update
        self.reseed()

    def reseed(self) -> None:
        """Set torch's generator for the next update, as :meth:`pull` does; again, if it was used since."""
        update = self.upcoming
        if self._seed is not None and update is not None:
            torch.manual_seed(seed_of(self._seed, update))

    def push(self, gradients: Mapping[str, torch.Tensor] | None = None) -> None:
        """Send the gradients of the batch :attr:`upcoming` to the shards, and do not wait.

        Args:
            gradients: By the parameter's name; by default, each parameter's ``grad``. Parameters without one are not
                stepped, and shards that hold none of the rest are not sent anything.

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
        """Say that this worker's batches are used up, and take part in snapshots until the training is over.

        Raises:
            CheckpointError: It ended for another reason.
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
        """Make an object part of this worker's state at every cut, and load what the checkpoint has of it.

        Args:
            name: Unique within the worker.
            stateful: Has ``state_dict`` and ``load_state_dict``. A worker of another name does not get its state. Its
                state is taken in :meth:`pull`, which :meth:`RemoteOptimizer.step` ends with.

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
        if self._seed is None:  # otherwise each update sets torch's generator itself
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
    """Makes a worker's training loop look like any other: :meth:`step` pushes the gradients and pulls what comes next.

    The parameters are those of the client. There is no learning rate here: the servers' optimizers have one, and a
    scheduler that is given this optimizer fails instead of being without effect.

    Args:
        client: The worker's connection. The first parameters are pulled at once.

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
            closure: Computes the gradients first, and returns the loss.
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
    """Gives a worker's loader the batches of its streams, from where the worker stands.

    Batches that were fetched and not yet pushed do not count, so loaders may prefetch.

    Args:
        client: The worker's connection.
        samples_of: Indices of the samples of a batch: a function of its stream and number alone.

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
    """What torch's generator is set from for an update, where ``seed`` is the client's."""
    text = f"{seed}/{update.stream}/{update.seq}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
