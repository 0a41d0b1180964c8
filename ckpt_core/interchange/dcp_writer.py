"""Storage writer with which ``torch.distributed.checkpoint.save`` writes our directory checkpoints."""

from __future__ import annotations

import dataclasses
import functools
import os
import pickle
import uuid
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ckpt_core._layouts.directory.skeleton import encode_plain
from ckpt_core._layouts.safetensors import TensorInfo
from ckpt_core._pipeline.staging import TornSnapshotGuard
from ckpt_core._plan import local_tensor
from ckpt_core.errors import CheckpointError, RankFailedError, SerializationError
from ckpt_core.geometry import Box
from ckpt_core.interchange.flat_names import EntryPath, split_path
from ckpt_core.interchange.named_checkpoint import NamedCheckpoint
from ckpt_core.interchange.streaming import given
from ckpt_core.interchange.unconnected_save import Chunk, RankShards, UnconnectedSave, Value
from ckpt_core.paths import StrPath, full_path
from ckpt_core.storage import Storage

_last_saves: dict[str, int] = {}  # by session, number of the last save in which this process took part


@dataclasses.dataclass(frozen=True)
class _SaveNumber:
    """Identifies a save and the rank; the coordinator sends it to each rank in its plan."""

    session: str  # identifies the coordinator's process
    # Number of the save. If a rank's plan has not changed, DCP uses the plan of an earlier save, with its number; the
    # rank then counts on from that.
    number: int
    rank: int  # this rank
    world_size: int  # number of ranks

    def token(self) -> str:
        number = max(self.number, _last_saves.get(self.session, 0) + 1)
        _last_saves[self.session] = number
        return f"dcp-{self.session}-{number}"


@functools.lru_cache(maxsize=1)
def _session(process: int) -> str:
    return uuid.uuid4().hex[:16]


class CkptStorageWriter(NamedCheckpoint, StorageWriter):
    """Lets ``torch.distributed.checkpoint.save`` and ``async_save`` write a directory checkpoint.

    It is committed when all ranks' bytes are durable; until then, and if any rank fails, an earlier checkpoint at the
    path stays as it is. Values that are not tensors must be plain data, since nothing is pickled. Top-level
    dictionaries of the state, and lists with tensors, become parts of the checkpoint
    (``{"model": ..., "optimizer": ...}``); the other values become the part ``root``.

    Args:
        path: The directory or URL; ``checkpoint_id=`` of ``save`` overrides it.
        part: Save the whole state as this part.
        metadata: Plain data to keep with the checkpoint; only that of the coordinator is used.
        storage_options: Passed to fsspec for a URL.
        storage: Use this storage, whatever the path.

    Raises:
        CheckpointError: Raised by ``save``, which wraps every error in a ``CheckpointException``: its ``failures`` has
            the error by rank.

    Examples:
        >>> import os, tempfile, torch, torch.distributed.checkpoint as dcp
        >>> from ckpt_core import DirectoryCheckpointer
        >>> from ckpt_core.interchange import CkptStorageWriter
        >>> path = os.path.join(tempfile.mkdtemp(), "step=1")
        >>> state = {"model": {"weight": torch.ones(2)}, "step": 1}
        >>> metadata = dcp.save(state, storage_writer=CkptStorageWriter(path), no_dist=True)
        >>> with DirectoryCheckpointer().load(path) as checkpoint:
        ...     checkpoint.load("model"), checkpoint.load("root")
        ({'weight': tensor([1., 1.])}, {'step': 1})
    """

    def __init__(
        self,
        path: StrPath | None = None,
        *,
        part: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        storage_options: dict[str, Any] | None = None,
        storage: Storage | None = None,
    ) -> None:
        super().__init__(path, storage_options, storage)
        self._part = part
        self._metadata = dict(metadata or {})
        self._held: UnconnectedSave | None = None
        self._cleanup: weakref.finalize[..., Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Give copies, such as the one in a process of ``async_save``, no save in progress."""
        return {**self.__dict__, "_held": None, "_cleanup": None}

    def storage_meta(self) -> StorageMeta | None:
        """Return the description of the storage that DCP passes to planners."""
        return StorageMeta(checkpoint_id=self._path)

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Begin a save, to ``checkpoint_id`` if it is given."""
        self._end()
        if checkpoint_id is not None:
            self._path = full_path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuse ``use_collectives=False``, which cannot produce one checkpoint of all ranks."""
        if kwargs.get("use_collectives") is False:
            raise CheckpointError(
                "use_collectives=False saves a separate checkpoint for each rank, which this storage does not support",
                path=self._path,
                remedy="save with use_collectives=True",
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin the checkpoint, and add the number of the save to each rank's plan. Called on the coordinator."""
        self._end()
        session = _session(os.getpid())
        number = _last_saves.get(session, 0) + 1
        held = UnconnectedSave(*self._found("save"), f"dcp-{session}-{number}")
        # DCP does not report that another rank has failed, so the next save or this object's end abandons this one.
        self._held, self._cleanup = held, weakref.finalize(self, held.abandon)
        return [
            dataclasses.replace(plan, storage_data=_SaveNumber(session, number, rank, len(plans)))
            for rank, plan in enumerate(plans)
        ]

    def _end(self) -> None:
        if self._cleanup is not None:
            self._cleanup()
        self._held = self._cleanup = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors, durably."""
        own: _SaveNumber = plan.storage_data
        save = UnconnectedSave(*self._found("save"), own.token())
        try:
            chunks, values = self._contents(plan, planner)
            guard = TornSnapshotGuard([chunk.load() for of_part in chunks.values() for chunk in of_part])
            shards = save.write(chunks, values, rank=own.rank, world_size=own.world_size)
            guard.check(path=save.path)
        except BaseException:
            save.give_up()
            if own.world_size == 1:
                self._end()
            raise
        finally:
            save.leave()
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(MetadataIndex(""), sum(shards.sizes.values()), shards)])
        return done

    def _contents(
        self, plan: SavePlan, planner: SavePlanner
    ) -> tuple[dict[str, list[Chunk]], dict[str, dict[EntryPath, Value]]]:
        paths = plan.planner_data if isinstance(plan.planner_data, dict) else {}
        chunks: dict[str, list[Chunk]] = {}
        values: dict[str, dict[EntryPath, Value]] = {}
        for item in plan.items:
            name = item.index.fqn
            part, path = split_path(paths.get(name, (name,)), self._part)
            if item.type == WriteItemType.BYTE_IO:
                value, inside = value_chunks(_value(planner, item), path, key=name)
                values.setdefault(part, {})[path] = value
                chunks.setdefault(part, []).extend(inside)
            else:
                chunks.setdefault(part, []).extend(_chunk(planner, item, path))
        return chunks, values

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint. Called on the coordinator, when all ranks have written."""
        held = self._held
        if held is None:
            raise RuntimeError("finish() ends a save that prepare_global_plan() of the same writer has begun")
        ranks: list[RankShards] = [result.storage_data for of_rank in results for result in of_rank]
        strays = [rank.rank for rank in ranks if rank.save_id != held.token]
        if strays:
            raise RankFailedError(
                f"ranks {strays} have written another save than the coordinator: an earlier one failed on some ranks",
                path=self._path,
                remedy="begin again, or save with DefaultSavePlanner(enable_plan_caching=False)",
            )
        ranks.sort(key=lambda rank: rank.rank)
        paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
        order = [split_path(path, self._part) for path in paths.values()]
        held.commit(ranks, kind="sharded", metadata=self._metadata, order=order)
        if self._cleanup is not None:
            self._cleanup.detach()
        held.leave()
        self._held = self._cleanup = None


def _chunk(planner: SavePlanner, item: WriteItem, path: EntryPath) -> list[Chunk]:
    data = item.tensor_data
    assert data is not None  # the item is a tensor
    resolved = planner.resolve_data(item)
    if not isinstance(resolved, torch.Tensor):
        raise SerializationError(f"the planner gives no tensor for {item.index.fqn}", key=item.index.fqn)
    tensor = local_tensor(resolved.detach(), key=item.index.fqn, rank=0, world_size=1, replicated=True).pieces[0].tensor
    shape = tuple(data.size)
    if not tensor.numel() and 0 not in shape:
        return []  # an uneven mesh leaves some ranks without elements
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    return [Chunk(path, 0, TensorInfo(tensor.dtype, shape), box, given(tensor))]


def _value(planner: SavePlanner, item: WriteItem) -> Any:
    if isinstance(planner, DefaultSavePlanner):
        return planner.lookup_object(item.index)  # what resolve_data() would pickle
    data = planner.resolve_data(item)
    try:
        return torch.load(data, weights_only=True)  # type: ignore[arg-type] # the BytesIO that goes with BYTE_IO
    except pickle.UnpicklingError as error:
        raise SerializationError(
            f"the object at {item.index.fqn} is not plain data, and the planner gives it as a pickle only",
            key=item.index.fqn,
            remedy="save what it is made of, or use a planner derived from DefaultSavePlanner",
        ) from error


def value_chunks(value: Any, path: EntryPath, *, key: str) -> tuple[Value, list[Chunk]]:
    """Split an entry of plain data into its structure and chunks for the tensors that it contains."""
    skeleton, tensors = encode_plain(value, key=key)
    chunks = []
    for number, (name, tensor) in enumerate(tensors):
        own = local_tensor(tensor, key=f"{key}.{name}", rank=0, world_size=1, replicated=True).pieces[0]
        info = TensorInfo(own.tensor.dtype, tuple(own.tensor.shape))
        chunks.append(Chunk(path, number, info, own.box, given(own.tensor)))
    return Value(skeleton, tuple(chunk.info for chunk in chunks)), chunks
