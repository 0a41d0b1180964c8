"""Directory checkpoints written by processes that are not ranks of one group: each writes its files, one commits.

Nothing here waits for other processes: the caller decides which process writes what, and when to commit.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ckpt_core._layouts.directory.manifest import ExtraFile, Manifest
from ckpt_core._layouts.directory.skeleton import encode_plain
from ckpt_core._layouts.directory.writing import PartContent, RankFiles, build_manifest
from ckpt_core._pipeline.directory_commit import wait_for_files
from ckpt_core._pipeline.directory_save import AddedFiles, plan_parts
from ckpt_core._pipeline.writer import write_image
from ckpt_core._plan import LocalTensor, Piece, WritePlanCache, local_tensor
from ckpt_core.buffers import ScratchBuffers
from ckpt_core.commit_time import Stamp, commit_time
from ckpt_core.errors import RankFailedError
from ckpt_core.paths import StrPath, full_path
from ckpt_core.state.kinds import Kind, Part
from ckpt_core.storage import is_remote, storage_for
from ckpt_core.survivors import Rescue

__all__ = ["LocalTensor", "Piece", "RescueSave", "SeparateSaves", "local_tensor"]


class SeparateSaves:
    """Saves of checkpoints directly below one directory, a local path or a URL.

    All processes that write a save use the same id: 1 to 64 letters, digits and dashes, never used before.
    """

    def __init__(self, root: StrPath, *, storage_options: dict[str, Any] | None = None) -> None:
        self.is_remote = is_remote(root)
        self.root = full_path(root)
        self._storage = storage_for(self.root, storage_options if self.is_remote else None)
        self._scratch = ScratchBuffers()

    def directories(self) -> list[str]:
        """Return the paths of all directories there, in no order, including those without a manifest."""
        return list(self._storage.subdirectories(self.root))

    def begin(self, path: str, save_id: str) -> None:
        """Create the directory of a save; until :meth:`commit` or :meth:`discard`, clean-up does not delete it."""
        self._storage.begin_directory(path, save_id)

    def write(
        self,
        parts: Sequence[Part],
        path: str,
        save_id: str,
        *,
        rank: int,
        world_size: int,
        suffix: str,
        local: Callable[[str, torch.Tensor], LocalTensor],
        write_files: Callable[[str], None] | None = None,
    ) -> str:
        """Write one process's files, durably, directly from the live tensors; return the report for :meth:`commit`.

        ``parts`` are the same in all processes; replicated parts are written by rank 0. ``rank`` is the process's rank
        in the checkpoint. ``suffix`` comes before the extension of the files' names, so that no two processes ever
        write the same file. ``local`` is called with key and tensor of each tensor in a sharded part, and returns what
        this process holds of it; only type and shape of the tensor passed to it matter. ``write_files`` is called with
        a directory; the files that it writes there become part of the checkpoint.
        """
        directory = self._storage.begin_directory(path, save_id)
        try:
            contents = [_content(part, rank, world_size, local) for part in parts]
            files = RankFiles(contents, rank=rank, world_size=world_size, save_id=save_id, suffix=suffix)
            for name, image in files.live_files():
                write_image(image, self._storage, f"{directory}/{name}", scratch=self._scratch)
            return files.report([] if write_files is None else self._add(write_files, path, directory))
        finally:
            self._storage.leave_directory(path, save_id)

    def _add(self, write_files: Callable[[str], None], path: str, directory: str) -> list[ExtraFile]:
        added = AddedFiles.collect(self._storage, path, write_files)
        try:
            files = added.describe()
            for file in files:
                self._storage.put_file(added.local_path(file.name), f"{directory}/{file.name}")
            return files
        finally:
            added.close()

    def commit(
        self, reports: Sequence[str], path: str, save_id: str, *, metadata: Mapping[str, Any], step: int | None = None
    ) -> None:
        """Write the manifest, which makes the directory a committed checkpoint.

        ``reports`` are what :meth:`write` returned, in the order of the ranks; ``step`` is the training step of the
        state, if known.

        Raises:
            StorageError: This process does not see a file that another process has written.
        """
        manifest = build_manifest(reports, metadata=metadata, path=path, stamp=Stamp(commit_time(), step))
        ranks = Manifest.decode(manifest, path=path).ranks
        sizes = {file.name: file.size for rank in ranks for file in rank.files}
        sizes |= {rank.digests.name: rank.digests.size for rank in ranks if rank.digests is not None}
        wait_for_files(self._storage, self._storage.begin_directory(path, save_id), sizes, path)
        self._storage.publish_directory(path, save_id, manifest)
        self._storage.leave_directory(path, save_id)

    def discard(self, path: str, save_id: str) -> None:
        """Delete the files of a save that is given up."""
        self._storage.leave_directory(path, save_id)
        self._storage.discard_directory(path, save_id)

    def remove(self, path: str) -> None:
        """Delete a committed checkpoint."""
        self._storage.remove_directory(path)


class RescueSave:
    """A directory checkpoint that the survivors of a lost rank save together, each writing for some of the ranks.

    Args:
        rescue: The state to be saved, and which rank writes for which.
        path: Local path or URL of the checkpoint.
        rank: This process's rank.
        session: Text that is the same on all ranks and different for every run.
        storage_options: For a URL, as in :class:`SeparateSaves`.
    """

    def __init__(
        self, rescue: Rescue, path: str, *, rank: int, session: str, storage_options: dict[str, Any] | None = None
    ) -> None:
        self._rescue, self._path, self._rank = rescue, path, rank
        self._id = hashlib.sha256(f"{session}-{rescue.number}".encode()).hexdigest()[:32]  # the same on all ranks
        self._saves = SeparateSaves(os.path.dirname(path), storage_options=storage_options)

    def write(
        self, parts: Callable[[int], Sequence[Part]], write_files: Callable[[str], None] | None = None
    ) -> dict[str, Any]:
        """Write the files of the ranks for which this rank writes; return what :meth:`commit` needs of each writer.

        ``parts`` returns the parts of a rank, with this rank's tensors. ``write_files`` writes the added files of
        rank 0, as in :meth:`SeparateSaves.write`.
        """
        ranks = [rank for rank, writer in enumerate(self._rescue.writers) if writer == self._rank]
        suffix = f"-{self._id}" if self._saves.is_remote else ""  # on a store, files are written under their final name
        self._saves.begin(self._path, self._id)
        try:
            reports = {
                rank: self._saves.write(
                    parts(rank),
                    self._path,
                    self._id,
                    rank=rank,
                    world_size=len(self._rescue.writers),
                    suffix=suffix,
                    local=functools.partial(self._local, rank),
                    write_files=write_files if rank == 0 else None,
                )
                for rank in ranks
            }
        except BaseException:
            self._saves.discard(self._path, self._id)
            raise
        return {"target": self._path, "reports": reports}

    def _local(self, rank: int, key: str, tensor: torch.Tensor) -> LocalTensor:
        """Return the pieces of a tensor that this process writes on behalf of a rank."""
        mine, writers = self._rank, self._rescue.writers
        is_mine = rank == mine and (type(tensor) is not torch.Tensor or mine == min(writers))  # plain: on all ranks
        found = local_tensor(tensor, key=key, rank=mine, world_size=len(writers), replicated=True)
        return found if is_mine else found._replace(pieces=(), holders=())

    def commit(self, *, metadata: Mapping[str, Any], step: int) -> None:
        """Commit the checkpoint of an optimizer step, after all writers have written.

        Raises:
            RankFailedError: Another rank has written to a different path, and so is at a different step.
            StorageError: This process does not see a file that another process has written.
        """
        written = self._rescue.written
        reports = {rank: report for each in written for rank, report in each["reports"].items()}
        try:
            if any(each["target"] != self._path for each in written):
                raise RankFailedError(
                    "the ranks are not at the same step",
                    path=self._path,
                    remedy="start the run again: it resumes from the last checkpoint",
                )
            ordered = [reports[rank] for rank in range(len(self._rescue.writers))]
            self._saves.commit(ordered, self._path, self._id, metadata=metadata, step=step)
        except BaseException:
            self._saves.discard(self._path, self._id)
            raise


def _content(part: Part, rank: int, world_size: int, local: Callable[[str, torch.Tensor], LocalTensor]) -> PartContent:
    if part.kind is not Kind.SHARDED:
        cache = WritePlanCache()
        (content,) = plan_parts(
            [part], rank=rank, world_size=world_size, slice_replicated=False, cache=cache, objects={}
        )
        return content
    skeleton, tensors = encode_plain(part.state, key=part.name)
    held = {key: local(key, tensor) for key, tensor in tensors}
    pieces = {key: tensor.pieces for key, tensor in held.items() if tensor.pieces}
    return PartContent(part.name, part.kind.value, skeleton, held, pieces, True, part.frozen)
