"""Recognize checkpoints of other programs: which program wrote one, what it holds, and a check of its completeness."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

from ckpt_core._layouts.torch_file.loading import peek_torch_file, verify_torch_file
from ckpt_core.errors import UnsafeCheckpointError
from ckpt_core.interchange.accelerate_files import is_file_of_stock, is_stock_accelerate
from ckpt_core.interchange.dcp_extras import STRUCTURE
from ckpt_core.interchange.dcp_files import entries_of_dcp, verify_dcp
from ckpt_core.interchange.dcp_format import METADATA_NAME, REST_NAME
from ckpt_core.interchange.flat_names import entry_name
from ckpt_core.interchange.model_files import MODEL_KEYS, holds_model, infos_of_model, refuse_unfinished
from ckpt_core.paths import StrPath, full_path
from ckpt_core.storage import Storage, storage_for

_HEADER = "names, types and sizes agree with the files; safetensors has no digests of the values"


@dataclasses.dataclass(frozen=True)
class Foreign:
    """A checkpoint of another program."""

    what: str  # the kind of checkpoint in words: `"a Hugging Face model, 2 files"`
    state: dict[str, Any]  # its state, with tensors without values
    model: dict[str, Any]  # the model in that state; all of the state if its place is unknown
    checked: str  # what `check` compares, in words
    check: Callable[[], None]  # reads the checkpoint to its end; raises a `CheckpointError` if it is damaged


@dataclasses.dataclass(frozen=True, repr=False)
class _NotRead:
    """Placeholder for an object of a checkpoint that was not read."""

    why: str

    def __repr__(self) -> str:
        return f"<{self.why}>"


def recognize(source: StrPath, *, storage_options: dict[str, Any] | None = None) -> Foreign | None:
    """Recognize the checkpoint of another program at a path; return None if ``ckpt convert`` does not know it.

    Args:
        source: A ``.safetensors`` file; a directory of a model in such files, of DCP or of stock Accelerate.
        storage_options: Passed to fsspec for URLs.

    Raises:
        CheckpointCorruptedError: A file is missing, truncated, or its header makes no sense.
        CheckpointError: The checkpoint cannot be read.
    """
    path = full_path(source)
    storage = storage_for(path, storage_options)
    if is_stock_accelerate(path, storage_options):
        return _accelerate(path, storage)
    if storage.exists(f"{path}/{METADATA_NAME}"):
        return _dcp(path, storage)
    refuse_unfinished(path, storage)
    if not holds_model(path, storage):
        return None
    files = infos_of_model(path, storage)
    state = {name: info.empty("meta") for infos in files.values() for name, info in infos.items()}
    what = (
        "a safetensors file"
        if path.endswith(".safetensors")
        else f"a Hugging Face model, {len(files)} file{'s' * (len(files) != 1)}"
    )
    return Foreign(what, state, state, _HEADER, lambda: None)  # the headers have been compared


def _accelerate(path: str, storage: Storage) -> Foreign:
    state: dict[str, Any] = {}
    files: list[str] = []
    for name in sorted(os.path.basename(file.path) for file in storage.list(path)):
        if name.endswith(".safetensors"):
            for infos in infos_of_model(f"{path}/{name}", storage).values():
                state.setdefault("model", {}).update({key: info.empty("meta") for key, info in infos.items()})
        elif is_file_of_stock(name):
            files.append(f"{path}/{name}")
            with storage.open(files[-1]) as reader:
                try:
                    state[name.rpartition(".")[0]] = peek_torch_file(reader)
                except UnsafeCheckpointError as error:
                    state[name.rpartition(".")[0]] = _NotRead(error.message)
    parts = [
        directory.rstrip("/")
        for directory in storage.subdirectories(path)
        if storage.exists(f"{directory.rstrip('/')}/{METADATA_NAME}")
    ]
    for part in parts:
        state[os.path.basename(part)] = _dcp(part, storage).state

    def check() -> None:
        for file in files:
            with storage.open(file) as reader:
                verify_torch_file(reader)
        for part in parts:
            verify_dcp(part, storage)

    return Foreign(
        "a checkpoint of stock Accelerate",
        state,
        state.get("model", state),
        f"CRC-32 of each record of torch's files; {_HEADER}",
        check,
    )


def _dcp(path: str, storage: Storage) -> Foreign:
    entries = entries_of_dcp(path, storage)
    state: dict[str, Any] = {
        entry_name(each.path): _NotRead("an object, not read here") if each.info is None else each.info.empty("meta")
        for each in entries
    }
    is_ours = state.pop(STRUCTURE, None) is not None
    names = [entry_name(each.path) for each in entries if each.path[0] in MODEL_KEYS]
    has_rest = storage.exists(f"{path}/{REST_NAME}")

    def check() -> None:
        verify_dcp(path, storage)
        if has_rest:
            with storage.open(f"{path}/{REST_NAME}") as reader:
                verify_torch_file(reader)

    whose = ", of Lightning" if has_rest else ", of this package" if is_ours else ""
    return Foreign(
        f"a checkpoint in DCP's format{whose}",
        state,
        {name: state[name] for name in names} or state,
        "every entry is there, and CRC-32 of each record of torch's",
        check,
    )
