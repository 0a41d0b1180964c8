"""Where the checkpoints of an asynchronous training are: directory checkpoints, one for each committed cut.

Every participant is a rank of the checkpoint: first the shards, then the workers. The parameters are the sharded part
``model``, which loads as a plain state dict; the rest of each participant is the per-rank part ``participant``. The vector
clock is in the manifest's metadata, and the manifest is written last.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ckpt_core.catalog import Catalog
from ckpt_core.commit_time import Stamp, commit_time
from ckpt_core.consistent_cut import ConsistentCut, InconsistentCutError
from ckpt_core.directory_checkpointer import DirectoryCheckpoint, DirectoryCheckpointer
from ckpt_core.errors import CheckpointError, StateMismatchError
from ckpt_core.layouts.sharded import PartContent, RankFiles, build_manifest, encode_plain
from ckpt_core.memory import ScratchBuffers
from ckpt_core.parameter_server.blocks import BlockTable
from ckpt_core.parameter_server.state import ServerState
from ckpt_core.plan import Box, LocalTensor, Piece
from ckpt_core.state.kinds import Kind
from ckpt_core.storage import is_remote, local_path, storage_for
from ckpt_core.writer import write_image

__all__ = ["CutCheckpoint", "CutStore"]

logger = logging.getLogger(__name__)

_NAME = re.compile(r"cut-(\d{6,})-(\d{8,})")
_GENERATIONS = ".ckpt-generations"
MODEL, PARTICIPANT = "model", "participant"


class CutStore:
    """The checkpoints of one training.

    Args:
        root: Local directory or URL that holds nothing else; all machines see the same.
        storage_options: For fsspec.
    """

    def __init__(self, root: str | os.PathLike[str], *, storage_options: dict[str, Any] | None = None) -> None:
        self.root = local_path(root) if is_remote(root) else os.path.abspath(local_path(root))
        self.storage_options = storage_options
        self._storage = storage_for(self.root, storage_options if is_remote(root) else None)
        self._checkpointer = DirectoryCheckpointer(storage=self._storage)
        self._catalog = Catalog(self.root, suffix="", storage=self._storage)
        self._scratch = ScratchBuffers()

    # ---- starting ------------------------------------------------------------------------------------------------------

    def claim_generation(self) -> int:
        """A number that no start of this training had before, and none will have again.

        Raises:
            CheckpointError: The root is an object store, not all of which can claim a name.
        """
        if is_remote(self.root):
            raise CheckpointError(
                "a generation can only be claimed on a filesystem",
                path=self.root,
                remedy="pass generation=, a number that grows with each start of the whole training",
            )
        directory = os.path.join(self.root, _GENERATIONS)
        os.makedirs(directory, exist_ok=True)
        while True:
            generation = 1 + max((int(name) for name in os.listdir(directory)), default=0)
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.join(directory, str(generation)))
                return generation

    def clean(self) -> None:
        """Delete what dead processes left unfinished."""
        self._catalog.prune()

    def committed(self) -> list[str]:
        """Paths of the committed checkpoints, the newest first."""
        found = [(_number(info.path), info.path) for info in self._catalog.checkpoints()]
        return [path for number, path in sorted(found, reverse=True) if number is not None]

    def newest(self) -> CutCheckpoint | None:
        """The newest checkpoint all of whose bytes verify, open; each damaged one is named in a warning."""
        for path in self.committed():
            try:
                checkpoint = self.open(path)
                checkpoint.verify()
                return checkpoint
            except CheckpointError as error:
                logger.warning("passed over the checkpoint %s: %s", path, error.message)
        return None

    def open(self, path: str) -> CutCheckpoint:
        """A committed checkpoint."""
        return CutCheckpoint(self._checkpointer.load(path))

    # ---- saving --------------------------------------------------------------------------------------------------------

    def path(self, generation: int, snapshot_id: int) -> str:
        """Where a snapshot becomes a checkpoint; its name is in the order of the training's life."""
        return f"{self.root}/cut-{generation:06d}-{snapshot_id:08d}"

    def reserve(self, generation: int, snapshot_id: int) -> None:
        """Create the directory of a snapshot; until :meth:`commit` or :meth:`discard` it is kept."""
        self._storage.begin_directory(self.path(generation, snapshot_id), _token(generation, snapshot_id))

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
            snapshot_id: What it belongs to.
            rank: The participant's place.
            world_size: Number of participants.
            incarnation: Life of the participant; it is in the files' names, so that no life writes another's file.
            table: All blocks of the model.
            blocks: The blocks that this participant holds.
            participant: The rest of its state: plain data and tensors.
        """
        path, token = self.path(generation, snapshot_id), _token(generation, snapshot_id)
        directory = self._storage.begin_directory(path, token)
        try:
            parts = [_model_part(table, blocks), _participant_part(participant)]
            files = RankFiles(
                parts, rank=rank, world_size=world_size, save_id=token, suffix=f"-{generation}-{incarnation}"
            )
            for name, image in files.live_files():
                write_image(image, self._storage, f"{directory}/{name}", scratch=self._scratch)
            return files.report()
        finally:
            self._storage.leave_directory(path, token)

    def commit(self, cut: ConsistentCut, reports: Sequence[str]) -> tuple[str, int]:
        """Write the manifest: from now on it is a checkpoint.

        Args:
            cut: What it is of.
            reports: Of the shards and then of the workers, in the order of the ranks.

        Returns:
            The checkpoint's path, and its size in bytes.
        """
        path = self.path(cut.generation, cut.snapshot_id)
        token = _token(cut.generation, cut.snapshot_id)
        metadata = {"cut": cut.to_metadata()}
        manifest = build_manifest(reports, metadata=metadata, path=path, stamp=Stamp(commit_time()))
        self._storage.publish_directory(path, token, manifest)
        self._storage.leave_directory(path, token)
        with self._checkpointer.load(path) as checkpoint:
            return path, checkpoint.size

    def discard(self, generation: int, snapshot_id: int) -> None:
        """Delete what was written for a snapshot that was given up."""
        path, token = self.path(generation, snapshot_id), _token(generation, snapshot_id)
        self._storage.leave_directory(path, token)
        self._storage.discard_directory(path, token)

    def prune(self, keep: int) -> None:
        """Delete all but the newest committed checkpoints."""
        for path in self.committed()[keep:]:
            self._storage.remove_directory(path)


class CutCheckpoint:
    """A committed checkpoint of an asynchronous training.

    Args:
        checkpoint: Its directory.

    Attributes:
        path: Where it is.
        cut: What it is of.

    Raises:
        InconsistentCutError: It is another kind of checkpoint.
    """

    def __init__(self, checkpoint: DirectoryCheckpoint) -> None:
        self._checkpoint = checkpoint
        self.path = checkpoint.path
        self.cut = ConsistentCut.from_metadata(checkpoint.metadata.get("cut", {}))

    def verify(self) -> None:
        """Compare every byte with its digest, and what each participant says of itself with the cut.

        Raises:
            CheckpointCorruptedError: A byte differs or is missing.
            InconsistentCutError: A participant's state is not of this cut.
        """
        self._checkpoint.verify()
        for rank, name in enumerate((*self.cut.shards, *self.cut.workers)):
            says = self.participant(rank)
            vector = dict(self.cut.vector)
            own = {int(stream): count for stream, count in says["cut"]}
            if says["name"] != name or any(vector.get(stream) != count for stream, count in own.items()):
                raise InconsistentCutError(
                    f"the state of {says['name']} is at {own}, and the cut at {vector}", path=self.path
                )

    def model(self) -> dict[str, torch.Tensor]:
        """The parameters, whole: a plain state dict, for evaluation. Recorded pieces, if any, are not in it."""
        state: dict[str, torch.Tensor] = self._checkpoint.load(MODEL)
        return state

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


def _model_part(table: BlockTable, blocks: Mapping[str, torch.Tensor]) -> PartContent:
    skeleton, tensors = encode_plain(table.shapes, key=MODEL)
    pieces = dict(_pieces(table, blocks, {name: key for (key, _), name in zip(tensors, table.shapes, strict=True)}))
    described = {key: LocalTensor(tensor.dtype, tuple(tensor.shape), (), ()) for key, tensor in tensors}
    return PartContent(MODEL, Kind.SHARDED.value, skeleton, described, pieces, spread=True)


def _pieces(
    table: BlockTable, blocks: Mapping[str, torch.Tensor], keys: Mapping[str, str]
) -> Iterator[tuple[str, list[Piece]]]:
    for name in table.shapes:
        found = [
            Piece(block.box, blocks[block.name].detach())
            for block in table.blocks.values()
            if block.parameter == name and block.name in blocks
        ]
        if found:
            yield keys[name], found


def _participant_part(state: Mapping[str, Any]) -> PartContent:
    skeleton, tensors = encode_plain(dict(state), key=PARTICIPANT)
    own = {
        key: LocalTensor(
            tensor.dtype, tuple(tensor.shape), (Piece(Box.whole(tuple(tensor.shape)), tensor.detach()),), (0,)
        )
        for key, tensor in tensors
    }
    pieces = {key: tensor.pieces for key, tensor in own.items()}
    return PartContent(PARTICIPANT, Kind.PER_RANK.value, skeleton, own, pieces)


def _number(path: str) -> tuple[int, int] | None:
    """Generation and snapshot of a checkpoint, by its name."""
    match = _NAME.fullmatch(os.path.basename(path))
    return None if match is None else (int(match[1]), int(match[2]))


def _token(generation: int, snapshot_id: int) -> str:
    return f"{generation}-{snapshot_id}"
