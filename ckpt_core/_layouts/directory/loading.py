"""Loads directory checkpoints: inspects the manifest, and reads the bytes that a rank needs into its tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from ckpt_core._devices.streams import on_current_streams
from ckpt_core._layouts.directory.contents import Contents, PartContents, Placed, Shard
from ckpt_core._layouts.directory.fetching import Job, Read, all_of, jobs_of, reads_of, run_job
from ckpt_core._layouts.directory.files import Files
from ckpt_core._layouts.directory.manifest import Kind, Manifest
from ckpt_core._layouts.directory.matching import (
    LocalView,
    Match,
    check_fits,
    match,
    unique_targets,
)
from ckpt_core._layouts.directory.skeleton import USUAL, decode_plain
from ckpt_core._layouts.safetensors import TensorInfo
from ckpt_core._plan import LocalTensor
from ckpt_core.buffers import buffers_for
from ckpt_core.errors import CheckpointFormatError, CheckpointNotFoundError, UnsafeCheckpointError
from ckpt_core.geometry import Box
from ckpt_core.process.threads import run_parallel
from ckpt_core.storage.base import MANIFEST_NAME, Storage

Opened = TypeVar("Opened", bound="DirectoryReader")
Placement = str | torch.device | Callable[[TensorInfo], torch.Tensor] | None


@dataclasses.dataclass(frozen=True)
class PartInfo:
    """Name, kind and tensors of one part of the state."""

    name: str
    kind: Kind
    # By key; for a per-rank part, those of the first rank that saved it. Tied tensors are listed under each key.
    tensors: Mapping[str, TensorInfo]


def _is_one_of_many() -> bool:
    """Return whether other processes, maybe on the same machine, are about to load the same files."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _whole(key: str, tensor: torch.Tensor) -> LocalTensor:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise TypeError(f"{key} is a {type(tensor).__name__}: say with local= which of its elements are on this rank")
    return LocalTensor.whole(tensor)


def _made(info: TensorInfo, where: Placement, strides: tuple[int, ...] | None) -> torch.Tensor:
    made = where(info) if callable(where) else info.empty(where)
    if strides is None or not made.is_contiguous():  # a memory layout chosen by the caller is kept
        return made
    with torch.inference_mode(False):
        return made.as_strided(info.shape, strides)


class DirectoryReader:
    """A committed directory checkpoint, open for reading.

    Opening it reads the manifest only. Use it as a context manager, or :meth:`close` it. Arguments, attributes and
    errors are those of :class:`ckpt_core.directory.DirectoryCheckpoint`.
    """

    def __init__(self, path: str, storage: Storage, *, weights_only: bool | None = None) -> None:
        self.path = path.rstrip("/") if len(path) > 1 else path
        self._weights_only = weights_only
        self._files = Files(self.path, storage)
        data = self._files.read_manifest()
        manifest = Manifest.decode(data, path=self._files.path_of(MANIFEST_NAME))
        self._manifest = manifest
        self._contents = Contents(manifest, self.path)
        self._files.use(manifest)
        self.metadata = manifest.metadata
        self.world_size = len(manifest.ranks)
        self.save_id = manifest.save_id
        self.stamp = manifest.stamp
        self.files = self._files.sizes
        self.size = len(data) + sum(self.files.values())

    def __enter__(self: Opened) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._files.close()

    @property
    def bytes_read(self) -> int:
        """Bytes read so far from the files of the checkpoint, including the manifest."""
        return self._files.bytes_read

    @functools.cached_property
    def parts(self) -> Mapping[str, PartInfo]:
        found = {}
        for name, kind in self._contents.kinds.items():
            ranks = self._contents.holders(name)
            tensors = self._contents.part(name, ranks[0]).tensors() if ranks else {}
            found[name] = PartInfo(name, kind, tensors)
        return found

    @property
    def extra_files(self) -> list[str]:
        """Names of the files that callers have added to the checkpoint."""
        return [file.name for rank in self._manifest.ranks for file in rank.extra_files]

    def ranks_with(self, part: str) -> tuple[int, ...]:
        """Return the ranks that have saved a per-rank part of this name."""
        return tuple(rank for rank, record in enumerate(self._manifest.ranks) if part in record.parts)

    def stored_tensors(self, part: str, *, rank: int = 0) -> list[int]:
        """Return the index of the stored tensor for each tensor of a part, in order; tied tensors share an index."""
        return [reference.index for reference in self._contents.part(part, rank).references]

    def peek(self, part: str, *, rank: int = 0) -> Any:
        """Return a part of the state with its tensors on the ``meta`` device.

        Reads no file: the manifest, which is already in memory, has everything. Values of NumPy arrays are undefined.
        """
        contents = self._contents.part(part, rank)
        references = iter(contents.references)

        def stand_in(_: int) -> torch.Tensor:
            reference = next(references)
            return contents.record.tensors[reference.index].empty(None if reference.is_array else "meta")

        with self._contents.sense(part):
            return decode_plain(contents.record.skeleton, stand_in)

    @property
    def bytes_of_parts(self) -> Mapping[str, int]:
        """Size of the files of each part in bytes, summed over all ranks; all per-rank parts are one entry."""
        found: dict[str, int] = {}
        for rank in self._manifest.ranks:
            for file in rank.files:
                name = "of each rank" if file.part is None else file.part
                found[name] = found.get(name, 0) + file.size
        return found

    def load(
        self,
        part: str,
        *,
        into: Any = None,
        local: LocalView | None = None,
        rank: int = 0,
        map_location: Placement = None,
        strict: bool = True,
    ) -> Any:
        """Load one part of the state.

        Every byte that is used is compared with its digest. A checkpoint that does not fit, has another version, or
        has a missing or wrong file is refused before anything is changed. Damage inside a tensor is detected when its
        bytes are read: the error names the file and the tensor, and ``into`` may then be partly overwritten.

        Args:
            part: Name of the part.
            into: A state with the same tensors, which are filled in place, whatever pieces of them this rank holds; its
                other values are ignored. None: make new, whole tensors; tied ones become one tensor again.
            local: Function that returns which pieces of a tensor are on this rank. None: the whole tensor, and only
                plain tensors are accepted.
            rank: The rank whose part to load, if the part is per-rank.
            map_location: Device of new tensors, or a function that makes an empty one; the CPU by default.
            strict: Whether a tensor that is only in the checkpoint, or only in ``into``, is an error. If not, tensors
                missing from the checkpoint stay as they are, and those missing from ``into`` are returned without
                values, on the ``meta`` device.

        Returns:
            The state: the tensors of ``into``, and everything else as it was saved.

        Raises:
            CheckpointNotFoundError: The checkpoint has no such part.
            StateMismatchError: ``into`` has other keys, shapes or types; or that rank did not save the part.
            CheckpointCorruptedError: A file is missing, truncated, or from another save, or a byte differs.
            UnsafeCheckpointError: Rebuilding an object that is not plain data would run code.
        """
        contents = self._contents.part(part, rank)
        infos = contents.record.tensors
        if into is None:
            matches = [Match(reference.key, reference.index, None) for reference in contents.references]
        else:
            matches = match(contents.references, infos, into, strict=strict, part=part, path=self.path)
        view = _whole if local is None else local
        found = [(m, view(m.key, m.target)) for m in unique_targets(matches) if m.target is not None]
        check_fits([(m.key, infos[m.index], own) for m, own in found], part=part, path=self.path)

        new = sorted({m.index for m in matches if m.target is None})
        boxes = [(m.index, piece.box) for m, own in found for piece in own.pieces]
        boxes += [(index, Box.whole(infos[index].shape)) for index in new]
        chunks = self._chunks_of(contents, boxes)
        arrays = {reference.index for reference in contents.references if reference.is_array}
        forms = {index: contents.record.forms.get(index, USUAL) for index in new}
        made = {
            index: _made(infos[index], None if index in arrays else map_location, form.strides)
            for index, form in forms.items()
        }
        targets = [piece.tensor for _, own in found for piece in own.pieces] + [made[i] for i in new]
        shared: set[str] = set()
        if self._contents.kinds[part] != "per-rank" and _is_one_of_many():
            for (index, box), of_box in zip(boxes, chunks, strict=True):
                if box.shape == infos[index].shape:
                    shared.update(placed.shard.file.name for placed in of_box)
        self._fill(zip(targets, (box for _, box in boxes), chunks, strict=True), shared)
        made = {index: forms[index].given_to(tensor) for index, tensor in made.items()}
        in_order = iter([made[m.index] if m.target is None else m.target for m in matches])
        with self._contents.sense(part):
            try:
                return decode_plain(
                    contents.record.skeleton,
                    lambda _: next(in_order),
                    rebuilds=True,
                    weights_only=self._weights_only,
                )
            except (UnsafeCheckpointError, CheckpointFormatError) as error:
                error.path, error.key = self.path, part
                raise

    def _chunks_of(self, contents: PartContents, boxes: Sequence[tuple[int, Box]]) -> list[list[Placed]]:
        """Return the chunks needed for each box of a tensor, after checking their files: sizes, headers, save ids."""
        for index in {index for index, _ in boxes}:
            if not contents.table.is_whole(contents.first + index):
                self._contents.check_tensor(contents, index)
        chunks = [contents.overlapping(index, box) for index, box in boxes]
        shards = {placed.shard.file.name: placed.shard for of_box in chunks for placed in of_box}
        self._contents.check_blocks(shards.values())
        self._files.prepare(list(shards.values()))
        return chunks

    def _fill(self, targets: Iterable[tuple[torch.Tensor, Box, Sequence[Placed]]], shared: Container[str]) -> None:
        """Read what the targets need; files that other processes read, too (``shared``), go through the page cache."""
        shards: dict[str, Shard] = {}
        reads: dict[str, list[Read]] = {}
        filled = []
        for tensor, box, chunks in targets:
            filled.append(tensor)
            for placed in chunks:
                name = placed.shard.file.name
                shards[name] = placed.shard
                reads.setdefault(name, []).extend(reads_of(placed, box, tensor))

        def jobs_in(shard: Shard) -> Iterable[Job]:
            name = shard.file.name
            return jobs_of(shard, reads[name], past_cache=name not in shared and self._files.passes_cache(shard))

        self._run(list(shards.values()), jobs_in, filled)

    def _run(
        self,
        shards: Sequence[Shard],
        jobs_in: Callable[[Shard], Iterable[Job]],
        filled: Sequence[torch.Tensor] = (),
    ) -> None:
        with contextlib.closing(buffers_for(filled)) as scratch:
            for batch in self._files.batches(shards):
                jobs = [job for shard in batch for job in jobs_in(shard)]
                largest = max((job.size for job in jobs), default=0)
                run = functools.partial(run_job, files=self._files, scratch=scratch, scratch_size=largest)
                work = on_current_streams(run, filled)
                run_parallel(work, jobs, threads=min(self._files.threads(batch), len(jobs)))

    def read_file(self, name: str) -> bytes:
        """Return the verified bytes of a file that a caller added to the checkpoint."""
        for rank in self._manifest.ranks:
            for file in rank.extra_files:
                if file.name == name:
                    return self._files.read_whole(file)
        raise CheckpointNotFoundError(f"the checkpoint holds no added file {name!r}", path=self.path)

    def verify(self) -> None:
        """Compare every byte with its digest, and check that every element of every tensor is stored exactly once."""
        shards = self._contents.check()
        extra = [file for rank in self._manifest.ranks for file in rank.extra_files]
        run_parallel(self._files.verify_whole, extra)
        self._files.prepare(shards)
        self._run(shards, lambda shard: all_of(shard, past_cache=self._files.passes_cache(shard)))
