"""Directory checkpoints by processes that are no ranks of one group: each writes when it can, and one of them commits.

Nobody waits for anybody here: who writes what, and when all have, is decided by whoever calls (``ckpt_async``).
"""

from __future__ import annotations

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
from ckpt_core.paths import StrPath
from ckpt_core.state.kinds import Kind, Part
from ckpt_core.storage import is_remote, local_path, storage_for

__all__ = ["LocalTensor", "Piece", "SeparateSaves", "local_tensor"]


class SeparateSaves:
    """The saves of checkpoints directly below one directory, local or at a URL.

    A save has an id, which all who write it know: 1 to 64 letters, digits and dashes, and never used before.
    """

    def __init__(self, root: StrPath, *, storage_options: dict[str, Any] | None = None) -> None:
        self.is_remote = is_remote(root)
        self.root = local_path(root) if self.is_remote else os.path.abspath(local_path(root))
        self._storage = storage_for(self.root, storage_options if self.is_remote else None)
        self._scratch = ScratchBuffers()

    def directories(self) -> list[str]:
        """Paths of all directories there, in no order: also of those whose manifest is missing now."""
        return list(self._storage.subdirectories(self.root))

    def begin(self, path: str, save_id: str) -> None:
        """Create the directory; until :meth:`commit` or :meth:`discard` it is not taken for a leftover."""
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
        """Write one process's files, durably, straight from the live tensors; return what :meth:`commit` needs.

        ``parts`` are the same in all processes; what is replicated is written by rank 0. ``rank`` is the process's
        place in the checkpoint. ``suffix`` comes before the extension of the files' names, so that no two processes
        ever write the same file. ``local`` is called with key and tensor of each tensor in a sharded part: what this
        process has of it. Of the tensor itself only type and shape count. ``write_files`` is called with a directory,
        and what it writes there becomes part of the checkpoint.
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
        """Write the manifest: from now on it is a checkpoint.

        ``reports`` are what :meth:`write` returned, in the order of the ranks; ``step`` is that of the state, where it
        is known.

        Raises:
            StorageError: This process does not see a file that another one has written.
        """
        manifest = build_manifest(reports, metadata=metadata, path=path, stamp=Stamp(commit_time(), step))
        ranks = Manifest.decode(manifest, path=path).ranks
        sizes = {file.name: file.size for rank in ranks for file in rank.files}
        sizes |= {rank.digests.name: rank.digests.size for rank in ranks if rank.digests is not None}
        wait_for_files(self._storage, self._storage.begin_directory(path, save_id), sizes, path)
        self._storage.publish_directory(path, save_id, manifest)
        self._storage.leave_directory(path, save_id)

    def discard(self, path: str, save_id: str) -> None:
        """Delete what was written for a save that is given up."""
        self._storage.leave_directory(path, save_id)
        self._storage.discard_directory(path, save_id)

    def remove(self, path: str) -> None:
        """Delete a committed checkpoint."""
        self._storage.remove_directory(path)


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
