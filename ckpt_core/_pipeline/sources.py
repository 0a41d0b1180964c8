"""The state that a rank writes: a copy in memory of ours that is being made, or the live tensors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from ckpt_core._commit import RankGroup
from ckpt_core._layouts.image import Image
from ckpt_core._layouts.sharded.writing import PartContent, RankFiles
from ckpt_core._pipeline.added_files import AddedFiles
from ckpt_core._pipeline.snapshot import COPY_GROUP, BackgroundCopy, BufferPool, TornSnapshotGuard, wait_for_devices
from ckpt_core.errors import CheckpointError, OutOfMemoryError
from ckpt_core.memory import StagingBuffer

__all__ = ["LiveState", "StagedState"]


class LiveState:
    """The live tensors, while the training thread waits.

    Args:
        ranks: The ranks.
        path: The checkpoint, for messages.
        plan: Returns what this rank writes.
        add_files: Returns what the caller adds.
    """

    def __init__(
        self,
        ranks: RankGroup,
        path: str,
        plan: Callable[[], Sequence[PartContent]],
        add_files: Callable[[], AddedFiles | None],
    ) -> None:
        self._ranks = ranks
        self._path = path
        self._plan = plan
        self._add_files = add_files
        self._guard = TornSnapshotGuard(())
        self._added: AddedFiles | None = None

    def lay_out(self, save_id: str, suffix: str) -> RankFiles:
        files = RankFiles(
            self._plan(), rank=self._ranks.rank, world_size=self._ranks.world_size, save_id=save_id, suffix=suffix
        )
        self._guard = TornSnapshotGuard(files.tensors)
        wait_for_devices(files.tensors)
        return files

    def images(self, files: RankFiles) -> Sequence[tuple[str, Image]]:
        return files.live_files()

    def complete(self) -> AddedFiles | None:
        self._guard.check(path=self._path)
        self._added = self._add_files()
        return self._added

    def close(self) -> None:
        """Delete what is left of the added files."""
        if self._added is not None:
            self._added.close()


class StagedState:
    """A copy that the training thread has made, while another thread writes what there is of it.

    Args:
        ranks: The ranks.
        buffers: Lends the memory.

    Attributes:
        sealed_at: ``time.perf_counter()`` of the moment in which it was complete.
        not_copied: Why there is no copy: the live tensors are written, and must not change until the save has ended.
    """

    def __init__(self, ranks: RankGroup, buffers: BufferPool) -> None:
        self.sealed_at = 0.0
        self.not_copied: OutOfMemoryError | None = None
        self._ranks = ranks
        self._buffers = buffers
        self._contents: Sequence[PartContent] = ()
        self._buffer: StagingBuffer | None = None
        self._copy: BackgroundCopy | None = None
        self._added: AddedFiles | None = None
        self._failure: CheckpointError | None = None
        self._begun = threading.Event()
        self._settled = threading.Event()

    # ---- the training thread -------------------------------------------------------------------------------------------

    def take(self, contents: Sequence[PartContent], *, path: str) -> int:
        """Copy what this rank writes, and return its size in bytes.

        Args:
            contents: What this rank writes.
            path: The checkpoint, for messages.

        Raises:
            SnapshotTornError: A tensor changed while it was being copied.
        """
        self._contents = contents
        files = self._files("0", "")
        guard = TornSnapshotGuard(files.tensors)
        if files.staged_size:
            try:
                self._buffer = self._buffers.acquire(files.staged_size)
            except OutOfMemoryError as error:
                self.not_copied = error
                wait_for_devices(files.tensors)
            else:
                self._copy = BackgroundCopy(files.pieces_in(self._buffer, COPY_GROUP))
        self._begun.set()
        if self._copy is not None:
            self._copy.wait()
        guard.check(path=path)
        return files.staged_size

    def add(self, files: AddedFiles | None) -> None:
        """Set what the caller adds."""
        self._added = files

    def seal(self) -> None:
        """Declare that all is there."""
        self.sealed_at = time.perf_counter()
        self._settled.set()

    def give_up(self, failure: CheckpointError) -> None:
        """Declare that there is nothing to save; returns when nothing is copied any more."""
        self._failure = failure
        try:
            if self._copy is not None:
                self._copy.settle()
        finally:
            self._begun.set()
            self._settled.set()

    @property
    def is_given_up(self) -> bool:
        """Whether there is nothing to save."""
        return self._failure is not None

    # ---- the thread that writes ----------------------------------------------------------------------------------------

    def lay_out(self, save_id: str, suffix: str) -> RankFiles:
        self._begun.wait()
        if self._failure is not None:
            raise self._failure
        return self._files(save_id, suffix)

    def _files(self, save_id: str, suffix: str) -> RankFiles:
        return RankFiles(
            self._contents, rank=self._ranks.rank, world_size=self._ranks.world_size, save_id=save_id, suffix=suffix
        )

    def images(self, files: RankFiles) -> Sequence[tuple[str, Image]]:
        if self._buffer is None or self._copy is None:
            return files.live_files()
        return files.staged_files(self._buffer, self._copy.wait_until)

    def complete(self) -> AddedFiles | None:
        self._settled.wait()
        if self._failure is not None:
            raise self._failure
        return self._added

    def close(self) -> None:
        """Give the memory back, and delete what is left of the added files."""
        self._settled.wait()  # until then the training thread may be copying
        self._contents = ()
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._buffers.release(buffer)
        if self._added is not None:
            self._added.close()
