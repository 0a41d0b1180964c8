"""A committed checkpoint of an asynchronous training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ckpt_async.consistent_cut import ConsistentCut, InconsistentCutError
from ckpt_async.parameter_server.blocks import BlockTable
from ckpt_async.parameter_server.model import mean_of
from ckpt_async.parameter_server.state import ServerState
from ckpt_core._plan import LocalTensor, Piece
from ckpt_core.directory import DirectoryCheckpoint
from ckpt_core.errors import StateMismatchError

__all__ = ["MODEL", "PARTICIPANT", "CutCheckpoint", "check_participants"]

MODEL, PARTICIPANT = "model", "participant"


class CutCheckpoint:
    """A committed checkpoint of an asynchronous training.

    Args:
        checkpoint: Its directory.

    Attributes:
        path: Where it is.
        cut: What it is of.
        passed_over: Names of checkpoints that were damaged when the training that wrote this one was resumed.

    Raises:
        InconsistentCutError: It is another kind of checkpoint.
    """

    def __init__(self, checkpoint: DirectoryCheckpoint) -> None:
        self._checkpoint = checkpoint
        self.path = checkpoint.path
        self.cut = ConsistentCut.from_metadata(checkpoint.metadata.get("cut", {}))
        self.passed_over: tuple[str, ...] = tuple(checkpoint.metadata.get("passed_over", ()))

    def verify(self) -> None:
        """Compare every byte with its digest, and what each participant says of itself with the cut.

        Raises:
            CheckpointCorruptedError: A byte differs or is missing.
            InconsistentCutError: A participant's state is not of this cut.
        """
        self._checkpoint.verify()
        said = [self.participant(rank) for rank in range(self._checkpoint.world_size)]
        check_participants(self.cut, [says["name"] for says in said], [says["cut"] for says in said], self.path)

    def model(self) -> dict[str, torch.Tensor]:
        """The model as a plain state dict, for evaluation: whole parameters, and the means of the workers' buffers.

        Buffers, and further names of tied parameters, are there if the workers' clients were given the model itself and not
        ``model.named_parameters()``. Recorded pieces, if any, are not.
        """
        state: dict[str, torch.Tensor] = self._checkpoint.load(MODEL)
        workers = [self.participant(rank) for rank in self._worker_ranks()]
        for alias, name in workers[0].get("aliases", {}).items():
            state[alias] = state[name]
        return {**state, **mean_of([worker.get("buffers", {}) for worker in workers])}

    def buffers(self) -> dict[str, torch.Tensor]:
        """The means of the workers' buffers: what a worker begins with that was not there before."""
        return mean_of([self.participant(rank).get("buffers", {}) for rank in self._worker_ranks()])

    def _worker_ranks(self) -> range:
        return range(len(self.cut.shards), self._checkpoint.world_size)

    def participant(self, rank: int) -> dict[str, Any]:
        """The state of one participant but its parameters."""
        state: dict[str, Any] = self._checkpoint.load(PARTICIPANT, rank=rank)
        return state

    def worker(self, name: str) -> dict[str, Any] | None:
        """The state of the worker of that name, if there was one."""
        if name not in self.cut.workers:
            return None
        return self.participant(len(self.cut.shards) + self.cut.workers.index(name))

    def load_into(self, state: ServerState, table: BlockTable) -> None:
        """Load the blocks that a shard holds, whichever shards held them when they were saved; only their bytes are read.

        Args:
            state: Receives them.
            table: All blocks of the model.

        Raises:
            StateMismatchError: The model is another one, or it is divided in another way.
        """
        saved_shards = [self.participant(rank) for rank in range(len(self.cut.shards))]
        saved = saved_shards[0]["blocks"]
        here = table.describe()
        if saved != here:
            wrong = sorted(name for name in {*saved, *here} if saved.get(name) != here.get(name))[:5]
            raise StateMismatchError(
                f"the checkpoint's parameters are divided in other blocks than the model's: {', '.join(wrong)}",
                path=self.path,
                remedy="resume with the same model and the same max_block_bytes",
            )
        pieces: dict[int, list[Piece]] = {id(tensor): [] for tensor in table.shapes.values()}
        for name, tensor in state.parameters.items():
            block = table.blocks[name]
            pieces[id(table.shapes[block.parameter])].append(Piece(block.box, tensor.detach()))

        def local(_: str, tensor: torch.Tensor) -> LocalTensor:
            here = tuple(pieces[id(tensor)])
            return LocalTensor(tensor.dtype, tuple(tensor.shape), here, (0,) if here else ())

        self._checkpoint.load(MODEL, into=dict(table.shapes), local=local)
        for saved_shard in saved_shards if state.parameters else ():
            state.load_optimizer(saved_shard["optimizer"])
            state.apply_recorded(saved_shard["recorded"])

    def close(self) -> None:
        """Close the files."""
        self._checkpoint.close()

    def __enter__(self) -> CutCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_participants(cut: ConsistentCut, names: Sequence[str], cuts: Sequence[Any], path: str) -> None:
    """Compare what the participants say of themselves, in the order of their ranks, with the cut."""
    expected = (*cut.shards, *cut.workers)
    if tuple(names) != expected:
        raise InconsistentCutError(
            f"the ranks are {', '.join(names)}, and the cut has {', '.join(expected)}",
            path=path,
            remedy="give ranks, reports and the cut's shards and workers in one order: dataclasses.replace(cut, workers=...)",
        )
    vector = dict(cut.vector)
    for name, pairs in zip(names, cuts, strict=True):
        own = {int(stream): count for stream, count in pairs}
        if any(vector.get(stream) != count for stream, count in own.items()):
            raise InconsistentCutError(f"the state of {name} is at {own}, and the cut at {vector}", path=path)
