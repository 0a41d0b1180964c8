"""Where the checkpoints of an asynchronous training are: directory checkpoints, one for each committed cut.

Every participant is a rank of the checkpoint: first the shards, then the workers. The parameters are the sharded part
``model``, which loads as a plain state dict; the rest of each participant is the per-rank part ``participant``. The vector
clock is in the manifest's metadata, and the manifest is written last.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ckpt_async.consistent_cut import ConsistentCut
from ckpt_async.parameter_server.blocks import BlockTable
from ckpt_async.parameter_server.checkpoint import MODEL, PARTICIPANT, CutCheckpoint, check_participants
from ckpt_core._layouts.sharded import PartContent, RankFiles, build_manifest, encode_plain
from ckpt_core._pipeline.writer import write_image
from ckpt_core._plan import Box, LocalTensor, Piece
from ckpt_core.catalog import Catalog
from ckpt_core.commit_time import Stamp, commit_time
from ckpt_core.directory import DirectoryCheckpointer
from ckpt_core.errors import CheckpointCorruptedError, CheckpointError
from ckpt_core.memory import ScratchBuffers
from ckpt_core.state.kinds import Kind
from ckpt_core.storage import is_remote, local_path, storage_for

__all__ = ["CutStore"]

logger = logging.getLogger(__name__)

_NAME = re.compile(r"cut-(\d{6,})-(\d{8,})")
_GENERATIONS = ".ckpt-generations"


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
        self._passed_over: set[str] = set()

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
        # Of a copy of the checkpoints alone, only their names tell which generations there were.
        known = {number[0] for path in self._storage.subdirectories(self.root) if (number := _number(path)) is not None}
        while True:
            generation = 1 + max(known.union(int(name) for name in os.listdir(directory)), default=0)
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.join(directory, str(generation)))
                return generation

    def clean(self) -> None:
        """Delete what dead processes left unfinished."""
        self._catalog.prune()

    def committed(self) -> list[str]:
        """Paths of the committed checkpoints, the newest first."""
        return _newest_first(self._catalog.paths())

    def newest(self) -> CutCheckpoint | None:
        """The newest checkpoint all of whose bytes verify, open; None where nothing was ever committed.

        Each damaged one is named in a warning, and is not deleted by :meth:`prune`.

        Raises:
            CheckpointCorruptedError: There are checkpoints, and none verifies.
        """
        reasons: dict[str, str] = {}
        found = self._found()
        for path in found:
            try:
                checkpoint = self._verified(path)
            except CheckpointError as error:
                if path in self._found():  # not deleted meanwhile
                    reasons[path] = error.message
                    self._pass_over(path, error)
            else:
                self._passed_over.update(checkpoint.passed_over)
                self._passed_over.discard(os.path.basename(path))
                return checkpoint
        if reasons:
            listed = "".join(f"\n  {path}: {reason}" for path, reason in reasons.items())
            raise CheckpointCorruptedError(
                f"none of the {len(reasons)} checkpoints in {self.root} can be used:{listed}",
                path=self.root,
                remedy="restore one of them from a copy; to begin the training anew, move them elsewhere or give another root",
            )
        return self.newest() if found else None

    def _found(self) -> list[str]:
        """Paths of all that was committed, the newest first, also where the manifest is missing now."""
        if is_remote(self.root):
            return self.committed()  # there, a directory without a manifest may be one that was never committed
        return _newest_first(self._storage.subdirectories(self.root))

    def _verified(self, path: str) -> CutCheckpoint:
        checkpoint = self.open(path)
        try:
            checkpoint.verify()
        except BaseException:
            checkpoint.close()
            raise
        return checkpoint

    def _pass_over(self, path: str, error: CheckpointError) -> None:
        self._passed_over.add(os.path.basename(path))
        logger.warning("passed over the checkpoint %s, which is kept: %s", path, error.message)

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
            rank: The participant's place: first the shards and then the workers, in the order of the cut that is committed.
            world_size: Number of participants.
            incarnation: Life of the participant; it is in the files' names, so that no life writes another's file.
            table: All blocks of the model.
            blocks: The blocks that this participant holds.
            participant: The rest of its state, plain data and tensors, with its ``name`` and the ``cut`` of its streams as
                pairs of stream and count.
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
            return json.dumps([participant["name"], participant["cut"], files.report()])
        finally:
            self._storage.leave_directory(path, token)

    def commit(self, cut: ConsistentCut, reports: Sequence[str]) -> tuple[str, int]:
        """Write the manifest: from now on it is a checkpoint.

        Args:
            cut: What it is of. Its workers must be in the order of the ranks; a :class:`SnapshotCoordinator` has them in the
                order in which they said hello, so give ``dataclasses.replace(cut, workers=...)``.
            reports: What :meth:`write` returned: of the shards and then of the workers, in the order of the ranks.

        Returns:
            The checkpoint's path, and its size in bytes.

        Raises:
            InconsistentCutError: The reports are of other participants, in another order, or of another cut.
        """
        path = self.path(cut.generation, cut.snapshot_id)
        token = _token(cut.generation, cut.snapshot_id)
        names, cuts, files = zip(*map(json.loads, reports), strict=True)
        check_participants(cut, names, cuts, path)
        metadata: dict[str, Any] = {"cut": cut.to_metadata()}
        if self._passed_over:
            metadata["passed_over"] = sorted(self._passed_over)
        manifest = build_manifest(files, metadata=metadata, path=path, stamp=Stamp(commit_time()))
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
        """Delete all but the newest committed checkpoints.

        What :meth:`newest` has passed over, now or at an earlier start of the training, is neither counted nor deleted.

        Args:
            keep: How many stay. Where it is 1, the newest is read and verified before the one before it goes.
        """
        good = [path for path in self.committed() if os.path.basename(path) not in self._passed_over]
        if keep == 1 and len(good) > 1:
            try:
                self._verified(good[0]).close()
            except CheckpointError as error:
                self._pass_over(good[0], error)
                return
        for path in good[keep:]:
            self._storage.remove_directory(path)


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


def _newest_first(paths: Iterable[str]) -> list[str]:
    found = [(number, path) for path in paths if (number := _number(path)) is not None]
    return [path for _, path in sorted(found, reverse=True)]


def _token(generation: int, snapshot_id: int) -> str:
    return f"{generation}-{snapshot_id}"
