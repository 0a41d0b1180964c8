"""The façade that both plugins use: save, wait, load, remove."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from ckpt_core._layouts.torch_file import FileImage, StateLayout
from ckpt_core._pipeline import reader
from ckpt_core._pipeline.advice import Advice
from ckpt_core._pipeline.snapshot import BufferPool, Snapshot, TornSnapshotGuard, wait_for_devices
from ckpt_core._pipeline.writer import BackgroundWriter, OnError, write_image
from ckpt_core.errors import CheckpointError, OutOfMemoryError
from ckpt_core.events import (
    CheckpointLoaded,
    CheckpointRemoved,
    Listener,
    SaveCommitted,
    SaveFailed,
    SaveStarted,
    SnapshotTaken,
    notify,
)
from ckpt_core.memory import ScratchBuffers
from ckpt_core.storage import Storage, is_remote, local_path, storage_for
from ckpt_core.storage.claims import Claims
from ckpt_core.tiers import Placement, Tiers

__all__ = ["Checkpointer", "CheckpointerBase", "Path", "full_path"]

Path = str | os.PathLike[str]
Base = TypeVar("Base", bound="CheckpointerBase")


class CheckpointerBase:
    """What the checkpointers of all layouts share: settings, a queue of background work, its failures and its memory."""

    def __init__(
        self,
        *,
        strategy: Literal["sync", "async"] = "async",
        max_pending: int = 1,
        on_error: OnError = "raise",
        storage_options: dict[str, Any] | None = None,
        listeners: Sequence[Listener] = (),
        storage: Storage | None = None,
        tiers: Tiers | None = None,
        uploads: bool = True,
    ) -> None:
        if strategy not in ("sync", "async"):
            raise ValueError(f"strategy must be 'sync' or 'async', not {strategy!r}")
        if max_pending < 1:
            raise ValueError(f"max_pending must be at least 1, not {max_pending}")
        if on_error not in ("raise", "warn"):
            raise ValueError(f"on_error must be 'raise' or 'warn', not {on_error!r}")
        self.strategy = strategy
        self._max_pending = max_pending
        self._on_error = on_error
        self._storage_options = storage_options
        self._listeners = list(listeners)
        self._storage = storage
        self._places = Placement(
            tiers,
            storage_for=self._storage_for,
            local=storage,
            storage_options=storage_options,
            on_error=on_error,
            listeners=listeners,
            uploads=uploads,
        )
        if self._places.uploader is not None:
            self._listeners.append(self._places.uploader)
        self._buffers = BufferPool(max_pending)
        self._scratch = ScratchBuffers()
        self._writer = BackgroundWriter(on_error=on_error, listeners=self._listeners)
        self._clean_directories: set[str] = set()
        self._known_directories: set[str] = set()
        self._claims = Claims()
        self._saving_thread: int | None = None
        self._advice = Advice()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, and what a spawned process gets, has the same settings and no saves of its own yet."""
        settings = functools.partial(
            type(self),
            strategy=self.strategy,
            max_pending=self._max_pending,
            on_error=self._on_error,
            storage_options=self._storage_options,
            listeners=[listener for listener in self._listeners if listener is not self._places.uploader],
            storage=self._storage,
            tiers=self._places.tiers,
        )
        return settings, ()

    @property
    def pending(self) -> tuple[str, ...]:
        """Paths whose save is still under way, oldest first."""
        return self._writer.pending

    def known_as(self, path: Path) -> str:
        """Return the name under which a checkpoint is known: of one in two tiers, its local path."""
        return self._places.known_as(full_path(path))

    def is_pending(self, path: Path) -> bool:
        """Return whether a save of ``path`` is under way."""
        return self.known_as(path) in self.pending

    def wait_when_touched(self, path: Path) -> None:
        """Let whoever touches a local ``path`` in this process wait for its save or removal, if one is under way."""
        known = self.known_as(path)
        if not is_remote(known):
            self._writer.wait_when_touched(known)

    @property
    def is_busy(self) -> bool:
        """Whether a save or an upload is under way."""
        return bool(self.pending) or self._places.is_uploading

    @property
    def failures(self) -> int:
        """How many background saves, uploads and removals have failed so far."""
        return self._writer.failures + self._places.failures

    def _remove_orphans_once(self, storage: Storage, path: str) -> None:
        directory = os.path.dirname(path)
        if directory not in self._clean_directories and not is_remote(path):
            self._clean_directories.add(directory)
            storage.remove_orphans(directory)

    def _note_commits_once(self, storage: Storage, path: str) -> None:
        """Read how old the checkpoints beside ``path`` are, in the background if there is one; a store is not asked."""
        directory = os.path.dirname(path)
        if directory not in self._known_directories and not is_remote(path):
            self._known_directories.add(directory)
            reader.note_commits(storage, directory, os.path.splitext(path)[1])

    def exists(self, path: Path) -> bool:
        """Return whether there is a checkpoint at ``path``, or a save of it is under way."""
        target = self.known_as(path)
        return self.is_pending(target) or self._places.to_read(target).exists(self._committed_by(target))

    def is_taken(self, path: Path) -> bool:
        """Return whether there is a checkpoint at ``path``; a remote tier is asked once for each directory, and not for each save."""
        target = self.known_as(path)
        found = self._storage_for(target).exists(self._committed_by(target))
        return found or self.is_pending(target) or self._places.is_uploaded(target)

    @staticmethod
    def _committed_by(path: str) -> str:
        return path  # the file itself

    def uploaded_in(self, directory: Path) -> list[str]:
        """Return the local paths of the checkpoints in ``directory`` of a remote tier, which is asked once."""
        return self._places.uploaded_in(self.known_as(directory))

    def upload(self, path: Path) -> None:
        """Upload the checkpoint at ``path``, which somebody else has saved in the local tier, if there are two tiers."""
        self._places.upload(self._save_path(path))

    def remove(self, path: Path) -> None:
        """Delete the checkpoint at ``path`` once all saves asked for so far are durable.

        If the newest of those fails, the checkpoint is kept, and a warning says so.
        """
        target = self.known_as(path)
        delete = self._places.removal(target, functools.partial(self._delete, self._storage_for(target), target))
        if self.strategy == "sync":
            delete()
            notify(self._listeners, CheckpointRemoved(path=target))
        else:
            self._writer.remove(target, delete)
            if not self.pending:
                self._writer.wait(target)  # a caller who saved nothing does not expect work in the background

    def _delete(self, storage: Storage, path: str) -> None:
        storage.remove(path)

    def wait(self, path: Path | None = None) -> None:
        """Block until all saves (or that of ``path``) have ended; raise the failure of one, if there was any."""
        self._writer.wait(None if path is None else self.known_as(path))
        self.raise_failure()

    def drain(self, *, timeout: float | None = None) -> None:
        """Block until all saves and removals have ended, whether they failed or not; at most ``timeout`` seconds."""
        self._writer.wait(timeout=timeout)

    @property
    def failure(self) -> CheckpointError | None:
        """A background failure that was not raised yet, and still will be."""
        return self._writer.failure or self._places.failure

    def take_failure(self) -> CheckpointError | None:
        """Return, instead of raising, a background failure that was not raised yet; returns at once."""
        return self._writer.take_failure() or self._places.take_failure()

    def raise_failure(self) -> None:
        """Raise a background failure that was not raised yet; returns at once."""
        self._writer.raise_failure()
        self._places.raise_failure()

    def close(self, *, raises: bool = True) -> None:
        """Wait for everything, uploads included, free the buffers, and raise what was not raised yet. It may be used again.

        Args:
            raises: Whether to; if not, failures, which were logged, are forgotten.
        """
        self._writer.wait()
        self._claims.release()
        self._buffers.close()
        self._scratch.close()
        self._places.close()
        while (failure := self.take_failure()) is not None:
            if raises:
                raise failure

    def __enter__(self: Base) -> Base:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _save_path(self, path: Path) -> str:
        """Return where a checkpoint is saved, which with two tiers is below their local directory."""
        return self._places.save_path(full_path(path))

    def _storage_for(self, path: str) -> Storage:
        return self._storage or storage_for(path, self._storage_options)


class Checkpointer(CheckpointerBase):
    """Saves states as single torch-loadable files, durable and verified, in the foreground or in the background.

    Args:
        strategy: ``"sync"`` returns from :meth:`save` when the checkpoint is durable and needs 112 MiB of extra memory;
            ``"async"`` returns when the state is copied and needs as much memory as ``max_pending`` states.
        max_pending: How many saves may be under way before the next one waits (async only).
        on_error: What a failure in the background does: ``"raise"`` at the next call of :meth:`save`, :meth:`wait`,
            :meth:`raise_failure` or :meth:`close`; ``"warn"`` logs and counts it.
        storage_options: Passed to fsspec for paths that are URLs: endpoint, credentials and so on.
        listeners: Called with every event (:mod:`ckpt_core.events`).
        storage: Keeps all checkpoints, whatever their path: your own :class:`~ckpt_core.storage.Storage`, or in tests a
            :class:`~ckpt_core.storage.FaultyStorage`. By default the path says what to use. With ``tiers``, the local tier's.
        tiers: Commit on a local disk, which is what :meth:`save` and :meth:`wait` are about, and upload from there in the
            background; :meth:`load` takes the nearest copy that is whole (:class:`ckpt_core.tiers.Tiers`).
        uploads: Whether this process uploads; with ``tiers``.

    Example:
        >>> import os, tempfile, torch
        >>> from ckpt_core import Checkpointer
        >>> path = os.path.join(tempfile.mkdtemp(), "step=1.ckpt")
        >>> with Checkpointer(strategy="async") as checkpointer:
        ...     checkpointer.save({"weight": torch.ones(2)}, path)
        >>> Checkpointer(strategy="sync").load(path)
        {'weight': tensor([1., 1.])}
    """

    def save(self, state: Any, path: Path) -> int:
        """Save ``state`` at ``path``.

        Args:
            state: What ``torch.save`` would take.
            path: Local path or URL. What is there now is replaced when, and only when, the new one is durable.

        Returns:
            The size of the checkpoint in bytes, which is approximate while it is being written.

        Raises:
            SerializationError: Something in ``state`` cannot be pickled.
            SnapshotTornError: A tensor was changed while it was being copied.
            StorageError: The storage refused, or had refused an earlier save in the background.
        """
        target = self._save_path(path)
        self.raise_failure()
        notify(self._listeners, SaveStarted(path=target))
        started = time.perf_counter()
        storage = self._storage_for(target)
        try:
            self._claims.hold(os.path.dirname(target), storage.claim)
            self._remove_orphans_once(storage, target)
            # A signal handler can save while this thread is inside a save and holds the buffer: that one cannot wait.
            reentered = self._saving_thread == threading.get_ident()
            if self.strategy == "sync" or reentered:
                size = self._save_now(state, storage, target, started)
            else:
                self._saving_thread = threading.get_ident()
                try:
                    size = self._save_later(state, storage, target, started)
                finally:
                    self._saving_thread = None
        except BaseException as error:
            notify(self._listeners, SaveFailed(path=target, error=str(error)))
            raise
        return size

    def _save_now(self, state: Any, storage: Storage, path: str, started: float) -> int:
        self._note_commits_once(storage, path)
        layout = StateLayout(state)
        guard = TornSnapshotGuard(layout.tensors)
        wait_for_devices(layout.tensors)
        image = layout.live_image()

        def complete() -> None:
            layout.pickle_into(image, state)
            image.seal()

        def check() -> None:
            guard.check(path=path)

        size = write_image(image, storage, path, scratch=self._scratch, meanwhile=complete, before_commit=check)
        self._advice.refused_by_default(image, path)
        stall = time.perf_counter() - started
        notify(self._listeners, SnapshotTaken(path=path, bytes=size, stall_seconds=stall))
        notify(self._listeners, SaveCommitted(path=path, bytes=size, background_seconds=0.0))
        return size

    def _save_later(self, state: Any, storage: Storage, path: str, started: float) -> int:
        waited = 0.0
        if self._buffers.exhausted:
            self._buffers.wait()
            waited = time.perf_counter() - started
        try:
            snapshot = Snapshot(state, path=path, buffers=self._buffers)
        except OutOfMemoryError as error:
            self._advice.no_copy(error)
            self._writer.wait()  # an older save of this path must not end after this one
            return self._save_now(state, storage, path, started)
        image = snapshot.image
        # Writing begins while the state is still being copied; the commit waits for the seal.
        write = functools.partial(self._write_staged, image, storage, path)
        running = False
        try:
            running = self._writer.save(path, write, staged_at=lambda: image.sealed_at)
            snapshot.finish()
            size = image.approximate_size
            stall = time.perf_counter() - started
            event = SnapshotTaken(path=path, bytes=size, stall_seconds=stall, waited_seconds=waited)
            notify(self._listeners, event)
            image.seal()
        except BaseException:  # Ctrl-C too: a buffer that never came back would block the next save for ever
            self._give_up(snapshot, path)
            raise
        finally:
            if not running:
                self._writer.run_queued()
        return size

    def _give_up(self, snapshot: Snapshot, path: str) -> None:
        try:
            snapshot.wait()
        finally:
            snapshot.image.abandon()
            self._writer.run_queued()
            self._writer.wait(path)  # until nothing is left of it
            self._release(snapshot.image)  # in case it was not even queued

    def _write_staged(self, image: FileImage, storage: Storage, path: str) -> int:
        try:
            self._note_commits_once(storage, path)
            size = write_image(image, storage, path, scratch=self._scratch)
            self._advice.refused_by_default(image, path)
            return size
        finally:
            image.wait_settled()  # until then the training thread may be copying into the buffer
            self._release(image)

    def _release(self, image: FileImage) -> None:
        buffer = image.release()
        if buffer is not None:
            self._buffers.release(buffer)

    def copy(self, source: Path, target: Path) -> None:
        """Save the checkpoint ``source``, which exists or whose save is under way, at ``target`` too.

        Costs nothing on a local disk (a hard link) and no upload on a store. The two files do not depend on each other.

        Raises:
            CheckpointError: There is no ``source``, or an earlier save failed in the background.
        """
        original, path = self.known_as(source), self._save_path(target)
        self.raise_failure()
        started = time.perf_counter()
        notify(self._listeners, SaveStarted(path=path))
        storage = self._places.to_read(original)
        if self.strategy == "sync":
            size = storage.copy(original, path)
            stall = time.perf_counter() - started
            notify(self._listeners, SnapshotTaken(path=path, bytes=size, stall_seconds=stall))
            notify(self._listeners, SaveCommitted(path=path, bytes=size, background_seconds=0.0))
            return
        notify(self._listeners, SnapshotTaken(path=path, bytes=0, stall_seconds=time.perf_counter() - started))
        self._writer.copy(original, path, lambda: storage.copy(original, path))

    def load(self, path: Path, *, map_location: Any = None, weights_only: bool | None = None) -> Any:
        """Load a checkpoint, waiting for it if its save is under way, and verify every byte of it.

        Args:
            path: Local path or URL.
            map_location: As for ``torch.load``.
            weights_only: As for ``torch.load``: None means True.

        Raises:
            CheckpointError: See the tree in :mod:`ckpt_core.errors`.
        """
        source = self.known_as(path)
        self._writer.wait(source)
        self._places.resume(source)
        started = time.perf_counter()
        state, verified, size = reader.load(
            source, map_location=map_location, weights_only=weights_only, storage=self._places.to_read(source)
        )
        seconds = time.perf_counter() - started
        notify(self._listeners, CheckpointLoaded(path=source, bytes=size, seconds=seconds, verified=verified))
        return state


def full_path(path: Path) -> str:
    """Return the name under which a checkpoint is known, however ``path`` is spelled."""
    # A background save must not depend on a later chdir, and two spellings of a path are one checkpoint.
    text = local_path(path)
    return text if is_remote(text) else os.path.abspath(text)
