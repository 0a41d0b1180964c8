"""Catalog of the checkpoints under one directory: list and order them, and find the newest one that verifies."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ckpt_core._layouts.directory.leftovers import has_digests, remove_leftovers
from ckpt_core._pipeline.loading import peek, stamp_of, verify
from ckpt_core.commit_time import NO_STAMP, Stamp
from ckpt_core.errors import (
    CheckpointCorruptedError,
    CheckpointError,
    CheckpointNotFoundError,
    StorageError,
    UnsafeCheckpointError,
    none_verifies,
)
from ckpt_core.events import CheckpointSkipped, Listener, notify
from ckpt_core.option_checks import (
    check_functions,
    check_mapping,
    check_options,
    check_path,
    check_text,
    instance_of,
    or_none,
)
from ckpt_core.paths import StrPath
from ckpt_core.pins import is_pin, pin_path
from ckpt_core.process.awaited_paths import wait_for_saves
from ckpt_core.process.threads import run_parallel
from ckpt_core.storage import (
    MANIFEST_NAME,
    Storage,
    is_remote,
    local_path,
    refuse_unwritable,
    refuse_wrong_directory,
    storage_for,
)
from ckpt_core.tiers import LEDGER_NAME, TieredStorage, Tiers, read_ledger

__all__ = [
    "RECORD_OF_RESUMES",
    "Catalog",
    "CheckpointInfo",
    "first_usable",
    "newest_first",
]

logger = logging.getLogger(__name__)


RECORD_OF_RESUMES = ".ckpt-resumes.json"  # see ckpt_core.resume
_RECORDS = (LEDGER_NAME, RECORD_OF_RESUMES)  # files next to the checkpoints that are not checkpoints
_READERS = 8  # threads
_LOOKS = 3  # maximum look-ups, if a running job deletes listed checkpoints: it may have saved newer ones meanwhile
_STEP_IN_NAME = re.compile(r"(?:step|checkpoint)[=_-]?([0-9]+)")
_NUMBER = re.compile(r"[0-9]+")


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint in a catalog.

    Attributes:
        path: Local path or URL.
        size: Length in bytes; for a directory, of all files directly in it.
        modified: The file system's date, Unix time in seconds; unreliable for copied files.
        is_directory: Whether it is a directory and not one file.
        committed: The commit time that its manifest records: Unix time in seconds, later than that of every checkpoint
            that its run had seen. None if it records none, because an older version or another program wrote it.
        step: The training step that its manifest records; None if it records none.
        is_readable: Whether its manifest could be read; if not, it is damaged, or this user may not read it.
        is_pinned: Whether it is pinned, so that no retention deletes it (``ckpt keep``).
    """

    path: str
    size: int
    modified: float
    is_directory: bool = False
    committed: float | None = None
    step: int | None = None
    is_readable: bool = True
    is_pinned: bool = False

    @property
    def name(self) -> str:
        """The last component of the path."""
        return os.path.basename(self.path.rstrip("/"))


def newest_first(infos: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    """Return checkpoints from newest to oldest, by the commit times and steps that they record.

    The later commit is the newer one, even if its step is lower, as in a run that went back to an older checkpoint on
    purpose. Checkpoints without a recorded commit time are ordered by step, also relative to the others; those without
    a step, by the numbers in names that are otherwise equal. The file system's date decides last.
    """
    said: list[CheckpointInfo] = []
    stepped: list[CheckpointInfo] = []
    series: dict[str, list[CheckpointInfo]] = {}
    for info in infos:
        if info.committed is not None:
            said.append(info)
        elif _step_of(info) is not None:
            stepped.append(info)
        else:
            series.setdefault(_series_of(info), []).append(info)
    said.sort(key=lambda info: (info.committed or 0.0, _step_of(info) or 0, *_by_name(info)), reverse=True)
    stepped.sort(key=lambda info: (_step_of(info) or 0, info.modified, *_by_name(info)), reverse=True)
    ordered = _merged(said, stepped)
    for alike in series.values():
        ordered = _merged(ordered, sorted(alike, key=_by_name, reverse=True))
    return ordered


def _step_of(info: CheckpointInfo) -> int | None:
    """Return the step that a checkpoint records, or else the step in its name; None if there is neither."""
    if info.step is not None:
        return info.step
    found = _STEP_IN_NAME.findall(info.name)
    return int(found[-1]) if found else None


def _numbers(info: CheckpointInfo) -> list[int]:
    return [int(digits) for digits in _NUMBER.findall(info.name)]


def _series_of(info: CheckpointInfo) -> str:
    return _NUMBER.sub("#", info.name)


def _by_name(info: CheckpointInfo) -> tuple[bool, list[int], str]:
    # A name without numbers, such as "last", is the newest of its series.
    numbers = _numbers(info)
    return not numbers, numbers, info.path


def _merged(first: Sequence[CheckpointInfo], second: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
    """Merge two sorted sequences; each keeps its order."""
    result, left, right = [], deque(first), deque(second)
    while left and right:
        result.append((left if _is_newer(left[0], right[0]) else right).popleft())
    return [*result, *left, *right]


def _is_newer(info: CheckpointInfo, other: CheckpointInfo) -> bool:
    step, others = _step_of(info), _step_of(other)
    if step is not None and others is not None and step != others:
        return step > others
    if _series_of(info) == _series_of(other):
        return _by_name(info) >= _by_name(other)
    # Damaged checkpoints come first, so that they are noticed and reported.
    return _by_date(info) >= _by_date(other)


def _by_date(info: CheckpointInfo) -> tuple[Any, ...]:
    return not info.is_readable, info.modified, *_by_name(info)


def _disagreement(newest: CheckpointInfo, other: CheckpointInfo) -> str | None:
    """Return, for a warning, what suggests that ``other`` is newer than ``newest``; None if nothing does."""
    if newest.committed is not None and (newest.committed, newest.step) == (other.committed, other.step):
        return None  # a copy
    step, others = _step_of(newest), _step_of(other)
    if step is not None and others is not None and others > step:
        return f"it was committed later, but {other.path} is at step {others}, and it is at step {step}"
    beside = os.path.dirname(newest.path.rstrip("/")) == os.path.dirname(other.path.rstrip("/"))
    if beside and other.modified > newest.modified:  # dates of a disk and of a memory tier cannot be compared
        return f"it records the latest commit, but by file dates {other.path} is newer: was the directory copied?"
    says = step is not None or newest.committed is not None
    if says or newest.modified == other.modified or _series_of(newest) == _series_of(other):
        return None
    if others is not None or other.committed is not None or _numbers(other) > _numbers(newest):
        return f"only its file date is later than that of {other.path}"
    return None


def first_usable(
    root: str,
    by_age: Sequence[CheckpointInfo],
    check: Callable[[CheckpointInfo], None],
    *,
    passed_over: dict[str, CheckpointError],
    order: Callable[[list[CheckpointInfo]], list[CheckpointInfo]] = list,
    is_wanted: Callable[[CheckpointInfo], bool] = lambda info: True,
    is_gone: Callable[[CheckpointInfo, CheckpointError], bool] = lambda info, error: False,
) -> CheckpointInfo | None:
    """Walk back to the newest checkpoint that can be used; return None if there is no checkpoint.

    A warning names each checkpoint that is passed over and the one used instead. Another warning names a checkpoint
    that is newer than the chosen one by its step or file date.

    Args:
        root: Directory of the checkpoints, for error messages.
        by_age: The checkpoints, newest first.
        check: Raises if a checkpoint cannot be used.
        passed_over: Receives the error of each checkpoint that is passed over, by path.
        order: Returns the checkpoints in the order in which to try them.
        is_wanted: Returns whether a usable checkpoint is of the wanted kind.
        is_gone: Returns whether an unusable checkpoint was merely deleted in the meantime.

    Raises:
        CheckpointCorruptedError: There are checkpoints, but none can be used. The run must not start from scratch.
        UnsafeCheckpointError: Reading a checkpoint would run code from it. The user must decide, because resuming from
            an older one would lose the training since then.
    """
    ordered = order(list(by_age))
    for index, info in enumerate(ordered):
        try:
            check(info)
            if not is_wanted(info):
                continue
        except UnsafeCheckpointError as error:
            if ordered[index + 1 :]:
                error.remedy = f"{error.remedy}; to go back to an older one, name it: {ordered[index + 1].path!r}"
            raise
        except CheckpointError as error:
            if not is_gone(info, error):
                passed_over[info.path] = error
            continue
        if ordered == by_age:  # otherwise a newer checkpoint was skipped, and a warning has named it
            _warn_of_disagreement(info, ordered[index + 1 :], is_wanted)
        _warn_of_passed_over(passed_over, info.path)
        return info
    if passed_over:
        _warn_of_passed_over(passed_over, None)
        raise none_verifies(root, passed_over)
    return None


def _warn_of_disagreement(
    newest: CheckpointInfo, older: Iterable[CheckpointInfo], is_wanted: Callable[[CheckpointInfo], bool]
) -> None:
    for other in older:
        reason = _disagreement(newest, other)
        with contextlib.suppress(CheckpointError):
            if reason is not None and is_wanted(other):
                logger.warning("using %s as the newest checkpoint: %s", newest.path, reason)
                return


def _warn_of_passed_over(problems: Mapping[str, CheckpointError], taken: str | None) -> None:
    instead = "" if taken is None else f"; took {taken} instead"
    for path, error in problems.items():
        logger.warning("passed over the checkpoint %s: %s%s", path, error.message, instead)


class _DeletedMeanwhileError(Exception):
    """A checkpoint was deleted after it was listed."""


class Catalog:
    """The committed checkpoints in one directory, whether they are files or directories.

    Args:
        root: Local directory or URL.
        suffix: Only names with this ending count. ``""`` means all, for directories that hold nothing else.
        storage_options: Passed to fsspec for URLs.
        listeners: Called for checkpoints that are passed over.
        storage: The storage of the directory; by default, ``root`` decides.
        tiers: Look in both tiers (:class:`ckpt_core.tiers.Tiers`), if ``root`` is in one of them; ``storage`` is then
            that of the local tier.
        memory: The directory of snapshots in memory (:meth:`ckpt_core.tiers.MemoryTier.found`), of which
            :meth:`newest_verified` may return one.
        levels: How many levels of subdirectories to look in, for checkpoints whose names contain slashes.

    Attributes:
        passed_over: The checkpoints that :meth:`newest_verified` passed over, by path, and why. Do not delete them.

    Examples:
        >>> from ckpt_core import Catalog
        >>> Catalog("no/such/directory").checkpoints()
        []
    """

    def __init__(
        self,
        root: StrPath,
        *,
        suffix: str = ".ckpt",
        storage_options: dict[str, Any] | None = None,
        listeners: Sequence[Listener] = (),
        storage: Storage | None = None,
        tiers: Tiers | None = None,
        memory: str | None = None,
        levels: int = 0,
    ) -> None:
        checks: dict[str, Callable[[Any], Any]] = {
            "storage_options": check_mapping,
            "memory": check_path,
            "storage": instance_of(Storage, "ckpt_core.storage.Storage"),
            "tiers": instance_of(Tiers, "ckpt_core.tiers.Tiers"),
        }
        check_options(
            {"suffix": check_text, "listeners": check_functions, **{n: or_none(check) for n, check in checks.items()}},
            locals(),
        )
        self.root = self._saved_in = self._uploaded_to = local_path(root)
        self._memory = None if memory is None else Catalog(memory, suffix=suffix)
        self._suffix = suffix
        self._levels = levels
        if tiers is not None and tiers.covers(self.root):
            storage = TieredStorage(tiers, local=storage, storage_options=storage_options)
            self._saved_in, self._uploaded_to = tiers.local_path(self.root), tiers.remote_path(self.root)
        self._storage = storage or storage_for(self.root, storage_options)
        self._storage_options = storage_options
        self._listeners = listeners
        self._stamps: dict[CheckpointInfo, Stamp | None] = {}  # None: not readable
        self.passed_over: dict[str, CheckpointError] = {}

    def paths(self) -> list[str]:
        """Return the paths of all committed checkpoints, in no particular order, without reading them."""
        return [info.path for info in self._found()]

    def checkpoints(self, *, files: str = "") -> list[CheckpointInfo]:
        """Return all committed checkpoints, newest first (:func:`newest_first`). Reads each manifest.

        Args:
            files: Read only files with this ending. Other files are listed without commit time and step.
        """
        for _ in range(_LOOKS):
            found, unread = list[CheckpointInfo](), list[CheckpointInfo]()
            for info in self._found():
                (found if info.is_directory or info.path.endswith(files) else unread).append(info)
            run_parallel(self._read_stamp, found, threads=min(_READERS, len(found)))
            self._stamps = {info: self._stamps[info] for info in found if info in self._stamps}
            if all(info in self._stamps for info in found):
                break
        known = [
            dataclasses.replace(info, is_readable=False)
            if stamp is None
            else dataclasses.replace(info, committed=stamp.committed, step=stamp.step)
            for info, stamp in self._stamps.items()
        ]
        return newest_first([*known, *unread])

    def _read_stamp(self, info: CheckpointInfo) -> None:
        if info in self._stamps:
            return
        try:
            self._stamps[info] = stamp_of(info.path, storage=self._storage, is_directory=info.is_directory)
        except UnsafeCheckpointError:
            self._stamps[info] = NO_STAMP  # reading its commit time and step would run code
        except CheckpointNotFoundError:
            pass  # deleted since it was listed
        except CheckpointError:
            self._stamps[info] = None

    def _found(self) -> list[CheckpointInfo]:
        storage = self._storage
        try:
            return self._listed(storage, self.root)
        except StorageError as error:
            if not isinstance(storage, TieredStorage):
                raise
            root = storage.tiers.local_path(self.root)
            found = self._listed(storage.local, root)
            if not found:
                raise  # an empty result would mean a fresh start
            logger.warning("looked for checkpoints only in %s: %s", root, error)
            return found

    def _listed(self, storage: Storage, root: str) -> list[CheckpointInfo]:
        found, places = self._directly_in(storage, root), [root]
        for _ in range(self._levels):
            checkpoints = {info.path for info in found}
            below = [path for place in places for path in storage.subdirectories(place)]
            places = [path for path in below if path not in checkpoints and not os.path.basename(path).startswith(".")]
            found += [info for place in places for info in self._directly_in(storage, place)]
        return found

    def _directly_in(self, storage: Storage, root: str) -> list[CheckpointInfo]:
        files = [(file, False) for file in storage.list(root)]
        directories = [(file, True) for file in storage.list_directories(root)]
        # The store's dates are those of the uploads, which may have ended in a different order than the saves.
        is_uploaded = any(os.path.basename(file.path) == LEDGER_NAME for file, _ in files)
        committed = read_ledger(storage, root) if is_uploaded else {}
        pins = {os.path.basename(file.path) for file, _ in files if is_pin(file.path)}
        found = []
        for file, is_directory in files + directories:
            name = os.path.basename(file.path)
            if name.endswith(self._suffix) and name not in _RECORDS and not is_pin(name):
                modified = committed[name].committed if name in committed else file.modified
                is_pinned = pin_path(name) in pins
                found.append(CheckpointInfo(file.path, file.size, modified, is_directory, is_pinned=is_pinned))
        return found

    def newest_verified(
        self,
        accept: Callable[[Any], bool] | None = None,
        order: Callable[[list[CheckpointInfo]], list[CheckpointInfo]] | None = None,
    ) -> CheckpointInfo | None:
        """Return the newest checkpoint whose bytes all match their digests, or None if there is no checkpoint.

        Each damaged checkpoint is warned about and is in :attr:`passed_over`. A file of another program, without
        digests, counts if it is complete (:func:`ckpt_core.verify`). If steps or file dates suggest that a different
        checkpoint is newer, a warning names both.

        Args:
            accept: Called with a checkpoint's state (with tensors that have no values) or the metadata of a directory
                (:func:`ckpt_core._pipeline.loading.peek`). Returns whether the checkpoint is wanted.
            order: Called with all checkpoints, newest first. Returns them in the order in which to try them, such as
                :meth:`ckpt_core.resume.ResumeAttempts.in_order`.

        Raises:
            CheckpointCorruptedError: There are checkpoints, some of them damaged, but none can be used.
            CheckpointNotFoundError: There is no such bucket.
            StorageError: The directory is a file, or is behind a dangling symbolic link.
        """
        wait_for_saves(self._saved_in, below=self._levels > 0)  # by any checkpointer in this process
        try:
            for _ in range(_LOOKS):
                with contextlib.suppress(_DeletedMeanwhileError):
                    return self._look(accept, order, again=True)
            return self._look(accept, order, again=False)
        finally:
            for path, error in self.passed_over.items():
                notify(self._listeners, CheckpointSkipped(path=path, reason=error.message))

    def _look(
        self,
        accept: Callable[[Any], bool] | None,
        order: Callable[[list[CheckpointInfo]], list[CheckpointInfo]] | None,
        *,
        again: bool,
    ) -> CheckpointInfo | None:
        """Walk back once; leave out checkpoints deleted meanwhile or, with ``again``, raise _DeletedMeanwhileError."""
        self.passed_over = {}
        by_age, in_memory = self.checkpoints(), [] if self._memory is None else self._memory.checkpoints()
        if not by_age:
            self.refuse_wrong_directory()

        def in_order(infos: list[CheckpointInfo]) -> list[CheckpointInfo]:
            ordered = infos if order is None else order(infos)
            if not ordered:  # the directory is empty, or holds only files that are no checkpoints
                self.refuse_remains()
            return ordered

        def place(info: CheckpointInfo) -> Catalog:
            return self._memory if self._memory is not None and info in in_memory else self

        def is_wanted(info: CheckpointInfo) -> bool:
            return accept is None or place(info)._is_accepted(info.path, accept)

        def is_gone(info: CheckpointInfo, error: CheckpointError) -> bool:
            gone = isinstance(error, CheckpointNotFoundError)
            if isinstance(error, CheckpointCorruptedError):  # a directory that is being deleted loses files one by one
                committed_by = f"{info.path}/{MANIFEST_NAME}" if info.is_directory else info.path
                with contextlib.suppress(StorageError):
                    gone = not place(info)._storage.exists(committed_by)
            if gone and again:
                raise _DeletedMeanwhileError
            return gone

        return first_usable(
            self.root,
            newest_first([*by_age, *in_memory]) if in_memory else by_age,
            lambda info: place(info).check(info.path),
            passed_over=self.passed_over,
            order=in_order,
            is_wanted=is_wanted,
            is_gone=is_gone,
        )

    def refuse_wrong_directory(self) -> None:
        """Refuse a directory in which there can be no checkpoint: that is a wrong path, not a first start.

        Raises:
            CheckpointError: As :func:`ckpt_core.storage.refuse_wrong_directory`.
        """
        for directory in {self._saved_in, self._uploaded_to}:
            refuse_wrong_directory(directory, self._storage_options)

    def refuse_remains(self) -> None:
        """Refuse a local directory with a checkpoint that has lost its manifest: that is not a first start, either.

        Raises:
            CheckpointCorruptedError: A checkpoint has lost its manifest.
        """
        if is_remote(self._saved_in):
            return  # on an object store, an unfinished save has its final name, too
        storage, places = storage_for(self._saved_in), [self._saved_in]
        for _ in range(self._levels + 1):
            below = [path for place in places for path in storage.subdirectories(place)]
            for path in below:
                if path.endswith(self._suffix) and has_digests(storage.list(path)):
                    reason = CheckpointCorruptedError(f"its {MANIFEST_NAME} is missing", path=path)
                    raise none_verifies(self._saved_in, {path: reason})
            places = [path for path in below if not os.path.basename(path).startswith(".")]

    def refuse_unwritable(self) -> None:
        """Refuse a directory in which a run could not save; check the remote tier only before the first local save.

        Raises:
            CheckpointError: As :func:`ckpt_core.storage.refuse_unwritable`.
        """
        refuse_unwritable(self._saved_in, self._storage_options)
        here = Catalog(self._saved_in, suffix=self._suffix, levels=self._levels)
        if self._uploaded_to != self._saved_in and not here.paths():
            refuse_wrong_directory(self._uploaded_to, self._storage_options)

    def peek(self, path: str) -> Any:
        """Return a checkpoint's state, with tensors that have no values, or the metadata of a directory.

        Args:
            path: The checkpoint, in this directory or another of the same storage.

        Raises:
            CheckpointError: As :func:`ckpt_core._pipeline.loading.peek`.
        """
        return peek(path, storage=self._storage)

    def check(self, path: str) -> None:
        """Compare every byte of a checkpoint with its digest.

        Args:
            path: The checkpoint, in this directory or another of the same storage.

        Raises:
            CheckpointError: As :func:`ckpt_core.verify`.
        """
        verify(path, storage=self._storage)

    def _is_accepted(self, path: str, accept: Callable[[Any], bool]) -> bool:
        try:
            return accept(self.peek(path))
        except UnsafeCheckpointError:
            return True  # holds more than plain data, so ``accept`` cannot be called without running its code

    def verify(self) -> dict[str, CheckpointError | None]:
        """Verify every checkpoint; return, by path, its error or None if it is intact."""
        result: dict[str, CheckpointError | None] = {}
        for info in self.checkpoints():
            try:
                verify(info.path, storage=self._storage)
                result[info.path] = None
            except CheckpointError as error:
                result[info.path] = error
        return result

    def prune(self, *, dry_run: bool = False) -> list[str]:
        """Delete unfinished files and directories that dead processes have left behind, and return their paths.

        On an object store, uploads count as left behind after an hour without changes, and directories that were never
        committed after a day.

        Args:
            dry_run: Delete nothing; only return the paths.
        """
        removed = list((self._storage.orphans if dry_run else self._storage.remove_orphans)(self.root))
        if is_remote(self.root):
            removed += remove_leftovers(self._storage, self.root, dry_run=dry_run)
        return removed
