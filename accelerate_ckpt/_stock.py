"""Checkpoints that stock Accelerate wrote: checked before they are loaded, and loaded by Accelerate itself.

Accelerate passes over missing random states in silence and finds a missing optimizer when the model has been replaced
already. What a checkpoint lacks is said here before anything is changed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

from accelerate.utils import MODEL_NAME, OPTIMIZER_NAME, RNG_STATE_NAME, SAFE_MODEL_NAME, SCALER_NAME, SCHEDULER_NAME
from accelerate.utils import load as load_file

from accelerate_ckpt import _fsdp
from accelerate_ckpt._parts import indexed
from ckpt_core.errors import CheckpointCorruptedError, CheckpointError, StateMismatchError

__all__ = ["check_custom_objects", "load_stock", "problem_of_stock"]

_CUSTOM = re.compile(r"custom_checkpoint_\d+\.pkl")
_RANDOM = re.compile(rf"{RNG_STATE_NAME}_(\d+)\.pkl")


def check_custom_objects(found: int, registered: int, directory: str) -> None:
    """Refuse another number of registered objects, in Accelerate's words.

    Raises:
        StateMismatchError: The numbers differ.
    """
    if found != registered:
        raise StateMismatchError(
            f"Number of custom checkpoints in folder {directory} does not match the number of registered objects:"
            f"\n\tFound checkpoints: {found}\n\tRegistered objects: {registered}\n"
            "Please make sure to only load checkpoints from folders that were created with the same set of registered "
            "objects,or avoid using `custom_checkpoint` in the filename for files in that same directory and load them in "
            "manually.",
            path=directory,
            key="custom_objects",
        )


def problem_of_stock(accelerator: Any, directory: str, rank: int) -> CheckpointError | None:
    """Return what keeps this Accelerator from going on from a checkpoint of stock Accelerate, None if nothing does.

    Args:
        accelerator: With everything prepared that is to be loaded.
        directory: The checkpoint.
        rank: This process's rank.
    """
    names = os.listdir(directory)
    wanted: list[tuple[str, ...]] = [
        (f"{indexed(SCHEDULER_NAME, i)}.bin",) for i, _ in enumerate(accelerator._schedulers)
    ]
    sharded = _fsdp.is_used(accelerator)  # then models and optimizers are in files of other kinds
    if not sharded:
        wanted += [(f"{indexed(OPTIMIZER_NAME, i)}.bin",) for i, _ in enumerate(accelerator._optimizers)]
    if not sharded and not accelerator._load_model_state_pre_hook:  # a hook may load the models in its own way
        models = range(len(accelerator._models))
        wanted += [(f"{indexed(SAFE_MODEL_NAME, i)}.safetensors", f"{indexed(MODEL_NAME, i)}.bin") for i in models]
    if accelerator.scaler is not None:
        wanted.append((SCALER_NAME,))
    missing = [" or ".join(choice) for choice in wanted if not set(choice) & set(names)]
    ranks = {int(found.group(1)) for name in names if (found := _RANDOM.fullmatch(name))}
    if rank not in ranks and (not ranks or rank < max(ranks)):
        missing.append(f"{RNG_STATE_NAME}_{rank}.pkl (the random states of rank {rank})")
    if missing:
        return CheckpointCorruptedError(
            f"the checkpoint is not complete: there is no {', no '.join(missing)}",
            path=directory,
            key=missing[0],
            remedy="it was cut off while it was saved, or is of another run: load an earlier checkpoint",
        )
    try:
        check_custom_objects(sum(map(bool, map(_CUSTOM.fullmatch, names))), len(accelerator._custom_objects), directory)
    except StateMismatchError as error:
        return error
    return None


def load_stock(accelerator: Any, original: Callable[[], None], directory: str, rank: int) -> None:
    """Load a checkpoint of stock Accelerate in which :func:`problem_of_stock` has found no problem.

    Args:
        accelerator: What to load into.
        original: Accelerate's own ``load_state`` with its arguments.
        directory: The checkpoint.
        rank: This process's rank.

    Raises:
        CheckpointCorruptedError: A file is damaged.
    """
    # Accelerate would pass over random states that it cannot read.
    random_states = _read(os.path.join(directory, f"{RNG_STATE_NAME}_{rank}.pkl"), required=False)
    try:
        original()
    except CheckpointError:
        raise
    except (OSError, EOFError, RuntimeError, ValueError, KeyError) as error:
        raise CheckpointCorruptedError(
            f"a checkpoint of stock Accelerate cannot be loaded: {type(error).__name__}: {error}",
            path=directory,
            remedy="it is damaged, or of another model: Accelerate cannot tell which; the model may be partly loaded",
        ) from error
    if random_states is None:
        # A rank that the saving run did not have: ranks with different counts would wait for each other for ever.
        first = _read(os.path.join(directory, f"{RNG_STATE_NAME}_0.pkl"), required=True)
        accelerator.step = first.get("step", accelerator.step)


def _read(path: str, *, required: bool) -> Any:
    if not required and not os.path.exists(path):
        return None
    try:
        return load_file(path)
    except Exception as error:
        raise CheckpointCorruptedError(
            f"the random states cannot be read: {type(error).__name__}: {error}",
            path=path,
            key="random_states",
            remedy="load an earlier checkpoint",
        ) from error
