"""Save and load checkpoints that are directories, written by one rank or by many ranks together."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch

from ckpt_core._commit.rank_group import RankGroup
from ckpt_core._commit.save_outcome import JointSave, SaveSeries
from ckpt_core._layouts.directory.loading import DirectoryReader, Placement
from ckpt_core._layouts.directory.matching import LocalView
from ckpt_core._pipeline.directory_commit import copy_directory, has_suffix, names_of_files
from ckpt_core._pipeline.directory_save import AddedFiles, DirectorySave, DirectoryState, WriteFiles
from ckpt_core._pipeline.jobs import OnError
from ckpt_core._pipeline.staging import given_up
from ckpt_core._pipeline.unchanged import IncrementalSave, UnchangedFiles
from ckpt_core._plan import LocalTensor, WritePlanCache, local_tensor
from ckpt_core.checkpointer import CheckpointerBase
from ckpt_core.errors import CheckpointError
from ckpt_core.events import Listener
from ckpt_core.option_checks import check_options, check_seconds, check_switch, instance_of, or_none
from ckpt_core.paths import StrPath
from ckpt_core.process.threads import do_uninterrupted
from ckpt_core.state.kinds import Kind, Part
from ckpt_core.storage import MANIFEST_NAME, Storage, is_remote
from ckpt_core.tiers import DAMAGE, TieredStorage, Tiers

__all__ = ["AddedFiles", "DirectoryCheckpoint", "DirectoryCheckpointer", "Kind", "Part"]

Result = TypeVar("Result")


class DirectoryCheckpoint(DirectoryReader):
    """A committed directory checkpoint, open for reading on one rank; with two tiers, the nearest intact copy.

    Damage inside a tensor is noticed when its bytes are read. The whole request is then repeated from the remote tier,
    if the copy there is of the same save. Use it as a context manager, or call :meth:`close`.

    Args:
        path: The checkpoint's directory or URL.
        storage: The storage that holds it.
        ranks: The ranks of the run that reads it.
        weights_only: As for ``torch.load``, for objects that are not plain data; None means True.

    Attributes:
        path: The directory that is read; with two tiers, its path in the tier that is used.
        metadata: The metadata passed to the save.
        world_size: Number of ranks that wrote it.
        save_id: The id of the save.
        stamp: Its commit time and step, as recorded in it.
        files: Size in bytes of each file except the manifest.
        size: Bytes of all files together.

    Raises:
        CheckpointNotFoundError: There is no manifest: no checkpoint was ever committed there.
        CheckpointFormatError: Another program or a newer version wrote it.
        CheckpointCorruptedError: The manifest is damaged or invalid.
    """

    def __init__(self, path: str, storage: Storage, ranks: RankGroup, *, weights_only: bool | None = None) -> None:
        self._name, self._ranks = path, ranks
        self._weights_only = weights_only
        self._tiers = storage if isinstance(storage, TieredStorage) else None
        self._identity = None if self._tiers is None else self._tiers.local_identity(path)
        storage.nearest(path, self._open)

    def _open(self, storage: Storage, path: str) -> None:
        super().__init__(path, storage, weights_only=self._weights_only)
        self._is_local = self._tiers is not None and storage is self._tiers.local
        self.__dict__.pop("parts", None)  # cached from the copy in the other tier

    def load(
        self,
        part: str,
        *,
        into: Any = None,
        local: LocalView | None = None,
        rank: int | None = None,
        map_location: Placement = None,
        strict: bool = True,
    ) -> Any:
        """Return a part of the state; see :meth:`ckpt_core._layouts.directory.loading.DirectoryReader.load`.

        ``into`` may hold distributed tensors; only this rank's pieces of them are read. ``rank`` defaults to the rank
        of this process.
        """
        read = functools.partial(
            super().load,
            part,
            into=into,
            local=self._local if local is None else local,
            rank=self._ranks.rank if rank is None else rank,
            map_location=map_location,
            strict=strict,
        )
        return self._from_whole_copy(read)

    def read_file(self, name: str) -> bytes:
        """Return the verified bytes of a file that was added to the checkpoint by ``write_files`` of the save.

        Args:
            name: Its path relative to the checkpoint's directory.

        Raises:
            CheckpointNotFoundError: The checkpoint has no such file.
            CheckpointCorruptedError: The file is missing, or a byte differs.
        """
        return self._from_whole_copy(functools.partial(super().read_file, name))

    def verify(self) -> None:
        """Compare every byte with its digest, and check that every element of every tensor is there once.

        Raises:
            CheckpointCorruptedError: A file is missing, truncated or from another save, or a byte differs. The error
                names the file and, if possible, the tensor.
        """
        self._from_whole_copy(super().verify)

    def _local(self, key: str, tensor: torch.Tensor) -> LocalTensor:
        return local_tensor(tensor, key=key, rank=self._ranks.rank, world_size=self._ranks.world_size, replicated=True)

    def _from_whole_copy(self, read: Callable[[], Result]) -> Result:
        try:
            return read()
        except DAMAGE as error:
            if not self._change_over(error):
                raise
        return read()

    def _change_over(self, error: CheckpointError) -> bool:
        """Open the copy in the remote tier in place of a damaged local one; return whether it is of the same save."""
        tiers, save_id = self._tiers, self.save_id
        if tiers is None or not self._is_local or self._identity is None:
            return False
        if not tiers.can_replace(self._name, self._identity, error):
            return False
        self.close()
        self._open(tiers.remote, tiers.tiers.remote_path(self._name))
        return self.save_id == save_id  # otherwise parts of two saves would be mixed


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "ranks": or_none(instance_of(RankGroup, "ckpt_core.RankGroup")),
    "commit_timeout": check_seconds,
    "slice_replicated": check_switch,
    "link_unchanged": check_switch,
}


class DirectoryCheckpointer(CheckpointerBase):
    """Saves each state as a directory of safetensors files, durable and verified; each rank writes its part.

    Call :meth:`save` and :meth:`copy` on all ranks together. They use no collective: the ranks report to rank 0 in the
    background, and rank 0 commits. If one rank fails, the save fails on all of them: the next :meth:`save`,
    :meth:`wait` or :meth:`close` raises the same class of error, and an earlier checkpoint at the path is untouched.
    If one rank raises in the call itself (because something cannot be saved), the other ranks raise that error in
    their next :meth:`save`, after it has begun; that next save is then pending on all ranks.

    Args:
        ranks: The ranks that save together; by default, only this process.
        strategy: When :meth:`save` returns. ``"sync"``: when the checkpoint is durable; needs 112 MiB of extra memory
            on each rank. ``"async"``: when this rank's part is copied; needs memory for ``max_pending`` such parts.
        slice_replicated: Whether each rank writes a slice of the replicated state. Otherwise rank 0 writes all of it,
            to files that other programs can read as they are.
        max_pending: How many saves may be pending before the next one waits (async only).
        on_error: What to do when a background save fails. ``"raise"``: raise it as above. ``"warn"``: log and count it.
        commit_timeout: How many seconds a rank whose part is durable waits for the other ranks before the save fails.
        storage_options: Passed to fsspec for paths that are URLs: endpoint, credentials and so on.
        listeners: Called with every event (:mod:`ckpt_core.events`).
        storage: Use this storage for all checkpoints, whatever their path. By default, the path decides. With
            ``tiers``, it is the storage of the local tier.
        tiers: Commit on a local disk that all ranks see, and upload from there in the background. Rank 0 uploads
            everything, so upload failures are raised there (:class:`ckpt_core.tiers.Tiers`).
        link_unchanged: Whether files whose tensors have not changed are linked to the previous checkpoint's, or copied
            by the store, instead of being written again (:mod:`ckpt_core._pipeline.unchanged`).
        overlap: As for :class:`~ckpt_core.Checkpointer`.
        max_host_bytes: As for :class:`~ckpt_core.Checkpointer`.

    Examples:
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
        overlap: bool = False,
        max_host_bytes: int | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "ranks", "__class__")}
        check_options(_CHECKS, locals())
        super().__init__(
            strategy=strategy,
            max_pending=max_pending,
            on_error=on_error,
            storage_options=storage_options,
            listeners=listeners,
            storage=storage,
            tiers=tiers,
            uploads=ranks is None or ranks.rank == 0,
            overlap=overlap,
            max_host_bytes=max_host_bytes,
        )
        self._made_with = given
        self._ranks = ranks if ranks is not None else RankGroup.alone()
        self._series = SaveSeries(self._ranks)
        self._slice_replicated = slice_replicated
        self._commit_timeout = commit_timeout
        self._plans = WritePlanCache()
        self._unchanged = UnchangedFiles(
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            divide_replicated=slice_replicated,
            enabled=link_unchanged,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Give copies the same settings and no pending saves; refuse a checkpointer of several ranks."""
        if self._ranks.world_size > 1:
            raise TypeError("a DirectoryCheckpointer of several ranks cannot be pickled: make one in each process")
        return super().__reduce__()

    def _bytes_of_this_rank(self, tensors: Iterable[torch.Tensor]) -> int:
        parts = self._ranks.world_size if self._slice_replicated else 1
        whole = 0 if self._ranks.rank and parts == 1 else 1
        return sum(
            tensor.to_local().nbytes if hasattr(tensor, "to_local") else whole * tensor.nbytes // parts
            for tensor in tensors
        )

    def save(
        self,
        parts: Sequence[Part],
        path: StrPath,
        *,
        metadata: Mapping[str, Any] | None = None,
        step: int | None = None,
        write_files: WriteFiles | AddedFiles | None = None,
        number: int | None = None,
        absent: Callable[[], Collection[int]] | None = None,
        slice_replicated: bool | None = None,
    ) -> int:
        """Save a state at ``path``. Call it on all ranks together, with the same path and part names.

        Args:
            parts: The state.
            path: Local path or URL of the directory. An existing checkpoint there is replaced only once the new one
                is durable; other files in the directory stay.
            metadata: Plain data to keep with the checkpoint; only that of rank 0 is used.
            step: The training step of the state. If ranks give different steps, the save is refused.
            write_files: Called on every rank with an empty local directory; what it writes there is added to the
                checkpoint, under the same relative names. Or :meth:`begin_files`' return value, already filled.
            number: The value of :attr:`next_number` on rank 0, for ranks that may have missed earlier saves.
            absent: Called on rank 0 while it waits for the other ranks; returns the ranks that will certainly not
                take part, which are left out.
            slice_replicated: Overrides the option of the class for this save.

        Returns:
            The size in bytes: of this rank's part (async), or of the checkpoint (sync).

        Raises:
            SerializationError: Something in ``parts`` or ``metadata`` is not plain data.
            SnapshotTornError: A tensor was changed while it was being copied.
            StorageError: The storage refused this save, or an earlier one in the background.
            RankFailedError: Another rank is gone or stopped, or does not call save.
        """
        target = self._name_of(path)
        if self._pipeline.is_inside_a_save and self._ranks.world_size > 1:
            raise CheckpointError(
                "save was called inside another save, which the other ranks may not be doing",
                path=target,
                remedy="let the signal handler only set a flag, and save after the next step",
            )
        started = time.perf_counter()
        if (
            self._ranks.world_size == 1 and self._uploader is not None
        ):  # with several ranks, the others would wait for this one
            self._uploader.queue.raise_failure()
        slices = self._slice_replicated if slice_replicated is None else slice_replicated

        def begin() -> IncrementalSave:
            self._save_path(path)  # if outside the tiers, raises here, where the failure is announced to all ranks
            return self._unchanged.begin(self._claimed(target), target)

        @functools.cache
        def share() -> DirectorySave:
            return DirectorySave(
                DirectoryState(parts, metadata or {}, step, write_files, slices),
                begin,
                target,
                self._pipeline,
                JointSave(self._series, target, timeout=self._commit_timeout, of=step, number=number, absent=absent),
                self._plans,
            )

        has_waited = False
        try:
            if not self._pipeline.in_foreground:
                self._pipeline.queue.wait_for_turn(self._max_pending)
            has_waited = True
            waited = time.perf_counter() - started
            with self._pipeline.attempt(target):
                size = self._pipeline.save(share(), started=started, waited=waited)
        except Exception:
            raise
        except BaseException as error:  # Ctrl-C on this rank: tell the other ranks, which would wait for its part
            left_out = functools.partial(self._pipeline.leave_out, share(), error, waited=has_waited)
            do_uninterrupted(functools.partial(left_out, limit=self._max_pending))
            raise
        self._pipeline.queue.raise_failure_of_other_rank(self._max_pending)
        return size

    def refuse(self, path: StrPath, error: Exception, **about: Any) -> None:
        """Tell the other ranks, which call :meth:`save`, why this rank cannot; the caller then raises ``error`` here.

        Args:
            path: As for :meth:`save`.
            error: Why this rank cannot save.
            about: ``number`` and ``absent``, as for :meth:`save`.
        """
        if self._ranks.world_size > 1:

            def fail(_: str) -> None:
                raise error

            self.save([], path, write_files=fail, **about)

    def _name_of(self, path: StrPath) -> str:
        """Return the path at which a checkpoint is saved; if invalid with several ranks, all of them fail later."""
        try:
            return self._save_path(path)
        except Exception:
            if self._ranks.world_size == 1:
                raise
            return str(path)

    def wait_for_no_dead(self, find: Callable[[], Collection[int]]) -> None:
        """Make saves fail instead of waiting for a rank that died before it did its part; ``find`` returns the dead."""
        self._series.find_dead = find

    @property
    def next_number(self) -> int:
        """Number of the next save, counted on this rank."""
        return self._series.opened + 1

    def begin_files(self, path: StrPath) -> AddedFiles:
        """Return an empty local directory for extra files of a checkpoint; pass it to :meth:`save`, or close it.

        Args:
            path: Local path or URL at which the checkpoint will be saved.
        """
        target = self._save_path(path)
        return AddedFiles(self._storage_for(target), target)

    def copy(self, source: StrPath, target: StrPath) -> None:
        """Copy the checkpoint ``source``, whose save may still be pending, to ``target``. Call it on all ranks.

        Costs nothing on a local disk (hard links) and no upload on an object store. Deleting or replacing one of the
        two does not affect the other.

        Raises:
            CheckpointError: There is no ``source``, or an earlier save failed in the background.
        """
        original, path = self.known_as(source), self._name_of(target)
        started = time.perf_counter()
        open_joint = functools.partial(JointSave, self._series, path, timeout=self._commit_timeout, of=original)
        if self.strategy == "async":
            limit = self._max_pending + 1  # a copy needs no buffer, so it does not wait for that of a pending save
            try:
                self._pipeline.queue.wait_for_turn(limit)
            except Exception:
                raise
            except BaseException as error:  # Ctrl-C on this rank: tell the other ranks, which would wait for it
                nothing = DirectoryState([], {}, None, None, slice_replicated=False)
                begin = functools.partial(self._unchanged.begin, self._storage_for(path), path)
                share = DirectorySave(nothing, begin, path, self._pipeline, open_joint(), self._plans)
                do_uninterrupted(functools.partial(self._pipeline.leave_out, share, error, waited=False, limit=limit))
                raise
        with self._pipeline.attempt(path):
            joint = open_joint()

            def act(refuse_older: Callable[[], None]) -> int:
                try:
                    self._save_path(target)
                    storage = self._claimed(path)
                except Exception as error:  # noqa: BLE001 - the other ranks must not wait for this one
                    return joint.refuse(given_up(error, path))

                def find() -> tuple[Storage, str]:
                    refuse_older()
                    return self._origin_of(original, storage)

                is_alone = functools.partial(self._pipeline.directories.is_alone, path)
                return copy_directory(storage, find, path, joint, is_alone=is_alone)

            self._pipeline.copy(original, path, act, started=started)
        self._pipeline.queue.raise_failure_of_other_rank(self._max_pending + 1)

    def _origin_of(self, path: str, storage: Storage) -> tuple[Storage, str]:
        """Return the storage to copy a checkpoint from (``storage`` itself or the remote tier), and its path there."""
        if self._tiered is None or not self._tiered.tiers.covers(path) or storage.exists(path):
            return storage, path
        return self._tiered.remote, self._tiered.tiers.remote_path(path)

    def load(self, path: StrPath, *, weights_only: bool | None = None) -> DirectoryCheckpoint:
        """Open a checkpoint for reading, after waiting for a pending save of it. Each rank opens it independently.

        Args:
            path: Local path or URL.
            weights_only: As for ``torch.load``, of objects in it that are not plain data; None means True. False runs
                code from the checkpoint.

        Returns:
            The open checkpoint; every byte that is read from it is verified.

        Raises:
            CheckpointError: See the tree in :mod:`ckpt_core.errors`.
        """
        source = self._wait_to_read(path)
        storage = self._storage_for(source)
        if not is_remote(source) and not storage.exists(source):
            # A crash while the checkpoint was being replaced may have left it under a temporary name.
            storage.remove_orphans(os.path.dirname(source))
        opened = DirectoryCheckpoint(source, self._to_read(source), self._ranks, weights_only=weights_only)
        self._unchanged.loaded(storage, source)
        return opened

    @staticmethod
    def _committed_by(path: str) -> str:
        return f"{path}/{MANIFEST_NAME}"  # not the directory: a killed upload leaves one without a manifest

    def _delete(self, storage: Storage, path: str) -> None:
        if self._ranks.rank != 0:
            return
        names = names_of_files(storage, path) if is_remote(path) else set()
        if not self._pipeline.directories.is_alone(path):
            # Another job may be writing its files under the names without a suffix.
            names = {name for name in names if has_suffix(name)}
        storage.remove_directory(path, names=names)

    def _claimed(self, path: str) -> Storage:
        """Return the storage of a checkpoint that this rank saves; rank 0 claims its directory first."""
        storage = self._storage_for(path)
        if self._ranks.rank == 0:  # rank 0 commits
            self._pipeline.directories.claim(storage, path)
        return storage
