"""Save and load checkpoints that are one file; the base class is shared with the checkpointer for directories."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

import torch

from ckpt_core._pipeline import loading
from ckpt_core._pipeline.device_copy import wait_staged
from ckpt_core._pipeline.file_save import FileSave
from ckpt_core._pipeline.jobs import OnError
from ckpt_core._pipeline.save import Pipeline
from ckpt_core.errors import CheckpointError
from ckpt_core.events import CheckpointLoaded, Event, Listener, notify, rank_of_process
from ckpt_core.option_checks import (
    check_count,
    check_functions,
    check_mapping,
    check_max_host_bytes,
    check_options,
    check_switch,
    instance_of,
    one_of,
    or_none,
)
from ckpt_core.paths import StrPath, full_path
from ckpt_core.pins import is_pinned
from ckpt_core.process.awaited_paths import wait_for_saves
from ckpt_core.storage import Storage, is_remote, storage_for
from ckpt_core.tiers import TieredStorage, Tiers, Uploader

__all__ = ["Checkpointer", "CheckpointerBase"]

logger = logging.getLogger(__name__)

_WORTH_RESERVING = 64 * 2**20  # bytes; allocating less takes only a few milliseconds

OPTION_CHECKS: dict[str, Callable[[Any], Any]] = {
    "strategy": one_of("sync", "async"),
    "on_error": one_of("raise", "warn"),
    "max_pending": check_count,
    "storage_options": or_none(check_mapping),
    "listeners": check_functions,
    "overlap": check_switch,
    "max_host_bytes": or_none(check_count),
}
_OWN_CHECKS: dict[str, Callable[[Any], Any]] = {
    "storage": or_none(instance_of(Storage, "ckpt_core.storage.Storage")),
    "tiers": or_none(instance_of(Tiers, "ckpt_core.tiers.Tiers")),
    "uploads": check_switch,
}

Base = TypeVar("Base", bound="CheckpointerBase")


class CheckpointerBase:
    """Base of both checkpointers: settings, tiers, the pipeline, and every method that takes a checkpoint's path."""

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
        overlap: bool = False,
        max_host_bytes: int | None = None,
    ) -> None:
        self._made_with = {name: value for name, value in locals().items() if name != "self"}
        check_options({**OPTION_CHECKS, **_OWN_CHECKS}, self._made_with)
        check_max_host_bytes(max_host_bytes, max_pending)
        self.strategy = strategy
        self._max_pending = max_pending
        self._storage_options = storage_options
        self._listeners = list(listeners)
        self._storage = storage
        self._tiers = tiers
        self._tiered: TieredStorage | None = None
        self._uploader: Uploader | None = None  # on the rank that uploads; None on others
        if tiers is not None:
            self._tiered = TieredStorage(tiers, local=storage, storage_options=storage_options)
        if self._tiered is not None and uploads:
            self._uploader = Uploader(self._tiered, on_error=on_error, listeners=tuple(listeners))
            self._listeners.append(self._uploader)
        self._warned_pins: set[str] = set()
        self._pipeline = Pipeline(
            strategy=strategy,
            max_pending=max_pending,
            on_error=on_error,
            listeners=self._listeners,
            overlap=overlap,
            max_host_bytes=max_host_bytes,
        )
        self._queues = [self._pipeline.queue, *([] if self._uploader is None else [self._uploader.queue])]

    def __reduce__(self) -> tuple[Any, ...]:
        """Give copies, including those pickled for spawned processes, the same settings and no pending saves."""
        return functools.partial(type(self), **self._made_with), ()

    def notify(self, event: Event) -> None:
        """Send the listeners an event that did not happen in this checkpointer."""
        notify(self._listeners, event)

    # ---- where checkpoints are ---------------------------------------------------------------------------------------

    def known_as(self, path: StrPath) -> str:
        """Return the absolute path or URL that identifies a checkpoint; with two tiers, its path in the local tier."""
        full = full_path(path)
        return full if self._tiers is None or not self._tiers.covers(full) else self._tiers.local_path(full)

    def _save_path(self, path: StrPath) -> str:
        """Return the path at which a checkpoint is saved; with two tiers, its path in the local tier.

        Raises:
            StorageError: The path is in neither tier.
        """
        full = full_path(path)
        return full if self._tiers is None else self._tiers.local_path(full)

    def _storage_for(self, path: str) -> Storage:
        return self._storage or storage_for(path, self._storage_options)

    def _to_read(self, path: str) -> Storage:
        """Return the storage to read a checkpoint from; with two tiers, one that reads from either of them."""
        is_tiered = self._tiered is not None and self._tiered.tiers.covers(path)
        return self._tiered if self._tiered is not None and is_tiered else self._storage_for(path)

    def _uploader_of(self, path: str) -> Uploader | None:
        """Return the uploader for a checkpoint or a directory of checkpoints; None if this process does not upload."""
        return self._uploader if self._tiers is not None and self._tiers.covers(path) else None

    @staticmethod
    def _committed_by(path: str) -> str:
        return path  # the file itself

    def exists(self, path: StrPath) -> bool:
        """Return whether there is a checkpoint at ``path``, or a pending save to it."""
        target = self.known_as(path)
        return self.is_pending(target) or self._to_read(target).exists(self._committed_by(target))

    def is_taken(self, path: StrPath) -> bool:
        """Return whether ``path`` is in use; the remote tier is listed only once for each directory."""
        target = self.known_as(path)
        found = self._storage_for(target).exists(self._committed_by(target))
        return found or self.is_pending(target) or target in self.uploaded_in(os.path.dirname(target))

    def uploaded_in(self, directory: StrPath) -> list[str]:
        """Return the local paths of the uploaded checkpoints of ``directory``; the remote tier is listed only once."""
        target = self.known_as(directory)
        uploader = self._uploader_of(target)
        return [] if uploader is None else uploader.uploaded_in(target)

    # ---- pending saves -----------------------------------------------------------------------------------------------

    @property
    def pending(self) -> tuple[str, ...]:
        """Paths of pending saves, oldest first."""
        return self._pipeline.queue.pending

    def is_pending(self, path: StrPath) -> bool:
        """Return whether a save of ``path`` is pending."""
        return self.known_as(path) in self.pending

    def has_failed(self, path: StrPath) -> bool:
        """Return whether the last save or copy to ``path`` has failed, regardless of ``on_error``."""
        target = self.known_as(path)
        return self._pipeline.has_failed(target) and target not in self.pending

    def wait_when_touched(self, path: StrPath) -> None:
        """Make all code in this process that opens a local ``path`` wait for its pending save or removal first."""
        target = self.known_as(path)
        jobs = self._pipeline.queue.jobs(target)
        if jobs and not is_remote(target):
            jobs[-1].wait_when_touched()

    @property
    def is_busy(self) -> bool:
        """Whether a save or an upload is pending."""
        return any(queue.pending for queue in self._queues)

    def wait(self, path: StrPath | None = None) -> None:
        """Block until all saves (or the save of ``path``) have ended, and raise a failure that was not raised yet.

        In a signal handler that has interrupted a save, this waits neither for that save nor for later requests.
        """
        self._pipeline.queue.wait(None if path is None else self.known_as(path))
        self.raise_failure()

    def reserve(self, modules: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
        """Allocate and pin memory for the copy of a state in the background, so that the first save is not slower.

        Call it when the optimizers have their state: after the first step, or after a resume. It only affects memory;
        a save may need more or less. Does nothing for states below 64 MiB.

        Args:
            modules: Modules whose parameters and buffers will be saved.
            optimizers: Optimizers whose state will be saved.
        """
        try:
            held = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
            states = [
                state for optimizer in optimizers for state in optimizer.state.values() if isinstance(state, dict)
            ]
            held += [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
            nbytes = self._bytes_of_this_rank(held)
        except Exception:  # noqa: BLE001 - whatever a user's module or tensor raises, the first save allocates
            return
        if self.strategy == "async" and nbytes >= _WORTH_RESERVING:
            self._pipeline.buffers.reserve(nbytes + nbytes // 100 + 2**20)  # with room for padding between tensors

    def _bytes_of_this_rank(self, tensors: Iterable[torch.Tensor]) -> int:
        return sum(tensor.nbytes for tensor in tensors)

    def wait_staged(self) -> None:
        """Make the caller's further work on accelerators wait until the state of all saves so far is copied.

        With ``overlap``, call it before anything but an optimizer's step changes parameters or an optimizer's state.
        The devices wait; this method returns at once.
        """
        wait_staged()

    def drain(self, *, timeout: float | None = None) -> None:
        """Block until all saves and removals have ended, successfully or not; at most ``timeout`` seconds."""
        self._pipeline.queue.wait(timeout=timeout)

    @property
    def failures(self) -> int:
        """Number of background saves, uploads and removals that have failed so far."""
        return sum(queue.failures for queue in self._queues)

    @property
    def failure(self) -> CheckpointError | None:
        """A background failure that has not been raised yet."""
        return next((queue.failure for queue in self._queues if queue.failure is not None), None)

    def take_failure(self) -> CheckpointError | None:
        """Return, instead of raising, a background failure that has not been raised yet. Does not block."""
        return next((failure for queue in self._queues if (failure := queue.take_failure()) is not None), None)

    def raise_failure(self) -> None:
        """Raise a background failure that has not been raised yet. Does not block."""
        failure = self.take_failure()
        if failure is not None:
            raise failure

    # ---- uploads and removals ----------------------------------------------------------------------------------------

    def upload(self, path: StrPath) -> None:
        """With two tiers: upload a checkpoint that another process has saved in the local tier."""
        target = self._save_path(path)
        if self._uploader is not None:
            self._uploader.upload(target)

    def remove(self, path: StrPath) -> None:
        """Delete the checkpoint at ``path`` once all saves requested so far are durable.

        If the newest of these saves fails, the checkpoint is kept and a warning is logged. A pinned checkpoint is
        never deleted (:mod:`ckpt_core.pins`).
        """
        target = self.known_as(path)
        delete = functools.partial(self._delete, self._storage_for(target), target)
        uploader = self._uploader_of(target)
        if uploader is not None:
            delete = functools.partial(uploader.remove, target, delete)
        self._pipeline.remove(target, delete, is_kept=functools.partial(self._is_pinned, target))

    def _is_pinned(self, path: str) -> bool:
        if not is_pinned(path, self._to_read(path)):
            return False
        if path not in self._warned_pins:
            self._warned_pins.add(path)
            logger.info("kept the checkpoint %s, which is pinned: ckpt drop unpins it", path)
        return True

    def _delete(self, storage: Storage, path: str) -> None:
        storage.remove(path)

    def _wait_to_read(self, path: StrPath) -> str:
        """Wait for pending saves of a checkpoint that is about to be read, and return its identifying path."""
        source = self.known_as(path)
        self._pipeline.queue.wait(source)
        wait_for_saves(source)  # by other checkpointers of this process
        self.wait_staged()  # the load may overwrite tensors that a save is still copying
        uploader = self._uploader_of(source)
        if uploader is not None and rank_of_process() == 0:  # all ranks load, but only rank 0 uploads
            uploader.resume(source)
        return source

    # ---- the end -----------------------------------------------------------------------------------------------------

    def close(self, *, raises: bool = True) -> None:
        """Wait for all pending work, including uploads, free the buffers, and raise failures. Allows further use.

        Args:
            raises: Whether to raise failures; if not, they are dropped (they have been logged).
        """
        self._pipeline.queue.wait()
        self._pipeline.close()
        if self._uploader is not None:
            self._uploader.close()
        while (failure := self.take_failure()) is not None:
            if raises:
                raise failure

    def __enter__(self: Base) -> Base:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Checkpointer(CheckpointerBase):
    """Saves each state as one torch-loadable file, durable and verified, in the foreground or in the background.

    Args:
        strategy: When :meth:`save` returns. ``"sync"``: when the checkpoint is durable; needs 112 MiB of extra memory.
            ``"async"``: when the state is copied; needs memory for ``max_pending`` copies of the state.
        max_pending: How many saves may be pending before the next one waits (async only).
        on_error: What to do when a background save fails. ``"raise"``: the next :meth:`save`, :meth:`wait`,
            :meth:`raise_failure` or :meth:`close` raises it. ``"warn"``: it is logged and counted.
        storage_options: Passed to fsspec for paths that are URLs: endpoint, credentials and so on.
        listeners: Called with every event (:mod:`ckpt_core.events`).
        storage: Use this storage for all checkpoints, whatever their path: your own
            :class:`~ckpt_core.storage.Storage`, or in tests a :class:`~ckpt_core.storage.FaultyStorage`. By default,
            the path decides. With ``tiers``, it is the storage of the local tier.
        tiers: Commit on a local disk (:meth:`save` and :meth:`wait` wait only for that commit), and upload from there
            in the background. :meth:`load` reads the nearest intact copy (:class:`ckpt_core.tiers.Tiers`).
        uploads: Whether this process uploads; only used with ``tiers``.
        overlap: Whether the device copies parameters and optimizer state during the next forward and backward pass
            (async saves of an accelerator's tensors). The host does not wait; the next step of any
            ``torch.optim.Optimizer`` waits, on the device. Before anything else changes these tensors, call
            :meth:`wait_staged`. Otherwise the save fails with a :class:`~ckpt_core.errors.SnapshotTornError`, and
            later saves wait for their copies.
        max_host_bytes: Maximum memory in bytes for copies of states; None: as much as they need. A state larger than
            its share (this limit divided by ``max_pending``) is copied and written in windows, and :meth:`save` returns
            when the last window is copied, even with ``overlap`` (async only).

    Examples:
        >>> import os, tempfile, torch
        >>> from ckpt_core import Checkpointer
        >>> path = os.path.join(tempfile.mkdtemp(), "step=1.ckpt")
        >>> with Checkpointer(strategy="async") as checkpointer:
        ...     size = checkpointer.save({"weight": torch.ones(2)}, path)
        >>> Checkpointer(strategy="sync").load(path)
        {'weight': tensor([1., 1.])}
    """

    def save(self, state: Any, path: StrPath) -> int:
        """Save ``state`` at ``path``.

        Args:
            state: Anything that ``torch.save`` accepts.
            path: Local path or URL. An existing checkpoint there is replaced only once the new one is durable.

        Returns:
            The size of the checkpoint in bytes; approximate while it is being written.

        Raises:
            SerializationError: Something in ``state`` cannot be pickled.
            SnapshotTornError: A tensor was changed while it was being copied.
            StorageError: The storage refused this save, or an earlier one in the background.
        """
        target = self._save_path(path)
        self.raise_failure()
        started = time.perf_counter()
        with self._pipeline.attempt(target):
            storage = self._storage_for(target)
            self._pipeline.directories.claim(storage, target)
            self._pipeline.directories.remove_orphans(storage, target)
            save = FileSave(state, storage, target, self._pipeline)
            waited = self._pipeline.wait_for_buffer()
            return self._pipeline.save(save, started=started, waited=waited)

    def copy(self, source: StrPath, target: StrPath) -> None:
        """Make ``target`` a second name of the checkpoint ``source``, whose save may still be pending.

        On a local disk, this is a hard link and costs nothing; on an object store, it needs no upload. Deleting or
        replacing one of the two files does not affect the other.

        Raises:
            CheckpointError: There is no ``source``, or an earlier save failed in the background.
        """
        original, path = self.known_as(source), self._save_path(target)
        self.raise_failure()
        started = time.perf_counter()

        def act(refuse_older: Callable[[], None]) -> int:
            refuse_older()
            return self._to_read(original).copy(original, path)

        with self._pipeline.attempt(path):
            self._pipeline.copy(original, path, act, started=started)

    def load(self, path: StrPath, *, map_location: Any = None, weights_only: bool | None = None) -> Any:
        """Load a checkpoint, waiting for a pending save of it, and verify every byte.

        Args:
            path: Local path or URL.
            map_location: As for ``torch.load``.
            weights_only: As for ``torch.load``: None means True.

        Returns:
            The state.

        Raises:
            CheckpointError: See the tree in :mod:`ckpt_core.errors`.
        """
        source = self._wait_to_read(path)
        started = time.perf_counter()
        state, verified, size = loading.load(
            source, map_location=map_location, weights_only=weights_only, storage=self._to_read(source)
        )
        seconds = time.perf_counter() - started
        notify(self._listeners, CheckpointLoaded(path=source, bytes=size, seconds=seconds, verified=verified))
        return state
