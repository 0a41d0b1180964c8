"""The parameter server: a process that holds a shard of the parameters and applies the updates that workers push."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

from ckpt_async.consistent_cut import COORDINATOR, CutShard, ShardState
from ckpt_async.consistent_cut.effects import DiscardCopy, Effect, PersistShard
from ckpt_async.consistent_cut.messages import Message, PushHeader, decode_message, encode_message
from ckpt_async.consistent_cut.types import MessageTag
from ckpt_async.parameter_server.frames import Frame
from ckpt_async.parameter_server.model import BlockTable, Model, parameters_of
from ckpt_async.parameter_server.participant import Participant
from ckpt_async.parameter_server.state import MakeOptimizer, ServerState, ShadowState, pack_recorded
from ckpt_async.parameter_server.transport import Transport

logger = logging.getLogger(__name__)

_TICK = 0.01  # seconds


class ParameterServer(Participant):
    """Holds the blocks of parameters that are assigned to a shard, and steps their optimizer with pushed gradients.

    If the training resumes from a checkpoint, its values replace those of ``parameters``.

    Args:
        transport: Its name is the shard's name, which must be one that the coordinator was given.
        coordinator: Address of the coordinator.
        parameters: The *whole* model, or name and initial value of each of its parameters; equal in every process.
        make_optimizer: Makes an optimizer for this shard's blocks; see
            :class:`~ckpt_async.parameter_server.state.ServerState`.
        max_block_bytes: See :class:`~ckpt_async.parameter_server.model.BlockTable`; equal in every process.
        storage_options: Options for fsspec, if the checkpoints are in an object store.

    Raises:
        StateMismatchError: The checkpoint is of another model.

    Example:
        A shard of two, in a process of its own::

            transport = SocketTransport("shard-0")
            make_optimizer = lambda parameters: torch.optim.Adam(parameters, lr=1e-3)
            ParameterServer(transport, "10.0.0.1:7000", model, make_optimizer).run()
    """

    def __init__(
        self,
        transport: Transport,
        coordinator: str,
        parameters: Model,
        make_optimizer: MakeOptimizer,
        *,
        max_block_bytes: int | None = None,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(transport, coordinator, "shard", storage_options=storage_options)
        with self._beginning():
            initial = parameters_of(parameters)
            self.table = BlockTable(initial.items(), max_block_bytes=max_block_bytes)
            here = self.table.deal(list(self.training.shards))[self.name]
            values = self.table.divide({name: tensor.detach() for name, tensor in initial.items()})
            self.state = ServerState({name: values[name] for name in here}, make_optimizer)
            positions: Mapping[int, int] = dict.fromkeys(range(self.training.streams), 0)
            checkpoint = self._open_checkpoint()
            if checkpoint is not None:
                with checkpoint:
                    checkpoint.load_into(self.state, self.table)
                    positions = checkpoint.cut.vector
            self._shard = CutShard(
                self.name,
                cast("ShardState", self.state),  # its copies lack copy(), which is never called on a copy
                positions,
                generation=self.training.generation,
                snapshot_id=self.training.snapshot_id,
                options=self.training.options,
            )
            self._begin(self._shard.hello())

    @property
    def version(self) -> int:
        """Number of updates applied since this start of the training."""
        return self._shard.version

    @property
    def lock(self) -> threading.RLock:
        """The lock that is held while the state changes; hold it to read the state from outside."""
        return self._lock

    def run(self) -> None:
        """Serve until the training is over.

        Raises:
            CheckpointError: The server cannot continue: restart the whole training from the newest checkpoint.
        """
        try:
            while not self._stopped.wait(_TICK):
                with self._lock:
                    self._perform(self._shard.tick(time.monotonic()))
                self._by_blocks(self.state.copy_a_block)
                self._watch.look([COORDINATOR])
        finally:
            self.close()
        self.check()

    def _by_blocks(self, copy: Callable[[], bool]) -> None:
        """Finish a copy that a snapshot has begun, releasing the lock for other threads between two blocks."""
        more = True
        while more:
            with self._lock:
                more = copy()
            time.sleep(0)

    def _on_request(self, frame: Frame) -> Frame | None:
        content = frame.content
        if content["kind"] == "meet":
            # A worker that takes over from a lost one sends a Takeover next, whose answer needs the worker's address.
            self.training.check(MessageTag(*content["tag"]))
            self._transport.connect(content["name"], content["address"])
        elif content["kind"] == "push":
            header = decode_message(content["header"])
            assert isinstance(header, PushHeader)
            self.state.check_gradients(frame.tensors)
            self._perform(self._shard.on_push(header, frame.tensors, time.monotonic()))
        elif content["kind"] == "pull":
            header, effects = self._shard.on_pull(MessageTag(*content["tag"]), time.monotonic())
            self._perform(effects)
            # The answer is copied under the lock, so it contains exactly the updates that the header counts.
            values = {name: tensor.detach().clone() for name, tensor in self.state.parameters.items()}
            return Frame({"kind": "pulled", "header": encode_message(header)}, values)
        return None

    def _on_message(self, message: Message) -> list[Effect]:
        return self._shard.on_message(message, time.monotonic())

    def _perform_own(self, effect: Effect) -> None:
        match effect:
            case PersistShard():
                shadow = effect.copy
                assert isinstance(shadow, ShadowState)
                self._write_later(
                    effect.snapshot_id,
                    lambda: self._write_copy(effect, shadow),
                    self._shard.persisted,
                    self._shard.persist_failed,
                    lambda: self.state.release(shadow),
                )
            case DiscardCopy():
                self.state.release(effect.copy)

    def _write_copy(self, effect: PersistShard, shadow: ShadowState) -> str:
        self._by_blocks(shadow.save_next_block)
        participant = {
            "name": self.name,
            "cut": effect.cut.to_pairs(),
            "blocks": self.table.describe(),
            "optimizer": shadow.state_dict(),
            "recorded": pack_recorded(effect.recorded),
            "order": [list(update) for update in effect.order],
            "folded": effect.folded,
            "held": effect.held,
        }
        return self._write(effect.snapshot_id, self.table, shadow.parameters, participant)
