"""Export a model to Hugging Face's safetensors files and import it from them, with one tensor in memory at a time.

The file is ``model.safetensors``; if that would be too large, ``model-00001-of-00002.safetensors`` and so on, with
``model.safetensors.index.json``, which records the file of each tensor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import uuid
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from ckpt_core._layouts.directory.loading import DirectoryReader
from ckpt_core._layouts.directory.matching import key_of, tensor_paths
from ckpt_core._layouts.directory.safetensors_file import SafetensorsImage, file_layout, file_order
from ckpt_core._layouts.safetensors import StoredTensor, TensorInfo, can_store, dtype_name, read_header
from ckpt_core._layouts.torch_file.loading import translated_errors
from ckpt_core._pipeline import loading
from ckpt_core._pipeline.writer import write_image
from ckpt_core.buffers import ScratchBuffers
from ckpt_core.errors import (
    CheckpointCorruptedError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    SerializationError,
    StateMismatchError,
)
from ckpt_core.geometry import Box
from ckpt_core.interchange.dcp_reader import TensorBatches, structure_of
from ckpt_core.interchange.flat_names import ROOT
from ckpt_core.interchange.streaming import DiskMemory, LazyTensors, TensorMemory, given, new_directory
from ckpt_core.interchange.unconnected_save import Chunk, save_alone
from ckpt_core.paths import StrPath, full_path
from ckpt_core.process.awaited_paths import wait_for_saves
from ckpt_core.state.trainer_parts import buffers_apart
from ckpt_core.storage import LocalStorage, Storage, is_remote, storage_for
from ckpt_core.storage.base import MANIFEST_NAME, is_directory_checkpoint

DEFAULT_SHARD_SIZE = 5 * 10**9  # bytes, as in transformers
_NAME = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_ADAPTERS = "adapter_model.safetensors"  # PEFT's file of adapters only, without the base model
_OURS = re.compile(r"rank-\d{5,}-of-\d{5,}.*\.digests")
_PLAIN_NAME = re.compile(r"[^/\\:\0]+\.safetensors")
MODEL_KEYS = ("state_dict", "model", "module", "model_state_dict")  # usual keys of the model in a file
_SURROGATE = re.compile("[\ud800-\udfff]")  # valid in JSON, but refused by readers of safetensors
_LARGEST_INDEX = 2**28  # bytes


@dataclasses.dataclass(frozen=True)
class _Tensor:
    info: TensorInfo
    load: Callable[[], torch.Tensor]


def export_model(
    source: StrPath,
    target: StrPath,
    *,
    part: str | None = None,
    prefix: str = "",
    max_shard_size: int = DEFAULT_SHARD_SIZE,
    storage_options: dict[str, Any] | None = None,
) -> list[str]:
    """Write the tensors of a model as safetensors files that ``from_pretrained`` and other programs can read.

    For a directory checkpoint, one tensor is in memory at a time. For a torch file (``.ckpt``) on a local disk, too:
    every byte is verified first, then the file is mapped into memory. A torch file on an object store is loaded whole.

    Args:
        source: A directory checkpoint or a torch file; path or URL.
        target: A local directory that does not exist yet, or is empty.
        part: Where the model is: a part of the checkpoint, or a key of the torch file. By default, the usual names are
            tried; a file may also be a bare ``state_dict``. Values that are not tensors are left out.
        prefix: Export only tensors whose names begin with this, and remove it: ``"model."`` for a LightningModule that
            holds the model in that attribute.
        max_shard_size: Maximum bytes of tensors in one file; a larger tensor has its own file.
        storage_options: Passed to fsspec for a URL.

    Returns:
        The files' names.

    Raises:
        CheckpointCorruptedError: A byte of ``source`` differs from what was saved. Nothing is left at ``target``.
        CheckpointNotFoundError: The checkpoint has no such part.
        SerializationError: safetensors does not support the type or the name of a tensor.
        StateMismatchError: There is no tensor below ``part`` and ``prefix``.
    """
    if max_shard_size < 1:
        raise ValueError(f"max_shard_size must be at least 1 byte, not {max_shard_size}")
    path = full_path(source)
    wait_for_saves(path)
    with tensors_of(path, part, storage_for(path, storage_options)) as found, new_directory(target) as directory:
        tensors = {key.removeprefix(prefix): tensor for key, tensor in found.items() if key.startswith(prefix)}
        if not tensors:
            raise StateMismatchError(
                f"no tensor's name begins with {prefix!r}; the first is {next(iter(found), None)!r}",
                path=path,
                remedy="change part= or prefix= (--part, --prefix)",
            )
        return _write_model(tensors, directory, max_shard_size)


@contextlib.contextmanager
def tensors_of(path: str, part: str | None, storage: Storage) -> Iterator[dict[str, _Tensor]]:
    """Yield the tensors of a model in a checkpoint by name; each is read when it is accessed."""
    if not is_directory_checkpoint(storage, path):
        yield _tensors_of_file(path, part, storage)
        return
    with DirectoryReader(path, storage) as checkpoint:
        name = part or part_of_model(checkpoint.parts)
        state = structure_of(checkpoint, name)
        wanted = list(tensor_paths(state, torch.Tensor))
        infos = [TensorInfo(like.dtype, tuple(like.shape)) for _, like in wanted]
        batches = TensorBatches(checkpoint, name, 0, [wanted[index] for index in file_order(infos)])
        loads = [functools.partial(batches.load, where) for where, _ in wanted]
        keys = [key_of(where) for where, _ in wanted]
        found = {key: _Tensor(info, load) for key, info, load in zip(keys, infos, loads, strict=True)}
        yield found | _in_memory(buffers_apart(checkpoint, name))


def _tensors_of_file(path: str, part: str | None, storage: Storage) -> dict[str, _Tensor]:
    if is_remote(path):
        state, _, _ = loading.load(path, map_location="cpu", storage=storage)
    else:
        loading.verify(path, storage=storage)
        with translated_errors(path):
            # Only zip archives can be mapped into memory.
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    model = model_in(state, part)
    if model is None:
        raise CheckpointNotFoundError(
            f"the checkpoint has no {part or 'state_dict'!r}; it has "
            + (", ".join(map(str, state)) if isinstance(state, Mapping) else "no keys"),
            path=path,
            key=part,
            remedy="say with part= (--part) where the model is",
        )
    return _in_memory(model)


def _in_memory(state: Any) -> dict[str, _Tensor]:
    return {
        key_of(where): _Tensor(TensorInfo(tensor.dtype, tuple(tensor.shape)), given(tensor))
        for where, tensor in tensor_paths(state, torch.Tensor)
    }


def model_in(state: Any, part: str | None = None) -> Any:
    """Return ``state[part]``; by default the model, at a usual key or as a bare ``state_dict``; None if missing."""
    if not isinstance(state, Mapping):
        return None
    if part is not None:
        return state.get(part)
    found = next((state[key] for key in MODEL_KEYS if isinstance(state.get(key), Mapping)), None)
    if found is None and any(isinstance(value, torch.Tensor) for value in state.values()):
        return state  # torch.save(model.state_dict(), path)
    return found


def part_of_model(parts: Collection[str]) -> str:
    """Return the name of the part of a directory checkpoint that holds the model, by the usual names."""
    return next((name for name in ("model", *MODEL_KEYS, ROOT) if name in parts), "model")


def _write_model(tensors: Mapping[str, _Tensor], directory: str, max_shard_size: int) -> list[str]:
    _check(tensors)
    groups: list[dict[str, _Tensor]] = [{}]
    size = 0
    for key, tensor in tensors.items():
        if groups[-1] and size + tensor.info.nbytes > max_shard_size:
            groups.append({})
            size = 0
        groups[-1][key] = tensor
        size += tensor.info.nbytes
    if len(groups) == 1:
        _write_file(groups[0], f"{directory}/{_NAME}")
        return [_NAME]
    names = [f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors" for number in range(len(groups))]
    for name, group in zip(names, groups, strict=True):
        _write_file(group, f"{directory}/{name}")
    index = {
        "metadata": {"total_size": sum(tensor.info.nbytes for tensor in tensors.values())},
        "weight_map": {key: name for name, group in zip(names, groups, strict=True) for key in group},
    }
    with open(f"{directory}/{_INDEX}", "w", encoding="utf-8") as file:
        json.dump(index, file, indent=2)
    return [*names, _INDEX]


def write_model_file(tensors: Mapping[str, torch.Tensor], path: str) -> None:
    """Write tensors to a local safetensors file."""
    found = {}
    for name, tensor in tensors.items():
        info = TensorInfo(tensor.dtype, tuple(tensor.shape))
        found[name] = _Tensor(info, given(tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()))
    _check(found)
    _write_file(found, path)


def _check(tensors: Mapping[str, _Tensor]) -> None:
    for key, tensor in tensors.items():
        if not can_store(tensor.info):
            raise SerializationError(
                f"safetensors has no name for the type {dtype_name(tensor.info.dtype)}",
                key=key,
                remedy="convert it to a type that safetensors has",
            )
        if _SURROGATE.search(key):
            raise SerializationError(
                "a name that is not valid Unicode cannot be saved as safetensors",
                key=key,
                remedy="rename the tensor",
            )


def _write_file(tensors: Mapping[str, _Tensor], path: str) -> None:
    keys, found = list(tensors), list(tensors.values())
    order = file_order([tensor.info for tensor in found])
    layout = file_layout(tuple((keys[index], found[index].info) for index in order), ())
    sources = LazyTensors([found[index].load for index in order])
    image = SafetensorsImage(layout, layout.header(uuid.uuid4().hex), sources)
    with contextlib.closing(ScratchBuffers()) as scratch:
        write_image(image, LocalStorage(), path, scratch=scratch, one_by_one=True)


def import_model(
    source: StrPath, target: StrPath, *, part: str = "model", storage_options: dict[str, Any] | None = None
) -> int:
    """Convert a model in safetensors files to a directory checkpoint, and return its size in bytes.

    One tensor is in memory at a time. Safetensors has no digests: values that were damaged before the import stay so.

    Args:
        source: The model's directory or URL: ``model.safetensors``, the index and the files that it names, or PEFT's
            ``adapter_model.safetensors``; or one ``.safetensors`` file.
        target: Path or URL of the directory checkpoint; an existing one is replaced.
        part: Name of the part for the model, with the tensors' names as its keys.
        storage_options: Passed to fsspec for URLs.

    Raises:
        CheckpointNotFoundError: There is no model.
        CheckpointFormatError: The index is invalid, or a tensor has a type that torch does not have.
        CheckpointCorruptedError: A file is missing, truncated or has a damaged header, or a tensor is missing.
    """
    origin = full_path(source)
    storage = storage_for(origin, storage_options)
    memory = TensorMemory()
    chunks = []
    for path, key, tensor in _tensors_in(storage, origin):
        load = _StoredLoader(storage, path, tensor, memory)
        chunks.append(Chunk((key,), 0, tensor.info, Box.whole(tensor.info.shape), load))
    if len({chunk.path for chunk in chunks}) != len(chunks):
        raise CheckpointFormatError("two files of the model hold the same tensor", path=origin, remedy="remove one")
    return save_alone(full_path(target), {part: chunks}, {}, kind="replicated", storage_options=storage_options)


def read_model(
    origin: str, storage: Storage, *, name: str = _NAME, memory: DiskMemory | None = None
) -> dict[str, torch.Tensor]:
    """Load all tensors of a model in safetensors files into memory.

    ``name`` is the name of the model's file, if the model is in one file. Errors as for :func:`import_model`.
    """
    found = _tensors_in(storage, origin, name)
    return {key: _StoredLoader(storage, path, tensor, memory or TensorMemory())() for path, key, tensor in found}


def infos_of_model(origin: str, storage: Storage) -> dict[str, dict[str, TensorInfo]]:
    """Return types and shapes of the tensors in each file of a model; arguments, errors as for :func:`read_model`."""
    found: dict[str, dict[str, TensorInfo]] = {}
    for path, key, tensor in _tensors_in(storage, origin):
        found.setdefault(path, {})[key] = tensor.info
    return found


def _tensors_in(storage: Storage, origin: str, name: str = _NAME) -> Iterator[tuple[str, str, StoredTensor]]:
    """Yield, for each tensor of a model or of one file, the path of its file, its name, and its place in the file."""
    directory, files = origin, None
    if origin.endswith(".safetensors"):
        directory, _, name = origin.rpartition("/")
        files = {name: None}
    for file, wanted in (files or _files_of(storage, origin, name)).items():
        path = f"{directory}/{file}"
        stored = _stored_in(storage, path)
        for key in stored if wanted is None else wanted:
            if key not in stored:
                raise CheckpointCorruptedError(
                    f"{key} is not in the file that the index names",
                    path=path,
                    key=key,
                    remedy="download the model again",
                )
            yield path, key, stored[key]


def refuse_unfinished(path: str, storage: Storage) -> None:
    """Refuse a directory checkpoint without its manifest, whose files could be mistaken for those of a model."""
    if not path.endswith(".safetensors") and any(_OURS.fullmatch(os.path.basename(f.path)) for f in storage.list(path)):
        happened = "the save was cut off" if is_remote(path) else "it was copied in part"
        raise CheckpointCorruptedError(
            f"it has no {MANIFEST_NAME}, which is written last: {happened}, or somebody has deleted it",
            path=path,
            remedy="take an older checkpoint: ckpt latest of the directory in which it is",
        )


def holds_model(path: str, storage: Storage) -> bool:
    """Return whether the path is a safetensors file, or a directory with a model in safetensors files."""
    return path.endswith(".safetensors") or any(storage.exists(f"{path}/{name}") for name in (_NAME, _INDEX, _ADAPTERS))


def _stored_in(storage: Storage, path: str) -> dict[str, StoredTensor]:
    try:
        with storage.open(path) as file:
            return read_header(file)
    except CheckpointNotFoundError as error:
        raise CheckpointCorruptedError(
            "a file of the model is missing", path=path, remedy="download the model again"
        ) from error


def _files_of(storage: Storage, directory: str, name: str) -> dict[str, Sequence[str] | None]:
    """Return the model's files, and for each the names of the tensors to read from it; None for all of them."""
    if storage.exists(f"{directory}/{name}"):
        return {name: None}
    path = f"{directory}/{_INDEX}"
    try:
        with storage.open(path) as file:
            data = file.read_whole(_LARGEST_INDEX)
    except CheckpointNotFoundError as error:
        if storage.exists(f"{directory}/{_ADAPTERS}"):
            return {_ADAPTERS: None}
        raise CheckpointNotFoundError(
            f"there is no model: neither {_NAME} nor {_INDEX}", path=directory, remedy="check the path"
        ) from error
    files: dict[str, list[str]] = {}
    try:
        for key, file_name in json.loads(data)["weight_map"].items():
            if _PLAIN_NAME.fullmatch(file_name) is None:
                raise ValueError(f"{file_name!r} is not the name of a file")
            files.setdefault(file_name, []).append(key)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise CheckpointFormatError(
            f"the model's index is invalid: {error}", path=path, remedy="download the model again"
        ) from error
    return dict(files)


@dataclasses.dataclass(frozen=True)
class _StoredLoader:
    storage: Storage
    path: str
    tensor: StoredTensor
    memory: TensorMemory | DiskMemory

    def __call__(self) -> torch.Tensor:
        flat = self.memory.flat(self.tensor.info.nbytes)
        if flat.numel():
            with self.storage.open(self.path) as file:
                file.read_into(self.tensor.begin, flat.numpy().data)
        return flat.view(self.tensor.info.dtype).view(self.tensor.info.shape)
