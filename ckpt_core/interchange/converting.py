"""Load a checkpoint of any layout, and convert between layouts: one file, our directories, DCP, stock Accelerate."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ckpt_core._layouts.directory.loading import DirectoryReader
from ckpt_core._layouts.torch_file.loading import load_torch_file
from ckpt_core.checkpointer import Checkpointer
from ckpt_core.directory import DirectoryCheckpoint, DirectoryCheckpointer
from ckpt_core.errors import CheckpointFormatError, StateMismatchError
from ckpt_core.interchange.accelerate_files import (
    is_ours_as_file,
    is_stock_accelerate,
    parts_of_ours,
    parts_of_stock,
    read_stock,
    write_stock,
)
from ckpt_core.interchange.dcp_extras import Exported
from ckpt_core.interchange.dcp_files import export_dcp, import_entries, open_exported, read_dcp
from ckpt_core.interchange.dcp_format import METADATA_NAME, REST_NAME
from ckpt_core.interchange.flat_names import ROOT, is_first_key_of_part
from ckpt_core.interchange.model_files import holds_model, read_model, refuse_unfinished
from ckpt_core.interchange.streaming import DiskMemory, scratch_directory
from ckpt_core.paths import StrPath, full_path
from ckpt_core.process.awaited_paths import wait_for_saves
from ckpt_core.state.kinds import Kind, Part
from ckpt_core.state.trainer_parts import is_of_trainer, metadata_of, parts_of, rest_of_fabric, whole
from ckpt_core.storage import Storage, storage_for
from ckpt_core.storage.base import is_directory_checkpoint
from ckpt_core.tiers import Tiers

_OPTIMIZER = re.compile(r"optimizer_([0-9]+)")


def load_whole(
    source: StrPath,
    *,
    map_location: Any | None = None,
    weights_only: bool | None = None,
    storage_options: dict[str, Any] | None = None,
    tiers: Tiers | None = None,
    of_trainer: bool = False,
    memory: DiskMemory | None = None,
) -> Any:
    """Return the whole state of a checkpoint of any layout in memory; every byte that has a digest is verified.

    For a directory of a Trainer, or of Lightning's sharded strategies (DCP's files and ``meta.pt``), this is the state
    that the Trainer collected. For any other directory of ours, it is a dictionary of its parts and of the entries of
    its part ``root``; a per-rank part is a list with one item for each rank. For a model in safetensors files, it has
    the key ``model``; for a directory of stock Accelerate, its parts
    (:func:`ckpt_core.interchange.accelerate_files.read_stock`).

    Args:
        source: Path or URL.
        map_location: Device of the tensors; the CPU, if not given.
        weights_only: As for ``torch.load``.
        storage_options: Passed to fsspec for a URL.
        tiers: Look in both tiers.
        of_trainer: Refuse directories that do not hold a Trainer's checkpoint.
        memory: Memory for large tensors; ordinary memory, if not given.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        CheckpointFormatError: It is not a Trainer's checkpoint, but ``of_trainer`` requires one.
        CheckpointError: It is damaged, or not readable.
    """
    path = full_path(source)
    wait_for_saves(path)  # by any checkpointer of this process
    settings: dict[str, Any] = {"strategy": "sync", "storage_options": storage_options, "tiers": tiers}
    with DirectoryCheckpointer(**settings) as directories:
        if directories.exists(path):
            empty = None if memory is None else memory.empty
            with directories.load(path, weights_only=weights_only) as opened:
                return _collected(opened, of_trainer, map_location, empty)
    storage = storage_for(path, storage_options)
    exported = _exported(path, storage_options)
    if exported is not None:
        return _collected(exported, of_trainer, map_location, None if memory is None else memory.empty)
    if is_stock_distributed(path, storage_options):
        return _load_stock(path, storage, weights_only, memory)
    if not of_trainer and is_stock_accelerate(path, storage_options):
        return read_stock(path, storage, weights_only=weights_only, memory=memory)
    refuse_unfinished(path, storage)
    if not of_trainer and holds_model(path, storage):
        return {"model": read_model(path, storage, memory=memory)}
    location = (lambda storage, _: storage) if map_location is None else map_location
    location = location if memory is None else memory.restore
    with Checkpointer(**settings) as files:
        return files.load(path, map_location=location, weights_only=weights_only)


def _collected(opened: DirectoryCheckpoint | Exported, of_trainer: bool, map_location: Any, empty: Any) -> Any:
    if is_of_trainer(opened):
        return whole(opened, range(opened.world_size), map_location=map_location, empty=empty)
    if of_trainer:
        raise CheckpointFormatError(
            f"the directory holds the parts {', '.join(opened.parts)}, which are not those of a Trainer's checkpoint",
            path=opened.path,
            remedy="load it with what saved it; or ckpt convert --to file (for Fabric) or --to safetensors (weights)",
        )
    return _parts(opened, empty)


def _parts(opened: DirectoryCheckpoint | Exported, empty: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, part in opened.parts.items():
        if part.kind != "per-rank":
            found[name] = opened.load(name, map_location=empty)
        else:
            found[name] = [opened.load(name, rank=rank, map_location=empty) for rank in opened.ranks_with(name)]
    rest = rest_of_fabric(opened)
    if rest is not None:
        return {**rest, **{name: {**found[name], **rest[name]} for name in found.keys() & rest.keys()}}
    root = found.get(ROOT)
    if isinstance(root, Mapping) and not root.keys() & (found.keys() - {ROOT}):
        del found[ROOT]
        found.update(root)
    return found


def is_stock_distributed(source: StrPath, storage_options: dict[str, Any] | None = None) -> bool:
    """Return whether there is a checkpoint in DCP's own format, such as Lightning's sharded strategies write.

    Args:
        source: Path or URL of the directory.
        storage_options: Passed to fsspec for URLs.
    """
    path = full_path(source)
    return storage_for(path, storage_options).exists(f"{path}/{METADATA_NAME}")


def _load_stock(path: str, storage: Storage, weights_only: bool | None, memory: DiskMemory | None) -> dict[str, Any]:
    state = read_dcp(path, storage, memory)
    if not storage.exists(f"{path}/{REST_NAME}"):
        return state
    with storage.open(f"{path}/{REST_NAME}") as reader:
        rest, _ = load_torch_file(reader, map_location="cpu", weights_only=weights_only)
    if "state_dict" not in state:  # FSDPStrategy saves it as "model", ModelParallelStrategy as "state_dict"
        state["state_dict"] = state.pop("model", {})
    numbers = sorted(int(found[1]) for found in map(_OPTIMIZER.fullmatch, state) if found is not None)
    if numbers:
        # Their state is keyed by parameter names; load_state_dict matches them by their order in the groups.
        state["optimizer_states"] = [state.pop(f"optimizer_{number}") for number in numbers]
    return {**rest, **state}


def convert_to_file(
    source: StrPath,
    target: StrPath,
    *,
    weights_only: bool | None = None,
    storage_options: dict[str, Any] | None = None,
) -> int:
    """Write a checkpoint of any layout as one file that ``torch.load`` reads, and return its size in bytes.

    A Trainer's checkpoint becomes a file that ``load_from_checkpoint`` accepts and from which a run can resume; the
    parts of many ranks are merged. For any other directory, the file has its step and metadata next to the parts. The
    state may be larger than memory: large tensors are kept in an unnamed file on the target's disk meanwhile. The file
    gets a new commit time: among other checkpoints, it is the newest.

    Args:
        source: Path or URL.
        target: Path or URL of the file; an existing file is replaced.
        weights_only: As for ``torch.load``.
        storage_options: Passed to fsspec for URLs.

    Raises:
        CheckpointError: As for :func:`load_whole`; or the storage refused.
    """
    with (
        _state_on_disk(source, target, weights_only, storage_options) as state,
        Checkpointer(strategy="sync", storage_options=storage_options) as files,
    ):
        beside = metadata_and_step(full_path(source), storage_options)
        return files.save({**beside, **state} if beside else state, target)


def metadata_and_step(path: str, storage_options: dict[str, Any] | None) -> dict[str, Any]:
    """Return metadata and ``step`` of a directory checkpoint; empty for a Trainer's checkpoint and other layouts."""
    storage = storage_for(path, storage_options)
    if not is_directory_checkpoint(storage, path):
        return {}
    with DirectoryReader(path, storage) as opened:
        if is_of_trainer(opened):
            return {}
        return {**({} if opened.stamp.step is None else {"step": opened.stamp.step}), **opened.metadata}


@contextlib.contextmanager
def _state_on_disk(
    source: StrPath, target: StrPath, weights_only: bool | None, storage_options: dict[str, Any] | None
) -> Iterator[Any]:
    with contextlib.closing(DiskMemory(full_path(target))) as memory:
        yield load_whole(source, weights_only=weights_only, storage_options=storage_options, memory=memory)


def _as_dictionary(state: Any, source: StrPath) -> Mapping[str, Any]:
    if not isinstance(state, Mapping):
        raise CheckpointFormatError(
            f"the state is a {type(state).__name__} and not a dictionary", path=os.fspath(source)
        )
    return state


def convert_to_accelerate(
    source: StrPath,
    target: StrPath,
    *,
    weights_only: bool | None = None,
    storage_options: dict[str, Any] | None = None,
) -> None:
    """Write a checkpoint of any layout as a directory that stock Accelerate's ``load_state`` accepts.

    The state may be larger than memory, as for :func:`convert_to_file`. Stock Accelerate has no place for the data
    position, gradients of an open window, and registered objects of ranks other than 0: those are left out.

    Args:
        source: Path or URL of a checkpoint of ``accelerate_ckpt`` or of a Lightning Trainer.
        target: A local directory that is empty or does not exist yet.
        weights_only: As for ``torch.load``.
        storage_options: Passed to fsspec for URLs.

    Raises:
        CheckpointError: As for :func:`load_whole`; or the checkpoint has no model; or the target is not empty.
    """
    with _state_on_disk(source, target, weights_only, storage_options) as state:
        write_stock(_as_dictionary(state, source), target)


def convert_to_directory(
    source: StrPath,
    target: StrPath,
    *,
    weights_only: bool | None = None,
    storage_options: dict[str, Any] | None = None,
) -> int:
    """Write a checkpoint of any layout as a directory of safetensors files, and return its size in bytes.

    A Trainer's checkpoint becomes what ``ShardedCheckpointIO`` saves. A file that was converted from a directory of
    one process of ``accelerate_ckpt`` becomes that directory again. Otherwise, each dictionary of the state becomes a
    part, and the rest the part ``root``. The state may be larger than memory, as for :func:`convert_to_file`. The
    directory gets a new commit time: among other checkpoints, it is the newest.

    Args:
        source: Path or URL.
        target: Path or URL of the directory; an existing checkpoint is replaced.
        weights_only: As for ``torch.load``.
        storage_options: Passed to fsspec for URLs.

    Raises:
        SerializationError: Something in the state is not plain data; the error names the key.
        CheckpointError: As for :func:`load_whole`; or the storage refused.
    """
    path = full_path(source)
    exported = _exported(path, storage_options)
    if exported is not None and not is_of_trainer(exported):
        return _write_exported(exported, target, storage_options)
    with _state_on_disk(source, target, weights_only, storage_options) as state:
        return _write_directory(_as_dictionary(state, source), source, target, storage_options)


def _exported(path: str, storage_options: dict[str, Any] | None) -> Exported | None:
    if not is_stock_distributed(path, storage_options):
        return None
    return open_exported(path, storage_for(path, storage_options))


def _write_exported(exported: Exported, target: StrPath, storage_options: dict[str, Any] | None) -> int:
    own = [name for name, part in exported.parts.items() if part.kind == Kind.PER_RANK.value]
    if exported.world_size > 1 and own:
        raise StateMismatchError(
            f"the checkpoint was saved by {exported.world_size} processes, each with {', '.join(own)} of its own",
            path=exported.path,
            key=own[0],
            remedy="take the rest of it: ckpt import --format dcp --only model optimizer",
        )
    with (
        contextlib.closing(DiskMemory(full_path(target))) as memory,
        DirectoryCheckpointer(strategy="sync", storage_options=storage_options) as directories,
    ):
        parts = [
            Part(name, exported.load(name, map_location=memory.empty), Kind(part.kind))
            for name, part in exported.parts.items()
        ]
        return directories.save(parts, target, metadata=exported.metadata, step=exported.step)


def convert_to_dcp(
    source: StrPath,
    target: StrPath,
    *,
    weights_only: bool | None = None,
    storage_options: dict[str, Any] | None = None,
) -> None:
    """Write a checkpoint of any layout in DCP's own format.

    :func:`convert_to_file` and :func:`convert_to_directory` can convert it back with the same bits. A source that is
    not a directory of ours is first converted to a temporary one next to the target, which needs additional space.

    Args:
        source: Path or URL.
        target: A local directory that is empty or does not exist yet.
        weights_only: As for ``torch.load``.
        storage_options: Passed to fsspec for URLs.

    Raises:
        SerializationError: Something in the state is not plain data; the error names the key.
        CheckpointError: As for :func:`load_whole`; or the target is not empty.
    """
    path = full_path(source)
    wait_for_saves(path)
    if is_directory_checkpoint(storage_for(path, storage_options), path):
        export_dcp(source, target, storage_options=storage_options)
        return
    with scratch_directory(target) as between:
        ours = os.path.join(between, "checkpoint")
        convert_to_directory(source, ours, weights_only=weights_only, storage_options=storage_options)
        export_dcp(ours, target)


def import_dcp(
    source: StrPath,
    target: StrPath,
    *,
    only: Collection[str] | None = None,
    storage_options: dict[str, Any] | None = None,
) -> int:
    """Convert a checkpoint in DCP's own format to a directory checkpoint, and return its size in bytes.

    One tensor, or DCP's chunk of one, is in memory at a time. No code from the checkpoint is run: its metadata are read
    by a reader that accepts only descriptions of tensors, and its objects by ``torch.load(weights_only=True)``. DCP
    keeps no digests, so values that were damaged before the import stay damaged. A checkpoint that
    :func:`convert_to_dcp` wrote is restored as :func:`convert_to_directory` would write it.

    Args:
        source: The DCP checkpoint: a directory or a URL.
        target: Path or URL of the directory checkpoint; an existing one is replaced.
        only: Top-level keys of the state to import (``"model"``); None: all.
        storage_options: Passed to fsspec for URLs.

    Raises:
        UnsafeCheckpointError: An object in the checkpoint is not plain data; the error names it.
        CheckpointFormatError: The source is not a DCP checkpoint.
        CheckpointCorruptedError: A file is missing or truncated, or does not match the metadata.
    """
    if only is None and _exported(full_path(source), storage_options) is not None:
        return convert_to_directory(source, target, storage_options=storage_options)
    return import_entries(source, target, only=only, storage_options=storage_options)


def _write_directory(
    state: Mapping[str, Any], source: StrPath, target: StrPath, storage_options: dict[str, Any] | None
) -> int:
    metadata: dict[str, Any] = {}
    if is_stock_accelerate(source, storage_options):
        parts, metadata = parts_of_stock(state)
        step = None
    elif is_ours_as_file(state):
        parts, metadata = parts_of_ours(state, os.fspath(source))
        step = state.get("step")
    elif "state_dict" in state and "global_step" in state:
        parts, metadata = parts_of(state, rank=0), metadata_of(state)
        step = state["global_step"]
    else:
        dictionaries = {
            name: value for name, value in state.items() if isinstance(value, Mapping) and is_first_key_of_part(name)
        }
        rest = {name: value for name, value in state.items() if name not in dictionaries}
        parts = [Part(name, value, Kind.REPLICATED) for name, value in dictionaries.items()]
        parts += [Part(ROOT, rest, Kind.REPLICATED)] if rest else []
        step = state.get("step")
    with DirectoryCheckpointer(strategy="sync", storage_options=storage_options) as directories:
        return directories.save(parts, target, metadata=metadata, step=step if isinstance(step, int) else None)
