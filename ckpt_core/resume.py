"""Choose the checkpoint from which an unattended run resumes: the newest that verifies and does not crash the run.

A run may crash after each resume from its newest checkpoint: the weights are not finite, the next data cannot be read,
or there is not enough memory. A scheduler would restart it for ever. So a small file next to the checkpoints counts how
often in a row a run was resumed from a checkpoint and ended before it had saved a newer one. After the third time, an
older checkpoint is tried first.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import logging
import os
from collections.abc import Iterable
from typing import Any

from ckpt_core.catalog import RECORD_OF_RESUMES, Catalog, CheckpointInfo
from ckpt_core.errors import CheckpointError, CheckpointNotFoundError
from ckpt_core.events import size_in_words
from ckpt_core.paths import StrPath, is_remote
from ckpt_core.storage import local_path, storage_for
from ckpt_core.tiers import MemoryTier, Tiers

__all__ = ["ResumeAttempts", "ResumePoint", "folder_of_run", "newest_to_resume", "only_checkpoints"]

logger = logging.getLogger(__name__)

_VERSION = 1


def folder_of_run() -> str:
    """Return the default folder for the checkpoints of a run.

    Each task of a SLURM array has its own folder, which stays the same when the array is submitted again.

    Example:
        >>> folder_of_run()
        'checkpoints'
    """
    task = os.environ.get("SLURM_ARRAY_TASK_ID", "")
    return f"checkpoints/task_{task}" if task.isdigit() else "checkpoints"


@dataclasses.dataclass(frozen=True)
class ResumePoint:
    """Where a run continues.

    Attributes:
        path: The checkpoint, a local path or URL.
        step: Optimizer steps taken; None if the checkpoint does not record it.
        epoch: The epoch in which it was saved, counted from 0; None if not recorded.
        batch: Batches of this epoch that each rank has used; None if not recorded.
    """

    path: str
    step: int | None = None
    epoch: int | None = None
    batch: int | None = None

    def __str__(self) -> str:
        place = self._place("step", "epoch", "batch")
        return f"{self.path} ({place})" if place else self.path

    def _place(self, *names: str) -> str:
        return ", ".join(f"{name} {value}" for name in names if (value := getattr(self, name)) is not None)

    def in_words(
        self, outcome: str, nbytes: int | None = None, seconds: float = 0.0, *, is_verified: bool = True
    ) -> str:
        """Return the line that a run prints when it resumes from this point.

        Args:
            outcome: Whether the resume is exact, or how it differs.
            nbytes: Number of bytes read; None if unknown.
            seconds: How long reading took.
            is_verified: Whether every byte was compared with its digest.

        Examples:
            >>> ResumePoint("run/step=5.ckpt", 5, 0, 5).in_words("exact", 2_000_000, 0.25)
            'resuming from run/step=5.ckpt: epoch 0, batch 5, step 5; 2.0 MB read and verified in 0.2 s; exact'
        """
        place = self._place("epoch", "batch", "step")
        words = [f"resuming from {self.path}: {place}" if place else f"resuming from {self.path}"]
        if nbytes is not None:
            checked = " and verified" if is_verified else ", not verified (it has no digests)"
            words.append(f"{size_in_words(nbytes)} read{checked} in {seconds:.1f} s")
        return "; ".join([*words, outcome])


class ResumeAttempts:
    """Counts how often in a row runs resumed from the checkpoints of a directory without saving a newer one.

    All ranks may call :meth:`in_order`; after all have, one of them calls :meth:`begin` and later :meth:`end`. If the
    record cannot be read or written, a warning is logged and nothing is counted: a broken record never stops a run.

    Args:
        root: The directory of the checkpoints, or its URL.
        limit: After how many attempts a checkpoint is skipped; None: never.
        storage_options: Passed to fsspec for URLs.
        tiers: If ``root`` is in one of the tiers, the record is kept in both: other machines see only the remote one.

    Raises:
        ValueError: ``limit`` is not at least 1.
    """

    def __init__(
        self,
        root: StrPath,
        limit: int | None = 3,
        *,
        storage_options: dict[str, Any] | None = None,
        tiers: Tiers | None = None,
    ) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"the number of attempts must be at least 1, not {limit}")
        directory = local_path(root)
        if not is_remote(directory):
            directory = os.path.abspath(directory)  # the program may change its working directory
        self._records = [(storage_for(directory, storage_options), _record_in(directory))]
        if tiers is not None and tiers.covers(directory):
            local, remote = tiers.local_path(directory), tiers.remote_path(directory)
            self._records = [
                (storage_for(local), _record_in(local)),
                (tiers.storage(storage_options), _record_in(remote)),
            ]
        self._limit = limit
        self._stepped_over: list[CheckpointInfo] = []
        self._begun: set[str] = set()

    def in_order(self, infos: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
        """Move checkpoints that the run crashed on too often to the end of the list; warn about skipped ones."""
        infos, counts = list(infos), self._read()
        counts = {key: count - (key in self._begun) for key, count in counts.items()}  # this start has not crashed yet
        last = [info for info in infos if self._limit is not None and counts.get(_key(info), 0) >= self._limit]
        newly = [info for info in last if info not in self._stepped_over]
        self._stepped_over += newly
        newer = itertools.takewhile(lambda info: info in last, infos)  # only those that would have been tried first
        for info in [info for info in newer if info in newly]:
            logger.warning(
                "skipped the checkpoint %s: the run was resumed from it %d times in a row and ended each time "
                "before it had saved another one. To use it anyway, pass its path or delete %s",
                info.path,
                counts[_key(info)],
                " and ".join(path for _, path in self._records),
            )
        return [info for info in infos if info not in last] + last

    @property
    def stepped_over(self) -> list[str]:
        """The paths of the checkpoints that :meth:`in_order` has put last."""
        return [info.path for info in self._stepped_over]

    def begin(self, info: CheckpointInfo) -> None:
        """Record, once for this object, that a run is being resumed from a checkpoint."""
        if _key(info) in self._begun:  # find_executable_batch_size loads for each batch size
            return
        self._begun.add(_key(info))
        counts = self._read()
        keys = {_key(each) for each in [*self._stepped_over, info]}
        counts = {key: count for key, count in counts.items() if key in keys}  # drop the counts of earlier crashes
        counts[_key(info)] = counts.get(_key(info), 0) + 1
        self._write(counts)

    def end(self) -> None:
        """Reset the record: the run ended normally or on request, so the checkpoint that it resumed from is sound."""
        self._begun.clear()
        for storage, path in self._records:
            try:
                if storage.exists(path):
                    storage.remove(path)
            except CheckpointError as error:
                logger.warning("%s cannot be deleted, so this end counts as a crash: %s", path, error)

    def _read(self) -> dict[str, int]:
        counts: collections.Counter[str] = collections.Counter()
        for storage, path in self._records:
            try:
                with storage.open(path) as reader:
                    record = json.loads(reader.read_whole())
                counts |= collections.Counter({str(key): int(count) for key, count in record["attempts"].items()})
            except CheckpointNotFoundError:
                continue
            except (CheckpointError, ValueError, KeyError, TypeError, AttributeError) as error:
                logger.warning("%s cannot be read, so no checkpoint is skipped because of it: %s", path, error)
        return dict(counts)

    def _write(self, counts: dict[str, int]) -> None:
        data = json.dumps({"version": _VERSION, "attempts": counts}).encode()
        for storage, path in self._records:
            try:
                storage.write_whole(path, data)
            except CheckpointError as error:
                logger.warning("%s cannot be written, so crashes are not counted there: %s", path, error)


def _record_in(directory: str) -> str:
    return f"{directory.rstrip('/')}/{RECORD_OF_RESUMES}"


def _key(info: CheckpointInfo) -> str:
    # Copies, such as "last.ckpt", hold the same state and share a key; a later save under the same name does not.
    return info.name if info.committed is None else f"{info.step}@{info.committed!r}"


def newest_to_resume(
    root: StrPath,
    *,
    attempts: int | None = 3,
    storage_options: dict[str, Any] | None = None,
    tiers: Tiers | None = None,
    memory: MemoryTier | None = None,
) -> ResumePoint | None:
    """Return where your own training loop continues, or None if there is nothing to resume. Counts as an attempt.

    With several ranks, call it on one rank and pass the result to the others.

    Args:
        root: The directory of the checkpoints, or its URL. Directories and ``*.ckpt`` files count.
        attempts: After how many attempts in a row from one checkpoint, without saving a newer one, an older one is
            tried first; None: never.
        storage_options: Passed to fsspec for URLs.
        tiers: Look in both tiers.
        memory: Also look at the run's snapshots in memory.

    Raises:
        CheckpointCorruptedError: There are checkpoints, but none of them verifies.
        StorageError: The directory cannot be read, or the run could not save there.

    Examples:
        >>> newest_to_resume("no/such/directory") is None
        True
    """
    counted = ResumeAttempts(root, attempts, storage_options=storage_options, tiers=tiers)
    found = None if memory is None else memory.found()
    catalog = Catalog(root, suffix="", storage_options=storage_options, tiers=tiers, memory=found)
    info = catalog.newest_verified(order=lambda infos: counted.in_order(only_checkpoints(infos)))
    catalog.refuse_unwritable()
    if info is None:
        return None
    counted.begin(info)
    return ResumePoint(info.path, info.step)


def only_checkpoints(infos: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    """Return only directories and ``*.ckpt`` files; a run's directory may also hold other files.

    Args:
        infos: From a :class:`~ckpt_core.Catalog` of all names (``suffix=""``).
    """
    return [info for info in infos if info.is_directory or info.path.endswith(".ckpt")]
