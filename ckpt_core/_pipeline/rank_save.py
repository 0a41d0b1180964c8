"""One rank's part in a save: written, reported, committed, and cleaned up if that fails."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ckpt_core._commit import JointSave
from ckpt_core._layouts.image import Image, ImageAbandonedError
from ckpt_core._layouts.sharded.joining import build_manifest
from ckpt_core._layouts.sharded.manifest import ExtraFile
from ckpt_core._layouts.sharded.writing import RankFiles
from ckpt_core._pipeline.added_files import AddedFiles
from ckpt_core._pipeline.cleaning import discard, leave
from ckpt_core._pipeline.previous import NOTHING, Previous, not_alone, previous_at, unchangeable
from ckpt_core._pipeline.unchanged import SaveBeside
from ckpt_core._pipeline.writer import write_image
from ckpt_core.commit_time import Stamp, commit_time, step_in
from ckpt_core.errors import CheckpointError, RankFailedError, SerializationError, StorageError
from ckpt_core.memory import ScratchBuffers
from ckpt_core.storage import MANIFEST_NAME, Storage

__all__ = ["RankSave", "StateSource", "given_up"]

_LISTING_SECONDS = 10.0  # a network filesystem may be that late in showing what another machine has written


class StateSource(Protocol):
    """Gives what a rank writes; called in this order."""

    def lay_out(self, save_id: str, suffix: str) -> RankFiles:
        """Return the files, waiting for the state if need be.

        Args:
            save_id: Goes into all of them.
            suffix: Of their names.
        """

    def images(self, files: RankFiles) -> Sequence[tuple[str, Image]]:
        """Return the files' names and bytes."""

    def complete(self) -> AddedFiles | None:
        """Return, with the files that the caller adds, when the whole state was taken and had not changed meanwhile.

        Raises:
            CheckpointError: There is nothing to save.
        """


class RankSave:
    """This rank's part in one save, from its first byte to the outcome.

    Args:
        storage: Where the checkpoint goes.
        path: The checkpoint.
        joint: What the ranks have in common.
        metadata: Plain data to keep with the checkpoint; that of rank 0 counts.
        step: Which step the state is of, if that is known.
        scratch: Lends memory for windows of live tensors.
        is_alone: Asked on rank 0: whether no other job may be writing files of the same names in the same place.
        beside: Knows which files need not be written again.
        before_commit: Called on rank 0.
    """

    def __init__(
        self,
        storage: Storage,
        path: str,
        joint: JointSave,
        *,
        metadata: Mapping[str, Any],
        step: int | None,
        scratch: ScratchBuffers,
        is_alone: Callable[[], bool] = lambda: True,
        beside: SaveBeside,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self._storage = storage
        self._path = path
        self._joint = joint
        self._metadata = metadata
        self._step = step
        self._scratch = scratch
        self._is_alone = is_alone
        self._beside = beside
        self._before_commit = before_commit
        self._has_place = True  # no other job writes files of the same names
        self._files: RankFiles | None = None
        self._directory = ""
        self._created: list[str] = []

    def run(self, source: StateSource) -> int:
        """Write, report, and return the checkpoint's size in bytes when it is committed.

        Args:
            source: Gives what is to be written.

        Raises:
            CheckpointError: The save has failed, for the same reason on all ranks.
        """
        self._joint.join()
        unexpected: BaseException | None = None
        report: str | CheckpointError
        try:
            report = self._write(source)
        except CheckpointError as error:
            report = error
        except BaseException as error:  # noqa: BLE001 - raised again below, when the other ranks know of it
            unexpected = error
            report = given_up(error, self._path)
        failure: BaseException | None = None
        size = 0
        try:
            size = self._joint.conclude(report, self._commit)
        except BaseException as error:  # noqa: BLE001 - raised again below, when all is cleaned up
            failure = error
        if failure is not None and not self._joint.undecided:
            discard(self._storage, self._path, self._joint.token, self._created)
        leave(self._storage, self._path, self._joint.token)
        if unexpected is not None and (self._joint.group.world_size == 1 or not isinstance(unexpected, Exception)):
            raise unexpected
        if failure is not None:
            raise failure
        assert self._files is not None  # or there would be a failure
        self._beside.committed(self._files)
        return size

    # ---- this rank's files ---------------------------------------------------------------------------------------------

    def _write(self, source: StateSource) -> str:
        directory = self._directory = self._storage.begin_directory(self._path, self._joint.token)
        is_final = directory == self._path
        try:
            previous = previous_at(self._storage, self._path) if is_final else NOTHING
            self._has_place = not is_final or self._joint.ask_rank_0("alone", self._is_alone)
            suffix = "" if self._has_place and not previous.exists else f"-{self._joint.token}"
            files = self._files = source.lay_out(self._joint.token, suffix)
            sizes = []
            try:
                for name, image in source.images(files):
                    self._created.append(name)
                    target = f"{directory}/{name}"
                    if self._beside.take_over(files, name, image, target, scratch=self._scratch):
                        size = image.approximate_size
                    else:
                        size = write_image(image, self._storage, target, scratch=self._scratch)
                    sizes.append((name, size))
            except ImageAbandonedError:
                source.complete()  # says why
                raise
            added = source.complete()
            extra = [] if added is None else self._add(added, directory, previous)
        except CheckpointError as error:
            if error.path is not None and error.path.startswith(directory):
                error.path = self._path + error.path[len(directory) :]  # where the user knows it
            raise
        head = json.dumps([self._step, sizes, [dataclasses.astuple(file) for file in extra]])
        return f"{head}\n{files.report()}"

    def _add(self, added: AddedFiles, directory: str, previous: Previous) -> list[ExtraFile]:
        files = added.describe()
        if files and not self._has_place:
            raise not_alone(files[0].name, self._path)
        for file in files:
            if file.name in {*self._created, MANIFEST_NAME}:
                raise SerializationError(
                    f"write_files has written {file.name!r}, which is a file of the checkpoint itself",
                    path=self._path,
                    key=file.name,
                    remedy="give it another name",
                )
            if previous.extra.get(file.name) == file:
                continue
            if file.name in previous.extra:
                raise unchangeable(file.name, self._path)
            self._created.append(file.name)
            self._storage.put_file(added.local_path(file.name), f"{directory}/{file.name}")
        return files

    # ---- all ranks' files, on rank 0 -----------------------------------------------------------------------------------

    def _commit(self, reports: Sequence[str | None]) -> int:
        texts: list[str | None] = [None] * len(reports)
        sizes: dict[str, int] = {}
        extra: dict[str, ExtraFile] = {}
        for rank, report in enumerate(reports):
            if report is None:
                continue
            head, texts[rank] = report.split("\n", 1)
            step, written, added = json.loads(head)
            if step != self._step:
                raise RankFailedError(
                    f"rank 0 saves step {self._step}, and rank {rank} step {step}: that is no checkpoint",
                    path=self._path,
                    remedy="call save on all ranks together, the same number of times",
                )
            sizes.update(written)
            for file in (ExtraFile(*fields) for fields in added):
                if extra.setdefault(file.name, file) != file:
                    raise SerializationError(
                        f"rank {rank} has added another {file.name!r} than a rank before it",
                        path=self._path,
                        key=file.name,
                        remedy="in write_files, write it on one rank only, or give every rank's file its own name",
                    )
        assert self._files is not None  # this rank has reported
        if None in reports and self._files.is_spread:
            gone = ", ".join(str(rank) for rank, report in enumerate(reports) if report is None)
            raise RankFailedError(
                f"save was called on rank 0 and not on rank {gone}, which holds a part of the state and went on without it",
                path=self._path,
                remedy="call save on all ranks, not under `if accelerator.is_main_process`",
            )
        own = self._files.report(list(extra.values()))
        self._before_commit()
        stamp = Stamp(commit_time(), step_in(self._metadata) if self._step is None else self._step)
        manifest = build_manifest([own, *texts[1:]], metadata=self._metadata, path=self._path, stamp=stamp)
        if len(reports) > 1:
            self._check_all_there(sizes)
        previous = previous_at(self._storage, self._path)
        old = [name for name in (*previous.files, *previous.extra) if name not in sizes and name not in extra]
        if not self._has_place:
            old = []  # another job's save may rely on what was there before
        self._storage.publish_directory(self._path, self._joint.token, manifest, gone=old)
        return sum(sizes.values()) + sum(file.size for file in extra.values()) + len(manifest)

    def _check_all_there(self, sizes: Mapping[str, int]) -> None:
        """Raise if a file that another rank has written is not where this rank sees it: on the disk of another machine."""
        deadline = time.monotonic() + _LISTING_SECONDS
        while True:
            found = {os.path.basename(file.path): file.size for file in self._storage.list(self._directory)}
            missing = sorted(name for name, size in sizes.items() if found.get(name) != size)
            if not missing:
                return
            if time.monotonic() > deadline:
                raise StorageError(
                    f"rank 0 does not see {len(missing)} files of {len(sizes)} that the ranks have written, "
                    f"{missing[0]!r} among them",
                    path=self._path,
                    remedy="save to a directory that all machines share",
                )
            time.sleep(0.1)


def given_up(error: BaseException, path: str) -> CheckpointError:
    """Return what other ranks are told of an exception that ended the save of one."""
    if isinstance(error, CheckpointError):
        return error
    failure = CheckpointError(f"the save failed: {type(error).__name__}: {error}", path=path)
    failure.__cause__ = error
    return failure
