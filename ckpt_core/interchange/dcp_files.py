"""Export directory checkpoints to DCP's own format and import them from it, with one tensor in memory at a time."""

from __future__ import annotations

import dataclasses
import io
import logging
import warnings
from collections.abc import Collection, Hashable, Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ckpt_core._layouts.directory.loading import DirectoryReader
from ckpt_core._layouts.safetensors import dtype_name
from ckpt_core.errors import (
    CheckpointCorruptedError,
    CheckpointNotFoundError,
    SerializationError,
    StateMismatchError,
)
from ckpt_core.geometry import Box
from ckpt_core.interchange.dcp_extras import STRUCTURE, Exported, structure
from ckpt_core.interchange.dcp_format import (
    METADATA_NAME,
    REMEDY,
    DcpEntry,
    Location,
    load_stored,
    read_dcp_metadata,
    verify_stored,
)
from ckpt_core.interchange.dcp_reader import TensorBatches, describe, entries_by_name, load_values
from ckpt_core.interchange.dcp_writer import value_chunks
from ckpt_core.interchange.flat_names import ROOT, EntryPath, entry_name, nested, split_path
from ckpt_core.interchange.streaming import DiskMemory, TensorMemory, new_directory
from ckpt_core.interchange.unconnected_save import Chunk, Value, save_alone
from ckpt_core.paths import StrPath, full_path
from ckpt_core.storage import Storage, storage_for

_NAMED = 10  # maximum keys in an error message
_logger = logging.getLogger(__name__)


def export_dcp(source: StrPath, target: StrPath, *, storage_options: dict[str, Any] | None = None) -> None:
    """Write a directory checkpoint in DCP's own format, which ``torch.distributed.checkpoint.load`` reads as it is.

    This process alone writes it, with one tensor in memory at a time. Names are those of
    :class:`~ckpt_core.interchange.CkptStorageReader`, except that the states of all ranks are written for a per-rank
    part, with the rank after the part's name: ``rng.0.seed``.

    Args:
        source: The checkpoint's directory or URL.
        target: A local directory that does not exist yet, or is empty.
        storage_options: Passed to fsspec for a URL.

    Raises:
        CheckpointCorruptedError: A byte of ``source`` differs from what was saved. Nothing is left at ``target``.
        SerializationError: DCP cannot write the type of a tensor.
        StorageError: The target is not empty, or the disk refused.
    """
    path = full_path(source)
    storage = storage_for(path, storage_options)
    with DirectoryReader(path, storage) as checkpoint, new_directory(target) as directory:
        # One thread and no copying ahead, so that DCP requests one tensor after the other.
        writer = FileSystemWriter(directory, thread_count=1, per_thread_copy_ahead=0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            try:
                dcp_save({}, storage_writer=writer, planner=_ExportPlanner(checkpoint), no_dist=True)
            except CheckpointException as error:
                raise error.failures[0][0] from error  # this process's own exception, which has the specific class


class _ExportPlanner(SavePlanner):
    """Save planner that passes the entries of a checkpoint to DCP's writer, loading each on request."""

    def __init__(self, checkpoint: DirectoryReader) -> None:
        self._checkpoint = checkpoint
        if added := checkpoint.extra_files:
            _logger.warning(
                "left out %d files that were added to %s, such as %s: DCP has no place for them",
                len(added),
                checkpoint.path,
                added[0],
            )
        self._structure = structure(checkpoint, _states_of(checkpoint))
        self._entries = entries_by_name(checkpoint, _states_of(checkpoint))
        wanted: dict[tuple[str, int], list[tuple[tuple[Hashable, ...], torch.Tensor]]] = {}
        for part, rank, entry in self._entries.values():
            if isinstance(entry.value, torch.Tensor):
                _check_type(entry.value.dtype, entry_name(entry.path))
                wanted.setdefault((part, rank), []).append((entry.where, entry.value))
        self._batches = {where: TensorBatches(checkpoint, *where, found) for where, found in wanted.items()}

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Do nothing: the state is the checkpoint."""

    def create_local_plan(self) -> SavePlan:
        items = [_item(name, entry.value) for name, (_, _, entry) in self._entries.items()]
        return SavePlan([*items, _item(STRUCTURE, None)])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        described = {name: describe(entry.value) for name, (_, _, entry) in self._entries.items()}
        paths = {name: entry.path for name, (_, _, entry) in self._entries.items()}
        described[STRUCTURE], paths[STRUCTURE] = describe(None), (STRUCTURE,)
        return all_plans, Metadata(described, planner_data=paths)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.index.fqn == STRUCTURE:
            return io.BytesIO(self._structure)
        part, rank, entry = self._entries[write_item.index.fqn]
        if isinstance(entry.value, torch.Tensor):
            return self._batches[part, rank].load(entry.where)
        data = io.BytesIO()
        torch.save(load_values(self._checkpoint, part, rank, {}, [entry])[0], data)
        data.seek(0)
        return data


def _check_type(dtype: torch.dtype, key: str) -> None:
    try:
        if dtype != torch.bool:  # DCP's writer determines the size in this way
            (torch.finfo if dtype.is_floating_point or dtype.is_complex else torch.iinfo)(dtype)
    except TypeError as error:
        raise SerializationError(
            f"a tensor of type {dtype_name(dtype)} cannot be saved by DCP", key=key, remedy="convert it to another type"
        ) from error


def _states_of(checkpoint: DirectoryReader) -> Iterator[tuple[str, int, EntryPath]]:
    for name, part in checkpoint.parts.items():
        prefix: EntryPath = () if name == ROOT else (name,)
        if part.kind != "per-rank":
            yield name, 0, prefix
            continue
        for rank in range(checkpoint.world_size):
            yield name, rank, (*prefix, str(rank))


def _item(name: str, value: Any) -> WriteItem:
    described = describe(value)
    if isinstance(described, BytesStorageMetadata):
        return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)
    (chunk,) = described.chunks
    data = TensorWriteData(chunk=chunk, properties=described.properties, size=described.size)
    return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.TENSOR, tensor_data=data)


def import_entries(
    source: StrPath, target: StrPath, *, only: Collection[str] | None, storage_options: dict[str, Any] | None
) -> int:
    """Convert the entries of a DCP checkpoint to a directory checkpoint: keys are text, and every part is sharded."""
    origin, path = full_path(source), full_path(target)
    storage = storage_for(origin, storage_options)
    entries = [entry for entry in entries_of_dcp(origin, storage) if entry.path != (STRUCTURE,)]
    if only is not None:
        first = {entry.path[0] for entry in entries}
        missing = sorted(set(only) - first)
        if missing:
            known = ", ".join(sorted(map(str, first))[:_NAMED])
            others = f" and {len(first) - _NAMED} more" if len(first) > _NAMED else ""
            raise StateMismatchError(
                f"the checkpoint has nothing below {missing}; it has {known}{others}",
                path=origin,
                key=str(missing[0]),
                remedy="check only= (--only)",
            )
        entries = [entry for entry in entries if entry.path[0] in only]
    chunks: dict[str, list[Chunk]] = {}
    values: dict[str, dict[EntryPath, Value]] = {}
    memory = TensorMemory()
    for entry in entries:
        part, below = split_path(entry.path)
        if entry.info is None:
            found = load_stored(storage, origin, entry, entry.chunks[0][1], memory)
            value, inside = value_chunks(found, below, key=entry_name(entry.path))
            values.setdefault(part, {})[below] = value
            chunks.setdefault(part, []).extend(inside)
            continue
        for box, location in entry.chunks:
            if box.numel or 0 in entry.info.shape:
                load = _ChunkLoader(storage, origin, entry, box, location, memory)
                chunks.setdefault(part, []).append(Chunk(below, 0, entry.info, box, load))
    order = [split_path(entry.path) for entry in entries]
    return save_alone(path, chunks, values, kind="sharded", order=order, storage_options=storage_options)


def read_dcp(origin: str, storage: Storage, memory: DiskMemory | None = None) -> dict[str, Any]:
    """Return the state of a checkpoint in DCP's own format, all of it in memory; no code from it is run.

    Keys of dictionaries are text, as DCP has them.
    """
    chunk = TensorMemory()
    found: dict[EntryPath, Any] = {}
    for entry in entries_of_dcp(origin, storage):
        if entry.info is None:
            found[entry.path] = load_stored(storage, origin, entry, entry.chunks[0][1], chunk)
        else:
            found[entry.path] = _whole(origin, storage, entry, chunk, None if memory is None else memory.empty)
    state: dict[str, Any] = nested(found)
    return state


def _whole(origin: str, storage: Storage, entry: DcpEntry, chunk: TensorMemory, where: Any) -> torch.Tensor:
    """Return the whole tensor of an entry; ``where`` is its device, or a function that allocates it."""
    assert entry.info is not None
    whole: torch.Tensor = where(entry.info) if callable(where) else entry.info.empty(where)
    for box, location in entry.chunks:
        if box.numel:
            begins = zip(box.offset, box.end, strict=True)
            target = whole[tuple(slice(begin, end) for begin, end in begins)]
            target.copy_(_ChunkLoader(storage, origin, entry, box, location, chunk)())
    return whole


def open_exported(origin: str, storage: Storage) -> Exported | None:
    """Open a DCP checkpoint that :func:`export_dcp` wrote; None if it has no structure entry."""
    entries = {entry_name(entry.path): entry for entry in entries_of_dcp(origin, storage)}
    about = entries.get(STRUCTURE)
    if about is None or about.info is not None:
        return None
    memory = TensorMemory()
    record = load_stored(storage, origin, about, about.chunks[0][1], memory)
    return Exported(origin, record, entries, lambda entry, where: _whole(origin, storage, entry, TensorMemory(), where))


def check_dcp(source: StrPath, *, storage_options: dict[str, Any] | None = None) -> None:
    """Check that ``torch.distributed.checkpoint.load`` would run no code from a checkpoint.

    Metadata and objects are read in the same way as by ``import_dcp``. Tensors are not read.

    Args:
        source: The DCP checkpoint: a directory or a URL.
        storage_options: Passed to fsspec for URLs.

    Raises:
        UnsafeCheckpointError: An object in it is not plain data; the error names it.
        CheckpointFormatError: The source is not a DCP checkpoint.
        CheckpointCorruptedError: A file is missing or truncated.
    """
    origin = full_path(source)
    storage = storage_for(origin, storage_options)
    memory = TensorMemory()
    for entry in entries_of_dcp(origin, storage):
        if entry.info is None:
            load_stored(storage, origin, entry, entry.chunks[0][1], memory)


def entries_of_dcp(origin: str, storage: Storage) -> list[DcpEntry]:
    """Return the entries of a checkpoint in DCP's own format; errors as for :func:`check_dcp`."""
    return read_dcp_metadata(_bytes_of(storage, f"{origin}/{METADATA_NAME}"), path=f"{origin}/{METADATA_NAME}")


def verify_dcp(origin: str, storage: Storage) -> None:
    """Read a checkpoint in DCP's own format to its end, one window in memory; errors as for :func:`check_dcp`."""
    for entry in entries_of_dcp(origin, storage):
        for box, location in entry.chunks:
            verify_stored(storage, origin, entry, box, location)


@dataclasses.dataclass(frozen=True)
class _ChunkLoader:
    storage: Storage
    directory: str
    entry: DcpEntry
    box: Box
    location: Location
    memory: TensorMemory

    def __call__(self) -> torch.Tensor:
        found = load_stored(self.storage, self.directory, self.entry, self.location, self.memory)
        info = self.entry.info
        assert info is not None
        if isinstance(found, torch.Tensor) and (found.dtype, tuple(found.shape)) == (info.dtype, self.box.shape):
            return found
        what = type(found).__name__
        if isinstance(found, torch.Tensor):
            what = f"{dtype_name(found.dtype)}{list(found.shape)}"
        key = entry_name(self.entry.path)
        raise CheckpointCorruptedError(
            f"{key} is {dtype_name(info.dtype)}{list(self.box.shape)} in the metadata and {what} in its file",
            path=f"{self.directory}/{self.location.file}",
            key=key,
            remedy=REMEDY,
        )


def _bytes_of(storage: Storage, path: str) -> bytes:
    try:
        with storage.open(path) as reader:
            return reader.read_whole()
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(
            f"there is no DCP checkpoint: it has no {METADATA_NAME}, which is written last",
            path=path,
            remedy="check the path",
        ) from error
