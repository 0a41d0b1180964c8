"""Read and write checkpoints of stock Accelerate: the directories of its ``save_state``, converted to and from parts.

Only names of files and keys are needed, so Accelerate need not be installed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ckpt_core._devices.generators import DeviceGenerators
from ckpt_core._layouts.torch_file.loading import load_torch_file
from ckpt_core.checkpointer import Checkpointer
from ckpt_core.errors import CheckpointCorruptedError, CheckpointFormatError, StateMismatchError
from ckpt_core.interchange.dcp_files import read_dcp
from ckpt_core.interchange.dcp_format import METADATA_NAME
from ckpt_core.interchange.model_files import read_model, write_model_file
from ckpt_core.interchange.streaming import DiskMemory, new_directory
from ckpt_core.paths import StrPath, full_path
from ckpt_core.state.kinds import Kind, Part, indexed
from ckpt_core.state.rng import RngState
from ckpt_core.storage import Storage, storage_for
from ckpt_core.storage.base import is_directory_checkpoint
from ckpt_core.tree import tensors

_FORMAT = "accelerate_ckpt"  # metadata key by which accelerate_ckpt recognizes its own checkpoints
_OWN = "own"
_RANDOM = re.compile(r"random_states_([0-9]+)\.pkl")
_CUSTOM = re.compile(r"custom_checkpoint_([0-9]+)\.pkl")
_NUMBERED = re.compile(r"(optimizer|scheduler|sampler|dl_state_dict|pytorch_model)(_[0-9]+)?\.bin")
_MODEL = re.compile(r"model(_[0-9]+)?\.safetensors")
_SHARDED = re.compile(r"(pytorch_model_fsdp|optimizer)_([0-9]+)")
_SCALER = "scaler.pt"
_OF_RANK = re.compile(r"own|custom_[0-9]+")
_OF_OURS = re.compile(rf"(model|optimizer|scheduler)(_[0-9]+)?|scaler|{_OF_RANK.pattern}")
_WHOLE_MODEL = "pytorch_model_fsdp.bin"
_ACCELERATORS = ("cuda", "xpu", "mlu", "sdaa", "musa", "hpu", "neuron")  # whose generators stock Accelerate saves
_WORDS = np.zeros(1, np.uint32)
_OF_NUMPY: list[Any] = [_WORDS.__reduce__()[0], np.ndarray, np.dtype, type(_WORDS.dtype)]


def is_stock_accelerate(source: StrPath, storage_options: dict[str, Any] | None = None) -> bool:
    """Return whether a directory was written by stock Accelerate's ``save_state``.

    Args:
        source: Path or URL of the directory.
        storage_options: Passed to fsspec for URLs.
    """
    path = full_path(source)
    storage = storage_for(path, storage_options)
    return not is_directory_checkpoint(storage, path) and any(
        storage.exists(f"{path}/{name}") for name in ("random_states_0.pkl", "optimizer.bin")
    )


def read_stock(
    path: str, storage: Storage, *, weights_only: bool | None = None, memory: DiskMemory | None = None
) -> dict[str, Any]:
    """Read a checkpoint of stock Accelerate into memory, as a dictionary of parts.

    Parts are ``model``, ``optimizer``, ``scheduler`` (from the second on with a number), ``scaler``, ``custom_0`` and
    so on, ``sampler``, ``dl_state_dict``, and ``random_states``, by rank. A file with more than plain data is refused.
    """
    names = [os.path.basename(file.path) for file in storage.list(path)]
    found: dict[str, Any] = {}
    for name in sorted(names):
        if (model := _MODEL.fullmatch(name)) is not None:
            found[f"model{model[1] or ''}"] = read_model(path, storage, name=name, memory=memory)
        elif (part := _part_in(name)) is not None:
            found[part] = _read(storage, path, name, weights_only, memory)
        elif (rank := _RANDOM.fullmatch(name)) is not None:
            states = _read(storage, path, name, weights_only, memory)
            try:
                found.setdefault("random_states", {})[rank[1]] = _plain(states)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise CheckpointFormatError(
                    f"the random states are not as stock Accelerate saves them: {error!r}", path=f"{path}/{name}"
                ) from error
    for directory in storage.subdirectories(path):
        name = os.path.basename(directory.rstrip("/"))
        sharded = _SHARDED.fullmatch(name)
        if sharded is not None and storage.exists(f"{path}/{name}/{METADATA_NAME}"):
            part = "model" if sharded[1] != "optimizer" else "optimizer"
            state = read_dcp(f"{path}/{name}", storage, memory)
            found[part if sharded[2] == "0" else f"{part}_{sharded[2]}"] = state.get(part, state)
    if "model" not in found and "model.safetensors.index.json" in names:
        found["model"] = read_model(path, storage, memory=memory)
    if "model" not in found and "optimizer" not in found:
        raise CheckpointCorruptedError(
            "the checkpoint of stock Accelerate has no model",
            path=path,
            remedy="it was cut off while it was saved, or its weights are in files of a hook: take another one",
        )
    return found


def is_file_of_stock(name: str) -> bool:
    """Return whether a file in such a directory is a torch file that :func:`read_stock` reads."""
    return _part_in(name) is not None or _RANDOM.fullmatch(name) is not None


def _part_in(name: str) -> str | None:
    """Return the part that a torch file holds; None for random states, which form one part for all ranks."""
    if (numbered := _NUMBERED.fullmatch(name)) is not None:
        part = "model" if numbered[1] == "pytorch_model" else numbered[1]
        return part + (numbered[2] or "")
    if (custom := _CUSTOM.fullmatch(name)) is not None:
        return f"custom_{custom[1]}"
    return {_SCALER: "scaler", _WHOLE_MODEL: "model"}.get(name)


def _read(storage: Storage, path: str, name: str, weights_only: bool | None, memory: DiskMemory | None) -> Any:
    # The random states hold a NumPy array; Accelerate allows NumPy's types for all of its files.
    allowed = _OF_NUMPY if _RANDOM.fullmatch(name) else []
    with storage.open(f"{path}/{name}") as reader, torch.serialization.safe_globals(allowed):
        return load_torch_file(
            reader, map_location="cpu" if memory is None else memory.restore, weights_only=weights_only
        )[0]


def parts_of_stock(state: Mapping[str, Any]) -> tuple[list[Part], dict[str, Any]]:
    """Convert the result of :func:`read_stock` to parts and metadata of a directory that ``accelerate_ckpt`` loads.

    Only the random states of rank 0 are used: the other ranks derive theirs. There is no data position.
    """
    random_states = state.get("random_states", {})
    custom = [name for name in state if name.startswith("custom_")]
    taken = [name for name in state if re.fullmatch(r"(model|optimizer|scheduler)(_[0-9]+)?|scaler", name)]
    parts = [Part(name, state[name], Kind.REPLICATED) for name in taken]
    parts += [Part(name, state[name], Kind.PER_RANK) for name in custom]
    first = random_states.get("0")
    own: dict[str, Any] = {
        "data": {
            "version": 1,
            "step": first["step"] if first else 0,
            "rng": first["rng"] if first else RngState.capture().encode(),
            "loaders": [],
        },
        "gradients": None,
        "buffers": [],
        "takes_buffers": [],
    }
    parts.append(Part(_OWN, own, Kind.PER_RANK))
    about = {
        "version": 1,
        "accelerate": "stock",
        "torch": str(torch.__version__),
        "world_size": 1,
        "iteration": None,
        "custom_objects": len(custom),
        "local_sgd": {"num_steps": [], "moments_differ": False},
        "of_stock": True,
    }
    return parts, {_FORMAT: about}


def is_ours_as_file(state: Mapping[str, Any]) -> bool:
    """Return whether the state of a file was converted from a directory of ``accelerate_ckpt``."""
    return isinstance(state.get(_FORMAT), Mapping) and isinstance(state.get(_OWN), list)


def parts_of_ours(state: Mapping[str, Any], path: str) -> tuple[list[Part], dict[str, Any]]:
    """Return the parts and metadata of the directory from which such a file was converted."""
    ranks = len(state[_OWN])
    if ranks != 1:
        raise StateMismatchError(
            f"the checkpoint was saved by {ranks} processes, each with its own state, which one file cannot give "
            "back to them",
            path=path,
            key=_OWN,
            remedy="take the directory that the file was made of; or its weights: ckpt convert --to safetensors",
        )
    names = [name for name in state if _OF_OURS.fullmatch(name)]
    parts = [Part(name, state[name], Kind.REPLICATED) for name in names if not _OF_RANK.fullmatch(name)]
    parts += [Part(name, state[name][0], Kind.PER_RANK) for name in names if _OF_RANK.fullmatch(name)]
    return parts, {name: value for name, value in state.items() if name not in names and name != "step"}


def _plain(states: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a rank's random states to plain data in the format of ``accelerate_ckpt``."""
    devices = {
        kind: DeviceGenerators(tuple(states[key]), 0)
        for kind, key in ((kind, f"torch_{kind}_manual_seed") for kind in _ACCELERATORS)
        if states.get(key)
    }
    rng = RngState(states["random_state"], tuple(states["numpy_random_seed"]), states["torch_manual_seed"], devices)
    return {"step": int(states.get("step", 0)), "rng": rng.encode()}


def write_stock(state: Mapping[str, Any], target: StrPath) -> None:
    """Write a state in the layout of stock Accelerate's ``save_state``, for its ``load_state``.

    The state is one that :func:`load_whole` returns. Written are models as safetensors, optimizers, schedulers, scaler,
    registered objects and random states. The layout has no place for the data position.
    """
    parts = _parts(state)
    if not isinstance(parts.get("model"), Mapping):
        raise CheckpointFormatError(
            f"there is no model to write for Accelerate: the checkpoint has {', '.join(map(str, state))}",
            remedy="take a checkpoint of accelerate_ckpt or of Lightning",
        )
    with new_directory(target) as directory, Checkpointer(strategy="sync") as files:
        for name, value in parts.items():
            if re.fullmatch(r"model(_[0-9]+)?", name):
                write_model_file(_untied(value), f"{directory}/{name}.safetensors")
            elif name == "random_states":
                for rank, states in value.items():
                    torch.save(_as_stock(states), f"{directory}/random_states_{rank}.pkl")
            elif name == "scaler":
                files.save(value, f"{directory}/{_SCALER}")
            elif name.startswith("custom_"):
                number = name.removeprefix("custom_")
                files.save(value, f"{directory}/custom_checkpoint_{number}.pkl")
            else:
                files.save(value, f"{directory}/{name}.bin")


def _parts(state: Mapping[str, Any]) -> dict[str, Any]:
    if "state_dict" in state:  # Lightning's
        found = {"model": state["state_dict"]}
        for name, key in (("optimizer", "optimizer_states"), ("scheduler", "lr_schedulers")):
            found |= {indexed(name, index): each for index, each in enumerate(state.get(key, ()))}
        return found
    known = re.compile(
        r"(model|optimizer|scheduler|sampler|dl_state_dict)(_[0-9]+)?|scaler|custom_[0-9]+|random_states"
    )
    found = {name: value for name, value in state.items() if known.fullmatch(str(name))}
    # A per-rank part is a list with one value for each rank, and Accelerate keeps only one of them.
    found = {name: value[0] if isinstance(value, list) else value for name, value in found.items()}
    if isinstance(state.get(_OWN), list):
        found["random_states"] = {rank: own["data"] for rank, own in enumerate(state[_OWN])}
    return found


def _as_stock(data: Mapping[str, Any]) -> dict[str, Any]:
    rng = RngState.decode(data["rng"])
    states = {
        "step": int(data["step"]),
        "random_state": rng.python,
        "numpy_random_seed": rng.numpy,
        "torch_manual_seed": rng.torch_cpu,
    }
    for kind, generators in rng.devices.items():
        states[f"torch_{kind}_manual_seed"] = list(generators.states)
    return states


def _untied(model: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a model, tied ones under one name only: Accelerate's load finds the other names itself."""
    found: dict[str, torch.Tensor] = {}
    seen: set[tuple[Any, ...]] = set()
    for name, tensor in tensors(model):
        place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.numel() == 0 or place not in seen:
            seen.add(place)
            found[name] = tensor
    return found
