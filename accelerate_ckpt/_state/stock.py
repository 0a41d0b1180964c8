"""Loads checkpoints of stock Accelerate: checks every file before anything is changed, and lets Accelerate load them.

Accelerate reads registered objects in a way that runs any code in them, silently ignores missing random states, and
finds a missing or damaged optimizer only after the model has been replaced. Here, an incomplete checkpoint raises
first.
"""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate.utils import (
    MODEL_NAME,
    OPTIMIZER_NAME,
    RNG_STATE_NAME,
    SAFE_MODEL_NAME,
    SAMPLER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
)
from accelerate.utils import load as load_file
from safetensors import SafetensorError, safe_open

from accelerate_ckpt._private.files import registered_states
from accelerate_ckpt._state.parts import check_optimizer, check_weights, is_sharded
from ckpt_core.errors import CheckpointCorruptedError, CheckpointError, StateMismatchError, UnsafeCheckpointError
from ckpt_core.interchange import check_dcp
from ckpt_core.state.kinds import indexed
from ckpt_core.weights_only import reason_of, refused_in

_CUSTOM = re.compile(r"custom_checkpoint_(\d+)\.pkl")
_RANDOM = re.compile(rf"{RNG_STATE_NAME}_(\d+)\.pkl")
_LOADERS = re.compile(rf"({SAMPLER_NAME}|dl_state_dict)(_\d+)?\.bin")
# Files to which Accelerate's load_kwargs apply. It reads the others with weights_only=True in any case.
_MAY_BE_ALLOWED = re.compile(rf"({OPTIMIZER_NAME}|{SCHEDULER_NAME}|dl_state_dict)(_\d+)?\.bin|{_CUSTOM.pattern}")
_OURS = re.compile(r"rank-\d+-of-\d+\.(safetensors|digests)")
_GLOBAL = re.compile(r"GLOBAL (\S+)")
_BLOCK = 2**20  # bytes
_EARLIER = "it was cut off while it was saved, or copied in part: load an earlier checkpoint"


def check_custom_objects(found: int, registered: int, directory: str) -> None:
    """Raise if the number of registered objects differs, with Accelerate's own message."""
    if found != registered:
        raise StateMismatchError(
            f"Number of custom checkpoints in folder {directory} does not match the number of registered objects:"
            f"\n\tFound checkpoints: {found}\n\tRegistered objects: {registered}\n"
            "Please make sure to only load checkpoints from folders that were created with the same set of registered "
            "objects,or avoid using `custom_checkpoint` in the filename for files in that same directory and load "
            "them in manually.",
            path=directory,
            key="custom_objects",
        )


def refuse_damaged_ours(directory: str) -> None:
    """Raise if the directory is a checkpoint of ours without its manifest, which must not pass for a stock one."""
    ours = next(filter(_OURS.fullmatch, sorted(os.listdir(directory))), None)
    if ours is not None:
        raise CheckpointCorruptedError(
            f"it was saved by accelerate_ckpt ({ours}), and its manifest.json is missing: nothing in it can be "
            "verified",
            path=directory,
            remedy="load another checkpoint; if stock Accelerate has saved here since, delete the files rank-*-of-*",
        )


class StockCheckpoint:
    """A checkpoint of stock Accelerate of which every file that a load uses was read, without running code from it.

    Raises ``CheckpointError`` if a file is missing or damaged, if reading one would run code without ``allow_pickle``,
    or if it is of another model or run. With ``strict``, models must have the same names as the checkpoint.
    """

    def __init__(
        self, accelerator: Any, directory: str, rank: int, *, allow_pickle: bool = False, strict: bool = True
    ) -> None:
        self._accelerator = accelerator
        self._directory = directory
        self._rank = rank
        self._allow_pickle = allow_pickle
        self._names = sorted(os.listdir(directory))
        self._check_names()
        if is_sharded(accelerator):
            for name in [] if allow_pickle else self._names:
                if os.path.isfile(self._path(name, ".metadata")):
                    check_dcp(self._path(name))
        else:
            self._check_models(strict)
            for index, optimizer in enumerate(accelerator._optimizers):
                name = f"{indexed(OPTIMIZER_NAME, index)}.bin"
                state = self._read(name)
                if state is not None:
                    check_optimizer(optimizer, state, path=self._path(name), key="param_groups")
        for index, _ in enumerate(accelerator._schedulers):
            self._read(f"{indexed(SCHEDULER_NAME, index)}.bin")
        for name in self._names:
            if _LOADERS.fullmatch(name) or (name == SCALER_NAME and accelerator.scaler is not None):
                self._read(name)
        random_states = f"{RNG_STATE_NAME}_{rank}.pkl"
        self._has_random_states = random_states in self._names
        if self._has_random_states:
            self._read(random_states)
        # Accelerate would read these without weights_only, so the objects get what was read here.
        objects = range(len(accelerator._custom_objects))
        self._custom = (
            None if allow_pickle else [self._read(f"custom_checkpoint_{index}.pkl", keep=True) for index in objects]
        )

    def load(self, original: Callable[..., None], load_kwargs: Mapping[str, Any] | None) -> None:
        """Load it by Accelerate's own ``load_state``, with ``load_kwargs`` for reading optimizers and schedulers.

        A failure that could not be found before is raised as ``CheckpointCorruptedError``.
        """
        arguments = dict(load_kwargs or {})
        if self._allow_pickle:
            arguments.setdefault("weights_only", False)
        try:
            with registered_states(self._custom):
                original(load_kwargs=arguments or None)
        except CheckpointError:
            raise
        except (OSError, EOFError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError) as error:
            raise CheckpointCorruptedError(
                f"a checkpoint of stock Accelerate cannot be loaded: {type(error).__name__}: {error}",
                path=self._directory,
                remedy=(
                    "its files are intact, so it is probably of another model; this model may now be partly loaded"
                ),
            ) from error
        if not self._has_random_states:
            # The saving run did not have this rank. Ranks with different counts would wait for each other forever.
            first = self._read(f"{RNG_STATE_NAME}_0.pkl")
            self._accelerator.step = first.get("step", self._accelerator.step)

    def _path(self, *names: str) -> str:
        return os.path.join(self._directory, *names)

    def _check_names(self) -> None:
        accelerator, directory, names = self._accelerator, self._directory, set(self._names)
        refuse_damaged_ours(directory)
        wanted: list[tuple[str, ...]] = [
            (f"{indexed(SCHEDULER_NAME, i)}.bin",) for i, _ in enumerate(accelerator._schedulers)
        ]
        if not is_sharded(accelerator):  # sharded models and optimizers are in files of other kinds
            wanted += [(f"{indexed(OPTIMIZER_NAME, i)}.bin",) for i, _ in enumerate(accelerator._optimizers)]
            wanted += [_model_files(i) for i in self._models()]
        if accelerator.scaler is not None:
            wanted.append((SCALER_NAME,))
        missing = [" or ".join(choice) for choice in wanted if not set(choice) & names]
        ranks = {int(found.group(1)) for name in names if (found := _RANDOM.fullmatch(name))}
        if self._rank not in ranks and (not ranks or self._rank < max(ranks)):
            missing.append(f"{RNG_STATE_NAME}_{self._rank}.pkl (the random states of rank {self._rank})")
        if missing:
            raise CheckpointCorruptedError(
                f"the checkpoint is not complete: there is no {', no '.join(missing)}",
                path=directory,
                key=missing[0],
                remedy="it was cut off while it was saved, or is of another run: load an earlier checkpoint",
            )
        check_custom_objects(sum(map(bool, map(_CUSTOM.fullmatch, names))), len(accelerator._custom_objects), directory)

    def _models(self) -> range:
        # A hook may load the models in its own way, from files of its own.
        return range(0 if self._accelerator._load_model_state_pre_hook else len(self._accelerator._models))

    def _check_models(self, strict: bool) -> None:
        for index in self._models():
            safe, pickled = _model_files(index)
            name = safe if safe in self._names else pickled
            shapes = shapes_in(self._path(name)) if name == safe else _shapes_of(self._read(name))
            check_weights(self._accelerator._models[index], shapes, strict=strict, path=self._path(name))

    def _read(self, name: str, *, keep: bool = False) -> Any:
        """Return what is in a file; None if reading it may run code, which is then left to Accelerate.

        Tensors are memory-mapped, and must not outlive the file, unless ``keep`` is set.
        """
        path = self._path(name)
        try:
            is_archive = _check_archive(path)
            if self._allow_pickle and _MAY_BE_ALLOWED.fullmatch(name):
                return None
            return load_file(path, map_location="cpu", mmap=is_archive and not keep)
        except FileNotFoundError as error:
            raise CheckpointCorruptedError(
                f"the checkpoint is not complete: there is no {name}", path=path, key=name, remedy=_EARLIER
            ) from error
        except Exception as error:  # damaged bytes may raise anything in torch and pickle
            what = refused_in(error)
            if what is None:
                raise _damaged(path, error) from error
            found = _GLOBAL.search(what)
            raise UnsafeCheckpointError(
                f"reading {name} would run code from it{f': it asks for {found[1]}' if found else ''}",
                path=path,
                key=name,
                remedy="if you trust its author, set allow_pickle: attach(..., allow_pickle=True), --allow_pickle "
                "true or ACCELERATE_CKPT_ALLOW_PICKLE=true; or allow the type with torch.serialization.add_safe_globals"
                if _MAY_BE_ALLOWED.fullmatch(name)
                else "do not use it: Accelerate itself never reads this file in a way that runs code",
            ) from error


def _model_files(index: int) -> tuple[str, str]:
    return f"{indexed(SAFE_MODEL_NAME, index)}.safetensors", f"{indexed(MODEL_NAME, index)}.bin"


def _check_archive(path: str) -> bool:
    """Compare the checksums in a torch file, if it has some; return whether it is an archive, as since torch 1.6."""
    with open(path, "rb") as file:
        if file.read(4) != b"PK\x03\x04":
            return False
    with zipfile.ZipFile(path) as archive:
        for record in archive.infolist():
            if record.CRC == 0:  # torch.serialization.set_crc32_options(False)
                continue
            with archive.open(record) as content:
                while content.read(_BLOCK):
                    pass
    return True


def shapes_in(path: str) -> dict[str, tuple[int, ...] | None]:
    """Return the shapes of the tensors in a safetensors file, whose length is compared with its header."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError) as error:
        raise _damaged(path, error) from error


def _shapes_of(state: Mapping[str, Any]) -> dict[str, tuple[int, ...] | None]:
    return {name: tuple(value.shape) if isinstance(value, torch.Tensor) else None for name, value in state.items()}


def _damaged(path: str, error: Exception) -> CheckpointCorruptedError:
    return CheckpointCorruptedError(
        f"{os.path.basename(path)} cannot be read: {type(error).__name__}: {reason_of(error)}",
        path=path,
        key=os.path.basename(path),
        remedy=_EARLIER,
    )
