"""The façade for checkpoints that are directories, written by one process or by many together."""

from __future__ import annotations

import copy
import functools
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import torch

from ckpt_core._commit import RankGroup, SaveSeries
from ckpt_core._layouts.image import ImageAbandonedError
from ckpt_core._layouts.sharded.matching import LocalView
from ckpt_core._layouts.sharded.writing import PartContent
from ckpt_core._pipeline.added_files import AddedFiles
from ckpt_core._pipeline.copying import copy_directory
from ckpt_core._pipeline.planning import plan_parts
from ckpt_core._pipeline.previous import names_of_files
from ckpt_core._pipeline.rank_save import RankSave, given_up
from ckpt_core._pipeline.sources import LiveState, StagedState
from ckpt_core._pipeline.unchanged import UnchangedFiles
from ckpt_core._pipeline.writer import OnError
from ckpt_core._plan import LocalTensor, WritePlanCache, local_tensor
from ckpt_core.checkpointer import CheckpointerBase, Path
from ckpt_core.errors import CheckpointError
from ckpt_core.events import Listener, SaveCommitted, SaveFailed, SaveStarted, SnapshotTaken, notify
from ckpt_core.state.kinds import Kind, Part
from ckpt_core.storage import MANIFEST_NAME, Storage, is_remote
from ckpt_core.tiers import NearestDirectoryCheckpoint, Tiers

__all__ = ["AddedFiles", "DirectoryCheckpoint", "DirectoryCheckpointer", "Kind", "Part"]

WriteFiles = Callable[[str], None]


class DirectoryCheckpoint(NearestDirectoryCheckpoint):
    """A committed checkpoint, open for reading on one of the ranks that load it.

    Args:
        path: The checkpoint's directory or URL.
        storage: Where it is.
        ranks: The ranks.
    """

    def __init__(self, path: str, storage: Storage, ranks: RankGroup) -> None:
        super().__init__(path, storage)
        self._ranks = ranks

    def load(
        self,
        part: str,
        *,
        into: Any = None,
        local: LocalView | None = None,
        rank: int | None = None,
        map_location: str | torch.device | None = None,
        strict: bool = True,
    ) -> Any:
        """Return a part of the state; see :meth:`ckpt_core._layouts.sharded.reading.DirectoryCheckpoint.load`.

        ``into`` may hold distributed tensors, of which this rank's pieces are read; ``rank`` is this process's by default.
        """
        return super().load(
            part,
            into=into,
            local=self._local if local is None else local,
            rank=self._ranks.rank if rank is None else rank,
            map_location=map_location,
            strict=strict,
        )

    def _local(self, key: str, tensor: torch.Tensor) -> LocalTensor:
        return local_tensor(tensor, key=key, rank=self._ranks.rank, world_size=self._ranks.world_size, replicated=True)


class DirectoryCheckpointer(CheckpointerBase):
    """Saves states as directories of safetensors files, durable and verified, each rank its part.

    :meth:`save` and :meth:`copy` are called on all ranks together. No collective is involved: in the background the ranks
    report to rank 0, which commits. A failure on one rank is the failure of the save on all of them: the same class is raised
    by the next :meth:`save`, :meth:`wait` or :meth:`close`, and what was at the path before is untouched.

    Args:
        ranks: Who saves together; by default, this process alone.
        strategy: ``"sync"`` returns from :meth:`save` when the checkpoint is durable, with 112 MiB of extra memory on each rank;
            ``"async"`` returns when this rank's part is copied, which needs memory for ``max_pending`` such parts.
        slice_replicated: Whether all ranks write a slice of what is the same on all of them; otherwise rank 0 writes it, to
            files that other programs read as they are.
        max_pending: How many saves may be under way before the next one waits (async only).
        on_error: What a failure in the background does: ``"raise"``, as above; ``"warn"`` logs and counts it.
        commit_timeout: Seconds that a rank whose part is durable waits for the others before the save has failed.
        storage_options: Passed to fsspec for paths that are URLs: endpoint, credentials and so on.
        listeners: Called with every event (:mod:`ckpt_core.events`).
        storage: Keeps all checkpoints, whatever their path. By default the path says what to use. With ``tiers``, the local tier's.
        tiers: Commit on a local disk that all ranks see, and upload from there in the background: rank 0 uploads everything, so
            that its failures are told there (:class:`ckpt_core.tiers.Tiers`).
        link_unchanged: Whether files whose tensors have not changed are linked to those of the checkpoint before, or copied by
            the store, instead of being written again (:mod:`ckpt_core._pipeline.unchanged`).

    Example:
        >>> import os, tempfile, torch
        >>> from ckpt_core import DirectoryCheckpointer, Kind, Part
        >>> path = os.path.join(tempfile.mkdtemp(), "step=1")
        >>> with DirectoryCheckpointer(strategy="async") as checkpointer:
        ...     size = checkpointer.save([Part("model", {"weight": torch.ones(2)}, Kind.REPLICATED)], path)
        >>> with DirectoryCheckpointer().load(path) as checkpoint:
        ...     checkpoint.load("model")
        {'weight': tensor([1., 1.])}
    """

    def __init__(
        self,
        *,
        ranks: RankGroup | None = None,
        strategy: Literal["sync", "async"] = "async",
        slice_replicated: bool = False,
        max_pending: int = 1,
        on_error: OnError = "raise",
        commit_timeout: float = 600.0,
        storage_options: dict[str, Any] | None = None,
        listeners: Sequence[Listener] = (),
        storage: Storage | None = None,
        tiers: Tiers | None = None,
        link_unchanged: bool = True,
    ) -> None:
        super().__init__(
            strategy=strategy,
            max_pending=max_pending,
            on_error=on_error,
            storage_options=storage_options,
            listeners=listeners,
            storage=storage,
            tiers=tiers,
            uploads=ranks is None or ranks.rank == 0,
        )
        if not commit_timeout > 0:
            raise ValueError(f"commit_timeout must be a number of seconds, not {commit_timeout}")
        self._ranks = ranks if ranks is not None else RankGroup.alone()
        self._series = SaveSeries(self._ranks)
        self._slice_replicated = slice_replicated
        self._commit_timeout = commit_timeout
        self._link_unchanged = link_unchanged
        self._plans = WritePlanCache()
        self._unchanged = UnchangedFiles(
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            divide_replicated=slice_replicated,
            enabled=link_unchanged,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has the same settings and no saves of its own; only one of a single process can be copied."""
        if self._ranks.world_size > 1:
            raise TypeError("a DirectoryCheckpointer of several ranks cannot be pickled: make one in each process")
        make, arguments = super().__reduce__()
        settings = {
            "slice_replicated": self._slice_replicated,
            "commit_timeout": self._commit_timeout,
            "link_unchanged": self._link_unchanged,
        }
        return functools.partial(make, **settings), arguments

    def save(
        self,
        parts: Sequence[Part],
        path: Path,
        *,
        metadata: Mapping[str, Any] | None = None,
        step: int | None = None,
        write_files: WriteFiles | AddedFiles | None = None,
        number: int | None = None,
        absent: Callable[[], Collection[int]] | None = None,
        slice_replicated: bool | None = None,
    ) -> int:
        """Save a state at ``path``; called on all ranks together, with the same path and parts of the same names.

        Args:
            parts: The state.
            path: Local path or URL of the directory. The checkpoint that is there now is replaced when, and only when, the new
                one is durable; other files in it stay.
            metadata: Plain data to keep with the checkpoint; that of rank 0 counts.
            step: Which step the state is of: ranks that name different ones are refused instead of being mixed.
            write_files: Called, on every rank, with an empty local directory: what it writes there becomes files of the
                checkpoint, under the same relative names. Or what :meth:`begin_files` returned, if they are written already.
            number: What :attr:`next_number` was on rank 0, for ranks that may have missed saves before.
            absent: Asked on rank 0, which waits for the others: those that certainly do not come, and are left out.
            slice_replicated: As for the class, in this save alone.

        Returns:
            The size in bytes: of what this rank writes (async), or of the checkpoint (sync).

        Raises:
            SerializationError: Something in ``parts`` or ``metadata`` is no plain data.
            SnapshotTornError: A tensor was changed while it was being copied.
            StorageError: The storage refused, or had refused an earlier save in the background.
            RankFailedError: Another rank is gone, is stopped, or does not save.
        """
        target = self._save_path(path)
        in_foreground = self._is_in_foreground(target)
        started = time.perf_counter()
        if self._ranks.world_size == 1:  # with several, the others would wait for this one
            self._places.raise_failure()
        if not in_foreground:
            self._writer.wait_for_turn(self._max_pending)
        waited = time.perf_counter() - started
        notify(self._listeners, SaveStarted(path=target))
        storage = self._storage_for(target)
        self._claim(storage, target)
        joint = self._series.open(target, timeout=self._commit_timeout, number=number, absent=absent)
        kept = copy.deepcopy(dict(metadata or {}))
        is_alone = functools.partial(self._claims.is_alone, os.path.dirname(target))
        beside = self._unchanged.begin(storage, target)
        rank_save = RankSave(
            storage,
            target,
            joint,
            metadata=kept,
            step=step,
            scratch=self._scratch,
            is_alone=is_alone,
            beside=beside,
            before_commit=functools.partial(self._note_commits_once, storage, target),
        )

        def plan() -> Sequence[PartContent]:
            if self._ranks.rank == 0:
                self._remove_orphans_once(storage, target)
            planned = plan_parts(
                parts,
                rank=self._ranks.rank,
                world_size=self._ranks.world_size,
                slice_replicated=self._slice_replicated if slice_replicated is None else slice_replicated,
                cache=self._plans,
            )
            return beside.divide(planned)

        def add_files() -> AddedFiles | None:
            if write_files is None or isinstance(write_files, AddedFiles):
                return write_files
            return AddedFiles.collect(storage, target, write_files)

        outer, self._saving_thread = self._saving_thread, threading.get_ident()
        try:
            if in_foreground:
                live = LiveState(self._ranks, target, plan, add_files)
                return self._save_now(rank_save, live, target, started)
            staged = StagedState(self._ranks, self._buffers)
            size = self._save_later(rank_save, staged, plan, add_files, target)
            stall = time.perf_counter() - started
            event = SnapshotTaken(path=target, bytes=size, stall_seconds=stall, waited_seconds=waited)
            notify(self._listeners, event)
            return size
        except BaseException as error:
            notify(self._listeners, SaveFailed(path=target, error=str(error)))
            raise
        finally:
            self._saving_thread = outer

    @property
    def next_number(self) -> int:
        """Number of the next save, counted on this rank."""
        return self._series.opened + 1

    def begin_files(self, path: Path) -> AddedFiles:
        """Return an empty local directory for files of a checkpoint, to be given to :meth:`save`, or closed."""
        target = self._save_path(path)
        return AddedFiles(self._storage_for(target), target)

    def _is_in_foreground(self, path: str) -> bool:
        if self._saving_thread == threading.get_ident():
            # A signal handler saves while this thread is inside a save, whose buffer and turn it cannot wait for.
            if self._ranks.world_size > 1:
                raise CheckpointError(
                    "save was called inside another save, which the other ranks may not be doing",
                    path=path,
                    remedy="let the signal handler only set a flag, and save after the next step",
                )
            return True
        return self.strategy == "sync"

    def _save_now(self, rank_save: RankSave, live: LiveState, path: str, started: float) -> int:
        try:
            size = rank_save.run(live)
        finally:
            live.close()
        stall = time.perf_counter() - started
        notify(self._listeners, SnapshotTaken(path=path, bytes=size, stall_seconds=stall))
        notify(self._listeners, SaveCommitted(path=path, bytes=size, background_seconds=0.0))
        return size

    def _save_later(
        self,
        rank_save: RankSave,
        staged: StagedState,
        plan: Callable[[], Sequence[PartContent]],
        add_files: Callable[[], AddedFiles | None],
        path: str,
    ) -> int:
        running = False
        try:
            # Writing begins while the state is still being copied; the report waits for the seal.
            write = functools.partial(_write_staged, rank_save, staged)
            running = self._writer.save(path, write, staged_at=lambda: staged.sealed_at)
            size = staged.take(plan(), path=path)
            staged.add(add_files())
            staged.seal()
        except (
            BaseException
        ) as error:  # Ctrl-C too: the others must not wait for this rank, nor the next save for memory
            staged.give_up(given_up(error, path))
            if self._ranks.world_size == 1:
                self._writer.run_queued()
                self._writer.wait(path)  # until nothing is left of it
            raise
        finally:
            if not running:
                self._writer.run_queued()
        if staged.not_copied is not None:
            self._advice.no_copy(staged.not_copied)
            self._writer.wait(path)  # until the live tensors are written
        return size

    def copy(self, source: Path, target: Path) -> None:
        """Save the checkpoint ``source``, which exists or whose save is under way, at ``target`` too; called on all ranks.

        Costs nothing on a local disk (hard links) and no upload on a store. The two do not depend on each other.

        Raises:
            CheckpointError: There is no ``source``, or an earlier save failed in the background.
        """
        original, path = self.known_as(source), self._save_path(target)
        started = time.perf_counter()
        if self.strategy == "async":
            self._writer.wait_for_turn(self._max_pending + 1)  # it needs no memory, so it need not wait for the save
        notify(self._listeners, SaveStarted(path=path))
        storage = self._storage_for(path)
        joint = self._series.open(path, timeout=self._commit_timeout)
        self._claim(storage, path)
        is_alone = functools.partial(self._claims.is_alone, os.path.dirname(path))

        def act() -> int:
            origin, there = self._places.origin_of(original, storage)
            return copy_directory(storage, there, path, joint, is_alone=is_alone, origin=origin)

        if self.strategy == "sync":
            try:
                size = act()
            except BaseException as error:
                notify(self._listeners, SaveFailed(path=path, error=str(error)))
                raise
            stall = time.perf_counter() - started
            notify(self._listeners, SnapshotTaken(path=path, bytes=size, stall_seconds=stall))
            notify(self._listeners, SaveCommitted(path=path, bytes=size, background_seconds=0.0))
            return
        notify(self._listeners, SnapshotTaken(path=path, bytes=0, stall_seconds=time.perf_counter() - started))
        if not self._writer.save(path, act):
            self._writer.run_queued()

    def load(self, path: Path) -> DirectoryCheckpoint:
        """Open a checkpoint, waiting for it if its save is under way. Every rank opens it for itself.

        Args:
            path: Local path or URL.

        Returns:
            The open checkpoint; every byte that is read from it is verified.

        Raises:
            CheckpointError: See the tree in :mod:`ckpt_core.errors`.
        """
        source = self.known_as(path)
        self._writer.wait(source)
        self._places.resume(source)
        storage = self._storage_for(source)
        if not is_remote(source) and not storage.exists(source):
            storage.remove_orphans(
                os.path.dirname(source)
            )  # which mends what a crash in the middle of a replacement left
        opened = DirectoryCheckpoint(source, self._places.to_read(source), self._ranks)
        self._unchanged.loaded(storage, source)
        return opened

    @staticmethod
    def _committed_by(path: str) -> str:
        return f"{path}/{MANIFEST_NAME}"  # a killed upload leaves other files there

    def _delete(self, storage: Storage, path: str) -> None:
        if self._ranks.rank != 0:
            return
        names = names_of_files(storage, path) if is_remote(path) else ()
        storage.remove_directory(path, names=names)

    def _claim(self, storage: Storage, path: str) -> None:
        if self._ranks.rank == 0:  # which commits
            self._claims.hold(os.path.dirname(path), storage.claim)


def _write_staged(rank_save: RankSave, staged: StagedState) -> int:
    try:
        return rank_save.run(staged)
    except CheckpointError as error:
        if staged.is_given_up:
            raise ImageAbandonedError("the save was given up") from error
        raise
    finally:
        staged.close()
