"""Storage reader with which ``torch.distributed.checkpoint.load`` loads our directory checkpoints."""

from __future__ import annotations

import functools
import io
import operator
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ckpt_core._layouts.directory.loading import DirectoryReader
from ckpt_core._layouts.directory.matching import tensor_paths
from ckpt_core._layouts.safetensors import TensorInfo
from ckpt_core._plan import LocalTensor, Piece
from ckpt_core.errors import StateMismatchError
from ckpt_core.events import rank_of_process
from ckpt_core.geometry import Box
from ckpt_core.interchange.flat_names import ROOT, Entry, EntryPath, entries_of, entry_name, subtree
from ckpt_core.interchange.named_checkpoint import NamedCheckpoint
from ckpt_core.interchange.streaming import TensorMemory
from ckpt_core.paths import StrPath, full_path
from ckpt_core.storage import Storage

_BATCH = 16 * 2**20  # bytes of tensors that are loaded together


class CkptStorageReader(NamedCheckpoint, StorageReader):
    """Lets ``torch.distributed.checkpoint.load`` read a directory checkpoint, whichever program wrote it.

    Every rank reads only the bytes that its pieces need, for any mesh and number of ranks that saved the checkpoint,
    and compares them with their digests. Names begin with the part: ``{"model": ...}`` is loaded from the part
    ``model``; entries of the part ``root`` have no prefix. Each rank reads its own per-rank parts.

    Args:
        path: The checkpoint's directory or URL; ``checkpoint_id=`` of ``load`` overrides it.
        part: Load the whole state from this part, without a prefix in the names.
        rank: The rank whose per-rank parts are read; by default this process's rank.
        storage_options: Passed to fsspec for a URL.
        storage: Use this storage, whatever the path.

    Raises:
        CheckpointError: Raised by ``load``, which wraps every error in a ``CheckpointException``: its ``failures`` has
            the error by rank. A tensor whose type differs from the saved one is refused, not converted.

    Examples:
        >>> import os, tempfile, torch, torch.distributed.checkpoint as dcp
        >>> from ckpt_core import DirectoryCheckpointer, Kind, Part
        >>> from ckpt_core.interchange import CkptStorageReader
        >>> path = os.path.join(tempfile.mkdtemp(), "step=1")
        >>> with DirectoryCheckpointer(strategy="sync") as checkpointer:
        ...     size = checkpointer.save([Part("model", {"weight": torch.ones(2)}, Kind.REPLICATED)], path)
        >>> state = {"model": {"weight": torch.zeros(2)}}
        >>> dcp.load(state, storage_reader=CkptStorageReader(path), no_dist=True)
        >>> state
        {'model': {'weight': tensor([1., 1.])}}
    """

    def __init__(
        self,
        path: StrPath | None = None,
        *,
        part: str | None = None,
        rank: int | None = None,
        storage_options: dict[str, Any] | None = None,
        storage: Storage | None = None,
    ) -> None:
        super().__init__(path, storage_options, storage)
        self._part = part
        self._rank = rank
        self._checkpoint: DirectoryReader | None = None
        self._entries: dict[str, tuple[str, Entry]] = {}

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Begin a load, from ``checkpoint_id`` if it is given."""
        if checkpoint_id is not None:
            self._path = full_path(checkpoint_id)
        self._checkpoint = None
        self._entries = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return DCP's description of the checkpoint; reads the manifest and arrays that are not tensors."""
        with DirectoryReader(*self._found("load")) as checkpoint:
            self._checkpoint = checkpoint
            rank = self._own_rank()
            names = list(checkpoint.parts) if self._part is None else [self._part]
            plain = (self._part, ROOT)  # parts whose entries' names have no prefix
            states = [(name, rank, () if name in plain else (name,)) for name in names]
            self._entries = {
                name: (part, entry) for name, (part, _, entry) in entries_by_name(checkpoint, states).items()
            }
        found = {name: describe(entry.value) for name, (_, entry) in self._entries.items()}
        return Metadata(found, planner_data={name: entry.path for name, (_, entry) in self._entries.items()})

    def _own_rank(self) -> int:
        return rank_of_process() if self._rank is None else self._rank

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: :meth:`read_metadata` has prepared everything."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Load the tensors and values of the plan."""
        by_part: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_part.setdefault(self._entries[item.storage_index.fqn][0], []).append(item)
        for part, items in by_part.items():
            self._read_part(part, items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_part(self, part: str, items: list[ReadItem], planner: LoadPlanner) -> None:
        assert self._checkpoint is not None  # read_metadata comes first
        pieces: dict[tuple[Hashable, ...], list[Piece]] = {}
        values: list[tuple[ReadItem, Entry]] = []
        targets: list[tuple[ReadItem, torch.Tensor]] = []
        shapes = {}
        for item in items:
            entry = self._entries[item.storage_index.fqn][1]
            if item.type == LoadItemType.BYTE_IO:
                values.append((item, entry))
                continue
            target = planner.resolve_tensor(item).detach()
            origin = item.storage_index.offset or (0,) * len(item.lengths)
            offset = tuple(a + b for a, b in zip(origin, item.storage_offsets, strict=True))
            pieces.setdefault(entry.where, []).append(Piece(Box(offset, tuple(item.lengths)), target))
            shapes[entry.where] = tuple(entry.value.shape)
            targets.append((item, target))
        wanted = {
            where: LocalTensor(found[0].tensor.dtype, shapes[where], tuple(found), ())
            for where, found in pieces.items()
        }
        found = load_values(self._checkpoint, part, self._own_rank(), wanted, [entry for _, entry in values])
        for item, target in targets:
            planner.commit_tensor(item, target)
        for (item, _), value in zip(values, found, strict=True):
            data = io.BytesIO()
            torch.save(value, data)
            data.seek(0)
            planner.load_bytes(item, data)


def structure_of(checkpoint: DirectoryReader, part: str, rank: int = 0) -> Any:
    """Return a part of the state with tensors that have no values, on the ``meta`` device."""
    return checkpoint.load(part, into={}, rank=rank, strict=False)


def entries_by_name(
    checkpoint: DirectoryReader, states: Iterable[tuple[str, int, EntryPath]]
) -> dict[str, tuple[str, int, Entry]]:
    """Return the entries of states (part, rank, path of the part's state) by their names in DCP, with part and rank.

    Parts that a rank has not saved are left out; DCP raises if they are requested. Two entries of one name are refused.
    """
    found: dict[str, tuple[str, int, Entry]] = {}
    for part, rank, prefix in states:
        try:
            state = structure_of(checkpoint, part, rank)
        except StateMismatchError:
            continue
        for entry in entries_of(state, prefix):
            name = entry_name(entry.path)
            if name in found:
                raise StateMismatchError(
                    f"the checkpoint has two entries that are both named {name} in DCP",
                    path=checkpoint.path,
                    key=name,
                    remedy="rename one, load one of its parts with part=, or use DirectoryCheckpointer",
                )
            found[name] = part, rank, entry
    return found


def load_values(
    checkpoint: DirectoryReader,
    part: str,
    rank: int,
    tensors: Mapping[tuple[Hashable, ...], LocalTensor],
    values: Sequence[Entry],
) -> list[Any]:
    """Fill tensors of a part in one load, and return entries that are not tensors, with the tensors that they contain.

    ``tensors`` is keyed by the keys below the part; ``values`` are from the part's structure; ``rank`` selects the
    state of a per-rank part.
    """
    views: dict[int, LocalTensor] = {}
    into: dict[tuple[Hashable, ...], torch.Tensor] = {}
    for where, wanted in tensors.items():
        into[where] = torch.empty(0)  # placeholder for the pieces, which ``local`` looks up
        views[id(into[where])] = wanted
    for entry in values:
        for inside, tensor in tensor_paths(entry.value, torch.Tensor):
            where = (*entry.where, *inside)
            into[where] = torch.empty(tensor.shape, dtype=tensor.dtype)
            views[id(into[where])] = LocalTensor.whole(into[where])
    if not into:
        return [entry.value for entry in values]
    with checkpoint:
        state = checkpoint.load(part, into=subtree(into), local=lambda _, t: views[id(t)], rank=rank, strict=False)
    return [functools.reduce(operator.getitem, entry.where, state) for entry in values]


class TensorBatches:
    """Loads the tensors of a part one after the other; consecutive small ones are loaded together.

    ``wanted`` has, for each tensor, its keys below the part and a tensor of that type and shape, in the order in which
    they will be loaded.
    """

    def __init__(
        self,
        checkpoint: DirectoryReader,
        part: str,
        rank: int,
        wanted: Sequence[tuple[tuple[Hashable, ...], torch.Tensor]],
    ) -> None:
        self._load = functools.partial(load_values, checkpoint, part, rank)
        self._wanted = list(wanted)
        self._number_of = {where: number for number, (where, _) in enumerate(wanted)}
        self._loaded: dict[tuple[Hashable, ...], torch.Tensor] = {}
        self._memory = TensorMemory()

    def load(self, where: tuple[Hashable, ...]) -> torch.Tensor:
        """Return a tensor; tensors of earlier batches lose their values."""
        if where not in self._loaded:
            self._loaded.clear()
            self._load_from(self._number_of[where])
        return self._loaded[where]

    def _load_from(self, first: int) -> None:
        batch = [self._wanted[first]]
        room = _BATCH - batch[0][1].nbytes
        for where, like in self._wanted[first + 1 :]:
            room -= like.nbytes
            if room < 0:
                break
            batch.append((where, like))
        infos = [TensorInfo(like.dtype, tuple(like.shape)) for _, like in batch]
        made = self._memory.tensors(infos)
        self._loaded = {where: tensor for (where, _), tensor in zip(batch, made, strict=True)}
        try:
            self._load({where: LocalTensor.whole(tensor) for where, tensor in self._loaded.items()}, [])
        except BaseException:
            self._loaded.clear()
            raise


def describe(value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    """Return DCP's description of an entry."""
    if not isinstance(value, torch.Tensor):
        return BytesStorageMetadata()
    # Always one chunk, however the bytes are stored: read_data determines which bytes a box needs.
    chunk = ChunkStorageMetadata(torch.Size([0] * value.ndim), value.shape)
    return TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.shape, [chunk])
