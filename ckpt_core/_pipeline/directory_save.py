"""Saves a state as a directory: each rank writes its files and reports them, and rank 0 commits the checkpoint."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckpt_core._commit.save_outcome import JointSave
from ckpt_core._layouts.directory.files import describe_file
from ckpt_core._layouts.directory.manifest import ExtraFile
from ckpt_core._layouts.directory.skeleton import Form, encode_plain
from ckpt_core._layouts.directory.writing import PartContent, RankFiles, build_manifest, encode_metadata
from ckpt_core._layouts.image import Image
from ckpt_core._pipeline.directory_commit import (
    NOTHING,
    Previous,
    discard,
    errors_name,
    leave,
    not_alone,
    previous_at,
    publish,
    unchangeable,
)
from ckpt_core._pipeline.save import Pipeline
from ckpt_core._pipeline.staging import Snapshot, given_up
from ckpt_core._pipeline.unchanged import IncrementalSave
from ckpt_core._pipeline.writer import write_image
from ckpt_core._plan import LocalTensor, Piece, WritePlanCache, local_tensor
from ckpt_core.commit_time import Stamp, commit_time, step_in
from ckpt_core.errors import CheckpointError, RankFailedError, SerializationError
from ckpt_core.state.kinds import Kind, Part
from ckpt_core.storage import MANIFEST_NAME, LocalStorage, Storage, is_remote
from ckpt_core.storage.local import files_of

WriteFiles = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class DirectoryState:
    """The state and the options of one directory save."""

    parts: Sequence[Part]  # the state
    metadata: Mapping[str, Any]  # plain data to store with the checkpoint; rank 0's is used
    step: int | None  # the training step of the state, if known
    write_files: WriteFiles | AddedFiles | None  # a function that writes the caller's own files, or the written files
    slice_replicated: bool  # whether each rank writes a slice of replicated tensors; otherwise rank 0 writes them


class DirectorySave:
    """This rank's share of one save of a directory."""

    def __init__(
        self,
        state: DirectoryState,
        begin: Callable[[], IncrementalSave],
        path: str,
        pipeline: Pipeline,
        joint: JointSave,
        plans: WritePlanCache,
    ) -> None:
        self.path = path
        self.is_known = False
        self._state: DirectoryState | None = state
        self._metadata: dict[str, Any] = {}
        self._step = state.step
        self._begin = begin
        self._begun: IncrementalSave | None = None
        self._joint = joint
        self._pipeline = pipeline
        self._plans = plans
        self._objects: dict[str, str] = {}
        self._has_place = True  # whether no other job can be writing files of the same names there
        self._files: RankFiles | None = None
        self._added: AddedFiles | None = None
        self._directory = ""
        self._created: list[str] = []

    @property
    def is_shared(self) -> bool:
        return self._joint.group.world_size > 1

    @property
    def size(self) -> int:
        return self._laid_out.staged_size

    @property
    def _incremental(self) -> IncrementalSave:
        assert self._begun is not None  # take() comes first
        return self._begun

    @property
    def _storage(self) -> Storage:
        return self._incremental.storage

    @property
    def _laid_out(self) -> RankFiles:
        assert self._files is not None  # take() comes first
        return self._files

    # ---- the training thread -----------------------------------------------------------------------------------------

    def take(self, snapshot: Snapshot) -> None:
        assert self._state is not None  # until it is closed
        self._begun = self._begin()  # opens the storage: in take(), because its failures reach the other ranks
        try:
            self._metadata = copy.deepcopy(dict(self._state.metadata))
        except Exception:
            encode_metadata(self._state.metadata, self.path)  # raises a better error, with the key
            raise
        rank, world_size = self._joint.group.rank, self._joint.group.world_size
        if rank == 0:
            self._pipeline.directories.remove_orphans(self._storage, self.path)
        planned = plan_parts(
            self._state.parts,
            rank=rank,
            world_size=world_size,
            slice_replicated=self._state.slice_replicated,
            cache=self._plans,
            objects=self._objects,
        )
        self._files = RankFiles(self._incremental.divide(planned), rank=rank, world_size=world_size)
        snapshot.take(self._files)

    def complete(self, snapshot: Snapshot) -> None:
        assert self._state is not None  # until it is closed
        snapshot.finish()
        write_files = self._state.write_files
        if write_files is None or isinstance(write_files, AddedFiles):
            self._added = write_files
        else:
            self._added = AddedFiles.collect(self._storage, self.path, write_files)
        if snapshot.is_copied:
            self._state = None
            self._laid_out.forget_tensors()

    # ---- this rank's files -------------------------------------------------------------------------------------------

    def write(self, snapshot: Snapshot) -> int:
        if self._begun is None:  # no take(), or it failed at once: nothing to clean up, and maybe no storage
            assert snapshot.failure is not None
            return self._joint.refuse(snapshot.failure)
        self._joint.join()
        unexpected: BaseException | None = None
        report: str | CheckpointError
        try:
            report = self._write_files(snapshot)
        except CheckpointError as error:
            report = error
        except BaseException as error:  # noqa: BLE001 - raised again below, when the other ranks know of it
            unexpected = error
            report = given_up(error, self.path)
        failure: BaseException | None = None
        size = 0
        try:
            size = self._joint.conclude(report, self._commit)
        except BaseException as error:  # noqa: BLE001 - raised again below, when all is cleaned up
            failure = error
        if failure is not None and not self._joint.undecided:
            discard(self._storage, self.path, self._joint.token, self._created)
        leave(self._storage, self.path, self._joint.token)
        if unexpected is not None and not (self.is_shared and isinstance(unexpected, Exception)):
            raise unexpected
        if failure is not None:
            raise failure
        self._incremental.committed(self._laid_out)
        if self._joint.group.rank == 0:
            self._pipeline.refused.warn_of(self.path, lambda: self._objects)
        return size

    def close(self) -> None:
        self._state = self._files = None
        if self._added is not None:
            self._added.close()

    def _write_files(self, snapshot: Snapshot) -> str:
        directory = self._directory = self._storage.begin_directory(self.path, self._joint.token)
        is_final = directory == self.path
        with errors_name(self.path, written_to=directory):
            previous = previous_at(self._storage, self.path) if is_final else NOTHING
            self._has_place = not is_final or self._joint.ask_rank_0("alone", self._is_alone)
            snapshot.wait_taken()
            files, token = self._laid_out, self._joint.token
            if snapshot.is_copied:  # otherwise the caller holds the parts until the end anyway
                files.forget_parts()
            files.identify(token, "" if self._has_place and not previous.exists else f"-{token}")
            sizes = self._write_images(files, snapshot)
            snapshot.wait_sealed()
            if snapshot.is_live:
                self.complete(snapshot)
            extra = [] if self._added is None else self._add(self._added, directory, previous)
        head = json.dumps([sizes, [dataclasses.astuple(file) for file in extra]])
        return f"{head}\n{files.report()}"

    def _is_alone(self) -> bool:
        return self._pipeline.directories.is_alone(self.path)

    def _write_images(self, files: RankFiles, snapshot: Snapshot) -> list[tuple[str, int]]:
        if snapshot.buffer is None:
            images = files.live_files()
        else:
            images = files.staged_files(snapshot.buffer, snapshot.wait_until)

        def take_over(name: str, image: Image) -> bool:
            self._created.append(name)
            target = f"{self._directory}/{name}"
            return self._incremental.take_over(files, name, image, target, scratch=self._pipeline.scratch)

        def write(name: str, image: Image, written: Callable[[int], None] | None = None) -> int:
            return write_image(
                image, self._storage, f"{self._directory}/{name}", scratch=self._pipeline.scratch, written=written
            )

        passed = snapshot.pass_through(images, take_over)
        if passed is None:
            return [
                (name, image.approximate_size if take_over(name, image) else write(name, image))
                for name, image in images
            ]
        return [
            (name, image.approximate_size if image.is_there() else write(name, image, image.written))
            for name, image in passed
        ]

    def _add(self, added: AddedFiles, directory: str, previous: Previous) -> list[ExtraFile]:
        files = added.describe()
        if files and not self._has_place:
            raise not_alone(files[0].name, self.path)
        for file in files:
            if file.name in {*self._created, MANIFEST_NAME}:
                raise SerializationError(
                    f"write_files has written {file.name!r}, which is a file of the checkpoint itself",
                    path=self.path,
                    key=file.name,
                    remedy="give it another name",
                )
            if previous.extra.get(file.name) == file:
                continue
            if file.name in previous.extra:
                raise unchangeable(file.name, self.path)
            self._created.append(file.name)
            self._storage.put_file(added.local_path(file.name), f"{directory}/{file.name}")
        return files

    # ---- all ranks' files, on rank 0 ---------------------------------------------------------------------------------

    def _commit(self, reports: Sequence[str | None]) -> int:
        texts: list[str | None] = [None] * len(reports)
        sizes: dict[str, int] = {}
        extra: dict[str, ExtraFile] = {}
        for rank, report in enumerate(reports):
            if report is None:
                continue
            head, texts[rank] = report.split("\n", 1)
            written, added = json.loads(head)
            sizes.update(written)
            for file in (ExtraFile(*fields) for fields in added):
                if extra.setdefault(file.name, file) != file:
                    raise SerializationError(
                        f"rank {rank} has added a different {file.name!r} than an earlier rank",
                        path=self.path,
                        key=file.name,
                        remedy="in write_files, write it on one rank only, or give every rank's file its own name",
                    )
        if None in reports and self._laid_out.is_spread:
            gone = ", ".join(str(rank) for rank, report in enumerate(reports) if report is None)
            raise RankFailedError(
                f"save was called on rank 0 and not on rank {gone}, which holds a part of the state",
                path=self.path,
                remedy="call save on all ranks, not under `if accelerator.is_main_process`",
            )
        own = self._laid_out.report(list(extra.values()))
        self._pipeline.directories.note_commits(self._storage, self.path)
        stamp = Stamp(commit_time(), step_in(self._metadata) if self._step is None else self._step)
        manifest = build_manifest([own, *texts[1:]], metadata=self._metadata, path=self.path, stamp=stamp)
        publish(
            self._storage,
            self.path,
            self._joint.token,
            manifest,
            sizes,
            written_to=self._directory,
            added=extra,
            keeps_old=not self._has_place,  # another job's save may still need the old files
            is_shared=len(reports) > 1,
        )
        return sum(sizes.values()) + sum(file.size for file in extra.values()) + len(manifest)


# ---- who writes what -------------------------------------------------------------------------------------------------


def plan_parts(
    parts: Sequence[Part],
    *,
    rank: int,
    world_size: int,
    slice_replicated: bool,
    cache: WritePlanCache,
    objects: dict[str, str],
) -> list[PartContent]:
    """Return what this rank writes of each part; planned without communication between ranks.

    Names and structures of parts are the same on all ranks. ``objects`` is filled with the names of types that torch's
    default loading (``weights_only=True``) will refuse, by key.
    """
    planned = []
    for part in parts:
        _check_part(part)
        same = part.kind is not Kind.PER_RANK
        # Sparse, quantized or nested tensors are refused unless the part is per-rank: no load could fill them in place.
        forms: dict[int, Form] = {}
        skeleton, tensors = encode_plain(part.state, key=part.name, objects=objects, any_tensor=not same, forms=forms)
        found = {
            name: local_tensor(tensor, key=f"{part.name}.{name}", rank=rank, world_size=world_size, replicated=same)
            for name, tensor in tensors
        }
        spread = part.kind is Kind.SHARDED or (part.kind is Kind.REPLICATED and slice_replicated)
        if spread and world_size > 1:
            pieces: Mapping[str, Sequence[Piece]] = cache.writes_of_rank(found, rank)
        else:
            _check_whole(part, found)
            pieces = {name: tensor.pieces for name, tensor in found.items()} if rank == 0 or not same else {}
        spread = spread and world_size > 1
        planned.append(
            PartContent(part.name, part.kind.value, skeleton, found, pieces, spread, part.frozen, forms=forms)
        )
    return planned


def _check_part(part: Any) -> None:
    if not isinstance(part, Part):
        raise TypeError(f"parts must be a list of ckpt_core.Part(name, state, kind), not of {type(part).__name__}")
    name: Any = part.name
    kind: Any = part.kind
    if not isinstance(name, str) or not isinstance(kind, Kind):
        raise TypeError(f"Part(name, state, kind) takes a text and a ckpt_core.Kind, not {name!r} and {kind!r:.80}")


def _check_whole(part: Part, tensors: Mapping[str, LocalTensor]) -> None:
    for name, tensor in tensors.items():
        if [piece.box.shape for piece in tensor.pieces] != [tensor.shape]:
            raise SerializationError(
                f"the tensor at {part.name}.{name} is sharded, and the part {part.name!r} is {part.kind.value}",
                key=f"{part.name}.{name}",
                remedy="give the part the kind Kind.SHARDED, or gather the tensor first",
            )


# ---- files of callers ------------------------------------------------------------------------------------------------


class AddedFiles:
    """Files that the caller adds to a checkpoint; they are in a local ``directory`` until they are moved into it."""

    def __init__(self, storage: Storage, path: str) -> None:
        self._storage = storage
        self._path = path
        self._token = f"added-{uuid.uuid4().hex[:12]}"
        self._is_temporary = is_remote(path)
        if self._is_temporary:
            self.directory = tempfile.mkdtemp(prefix="ckpt-")
        else:
            self.directory = storage.begin_directory(path, self._token)  # on the same disk, so that moving is free

    @classmethod
    def collect(cls, storage: Storage, path: str, write_files: Callable[[str], None]) -> AddedFiles:
        """Call ``write_files`` with a new directory, and return the files that it writes there."""
        added = cls(storage, path)
        try:
            write_files(added.directory)
        except BaseException:
            added.close()
            raise
        return added

    def describe(self) -> list[ExtraFile]:
        """Return the files with their digests; symbolic and hard links are first replaced by copies."""
        found = []
        for name in self.names():
            path = self.local_path(name)
            if os.path.islink(path) or os.stat(path).st_nlink > 1:
                self._own(path)
            with LocalStorage().open(path) as reader:
                found.append(describe_file(name, reader))
        return found

    def _own(self, path: str) -> None:
        """Replace a link with a copy, so that a later write to the linked file does not change the checkpoint."""
        copied = f"{path}.{self._token}"
        shutil.copyfile(path, copied)
        os.replace(copied, path)

    def names(self) -> Sequence[str]:
        """Return the paths of the files relative to the directory, sorted."""
        return sorted(os.path.relpath(file, self.directory) for file in files_of(self.directory))

    def local_path(self, name: str) -> str:
        """Return the local path of the file ``name``."""
        return os.path.join(self.directory, *name.split("/"))

    def close(self) -> None:
        """Delete the files that were not moved."""
        if self._is_temporary:
            shutil.rmtree(self.directory, ignore_errors=True)
        else:
            leave(self._storage, self._path, self._token)
