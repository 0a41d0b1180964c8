"""The checkpoints of an asynchronous training: directory checkpoints, one for each committed cut.

Every participant is a rank of the checkpoint: first the shards, then the workers. The parameters are the sharded part
``model``, which loads as a plain state dict; the rest of each participant's state is the per-rank part ``participant``.
The vector clock is in the manifest's metadata, and the manifest is written last.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ckpt_async.consistent_cut import ConsistentCut, InconsistentCutError
from ckpt_async.parameter_server.model import BlockTable, mean_of
from ckpt_async.parameter_server.state import ServerState
from ckpt_core.catalog import Catalog, CheckpointInfo, first_usable
from ckpt_core.directory import DirectoryCheckpoint, DirectoryCheckpointer, Kind, Part
from ckpt_core.errors import CheckpointError, StateMismatchError
from ckpt_core.paths import StrPath
from ckpt_core.separate import LocalTensor, Piece, SeparateSaves

logger = logging.getLogger(__name__)

_MODEL, _PARTICIPANT = "model", "participant"
_NAME = re.compile(r"cut-(\d{6,})-(\d{8,})")
_GENERATIONS = ".ckpt-generations"


class CutCheckpoint:
    """A committed checkpoint of an asynchronous training.

    Args:
        checkpoint: The open directory checkpoint.

    Attributes:
        path: Where it is.
        cut: The cut at which it was taken.
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
        """Compare every byte with its digest, and the name and streams that each participant has saved with the cut.

        Raises:
            CheckpointCorruptedError: A byte differs or is missing.
            InconsistentCutError: A participant's state is not of this cut.
        """
        self._checkpoint.verify()
        said = [self._checkpoint.peek(_PARTICIPANT, rank=rank) for rank in range(self._checkpoint.world_size)]
        _check_participants(self.cut, [says["name"] for says in said], [says["cut"] for says in said], self.path)

    def model(self) -> dict[str, torch.Tensor]:
        """Return the model as a plain state dict, for evaluation: whole parameters, and means of the workers' buffers.

        Buffers and further names of tied parameters are included if the workers' clients were given the model itself,
        not ``model.named_parameters()``. Recorded pieces of updates, if any, are not applied.
        """
        state: dict[str, torch.Tensor] = self._checkpoint.load(_MODEL)
        workers = [self.participant(rank) for rank in self._worker_ranks()]
        for alias, name in workers[0].get("aliases", {}).items():
            state[alias] = state[name]
        return {**state, **mean_of([worker.get("buffers", {}) for worker in workers])}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the means of the workers' buffers, with which a worker begins that is not in the checkpoint."""
        return mean_of([self.participant(rank).get("buffers", {}) for rank in self._worker_ranks()])

    def _worker_ranks(self) -> range:
        return range(len(self.cut.shards), self._checkpoint.world_size)

    def participant(self, rank: int) -> dict[str, Any]:
        """Return the state of one participant, without its parameters."""
        state: dict[str, Any] = self._checkpoint.load(_PARTICIPANT, rank=rank)
        return state

    def worker(self, name: str) -> dict[str, Any] | None:
        """Return the state of the worker of that name; None if the checkpoint has none."""
        if name not in self.cut.workers:
            return None
        return self.participant(len(self.cut.shards) + self.cut.workers.index(name))

    def load_into(self, state: ServerState, table: BlockTable) -> None:
        """Load the blocks that a shard holds, regardless of which shards held them when they were saved.

        Reads only the bytes of these blocks, and the whole optimizer states of the shards that held them.

        Args:
            state: Receives the blocks and their optimizer state.
            table: All blocks of the model.

        Raises:
            StateMismatchError: The model is another one, or it is divided into other blocks.
        """
        shards = [self._checkpoint.peek(_PARTICIPANT, rank=rank) for rank in range(len(self.cut.shards))]
        saved = shards[0]["blocks"]
        here = table.describe()
        if saved != here:
            wrong = sorted(name for name in {*saved, *here} if saved.get(name) != here.get(name))[:5]
            raise StateMismatchError(
                f"the checkpoint's parameters are divided in other blocks than the model's: {', '.join(wrong)}",
                path=self.path,
                remedy="resume with the same model and the same max_block_bytes",
            )
        self._checkpoint.load(_MODEL, into=dict(table.shapes), local=_held(table, state.parameters))
        for rank, shard in enumerate(shards):
            if not state.parameters.keys().isdisjoint(shard["optimizer"]["state"]):
                participant = self.participant(rank)
                state.load_optimizer(participant["optimizer"])
                state.apply_recorded(participant["recorded"])

    def close(self) -> None:
        """Close the files."""
        self._checkpoint.close()

    def __enter__(self) -> CutCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class CutStore:
    """The checkpoints of one training.

    Args:
        root: Local directory or URL that contains nothing else; shared by all machines.
        storage_options: Options for fsspec.
    """

    def __init__(self, root: StrPath, *, storage_options: dict[str, Any] | None = None) -> None:
        self._saves = SeparateSaves(root, storage_options=storage_options)
        self.root = self._saves.root
        self._checkpointer = DirectoryCheckpointer(storage_options=storage_options)
        self._catalog = Catalog(self.root, suffix="", storage_options=storage_options)
        self._passed_over: set[str] = set()

    # ---- starting ----------------------------------------------------------------------------------------------------

    def claim_generation(self, generation: int | None = None) -> int:
        """Return the generation of this start of the training: a number that no other start has or will have.

        Args:
            generation: The number, if the caller counts the starts. None claims a new one, which needs a filesystem.

        Raises:
            CheckpointError: The root is an object store, where a name cannot be claimed in general; or the number is
                not larger than earlier ones, so that older checkpoints would be taken for newer ones.
        """
        grows = "pass generation=, a number that grows with each start of the whole training"
        if generation is None and self._saves.is_remote:
            raise CheckpointError("a generation can only be claimed on a filesystem", path=self.root, remedy=grows)
        # In a copy of the checkpoints alone, only their names show which generations there were.
        known = {number[0] for path in self._saves.directories() if (number := _number(path)) is not None}
        if generation is not None:
            if generation <= (newest := max(known, default=generation - 1)):
                raise CheckpointError(
                    f"this start has generation {generation}, and there are checkpoints of generation {newest}",
                    path=self.root,
                    remedy=grows,
                )
            return generation
        directory = os.path.join(self.root, _GENERATIONS)
        os.makedirs(directory, exist_ok=True)
        while True:
            claimed = {int(name) for name in os.listdir(directory) if name.isdecimal()}
            generation = 1 + max(known | claimed, default=0)
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.join(directory, str(generation)))
                return generation

    def clean(self) -> None:
        """Delete unfinished checkpoints of dead processes."""
        self._catalog.prune()

    def committed(self) -> list[str]:
        """Return the paths of the committed checkpoints, the newest first."""
        return newest_first(self._catalog.paths())

    def newest(self) -> CutCheckpoint | None:
        """Open the newest checkpoint whose bytes all verify; return None if none was ever committed.

        Each damaged checkpoint is warned about, and is not deleted by :meth:`prune`.

        Raises:
            CheckpointCorruptedError: There are checkpoints, and none verifies.
        """
        problems: dict[str, CheckpointError] = {}
        found = self._found()
        try:
            info = first_usable(
                self.root,
                [CheckpointInfo(path, size=0, modified=0.0, is_directory=True) for path in found],
                lambda info: self._verify(info.path),
                passed_over=problems,
                is_gone=lambda info, _: info.path not in self._found(),
            )
        finally:
            self._passed_over |= {os.path.basename(path) for path in problems}
        if info is None:
            return self.newest() if found else None
        checkpoint = self.open(info.path)
        self._passed_over.update(checkpoint.passed_over)
        self._passed_over.discard(os.path.basename(info.path))
        return checkpoint

    def _found(self) -> list[str]:
        """Return the paths of all checkpoints ever committed, the newest first, even if the manifest is missing now."""
        if self._saves.is_remote:
            return self.committed()  # in a store, a directory without a manifest may never have been committed
        return newest_first(self._saves.directories())

    def _verify(self, path: str) -> None:
        with self.open(path) as checkpoint:
            checkpoint.verify()

    def open(self, path: str) -> CutCheckpoint:
        """Open the committed checkpoint at ``path``."""
        return CutCheckpoint(self._checkpointer.load(path))

    # ---- saving ------------------------------------------------------------------------------------------------------

    def path(self, generation: int, snapshot_id: int) -> str:
        """Return the path of a snapshot's checkpoint; names sort in the order of the snapshots, over all starts."""
        return f"{self.root}/cut-{generation:06d}-{snapshot_id:08d}"

    def reserve(self, generation: int, snapshot_id: int) -> None:
        """Create the directory of a snapshot, which no clean-up deletes until :meth:`commit` or :meth:`discard`."""
        self._saves.begin(self.path(generation, snapshot_id), _save_id(generation, snapshot_id))

    def write(
        self,
        generation: int,
        snapshot_id: int,
        *,
        rank: int,
        world_size: int,
        incarnation: int,
        table: BlockTable,
        blocks: Mapping[str, torch.Tensor],
        participant: Mapping[str, Any],
    ) -> str:
        """Write one participant's files, durably, and return the report that the commit needs.

        Args:
            generation: Number of this start of the training.
            snapshot_id: The snapshot that the files belong to.
            rank: The participant's rank: first the shards and then the workers, in the order of the cut that is
                committed.
            world_size: Number of participants.
            incarnation: Incarnation of the participant; part of the file names, so that none overwrites another's file.
            table: All blocks of the model.
            blocks: The blocks that this participant holds.
            participant: The rest of its state, plain data and tensors, with its ``name``, and the ``cut`` of its
                streams as pairs of stream and count.
        """
        parts = [
            Part(_MODEL, table.shapes, Kind.SHARDED),
            Part(_PARTICIPANT, dict(participant), Kind.PER_RANK),
        ]
        report = self._saves.write(
            parts,
            self.path(generation, snapshot_id),
            _save_id(generation, snapshot_id),
            rank=rank,
            world_size=world_size,
            suffix=f"-{generation}-{incarnation}",
            local=_held(table, blocks),
        )
        return json.dumps([participant["name"], participant["cut"], report])

    def commit(self, cut: ConsistentCut, reports: Sequence[str]) -> tuple[str, int]:
        """Write the manifest, which makes the snapshot a checkpoint.

        Args:
            cut: The cut of the snapshot. Its workers must be in the order of the ranks; a :class:`SnapshotCoordinator`
                has them in the order in which they said hello, so pass ``dataclasses.replace(cut, workers=...)``.
            reports: The results of :meth:`write`: of the shards and then of the workers, in the order of the ranks.

        Returns:
            The checkpoint's path, and its size in bytes.

        Raises:
            InconsistentCutError: The reports are of other participants, in another order, or of another cut.
        """
        path = self.path(cut.generation, cut.snapshot_id)
        names, cuts, files = zip(*map(json.loads, reports), strict=True)
        _check_participants(cut, names, cuts, path)
        metadata: dict[str, Any] = {"cut": cut.to_metadata()}
        if self._passed_over:
            metadata["passed_over"] = sorted(self._passed_over)
        self._saves.commit(files, path, _save_id(cut.generation, cut.snapshot_id), metadata=metadata)
        with self._checkpointer.load(path) as checkpoint:
            return path, checkpoint.size

    def discard(self, generation: int, snapshot_id: int) -> None:
        """Delete the files of a snapshot that was given up."""
        self._saves.discard(self.path(generation, snapshot_id), _save_id(generation, snapshot_id))

    def prune(self, keep: int) -> None:
        """Delete all but the newest committed checkpoints.

        Checkpoints that :meth:`newest` has passed over, now or at an earlier start, are neither counted nor deleted.

        Args:
            keep: How many to keep. If it is 1, the newest is read and verified before the previous one is deleted.
        """
        good = [path for path in self.committed() if os.path.basename(path) not in self._passed_over]
        if keep == 1 and len(good) > 1:
            try:
                self._verify(good[0])
            except CheckpointError as error:
                self._passed_over.add(os.path.basename(good[0]))
                logger.warning("passed over the checkpoint %s, which is kept: %s", good[0], error.message)
                return
        for path in good[keep:]:
            self._saves.remove(path)


def _held(table: BlockTable, blocks: Mapping[str, torch.Tensor]) -> Callable[[str, torch.Tensor], LocalTensor]:
    """Return a function that describes, for each parameter in ``table.shapes``, which pieces are in these blocks."""
    pieces: dict[int, list[Piece]] = {id(tensor): [] for tensor in table.shapes.values()}
    for name, tensor in blocks.items():
        block = table.blocks[name]
        pieces[id(table.shapes[block.parameter])].append(Piece(block.box, tensor.detach()))

    def local(_: str, tensor: torch.Tensor) -> LocalTensor:
        here = tuple(pieces[id(tensor)])
        return LocalTensor(tensor.dtype, tuple(tensor.shape), here, (0,) if here else ())

    return local


def _check_participants(cut: ConsistentCut, names: Sequence[str], cuts: Sequence[Any], path: str) -> None:
    """Compare the names and streams that participants have saved, in the order of their ranks, with the cut."""
    expected = (*cut.shards, *cut.workers)
    if tuple(names) != expected:
        raise InconsistentCutError(
            f"the ranks are {', '.join(names)}, and the cut has {', '.join(expected)}",
            path=path,
            remedy="give ranks, reports and the cut's members in one order: dataclasses.replace(cut, workers=...)",
        )
    vector = dict(cut.vector)
    for name, pairs in zip(names, cuts, strict=True):
        own = {int(stream): count for stream, count in pairs}
        if any(vector.get(stream) != count for stream, count in own.items()):
            raise InconsistentCutError(f"the state of {name} is at {own}, and the cut at {vector}", path=path)


def _number(path: str) -> tuple[int, int] | None:
    """Return generation and snapshot ID of a checkpoint, from its name; None if it has another name."""
    match = _NAME.fullmatch(os.path.basename(path))
    return None if match is None else (int(match[1]), int(match[2]))


def newest_first(paths: Iterable[str]) -> list[str]:
    """Return the paths of checkpoints, the newest first, by their names; leave out other paths."""
    found = [(number, path) for path in paths if (number := _number(path)) is not None]
    return [path for _, path in sorted(found, reverse=True)]


def _save_id(generation: int, snapshot_id: int) -> str:
    return f"{generation}-{snapshot_id}"
