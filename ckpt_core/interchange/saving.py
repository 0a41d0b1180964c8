"""A directory checkpoint in the making, without the ranks' own connection: whoever calls knows when all have written."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ckpt_core._layouts.image import WINDOW
from ckpt_core._pipeline.directories import NOTHING, discard, leave, previous_at
from ckpt_core._pipeline.writer import write_image
from ckpt_core.errors import CheckpointError, StorageError
from ckpt_core.interchange.naming import EntryPath
from ckpt_core.interchange.shards import Chunk, Image, RankShards, Value, join_ranks, write_shards
from ckpt_core.memory import ScratchBuffers, StagingBuffer
from ckpt_core.storage import Storage

__all__ = ["DirectorySave", "write_in_order"]

_BLOCK = 4096
_LISTING_SECONDS = 10.0  # a network filesystem may be that late in showing what another machine has written


class DirectorySave:
    """One process's part in the making of a checkpoint.

    Args:
        storage: Where it goes.
        path: The checkpoint.
        token: 1 to 64 letters, digits and dashes: the same for all who write it, and never used again.
    """

    def __init__(self, storage: Storage, path: str, token: str) -> None:
        self.path = path
        self.token = token
        self._storage = storage
        self._created: list[str] = []
        self._directory = storage.begin_directory(path, token)
        self._is_in_place = self._directory == path
        previous = previous_at(storage, path) if self._is_in_place else NOTHING
        self._suffix = f"-{token}" if previous.exists else ""

    def write(
        self,
        chunks: Mapping[str, Sequence[Chunk]],
        values: Mapping[str, Mapping[EntryPath, Value]],
        *,
        rank: int = 0,
        world_size: int = 1,
        one_by_one: bool = False,
    ) -> RankShards:
        """Write a rank's files.

        Args:
            chunks: What it writes of each part.
            values: The entries of each part that are no tensors.
            rank: Its number.
            world_size: Number of ranks.
            one_by_one: Whether at most one tensor is loaded at any time. If not, several threads load them, and each is
                expected to be there already.

        Raises:
            StorageError: The storage refused.
        """

        def write(name: str, image: Image) -> int:
            self._created.append(name)
            target = f"{self._directory}/{name}"
            if one_by_one:
                return write_in_order(image, self._storage, target)
            return write_image(image, self._storage, target, scratch=scratch)

        scratch = ScratchBuffers()
        try:
            return write_shards(
                chunks,
                values,
                rank=rank,
                world_size=world_size,
                save_id=self.token,
                suffix=self._suffix,
                one_by_one=one_by_one,
                write=write,
            )
        except CheckpointError as error:
            if error.path is not None and error.path.startswith(self._directory):
                error.path = self.path + error.path[len(self._directory) :]  # where the user knows it
            raise
        finally:
            scratch.close()

    def commit(
        self,
        ranks: Sequence[RankShards],
        *,
        kind: str,
        metadata: Mapping[str, Any],
        order: Iterable[tuple[str, EntryPath]] = (),
    ) -> int:
        """Make it the checkpoint at its path, in the place of what was there; return its size in bytes.

        Args:
            ranks: What all have written, in their order.
            kind: Kind of all parts.
            metadata: Plain data to keep with it.
            order: Part and path of entries, as they come in the state.

        Raises:
            CheckpointError: What was written is no checkpoint, or the storage refused.
        """
        manifest = join_ranks(ranks, kind=kind, metadata=metadata, order=order, path=self.path)
        sizes = {name: size for rank in ranks for name, size in rank.sizes.items()}
        self._check_all_there(sizes)
        previous = previous_at(self._storage, self.path)
        gone = [name for name in (*previous.files, *previous.extra) if name not in sizes]
        self._storage.publish_directory(self.path, self.token, manifest, gone=gone)
        return sum(sizes.values()) + len(manifest)

    def _check_all_there(self, sizes: Mapping[str, int]) -> None:
        deadline = time.monotonic() + _LISTING_SECONDS
        while True:
            found = {os.path.basename(file.path): file.size for file in self._storage.list(self._directory)}
            missing = sorted(name for name, size in sizes.items() if found.get(name) != size)
            if not missing:
                return
            if time.monotonic() > deadline:
                raise StorageError(
                    f"{len(missing)} of the {len(sizes)} files that the ranks have written cannot be seen here, "
                    f"{missing[0]!r} among them",
                    path=self.path,
                    remedy="save to a directory that all machines share",
                )
            time.sleep(0.1)

    def leave(self) -> None:
        """End this process's part; what nobody else is working on and nobody has committed is deleted."""
        leave(self._storage, self.path, self.token)

    def give_up(self) -> None:
        """Delete what this process has written where nobody would look for it later."""
        if self._is_in_place:
            discard(self._storage, self.path, self.token, self._created)

    def abandon(self) -> None:
        """End the whole save: nothing is left of it."""
        discard(self._storage, self.path, self.token, self._created)
        self.leave()


def write_in_order(image: Image, storage: Storage, path: str) -> int:
    """Write a file from its first byte to its last with memory for one window, and return its size."""
    writer = storage.create(path, image.approximate_size)
    buffer = StagingBuffer(WINDOW)
    try:
        for begin in range(0, image.region_size, WINDOW):
            writer.write_at(begin, image.window(begin, buffer))
        tail = image.tail()
        size = len(tail) if not writer.parallel else -(-len(tail) // _BLOCK) * _BLOCK
        if tail:
            buffer.memory[: len(tail)] = tail
            with buffer.memory[:size] as blocks:  # direct I/O wants whole ones; commit cuts the file
                writer.write_at(image.region_size, blocks)
        writer.commit(image.region_size + len(tail))
    except BaseException:
        writer.abort()
        raise
    finally:
        buffer.close()
    return image.region_size + len(tail)
