"""Where a checkpointer saves to and reads from: one tier, or two and the uploads between them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

from ckpt_core._pipeline.writer import OnError
from ckpt_core.errors import CheckpointError
from ckpt_core.events import Listener
from ckpt_core.storage import Storage
from ckpt_core.tiers.nearest import TieredStorage
from ckpt_core.tiers.places import Tiers
from ckpt_core.tiers.uploader import Uploader

__all__ = ["Placement"]


class Placement:
    """Where a checkpointer saves to and reads from.

    All paths are full ones. Where there is one tier only, they stay as they are.

    Args:
        tiers: The tiers, if there are two.
        storage_for: Returns what keeps a path.
        local: Keeps the local tier; by default, a local disk.
        storage_options: For fsspec, if the other tier is a URL.
        on_error: What a failed upload does.
        listeners: Told about uploads.
        uploads: Whether this process uploads.

    Attributes:
        tiers: The tiers, if there are two.
        uploader: Uploads what is committed, if this process does; a listener.
    """

    def __init__(
        self,
        tiers: Tiers | None,
        *,
        storage_for: Callable[[str], Storage],
        local: Storage | None,
        storage_options: dict[str, Any] | None,
        on_error: OnError,
        listeners: Sequence[Listener],
        uploads: bool,
    ) -> None:
        self.tiers = tiers
        self.uploader: Uploader | None = None
        self._storage_for = storage_for
        self._both: TieredStorage | None = None
        if tiers is not None:
            self._both = TieredStorage(tiers, local=local, storage_options=storage_options)
            if uploads:
                self.uploader = Uploader(self._both, on_error=on_error, listeners=tuple(listeners))

    # ---- paths and storages ------------------------------------------------------------------------------------------

    def known_as(self, path: str) -> str:
        """Return the one name of a checkpoint: of one in two tiers, its local path."""
        return self.tiers.local_path(path) if self.tiers is not None and self.tiers.covers(path) else path

    def save_path(self, path: str) -> str:
        """Return where a checkpoint is saved.

        Raises:
            StorageError: It lies in neither tier.
        """
        return path if self.tiers is None else self.tiers.local_path(path)

    def to_read(self, path: str) -> Storage:
        """Return what a checkpoint is read from, in whichever tier it is."""
        return self._both if self._both is not None and self._both.tiers.covers(path) else self._storage_for(path)

    def origin_of(self, path: str, storage: Storage) -> tuple[Storage | None, str]:
        """Return the storage to copy a checkpoint from, if it is not ``storage`` itself, and its path there."""
        if self._both is None or not self._both.tiers.covers(path) or storage.exists(path):
            return None, path
        return self._both.remote, self._both.tiers.remote_path(path)

    # ---- uploads: nothing to do where there are none -----------------------------------------------------------------

    def resume(self, path: str) -> None:
        """Upload what earlier processes have left beside ``path``, once."""
        if self.uploader is not None and self.uploader.covers(path):
            self.uploader.resume(path)

    def upload(self, path: str) -> None:
        """Upload a checkpoint that is committed in the local tier."""
        if self.uploader is not None:
            self.uploader.upload(path)

    def removal(self, path: str, delete: Callable[[], None]) -> Callable[[], None]:
        """Return what deletes a checkpoint from all tiers, ``delete`` being what deletes the local copy."""
        if self.uploader is None or not self.uploader.covers(path):
            return delete
        return functools.partial(self.uploader.remove, path, delete)

    def is_uploaded(self, path: str) -> bool:
        """Return whether a checkpoint is in the remote tier, which is asked once for each directory."""
        return (
            self.uploader is not None and self.uploader.covers(path) and path in self.uploaded_in(os.path.dirname(path))
        )

    def uploaded_in(self, directory: str) -> list[str]:
        """Return the local paths of the checkpoints of a directory that are in the remote tier, which is asked once."""
        is_covered = self.uploader is not None and self.uploader.covers(directory)
        return self.uploader.uploaded_in(directory) if self.uploader is not None and is_covered else []

    @property
    def is_uploading(self) -> bool:
        """Whether an upload is under way or waits for its turn."""
        return self.uploader is not None and bool(self.uploader.pending)

    @property
    def failures(self) -> int:
        """How many uploads and removals from the remote tier have failed."""
        return 0 if self.uploader is None else self.uploader.failures

    @property
    def failure(self) -> CheckpointError | None:
        """The failure of an upload that was not taken yet."""
        return None if self.uploader is None else self.uploader.failure

    def take_failure(self) -> CheckpointError | None:
        """Return the failure of an upload that was not taken yet, once."""
        return None if self.uploader is None else self.uploader.take_failure()

    def raise_failure(self) -> None:
        """Raise the failure of an upload that was not taken yet, once."""
        failure = self.take_failure()
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Wait for the uploads."""
        if self.uploader is not None:
            self.uploader.close()
